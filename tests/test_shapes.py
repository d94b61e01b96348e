"""Every shape of speculation is known beforehand: nothing is compiled after warm-up, whatever happens."""

from __future__ import annotations

import random
from typing import Any

import drafting
import pytest
import tiny
import torch

import cb_engine
from cb_engine import Engine, GenerationOutput, SamplingParams, ShapeNotWarmedError
from cb_engine.kv_cache.block_manager import BlockCopy
from cb_engine.runner.paged_model import PagedModel
from cb_engine.runner.static_device import FakeStaticDevice, _on_device
from cb_engine.speculator import Speculator

K = 3
STATIC: dict[str, Any] = {"fake_static_device": True}
COMPILED: dict[str, Any] = {
    "compile": True,
    "compile_prefill": True,
    "compile_options": {"backend": "eager"},
    "strict_shapes": True,
}
SMALL = {"block_size": 4, "max_num_seqs": 3, "max_model_len": 32, "max_num_batched_tokens": 32}


def device_of(engine: Engine) -> FakeStaticDevice:
    device = engine._runner.executor
    assert isinstance(device, FakeStaticDevice)
    return device


def random_params(rng: random.Random, seed: int) -> tuple[SamplingParams, bool]:
    """Of all kinds, and whether the output is that of plain greedy generation."""
    greedy = rng.random() < 0.6
    changed = rng.random() < 0.4
    edits: dict[str, Any] = {
        "repetition_penalty": rng.choice((1.0, 1.4)),
        "frequency_penalty": rng.choice((0.0, 0.8)),
        "min_tokens": rng.choice((0, 1)),
        "stop_token_ids": [5, 6, 7],
    }
    params = SamplingParams(
        n=rng.choice((1, 1, 1, 3)),
        temperature=0.0 if greedy else 0.8,
        top_k=rng.choice((0, 5)),
        top_p=rng.choice((1.0, 0.9)),
        max_tokens=rng.choice((1, 2, K, K + 1, 9, None)),
        logprobs=rng.choice((None, None, 2)),
        prompt_logprobs=rng.choice((None, None, 1)),
        seed=seed,
        speculative=rng.random() < 0.9,
        **(edits if changed else {}),
    )
    return params, greedy and not changed


def fuzz(engine: Engine, prompts: list[list[int]], references: list[list[int]], steps: int, seed: int) -> set[str]:
    """Requests of all kinds come, alone and together, are aborted, preempted, and end at the maximum length; greedy
    ones are checked."""
    rng = random.Random(seed)
    known: dict[str, tuple[list[int], bool]] = {}
    reasons: set[str] = set()
    for step in range(steps):
        newcomers = rng.choice((1, 1, 3)) if rng.random() < 0.3 and step < steps - 40 else 0
        for number in range(newcomers):
            index = rng.randrange(len(prompts))
            params, is_plain = random_params(rng, 10 * step + number)
            for request_id in engine.add_request(prompts[index], params):
                known[request_id] = (references[index], is_plain)
        if known and rng.random() < 0.1:
            engine.abort(rng.choice(list(known)))
        for output in engine.step():
            reference, is_plain = known.pop(output.request_id)
            reasons.add(str(output.stop_reason or output.finish_reason))
            assert output.error is None
            if is_plain:
                assert output.generated_tokens == reference[: len(output.generated_tokens)]
        engine.check()
    while engine.has_work:
        engine.step()
    return reasons


@pytest.fixture(scope="module")
def case() -> tuple[Any, list[list[int]], list[list[int]]]:
    model, prompts, _ = tiny.family("llama")
    prompts = [*(p for p in prompts if len(p) <= 13), [5, 6], [5, 6, 9]]
    return model, prompts, [tiny.generate(model, p, 32 - len(p)) for p in prompts]


def drafter_settings(name: str, model: Any) -> dict[str, Any]:
    if name == "first_layers":
        return {"method": "draft_model", "num_draft_layers": 1}
    if name == "draft_model":
        return {"method": "draft_model", "model": tiny.make_model("llama", seed=5, num_hidden_layers=1)}
    if name == "eagle3":
        return {"method": "eagle3", "model": drafting.make_head(model)}
    return {"method": "ngram"}


