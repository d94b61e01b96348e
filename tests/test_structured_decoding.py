"""Structured output through the whole engine: valid wherever it ends, whatever shares the engine."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import byte_tokenizer
import drafting
import pytest
import structured_rig as rig
import tiny
import torch
from byte_tokenizer import BOS, EOS, ids_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_model import ScriptedModel
from structured_rig import PERSON, check_json, make_engine, one, prompts, run

from cb_engine import Engine, GenerationOutput, SamplingParams, StructuredOutput

INF = float("inf")
A, B, C = ids_of("abc")
LIST = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}

# ---- whatever the schema -------------------------------------------------------------------------------------------

_LEAVES: Any = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.integers(-50, 50).map(lambda low: {"type": "integer", "minimum": low, "maximum": low + 70}),
    st.integers(0, 4).map(lambda low: {"type": "string", "minLength": low, "maxLength": low + 2}),
    st.lists(st.text(max_size=4), min_size=1, max_size=3, unique=True).map(lambda values: {"enum": values}),
)


def _object(parts: list[tuple[str, Any]], required: int) -> dict[str, Any]:
    properties = dict(parts)
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties)[:required],
        "additionalProperties": False,
    }


_KEYS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=3)
_SCHEMAS: Any = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.builds(_object, st.lists(st.tuples(_KEYS, inner), max_size=3), st.integers(0, 3)),
        st.builds(
            lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    schemas=st.lists(_SCHEMAS, min_size=1, max_size=5), compact=st.booleans(), temperature=st.sampled_from([0, 1, 5])
)
def test_every_text_is_valid_or_the_beginning_of_one(
    schemas: list[dict[str, Any]], compact: bool, temperature: float
) -> None:
    params = [
        SamplingParams(
            temperature=temperature,
            seed=i,
            max_tokens=90,
            structured=StructuredOutput(json_schema=schema, compact=compact),
        )
        for i, schema in enumerate(schemas)
    ]
    outputs = run(_shared_engine(), zip(prompts(len(schemas)), params, strict=True))
    for output, schema in zip(outputs, schemas, strict=True):
        check_json(output, schema)


_engines: list[Engine] = []


def _shared_engine() -> Engine:
    if not _engines:
        _engines.append(make_engine(max_num_seqs=4, num_blocks=60))
    return _engines[0]


def test_thirty_two_grammars_in_one_batch() -> None:
    """Each is its own, and each request gives what it gives alone."""
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=40, structured=grammar)
        for i, grammar in enumerate(
            [{"json_schema": {"type": "array", "items": {"const": i}, "minItems": 1}} for i in range(8)]
            + [{"regex": f"x{i}(yes|no){{{i}}}"} for i in range(8)]
            + [{"choice": [f"{i} a", f"{i} ab", "c"]} for i in range(8)]
            + [{"grammar": f'start: "<{i}>" (word " ")* "."\nword: /[a-c]{{2}}/'} for i in range(8)]
        )
    ]
    many = prompts(32)
    engine = make_engine(max_num_seqs=32)
    outputs = run(engine, zip(many, params, strict=True))
    assert engine.stats().num_steps < 120, "they ran together"
    for i, output in enumerate(outputs[:8]):
        if output.finish_reason == "stop":
            assert set(json.loads(output.text or "")) == {i}
    for i, output in enumerate(outputs[8:16]):
        assert (output.text or "").startswith(f"x{i}")
        assert output.finish_reason == "stop"
    for i, output in enumerate(outputs[16:24]):
        assert output.text in (f"{i} a", f"{i} ab", "c")
    for i, output in enumerate(outputs[24:]):
        assert (output.text or "").startswith(f"<{i}>")
    for i in (0, 5, 9, 17, 30):
        (alone,) = run(make_engine(), [(many[i], params[i])])
        assert alone.generated_tokens == outputs[i].generated_tokens


# ---- one text, whatever the engine is like -------------------------------------------------------------------------

MIXED: list[dict[str, Any]] = [
    {"structured": {"json_schema": PERSON}, "temperature": 0.0},
    {"structured": {"json_schema": PERSON}, "temperature": 1.0, "logprobs": 2},
    {"temperature": 1.0, "logprobs": 1},
    {"structured": {"json_schema": LIST, "compact": True}, "temperature": 2.0, "frequency_penalty": 0.5},
    {"temperature": 0.0, "prompt_logprobs": 1},
    {"structured": {"regex": "[ab]{4,30}"}, "temperature": 0.7, "top_k": 3, "min_tokens": 9, "prompt_logprobs": 0},
    {"structured": {"json_object": True}, "temperature": 0.9, "top_p": 0.8, "repetition_penalty": 1.4},
    {"structured": {"choice": ["abab", "ab", "b"]}, "temperature": 9.0, "n": 3, "seed": 77, "logit_bias": {B: 0.5}},
    {"structured": {"grammar": 'start: "a" start "b" | "c"'}, "temperature": 3.0, "ignore_eos": True, "stop": "bb"},
    {"structured": {"regex": "(?s:.){1,40}"}, "temperature": 1.0, "min_p": 0.01, "logprobs": 1, "logprobs_mode": "raw"},
    {"structured": {"regex": "[a-z ]+"}, "temperature": 1.0, "bad_words": ["ab", "c"], "stop_token_ids": ids_of("q ")},
]


def mixed_requests() -> list[tuple[list[int], SamplingParams]]:
    params = [SamplingParams(**{"max_tokens": 45, "seed": i, **options}) for i, options in enumerate(MIXED)]
    return list(zip(prompts(len(params)), params, strict=True))


@pytest.fixture(scope="module")
def plain() -> list[GenerationOutput]:
    """What each of the mixed requests gives alone."""
    outputs = [o for request in mixed_requests() for o in run(make_engine(attention_backend="torch"), [request])]
    assert len({o.finish_reason for o in outputs}) == 2
    assert all(o.error is None for o in outputs)
    return outputs


def check_equal(outputs: Sequence[GenerationOutput], plain: Sequence[GenerationOutput]) -> None:
    for a, b in zip(outputs, plain, strict=True):
        assert a.generated_tokens == b.generated_tokens
        assert (a.text, a.finish_reason, a.stop_reason, a.error) == (b.text, b.finish_reason, b.stop_reason, b.error)
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        for one_, other in zip(a.top_logprobs or [], b.top_logprobs or [], strict=True):
            assert {e.token_id: e.logprob for e in one_} == pytest.approx(
                {e.token_id: e.logprob for e in other}, abs=1e-4
            )


def test_the_mixed_texts_are_what_they_should_be(plain: list[GenerationOutput]) -> None:
    check_json(plain[0], PERSON)
    check_json(plain[1], PERSON)
    check_json(plain[3], LIST)
    assert set(plain[5].text or "") <= set("ab")
    assert len(plain[5].generated_tokens) >= 9
    assert all(o.text in ("abab", "ab", "b") for o in plain[7:10])
    assert len({o.text for o in plain[7:10]}) > 1, "samples have places of their own"
    assert plain[10].stop_reason in ("bb", None)
    assert "ab" not in (plain[12].text or "")


SETTINGS: dict[str, dict[str, Any]] = {
    "together": {"attention_backend": "torch"},
    "native": {},
    "chunks": {"attention_backend": "torch", "max_prefill_chunk": 3, "max_num_batched_tokens": 16},
    "preempted": {"attention_backend": "torch", "num_blocks": 32},
    "no_prefixes": {"attention_backend": "torch", "enable_prefix_caching": False, "num_blocks": 32},
    "padded": {"attention_backend": "torch", "pad_decode_batches": True},
    "mixed_steps": {"attention_backend": "torch", "decode_fast_path": False, "scheduler_type": "prefill_first"},
    "few": {"attention_backend": "torch", "max_num_seqs": 2},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_output_does_not_depend_on_the_engine(plain: list[GenerationOutput], name: str) -> None:
    """Nor on what shares its batch: rows without a grammar are among these."""
    engine = make_engine(**SETTINGS[name])
    check_equal(run(engine, mixed_requests()), plain)
    assert (engine.stats().num_preemptions > 0) == (name in ("preempted", "no_prefixes"))


def test_a_prefix_that_is_hit_changes_nothing(plain: list[GenerationOutput]) -> None:
    engine = make_engine(attention_backend="torch")
    run(engine, mixed_requests())
    again = run(engine, mixed_requests())
    check_equal(again, plain)
    assert sum(o.num_cached_tokens for o in again) > 0


# ---- with speculation ----------------------------------------------------------------------------------------------


class Wanting:
    """Proposes what is known to come, spoilt here and there; also where it is none of the grammar's."""

    def __init__(self, outputs: dict[str, list[int]], rng: random.Random) -> None:
        self.outputs, self.rng = outputs, rng

    def propose(self, asks: Any) -> Any:
        drafts = []
        for ask in asks:
            done = len(ask.request.output_token_ids)
            future = self.outputs[ask.request.request_id][done : done + ask.max_tokens]
            spoilt = [t if self.rng.random() < 0.8 else self.rng.randrange(rig.VOCAB) for t in future]
            drafts.append(drafting.Draft(tuple(spoilt)))
        return drafts

    def forget(self, request: Any) -> None:
        pass


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("config", ["torch", "preempted", "static"])
def test_drafts_change_nothing(
    monkeypatch: pytest.MonkeyPatch, plain: list[GenerationOutput], k: int, config: str
) -> None:
    configs: dict[str, dict[str, Any]] = {
        "torch": {"attention_backend": "torch"},
        "preempted": {"attention_backend": "torch", "num_blocks": 32},
        "static": {"fake_static_device": True, "max_num_seqs": 16, "max_model_len": 128},
    }
    ids = [
        f"req_{i}" if sample == options.get("n", 1) - 1 else f"req_{i}__child#{sample}"
        for i, options in enumerate(MIXED)
        for sample in range(options.get("n", 1))
    ]
    known = {i: o.generated_tokens for i, o in zip(ids, plain, strict=True)}
    engine = drafting.oracle_engine(
        monkeypatch,
        Wanting(known, random.Random(k)),
        rig.model(),
        k,
        config={"block_size": 4, **configs[config]},
        tokenizer=byte_tokenizer.make_tokenizer(),
        eos_token_id=EOS,
    )
    if config == "static":
        engine.warmup()
    outputs = run(engine, mixed_requests())
    check_equal(outputs, plain)
    assert sum(o.num_accepted_tokens for o in outputs) > 60
    assert engine.stats().num_draft_tokens > engine.stats().num_accepted_tokens


