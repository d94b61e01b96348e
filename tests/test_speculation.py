"""Output with drafts equals that without, token for token: whatever the drafts are, in every setting."""

from __future__ import annotations

from itertools import product
from typing import Any

import byte_tokenizer
import drafting
import pytest
import tiny
import torch
from fake_model import FakeModel, expected
from scripted_model import ScriptedModel

import cb_engine
from cb_engine import Engine, GenerationOutput, SamplingParams
from cb_engine.speculative.proposer import Draft

SETTINGS = [
    {
        "decode_fast_path": fast,
        "enable_prefix_caching": prefix,
        "max_prefill_chunk": chunk,
        "num_blocks": num_blocks,
        "pad_decode_batches": pad,
    }
    for fast, prefix, chunk, (num_blocks, pad) in product(
        (True, False), (True, False), (None, 3, 4), ((None, False), (13, True))
    )
]
HINTS = {"num_requests": 8, "max_prompt_length": 30}


def drain(engine: Engine, ids: list[str]) -> list[GenerationOutput]:
    """Runs an engine to the end, checking its books after every step."""
    ended: dict[str, GenerationOutput] = {}
    while engine.has_work:
        for output in engine.step():
            if output.is_finished():
                assert output.request_id not in ended
                ended[output.request_id] = output
        engine.check()
    stats = engine.stats()
    assert stats.live_blocks == stats.num_waiting == stats.num_running == 0
    return [ended[i] for i in ids]


def run(engine: Engine, prompts: list[list[int]], **params: Any) -> list[GenerationOutput]:
    engine.warmup()
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": tiny.NEW_TOKENS, **params})
    return drain(engine, [engine.add_request(prompt, sampling)[0] for prompt in prompts])


def futures_of(prompts: list[list[int]], references: list[list[int]]) -> dict[tuple[int, ...], list[int]]:
    return {tuple(p): r for p, r in zip(prompts, references, strict=True)}


# ---- greedy output -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guess", drafting.GUESSES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "mistral"])
def test_greedy_output_does_not_depend_on_drafts(monkeypatch: pytest.MonkeyPatch, family: str, guess: str) -> None:
    model, prompts, references = tiny.family(family)
    for settings in SETTINGS[:: 1 if family == "llama" else 5]:
        oracle = drafting.Oracle(futures_of(prompts, references), drafting.GUESSES[guess])
        config = {"block_size": 4, "attention_backend": "torch", **settings}
        engine = drafting.oracle_engine(monkeypatch, oracle, model, config=config, hints=HINTS, eos_token_id=-1)
        outputs = run(engine, prompts)
        assert [o.generated_tokens for o in outputs] == references, settings
        drafted, accepted = sum(o.num_draft_tokens for o in outputs), sum(o.num_accepted_tokens for o in outputs)
        assert drafted > 0
        assert {"right": accepted == drafted, "wrong": accepted == 0, "random": accepted < drafted}[guess]
        assert len(oracle.ended) == len(prompts)
        stats = engine.stats()
        assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (drafted, accepted)


DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "suffix": {"method": "suffix"},
    "first_layers": {"method": "draft_model", "num_draft_layers": 1},
    "draft_model": {"method": "draft_model"},
    "itself": {"method": "draft_model"},
}