@pytest.mark.parametrize("name", ["lookup", "first_layers", "draft_model", "eagle3"])
def test_a_static_device_compiles_nothing_after_warm_up(monkeypatch: pytest.MonkeyPatch, case: Any, name: str) -> None:
    model, prompts, references = case
    config = {**SMALL, **STATIC, "num_blocks": 11}
    speculative = {**drafter_settings(name, model), "num_speculative_tokens": K, "adaptive": False}
    if name == "lookup":
        futures = {tuple(p): r for p, r in zip(prompts, references, strict=True)}
        oracle = drafting.Oracle(futures, drafting.at_random)
        monkeypatch.setattr("cb_engine.engine.make_lookup", lambda settings: oracle)
        monkeypatch.setattr(drafting.Oracle, "propose", _guess_about_anything)

    def warm_engine(compile_only: bool) -> Engine:
        engine = Engine(model, config={**config, "speculative": speculative}, eos_token_id=-1)
        progress: list[tuple[int, int]] = []
        count = engine.warmup(lambda done, total: progress.append((done, total)), compile_only=compile_only)
        assert device_of(engine).num_reads == 0
        assert progress == [(i, count) for i in range(1, count + 1)]
        return engine

    engine = warm_engine(compile_only=True)
    device = device_of(engine)
    warmed, compiles = set(device.keys), device.num_compiles
    assert set(device_of(warm_engine(compile_only=False)).keys) == warmed
    reasons = fuzz(engine, prompts, references, 130, seed=3)
    assert {"max_tokens", "max_model_len", "abort"} <= reasons
    assert device.num_compiles == compiles
    assert {key for key, uses in device.keys.items() if uses} <= warmed
    assert not engine.coverage.missed
    kinds = {bucket.kind for bucket in engine.coverage.used}
    assert {"prefill", "decode", "verify"} <= kinds
    if name != "lookup":
        assert {"draft_first", "draft_next"} <= kinds
    names = {key.name for key, uses in device.keys.items() if uses}
    assert {"sample", "accept", "select_rows", "copy_blocks"} <= names
    check_that_it_drafted(engine)
    assert engine.stats().num_preemptions > 0


def check_that_it_drafted(engine: Engine) -> None:
    """To the end: a proposer that fails is switched off, and all goes on."""
    speculator = engine._speculator
    assert isinstance(speculator, Speculator)
    assert speculator._works
    assert engine.stats().num_draft_tokens > 0


def _guess_about_anything(self: drafting.Oracle, asks: Any) -> list[Any]:
    """Sampled requests have no known future: theirs are guessed from nothing."""
    drafts = []
    for ask in asks:
        future = self._futures[tuple(ask.request.prompt_token_ids)]
        done = len(ask.request.output_token_ids)
        drafts.append(drafting.Draft(tuple(self._guess(future[done : done + ask.max_tokens], self._rng))))
    return drafts