DRAFTERS = ["ngram", "suffix", "first_layers", "draft_model", "eagle3"]


@pytest.mark.parametrize("name", DRAFTERS)
def test_output_with_every_drafter(plain: list[GenerationOutput], name: str) -> None:
    settings: dict[str, dict[str, Any]] = {
        "ngram": {"method": "ngram", "prompt_lookup_min": 1},
        "suffix": {"method": "suffix"},
        "first_layers": {"method": "draft_model", "num_draft_layers": 1},
        "draft_model": {"method": "draft_model", "model": rig.model(seed=5, num_hidden_layers=1)},
        "eagle3": {"method": "eagle3", "model": drafting.make_head(rig.model(), vocab_size=rig.VOCAB)},
    }
    speculative = {"num_speculative_tokens": 3, "adaptive": False, **settings[name]}
    configs: list[dict[str, Any]] = [{}, {"num_blocks": 40, "max_prefill_chunk": 4}]
    for more in configs:
        engine = make_engine(attention_backend="torch", speculative=speculative, **more)
        check_equal(run(engine, mixed_requests()), plain)
        assert engine.stats().num_draft_tokens > 0


def test_drafts_that_the_grammar_forbids_are_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """All drafts end where the grammar does not go: whatever is verified is legal."""
    script = ids_of('{"name":"bo","age":7,"tags":[]}')
    proposed = script[:3] + ids_of("!!!!")
    oracle = drafting.Oracle({(BOS,): script}, lambda future, rng: [*future[:2], *proposed[3:]])
    engine = drafting.oracle_engine(
        monkeypatch, oracle, ScriptedModel(script), 6, tokenizer=byte_tokenizer.make_tokenizer()
    )
    params = SamplingParams(temperature=0.0, max_tokens=60, structured={"json_schema": PERSON})
    engine.add_request([BOS], params)
    verified: list[tuple[int, ...]] = []
    outputs: list[GenerationOutput] = []
    while engine.has_work:
        verified += [request.draft_token_ids for request in engine._scheduler.unfinished() if request.draft_token_ids]
        outputs += engine.step()
    (output,) = outputs
    assert output.text == '{"name":"bo","age":7,"tags":[]}'
    assert max(map(len, verified)) >= 2
    bang = ids_of("!")[0]
    inside_the_string = [drafts for drafts in verified if bang in drafts]
    assert all(drafts.count(bang) <= 4 for drafts in inside_the_string)
    assert len(inside_the_string) < len(verified)