def speculative_of(drafter: str, family: str, model: Any) -> dict[str, Any]:
    settings = {"num_speculative_tokens": 3, "adaptive": False, **DRAFTERS[drafter]}
    if drafter in ("draft_model", "itself"):
        settings["model"] = model if drafter == "itself" else tiny.make_model(family, seed=77)
    return settings


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "qwen3_moe"])
def test_greedy_output_with_every_drafter(family: str, drafter: str) -> None:
    model, prompts, references = tiny.family(family)
    speculative = speculative_of(drafter, family, model)
    for settings in ({}, {"max_prefill_chunk": 3, "num_blocks": 14}, {"pad_decode_batches": True, "num_blocks": 14}):
        config = {"block_size": 4, "attention_backend": "torch", "speculative": speculative, **settings}
        engine = Engine(model, config=config, hints=HINTS, eos_token_id=-1)
        outputs = run(engine, prompts)
        assert [o.generated_tokens for o in outputs] == references, settings
        stats = engine.stats()
        assert stats.num_draft_tokens > 0 or drafter == "suffix"
        if drafter == "itself":
            assert stats.num_accepted_tokens == stats.num_draft_tokens, "a model agrees with itself"


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
@pytest.mark.parametrize("drafter", ["draft_model", "first_layers"])
def test_a_drafter_sees_what_it_would_see_alone(drafter: str, family: str) -> None:
    """Its drafts are those of plain generation with the draft model, also after chunks, rejections and preemptions, and
    with windows that have passed the beginning of a prompt: its cache has no holes and nothing stale."""
    model, prompts, _ = tiny.family(family)
    draft_model = tiny.make_model(family, seed=77)
    speculative = {"method": "draft_model", "num_speculative_tokens": 3, "adaptive": False}
    if drafter == "draft_model":
        speculative["model"] = draft_model
    else:
        speculative["num_draft_layers"] = 1
        draft_model = tiny.make_model(family)
        draft_model.load_state_dict(model.state_dict())
        draft_model.model.layers = draft_model.model.layers[:1]
    config = {"block_size": 4, "num_blocks": 13, "max_prefill_chunk": 5, "speculative": speculative}
    engine = Engine(model, config=config, hints=HINTS, eos_token_id=-1)
    sampling = SamplingParams(temperature=0.0, max_tokens=tiny.NEW_TOKENS)
    for prompt in prompts:
        engine.add_request(prompt, sampling)
    num_checked = 0
    while engine.has_work:
        engine.step()
        for request in engine._scheduler.unfinished():
            if request.draft_token_ids:
                count = len(request.draft_token_ids)
                assert list(request.draft_token_ids) == tiny.generate(draft_model, request.token_ids, count)
                num_checked += 1
    assert num_checked > 10
    assert engine.stats().num_preemptions > 0


def test_native_kernels_verify_too() -> None:
    for family in ("llama", "gemma2"):
        model, prompts, references = tiny.family(family)
        for drafter in ("ngram", "itself"):
            speculative = speculative_of(drafter, family, model)
            engine = Engine(model, config={"speculative": speculative}, hints=HINTS, eos_token_id=-1)
            assert [o.generated_tokens for o in run(engine, prompts)] == references
            assert engine.stats().num_draft_tokens > 0


@pytest.mark.parametrize("length", range(1, 13))
@pytest.mark.parametrize("window", [None, 5])
def test_block_edges_at_every_residue(monkeypatch: pytest.MonkeyPatch, length: int, window: int | None) -> None:
    """The fake model's token is a sum over all it has seen: one slot read wrongly shows."""
    prompt = list(range(1, length + 1))
    answer = expected(prompt, 20, window)
    for k in (1, 2, 5):
        oracle = drafting.Oracle({tuple(prompt): answer}, drafting.at_random, seed=k)
        engine = drafting.oracle_engine(monkeypatch, oracle, FakeModel(window), k, config={"block_size": 4})
        (output,) = run(engine, [prompt], max_tokens=20)
        assert output.generated_tokens == answer


@pytest.mark.parametrize("max_model_len", range(9, 17))
def test_drafts_end_at_the_maximum_length(monkeypatch: pytest.MonkeyPatch, max_model_len: int) -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7]
    answer = expected(prompt, 30)
    oracle = drafting.Oracle({tuple(prompt): answer}, drafting.always_right)
    config = {"block_size": 4, "max_model_len": max_model_len}
    engine = drafting.oracle_engine(monkeypatch, oracle, FakeModel(), 5, config=config)
    (output,) = run(engine, [prompt], max_tokens=None)
    assert output.generated_tokens == answer[: max_model_len - 7]
    assert (output.finish_reason, output.stop_reason) == ("length", "max_model_len")


