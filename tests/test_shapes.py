"""Every shape of speculation is known beforehand: nothing is compiled after warm-up, whatever happens."""

from __future__ import annotations

import random
from typing import Any

import drafting
import pytest
import tiny

import cb_engine
from cb_engine import Engine, SamplingParams
from cb_engine.runner.static_device import FakeStaticDevice

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


def fuzz(engine: Engine, prompts: list[list[int]], references: list[list[int]], steps: int, seed: int) -> set[str]:
    """Requests of all kinds come, are aborted, preempted, and end at the maximum length; greedy ones are checked."""
    rng = random.Random(seed)
    known: dict[str, tuple[list[int], bool]] = {}
    reasons: set[str] = set()
    for step in range(steps):
        if rng.random() < 0.4 and step < steps - 40:
            index = rng.randrange(len(prompts))
            greedy = rng.random() < 0.6
            params = SamplingParams(
                temperature=0.0 if greedy else 0.8,
                top_k=rng.choice((0, 5)),
                max_tokens=rng.choice((1, 2, K, K + 1, 9, None)),
                logprobs=rng.choice((None, None, 2)),
                prompt_logprobs=rng.choice((None, None, 1)),
                seed=step,
                speculative=rng.random() < 0.9,
            )
            request_id = engine.add_request(prompts[index], params)[0]
            known[request_id] = (references[index], greedy)
        if known and rng.random() < 0.08:
            engine.abort(rng.choice(list(known)))
        for output in engine.step():
            reference, greedy = known.pop(output.request_id)
            reasons.add(str(output.stop_reason or output.finish_reason))
            assert output.error is None
            if greedy:
                assert output.generated_tokens == reference[: len(output.generated_tokens)]
        engine.check()
    while engine.has_work:
        engine.step()
    return reasons


@pytest.fixture(scope="module")
def case() -> tuple[Any, list[list[int]], list[list[int]]]:
    model, prompts, _ = tiny.family("llama")
    prompts = [p for p in prompts if len(p) <= 13]
    return model, prompts, [tiny.generate(model, p, 32 - len(p)) for p in prompts]


def drafter_settings(name: str, model: Any) -> dict[str, Any]:
    if name == "first_layers":
        return {"method": "draft_model", "num_draft_layers": 1}
    if name == "draft_model":
        return {"method": "draft_model", "model": tiny.make_model("llama", seed=5, num_hidden_layers=1)}
    return {"method": "ngram"}


@pytest.mark.parametrize("name", ["lookup", "first_layers", "draft_model"])
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
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_draft_tokens > 0


def _guess_about_anything(self: drafting.Oracle, asks: Any) -> list[Any]:
    """Sampled requests have no known future: theirs are guessed from nothing."""
    drafts = []
    for ask in asks:
        future = self._futures[tuple(ask.request.prompt_token_ids)]
        done = len(ask.request.output_token_ids)
        drafts.append(drafting.Draft(tuple(self._guess(future[done : done + ask.max_tokens], self._rng))))
    return drafts


@pytest.mark.parametrize(("name", "max_num_seqs"), [("first_layers", 1), ("draft_model", 2)])
def test_torch_compiles_nothing_after_warm_up(case: Any, name: str, max_num_seqs: int) -> None:
    model, prompts, references = case
    speculative = {**drafter_settings(name, model), "num_speculative_tokens": K, "adaptive": False}
    config = {**SMALL, **COMPILED, "num_blocks": 14, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": 16}
    engine = Engine(model, config={**config, "speculative": speculative}, eos_token_id=-1)
    engine.warmup()
    fuzz(engine, prompts, references, 80, seed=4)
    assert engine.coverage.used <= engine.coverage.warmed
    assert not engine.coverage.missed


def test_without_speculation_there_are_no_more_shapes_than_before() -> None:
    model = tiny.family("llama")[0]
    engine = cb_engine.Engine(model, config={**SMALL, "pad_decode_batches": True})
    # 1, 2, 3 sequences times 1, 2, 4, 8 blocks
    assert engine.num_shapes == 12
    engine = cb_engine.Engine(model, config={**SMALL, "pad_decode_batches": True, "speculative": {"method": "ngram"}})
    assert engine.num_shapes == 24