@pytest.mark.parametrize("rule", ["x[max_tokens=4]", 'x[stop="c"]'])
def test_a_grammar_that_cannot_go_back_is_not_speculated_on(rule: str) -> None:
    structured = {"grammar": f'start: x "!"\n{rule}: /[a-c]+/'}
    texts = []
    for speculative in (None, {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}):
        engine = make_engine(speculative=speculative)
        params = SamplingParams(temperature=1.0, seed=3, max_tokens=30, structured=structured)
        (output,) = run(engine, [([BOS, A, A, A, B, A, A], params)])
        assert output.error is None
        texts.append((output.generated_tokens, output.finish_reason))
        assert output.num_draft_tokens == 0
    assert texts[0] == texts[1]


# ---- ends ----------------------------------------------------------------------------------------------------------


def said(text: str, structured: Any, **params: Any) -> GenerationOutput:
    """What a model that would say `text`, then EOS, gives."""
    engine = Engine(ScriptedModel(ids_of(text)), tokenizer=byte_tokenizer.make_tokenizer())
    engine.add_request([BOS], SamplingParams(**{"temperature": 0.0, "max_tokens": 40, **params}, structured=structured))
    outputs: list[GenerationOutput] = []
    while engine.has_work:
        outputs += engine.step()
    return outputs[0]