def test_a_pool_without_spare_blocks_verifies_nothing_and_preempts_nobody_more(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts, references = tiny.family("llama")
    counts = []
    for speculate in (False, True):
        oracle = drafting.Oracle(futures_of(prompts, references), drafting.always_wrong)
        config = {"block_size": 4, "num_blocks": 13, "attention_backend": "torch"}
        if speculate:
            engine = drafting.oracle_engine(monkeypatch, oracle, model, 8, config=config, eos_token_id=-1)
        else:
            engine = Engine(model, config=config, eos_token_id=-1)
        assert [o.generated_tokens for o in run(engine, prompts)] == references
        counts.append(engine.stats().num_preemptions)
    assert counts[0] == counts[1] > 0


# ---- sampling ------------------------------------------------------------------------------------------------------


def settings_of_all_kinds() -> list[dict[str, Any]]:
    return [
        {"temperature": 0.9, "seed": 1},
        {"temperature": 1.1, "top_k": 7, "seed": 2, "logprobs": 2},
        {"temperature": 0.8, "top_p": 0.7, "seed": 3, "presence_penalty": 0.8, "frequency_penalty": 0.6},
        {"temperature": 0.0, "repetition_penalty": 1.7, "logprobs": 0},
        {
            "temperature": 0.7,
            "min_p": 0.1,
            "seed": 4,
            "logit_bias": {5: 3.0, 9: -4.0},
            "logprobs_mode": "raw",
            "logprobs": 1,
        },
        {"temperature": 1.0, "seed": 5, "min_tokens": 9, "stop_token_ids": list(range(40, 80))},
        {"temperature": 1.0, "seed": 6, "allowed_token_ids": list(range(20, 60)), "bad_words": [[21], [22, 23]]},
        {"temperature": 0.9, "seed": 7, "repetition_penalty": 1.3, "min_tokens": 4, "stop_token_ids": [1, 2, 3, 4, 5]},
    ]


@pytest.mark.parametrize("guess", ["right", "random"])
@pytest.mark.parametrize("static", [False, True])
def test_every_sampling_option_holds_within_accepted_runs(
    monkeypatch: pytest.MonkeyPatch, guess: str, static: bool
) -> None:
    """With one seed the tokens are those without speculation, and so are their log-probabilities."""
    model, prompts, _ = tiny.family("llama")
    params = [SamplingParams(max_tokens=24, **options) for options in settings_of_all_kinds()]
    several = [prompts[i % len(prompts)] + [i] for i in range(len(params))]

    def results(engine: Engine) -> list[GenerationOutput]:
        ids = [engine.add_request(p, options)[0] for p, options in zip(several, params, strict=True)]
        return drain(engine, ids)

    config: dict[str, object] = {"block_size": 4, "max_model_len": 64, "max_num_seqs": 8}
    plain = results(Engine(model, config={**config, "attention_backend": "torch"}, eos_token_id=-1))
    futures = {tuple(p): o.generated_tokens for p, o in zip(several, plain, strict=True)}
    oracle = drafting.Oracle(futures, drafting.GUESSES[guess])
    config |= {"fake_static_device": True} if static else {"attention_backend": "torch"}
    engine = drafting.oracle_engine(monkeypatch, oracle, model, 4, config=config, eos_token_id=-1)
    with drafting.any_shape(engine):
        drafted = results(engine)
    assert sum(o.num_accepted_tokens for o in drafted) > 20
    for a, b, options in zip(plain, drafted, params, strict=True):
        assert a.generated_tokens == b.generated_tokens, options
        assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        for one, other in zip(a.top_logprobs or [], b.top_logprobs or [], strict=True):
            assert [e.token_id for e in one] == [e.token_id for e in other]
    if guess == "right":
        assert all(o.num_draft_tokens - o.num_accepted_tokens <= 4 for o in drafted), "but for what lies behind an end"


def test_samples_have_the_models_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens of a model with known odds, drafted: the pairs that come out are distributed as the model says.

    A chi-square statistic with 24 degrees of freedom exceeds 59.7 by chance once in 16,000 runs; the seeds are fixed.
    """
    odds = torch.tensor([0.05, 0.15, 0.4, 0.3, 0.1])
    pairs = torch.zeros(5, 5)
    model = FakeModel()
    model.hook.append(lambda positions, logits: _logits_after(positions, odds, logits))
    draft = Draft((2, 1, 3))
    oracle = _Always(draft)
    engine = drafting.oracle_engine(monkeypatch, oracle, model, config={"block_size": 4, "max_num_seqs": 256})
    count = 4000
    ids = engine.add_request([1, 2, 3], SamplingParams(temperature=1.0, max_tokens=3, n=count, seed=11))
    for output in drain(engine, ids):
        pairs[output.generated_tokens[1], output.generated_tokens[2]] += 1
    wanted = torch.stack([_odds_at(odds, 3), _odds_at(odds, 4)])
    expectation = count * wanted[0][:, None] * wanted[1][None, :]
    chi_square = ((pairs - expectation) ** 2 / expectation).sum().item()
    assert chi_square < 59.7
    stats = engine.stats()
    # The second of the tokens is right as often as it is likely.
    rate = stats.accepted_per_position[0] / stats.num_drafts
    assert rate == pytest.approx(wanted[0][2].item(), abs=0.04)


def _odds_at(odds: torch.Tensor, position: int) -> torch.Tensor:
    return odds.roll(position % 5)


def _logits_after(positions: torch.Tensor, odds: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    rows = torch.full_like(logits, float("-inf"))
    for row, position in enumerate(positions.tolist()):
        rows[row, :5] = _odds_at(odds, position).log()
    return rows


class _Always:
    """The same draft for everybody."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft

    def propose(self, asks: Any) -> list[Draft]:
        return [Draft(self.draft.token_ids[: ask.max_tokens]) for ask in asks]

    def forget(self, request: Any) -> None:
        pass


# ---- ends, failures, wishes ----------------------------------------------------------------------------------------


def said(monkeypatch: pytest.MonkeyPatch, text: str, k: int, **params: Any) -> GenerationOutput:
    """What a model that says `text` gives, with all of it drafted."""
    ids = byte_tokenizer.ids_of(text)
    oracle = drafting.Oracle({(byte_tokenizer.BOS,): ids}, drafting.always_right)
    engine = drafting.oracle_engine(
        monkeypatch, oracle, ScriptedModel(ids), k, tokenizer=byte_tokenizer.make_tokenizer()
    )
    request_id = engine.add_request([byte_tokenizer.BOS], SamplingParams(temperature=0.0, **params))[0]
    return drain(engine, [request_id])[0]


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8, 13])
def test_a_stop_string_within_an_accepted_run(monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    """What was accepted behind it is dropped, with all that was noted of it; it wins over ends that come later."""
    text = "one two three four"
    output = said(monkeypatch, text, k, stop="two", max_tokens=len("one two thr"), logprobs=1)
    assert (output.text, output.finish_reason, output.stop_reason) == ("one ", "stop", "two")
    assert output.generated_tokens == byte_tokenizer.ids_of("one two")
    assert len(output.logprobs) == len(output.top_logprobs or []) == len(output.weight_version) == 7
    assert output.num_accepted_tokens <= output.num_draft_tokens
    (stop,) = byte_tokenizer.ids_of("w")
    output = said(monkeypatch, text, k, stop_token_ids=[stop], max_tokens=12)
    assert (output.generated_tokens, output.stop_reason) == (byte_tokenizer.ids_of("one tw"), stop)
    output = said(monkeypatch, text, k, stop=["two", "three"], min_tokens=8, max_tokens=16)
    assert (output.text, output.stop_reason) == ("one two ", "three")


def test_counters_follow_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    output = said(monkeypatch, "one two three four", 8, stop="two", max_tokens=12)
    # "o" comes of the prompt. A step verifies the eight that follow and gives nine, of which "ne two" are kept: all of
    # them drafts.
    assert (output.num_draft_tokens, output.num_accepted_tokens) == (8, 6)


def test_a_row_of_nan_behind_a_draft_fails_nobody_before_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = FakeModel(), [1, 2, 3, 4]
    answer = expected(prompt, 12)

    def spoil(positions: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits.masked_fill((positions == 9).unsqueeze(1), float("nan"))

    model.hook.append(spoil)
    oracle = drafting.Oracle({tuple(prompt): answer}, drafting.always_right)
    engine = drafting.oracle_engine(monkeypatch, oracle, model, 8, config={"block_size": 4})
    (output,) = run(engine, [prompt], max_tokens=12)
    assert output.finish_reason == "error"
    assert output.generated_tokens == answer[:6], "all that was sampled before position 9"


def test_a_proposer_that_fails_is_left_alone_and_nobody_notices(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(_Always):
        def propose(self, asks: Any) -> list[Draft]:
            raise RuntimeError("no idea")

    engine = drafting.oracle_engine(monkeypatch, Broken(Draft()), FakeModel())
    prompts = [[1, 2], [3, 4, 5]]
    assert [o.generated_tokens for o in run(engine, prompts, max_tokens=6)] == [expected(p, 6) for p in prompts]
    assert caplog.text.count("speculation is off") == 1


def test_a_request_may_opt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[1, 2], [3, 4, 5]]
    oracle = drafting.Oracle({tuple(p): expected(p, 9) for p in prompts}, drafting.always_right)
    engine = drafting.oracle_engine(monkeypatch, oracle, FakeModel())
    wishes = [SamplingParams(temperature=0.0, max_tokens=9, speculative=wish) for wish in (True, False)]
    ids = [engine.add_request(p, params)[0] for p, params in zip(prompts, wishes, strict=True)]
    outputs = drain(engine, ids)
    assert [o.generated_tokens for o in outputs] == [expected(p, 9) for p in prompts]
    assert [o.num_draft_tokens > 0 for o in outputs] == [True, False]


def test_new_weights_are_drafted_with() -> None:
    """First layers are the model's own: they change with it."""
    model = tiny.make_model("llama")
    other = tiny.make_model("llama", seed=3)
    prompts = tiny.make_prompts((9,))
    speculative = {"method": "draft_model", "num_draft_layers": 1, "adaptive": False}
    engine = Engine(model, config={"speculative": speculative}, eos_token_id=-1)
    run(engine, prompts)
    model.load_state_dict(other.state_dict())
    assert engine.sync_weights()
    assert run(engine, prompts)[0].generated_tokens == tiny.generate(other, prompts[0])


@pytest.mark.parametrize(
    ("speculative", "message"),
    [
        (
            {"method": "draft_model", "num_draft_layers": 2},
            "^speculative num_draft_layers=2 must be below .* 2 layers; give fewer",
        ),
        (
            {"method": "draft_model", "model": "no such folder"},
            "^speculative model='no such folder': .*give the folder or",
        ),
        ({"method": "draft_model", "model": 7}, "loaded causal LM"),
        ({"method": "draft_model"}, "needs either model, .* or num_draft_layers"),
        ({"method": "eagle3"}, "needs model"),
        (
            {"method": "eagle3", "model": "no such folder"},
            "^speculative model='no such folder': .* is no folder; give one",
        ),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "exceeds"),
        ({"method": "suffix", "model": "x"}, "not for method"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "from 1"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(speculative: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError, OSError), match=message):
        Engine(tiny.family("llama")[0], config={"speculative": speculative})


def test_a_draft_model_with_another_vocabulary_is_refused() -> None:
    foreign = tiny.make_model("llama", vocab_size=tiny.VOCAB // 2)
    with pytest.raises(ValueError, match="same tokenizer"):
        Engine(tiny.family("llama")[0], config={"speculative": {"method": "draft_model", "model": foreign}})
    padded = tiny.make_model("llama", vocab_size=tiny.VOCAB + 8)
    for own in (padded, tiny.make_model("llama", vocab_size=tiny.VOCAB - 8)):
        model, prompts, references = tiny.family("llama")
        speculative = {"method": "draft_model", "model": own, "adaptive": False}
        engine = Engine(model, config={"speculative": speculative}, eos_token_id=-1)
        assert [o.generated_tokens for o in run(engine, prompts)] == references


def test_generate_batch_speculates() -> None:
    model, prompts, references = tiny.family("llama")
    cb_engine.attach(model)
    try:
        outputs = model.generate_batch(
            prompts,
            continuous_batching_config={"speculative": {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}},
            sampling_params=SamplingParams(temperature=0.0, max_tokens=tiny.NEW_TOKENS, ignore_eos=True),
        )
    finally:
        cb_engine.detach(model)
    assert [o.generated_tokens for o in outputs.values()] == references
    assert sum(o.num_draft_tokens for o in outputs.values()) > 0