@pytest.mark.parametrize(("name", "max_num_seqs"), [("first_layers", 1), ("draft_model", 2), ("eagle3", 1)])
def test_torch_compiles_nothing_after_warm_up(case: Any, name: str, max_num_seqs: int) -> None:
    model, prompts, references = case
    speculative = {**drafter_settings(name, model), "num_speculative_tokens": K, "adaptive": False}
    config = {**SMALL, **COMPILED, "num_blocks": 14, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": 16}
    engine = Engine(model, config={**config, "speculative": speculative}, eos_token_id=-1)
    engine.warmup()
    fuzz(engine, prompts, references, 80, seed=4)
    assert engine.coverage.used <= engine.coverage.warmed
    assert not engine.coverage.missed
    check_that_it_drafted(engine)


def test_a_drafter_that_would_be_compiled_once_more_ends_a_strict_engine(
    case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts, _ = case
    speculative = {**drafter_settings("first_layers", model), "num_speculative_tokens": K, "adaptive": False}
    config = {**SMALL, **COMPILED, "compile_prefill": False, "max_num_seqs": 1, "max_model_len": 16}
    engine = Engine(model, config={**config, "speculative": speculative}, eos_token_id=-1)
    engine.warmup()
    run = PagedModel.run

    def with_other_ids(self: PagedModel, batch: Any, *more: Any, input_ids: Any = None, **options: Any) -> Any:
        other = None if input_ids is None else input_ids.to(torch.int32)
        return run(self, batch, *more, input_ids=other, **options)

    monkeypatch.setattr(PagedModel, "run", with_other_ids)
    engine.add_request(prompts[1], SamplingParams(temperature=0.0, max_tokens=9))
    with pytest.raises(ShapeNotWarmedError, match=r"draft_next.* other arguments"):
        run_to_end(engine)


# ---- what warm-up did not foresee ----------------------------------------------------------------------------------


def run_to_end(engine: Engine) -> dict[str, GenerationOutput]:
    outputs: dict[str, GenerationOutput] = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


def static_engine(**config: Any) -> Engine:
    model = tiny.family("llama")[0]
    engine = Engine(model, config={**SMALL, **STATIC, "num_blocks": 40, **config}, eos_token_id=-1)
    engine.warmup(compile_only=True)
    return engine


@pytest.mark.parametrize(
    ("prompts", "chunk"),
    [
        ([[5, 6], [7, 8, 9], [17, 8, 9]], None),  # four rows for four sequences, of which one is not sampled
        ([[5, 6, 7], [7, 8]], 1),  # a step of single tokens
        ([[5, 6, 7], *([token] for token in range(8))], None),  # a step of as many sequences as tokens
    ],
)
def test_rows_of_prompts_are_known_however_few_they_are(prompts: list[list[int]], chunk: int | None) -> None:
    engine = static_engine(max_num_seqs=4 if len(prompts) < 4 else 16, max_prefill_chunk=chunk)
    model = tiny.family("llama")[0]
    ids = [
        engine.add_request(p, SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=None if i else 1))[0]
        for i, p in enumerate(prompts)
    ]
    outputs = run_to_end(engine)
    assert [outputs[i].generated_tokens for i in ids] == [tiny.generate(model, p, 3) for p in prompts]
    with torch.no_grad():
        logprobs = model(torch.tensor(prompts[:1])).logits[0].log_softmax(-1)
    entries = outputs[ids[0]].prompt_logprobs
    assert entries is not None
    assert entries[0] is None
    for at, of_one in enumerate(entries[1:]):
        found = {entry.token_id: entry.logprob for entry in of_one or []}
        assert found[prompts[0][at + 1]] == pytest.approx(logprobs[at, prompts[0][at + 1]].item(), abs=1e-4)


def test_copies_of_blocks_are_known_however_many_they_are() -> None:
    engine = static_engine()
    runner, device = engine._runner, device_of(engine)
    caches = list(runner._caches[False].values())
    with torch.inference_mode(), _on_device():
        for at, cache in enumerate(caches):
            numbers = torch.arange(41.0).view(41, 1, 1, 1) + 100 * at
            cache.k.copy_(numbers.expand(cache.k.shape))
            cache.v.copy_(-numbers.expand(cache.v.shape))
    for count in range(9):  # more than there are sequences, too
        with torch.inference_mode():
            runner._copy_blocks([BlockCopy(0, 1 + i, 20 + i) for i in range(count)])
        for at, cache in enumerate(caches):
            wanted = [float(100 * at + (b - 19 if 20 <= b < 20 + count else b)) for b in range(41)]
            assert device.to_host(cache.k)[:, 0, 0, 0].tolist() == wanted
            assert device.to_host(cache.v)[:, -1, -1, -1].tolist() == [-number for number in wanted]
    assert {key.name for key, uses in device.keys.items() if uses} == {"copy_blocks"}


def test_without_speculation_there_are_no_more_shapes_than_before() -> None:
    model = tiny.family("llama")[0]
    engine = cb_engine.Engine(model, config={**SMALL, "pad_decode_batches": True})
    # 1, 2, 3 sequences times 1, 2, 4, 8 blocks
    assert engine.num_shapes == 12
    engine = cb_engine.Engine(model, config={**SMALL, "pad_decode_batches": True, "speculative": {"method": "ngram"}})
    assert engine.num_shapes == 24