def ending(output: GenerationOutput) -> tuple[str | None, str | None, Any]:
    assert output.error is None
    return output.text, output.finish_reason, output.stop_reason


def test_eos_ends_a_text_that_could_go_on() -> None:
    assert ending(said("aab", {"regex": "[ab]+"})) == ("aab", "stop", EOS)
    assert ending(said("aab", {"regex": "[ab]+"}, max_tokens=2)) == ("aa", "length", "max_tokens")


def test_eos_is_not_legal_before_the_text_is_whole() -> None:
    text, reason, _ = ending(said("ab", {"regex": "ab[ab]{3}"}))
    assert (len(text or ""), reason) == (5, "stop")


def test_a_text_that_cannot_go_on_ends_without_an_eos() -> None:
    for params in ({}, {"ignore_eos": True}, {"min_tokens": 20}, {"max_tokens": 3}):
        assert ending(said("abcdef", {"regex": "abc"}, **params)) == ("abc", "stop", None)


def test_models_without_an_eos_end_too() -> None:
    for seed in range(3):
        text, reason, stop = ending(one({"json_schema": LIST, "compact": True}, eos=-1, seed=seed))
        assert 2 <= len(json.loads(text or "")) <= 4
        assert (reason, stop) == ("stop", None)


def test_an_eos_that_is_ignored_is_never_generated() -> None:
    output = said("aab", {"regex": "[ab]+"}, ignore_eos=True)
    assert ending(output)[1:] == ("length", "max_tokens")
    assert set(output.text or "") <= {"a", "b"}
    assert len(output.generated_tokens) == 40


def test_the_grammar_wins_over_min_tokens_where_it_must_end() -> None:
    assert ending(said("ab", {"regex": "[ab]{2,5}"}, min_tokens=4))[1:] == ("stop", EOS)
    assert len(said("ab", {"regex": "[ab]{2,5}"}, min_tokens=4).generated_tokens) == 5, "four, and EOS"
    text, *rest = ending(said("ab", {"regex": "[ab]{2,5}"}, min_tokens=9))
    assert (len(text or ""), rest) == (5, ["stop", None])
    # That it must end shows in its mask only, in which EOS is not legal yet.
    for params in ({"min_tokens": 9}, {"ignore_eos": True}):
        assert ending(said("aaa", {"grammar": 'start: "a" B?\nB: /b/ & /c/'}, **params)) == ("a", "stop", None)


def test_a_late_end_is_no_failure_after_a_prefix_hit() -> None:
    engine = make_engine()
    structured = {"grammar": 'start: "a" B?\nB: /b/ & /c/'}
    prompt = [BOS, *range(3, 23)]
    params = SamplingParams(structured=structured, ignore_eos=True, max_tokens=9)
    for hit in (0, 20):
        (output,) = run(engine, [(prompt, params)])
        assert ending(output) == ("a", "stop", None)
        assert (output.num_cached_tokens, output.num_preemptions) == (hit, 0)


def test_stop_tokens_end_where_the_grammar_can_and_are_no_part_of_the_text() -> None:
    (newline,) = ids_of("\n")
    assert ending(said("aa\nb", {"regex": "[ab]+"}, stop_token_ids=[newline])) == ("aa", "stop", newline)
    output = said("\naa\nb", {"regex": "[ab]{3,}"}, stop_token_ids=[newline])
    assert len(output.text or "") >= 3
    assert set(output.text or "") <= {"a", "b"}
    # A stop token that the grammar has as text ends nothing in its middle.
    assert ending(said("ab", {"regex": "a?[bc]{2}"}, stop_token_ids=[A]))[0] in ("bb", "bc", "cb", "cc")


def test_a_stop_string_cuts_where_it_is_found() -> None:
    text = '{"name":"bo","age":7,"tags":[]}'
    assert ending(said(text, {"json_schema": PERSON}, stop="age")) == ('{"name":"bo","', "stop", "age")
    assert ending(said(text, {"json_schema": PERSON}, stop="else")) == (text, "stop", None)


def test_a_callers_own_eos_counts() -> None:
    engine = make_engine()
    params = SamplingParams(structured={"regex": "[ab]+"}, temperature=0.0, max_tokens=30, logit_bias={C: 50.0})
    (request_id,) = engine.add_request([BOS, 9], params, eos_token_id=[C, 263])
    outputs: list[GenerationOutput] = []
    while engine.has_work:
        outputs += engine.step()
    assert outputs[0].request_id == request_id
    assert (len(outputs[0].generated_tokens), outputs[0].stop_reason) == (2, C)


def test_nothing_wanted_is_nothing_given() -> None:
    assert ending(one({"regex": "a+"}, max_tokens=0)) == ("", "length", "max_tokens")


# ---- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [{"allowed_token_ids": [C]}, {"logit_bias": {A: -INF, B: -INF}}, {"bad_words": [[A], [B]]}],
    ids=["allowed_token_ids", "logit_bias", "bad_words"],
)
@pytest.mark.parametrize("static", [False, True])
def test_a_contradiction_ends_its_request_alone(fields: dict[str, Any], static: bool) -> None:
    config: dict[str, Any] = {"fake_static_device": True, "max_num_seqs": 4, "max_model_len": 64} if static else {}
    engine = make_engine(**config)
    if static:
        engine.warmup()
    good = SamplingParams(temperature=1.0, seed=1, max_tokens=20, structured={"regex": "[ab]{3}"})
    bad = SamplingParams(temperature=1.0, max_tokens=20, structured={"regex": "x[ab]{3}"}, **fields)
    if "allowed_token_ids" in fields:
        bad = bad.clone(allowed_token_ids=[C, *ids_of("x")])
    first, failed, last = run(engine, zip(prompts(3), (good, bad, good), strict=True))
    assert (failed.finish_reason, failed.generated_tokens) == ("error", ids_of("x"))
    assert "structured, logit_bias, allowed_token_ids and bad_words together left no token" in (failed.error or "")
    for output, prompt in ((first, prompts(3)[0]), (last, prompts(3)[2])):
        (alone,) = run(make_engine(), [(prompt, good)])
        assert (output.generated_tokens, output.finish_reason) == (alone.generated_tokens, "stop")


@pytest.mark.parametrize("speculative", [None, {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}])
def test_a_grammar_that_fails_while_it_runs_ends_its_request_alone(speculative: Any) -> None:
    dear = SamplingParams(temperature=1.0, max_tokens=40, structured={"regex": "(ab|cd)*" * 500}, ignore_eos=True)
    good = SamplingParams(temperature=1.0, seed=1, max_tokens=30, structured={"json_schema": LIST, "compact": True})
    engine = make_engine(speculative=speculative)
    outputs = run(engine, zip(prompts(3), (good, dear, good), strict=True))
    failed = outputs.pop(1)
    assert failed.finish_reason == "error"
    assert failed.error == "the grammar failed: lexer error: too many expressions constructed"
    for output in outputs:
        assert 2 <= len(json.loads(output.text or "")) <= 4
    engine.check()
    assert engine.stats().live_blocks == 0


def test_an_abort_in_the_middle_leaves_the_others_alone() -> None:
    engine = make_engine()
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=50, structured={"json_schema": PERSON}) for i in range(3)
    ]
    ids = [engine.add_request(p, s)[0] for p, s in zip(prompts(3), params, strict=True)]
    outputs: dict[str, GenerationOutput] = {}
    while engine.has_work:
        if engine.stats().num_steps == 7:
            engine.abort(ids[1])
        outputs |= {output.request_id: output for output in engine.step()}
        engine.check()
    assert outputs[ids[1]].finish_reason == "abort"
    assert rig.is_prefix({"json_schema": PERSON}, outputs[ids[1]].generated_tokens)
    for i in (0, 2):
        (alone,) = run(make_engine(), [(prompts(3)[i], params[i])])
        assert outputs[ids[i]].generated_tokens == alone.generated_tokens


def test_what_cannot_be_compiled_is_refused_at_the_door() -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match=r"structured\.regex cannot be used: unclosed group"):
        engine.add_request([BOS], SamplingParams(structured={"regex": "a("}))
    assert not engine.has_work
    bare = Engine(rig.model(), config={"block_size": 4})
    with pytest.raises(ValueError, match="structured output needs a tokenizer: pass tokenizer= to attach"):
        bare.add_request([BOS], SamplingParams(structured={"regex": "a"}))
    assert not bare.has_work


# ---- log-probabilities ---------------------------------------------------------------------------------------------


def test_processed_log_probabilities_are_of_what_the_grammar_allows() -> None:
    prompt = prompts(1)[0]
    params = SamplingParams(
        temperature=0.0, max_tokens=5, logprobs=5, structured={"regex": "[abc]{5}"}, prompt_logprobs=1
    )
    (output,) = run(make_engine(), [(prompt, params)])
    assert output.top_logprobs is not None
    assert output.prompt_logprobs is not None
    tokens = list(prompt)
    for step, entries in enumerate(output.top_logprobs):
        with torch.no_grad():
            logits = rig.model()(torch.tensor([tokens])).logits[0, -1]
        wanted = dict(zip((A, B, C), logits[[A, B, C]].log_softmax(-1).tolist(), strict=True))
        assert {entry.token_id: entry.logprob for entry in entries} == pytest.approx(wanted, abs=1e-4)
        assert output.generated_tokens[step] == max(wanted, key=lambda token_id: wanted[token_id])
        assert output.logprobs[step] == pytest.approx(max(wanted.values()), abs=1e-4)
        tokens.append(output.generated_tokens[step])
    with torch.no_grad():
        of_prompt = rig.model()(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for at, of_one in enumerate(output.prompt_logprobs[1:]):
        found = {entry.token_id: entry.logprob for entry in of_one or []}
        assert found[prompt[at + 1]] == pytest.approx(of_prompt[at, prompt[at + 1]].item(), abs=1e-4)


# ---- shapes --------------------------------------------------------------------------------------------------------

SMALL = {"max_num_seqs": 3, "max_model_len": 48, "max_num_batched_tokens": 48, "num_blocks": 22}


def fuzz(engine: Engine, steps: int, seed: int) -> dict[str, int]:
    """Requests with grammars and without, together, aborted, preempted; how often each reason ended one."""
    rng = random.Random(seed)
    known: dict[str, Any] = {}
    reasons: dict[str, int] = {}
    step = 0
    while step < steps or engine.has_work:
        if rng.random() < 0.35 and step < steps:
            structured = rng.choice([None, {"json_schema": LIST}, {"regex": "[ab]{1,9}"}, {"json_schema": PERSON}])
            params = SamplingParams(
                structured=structured,
                temperature=rng.choice((0.0, 1.0)),
                top_k=rng.choice((0, 5)),
                n=rng.choice((1, 1, 2)),
                max_tokens=rng.choice((1, 4, 20, None)),
                logprobs=rng.choice((None, None, 2)),
                presence_penalty=rng.choice((0.0, 0.5)),
                ignore_eos=rng.random() < 0.3,
                seed=step,
            )
            known |= dict.fromkeys(engine.add_request(prompts(9)[rng.randrange(9)], params), structured)
        if known and rng.random() < 0.05:
            engine.abort(rng.choice(list(known)))
        for output in engine.step():
            structured = known.pop(output.request_id)
            assert output.error is None
            reasons[str(output.finish_reason)] = reasons.get(str(output.finish_reason), 0) + 1
            ids = [t for t in output.generated_tokens if t != EOS]
            assert structured is None or rig.is_prefix(structured, ids)
            if structured is not None and output.finish_reason == "stop" and "json_schema" in structured:
                check_json(output, structured["json_schema"])
        engine.check()
        step += 1
    return reasons


@pytest.mark.parametrize(
    "speculative", [None, {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}]
)
def test_a_static_device_compiles_nothing_after_warm_up(speculative: Any) -> None:
    chosen = speculative and {**speculative, "adaptive": False}
    engine = make_engine(fake_static_device=True, speculative=chosen, **SMALL)
    engine.warmup(compile_only=True)
    device: Any = engine._runner.executor
    warmed, compiles = set(device.keys), device.num_compiles
    reasons = fuzz(engine, 90, seed=2)
    assert reasons.keys() == {"stop", "length", "abort"}
    assert device.num_compiles == compiles
    assert {key for key, uses in device.keys.items() if uses} <= warmed
    assert not engine.coverage.missed
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_draft_tokens > 0) == bool(speculative)


def test_torch_compiles_nothing_after_warm_up() -> None:
    engine = make_engine(
        compile=True, compile_options={"backend": "eager"}, strict_shapes=True, **{**SMALL, "max_num_seqs": 2}
    )
    engine.warmup()
    reasons = fuzz(engine, 40, seed=3)
    assert "stop" in reasons
    assert engine.coverage.used <= engine.coverage.warmed


def test_grammars_work_for_models_of_other_families() -> None:
    for family in ("gpt2", "gemma3"):
        target = tiny.make_model(family, vocab_size=rig.VOCAB)
        check_json(one({"json_schema": PERSON, "compact": True}, target=target, max_tokens=120), PERSON)
