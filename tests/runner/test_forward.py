"""Warm-up covers what is used, and what it does not cover is said."""

from __future__ import annotations

import random
from typing import Any

import pytest
import tiny
import torch
from fake_model import FakeModel, expected

from cb_engine import Engine, EngineConfig, SamplingParams, ShapeNotWarmedError
from cb_engine.runner.buckets import Bucket, BucketTable, StepKind
from cb_engine.runner.forward import ForwardTable, ShapeGuard

GREEDY = SamplingParams(temperature=0.0, max_tokens=9)


def padded_engine(**changes: Any) -> Engine:
    config = EngineConfig(block_size=4, pad_decode_batches=True, max_num_seqs=6, max_model_len=40, **changes)
    return Engine(FakeModel(), config=config)


def run(engine: Engine) -> list[int]:
    tokens: list[int] = []
    while engine.has_work:
        tokens = [t for o in engine.step() for t in o.generated_tokens]
    return tokens


def test_a_fuzzed_run_uses_only_warmed_shapes() -> None:
    engine = padded_engine(strict_shapes=True, num_blocks=30, max_prefill_chunk=7)
    progress: list[tuple[int, int]] = []
    count = engine.warmup(lambda done, total: progress.append((done, total)))
    # 1, 2, 4, 6 sequences times 1, 2, 4, 8, 10 blocks
    assert count == 20 == len(engine.coverage.warmed)
    assert progress == [(i, 20) for i in range(1, 21)]
    rng = random.Random(0)
    prompts = {}
    for step in range(200):
        if rng.random() < 0.3 and step < 150:
            prompt = [rng.randrange(97) for _ in range(rng.randrange(1, 30))]
            prompts[engine.add_request(prompt, GREEDY)[0]] = prompt
        if rng.random() < 0.05 and prompts:
            engine.abort(rng.choice(list(prompts)))
        for output in engine.step():
            wanted = expected(prompts[output.request_id], len(output.generated_tokens))
            assert output.generated_tokens == wanted
        engine.check()
    assert engine.coverage.used <= engine.coverage.warmed
    assert not engine.coverage.missed
    assert engine.coverage.never_used == engine.coverage.warmed - engine.coverage.used


@pytest.mark.parametrize("strict", [True, False])
def test_an_unknown_shape_is_an_error_or_a_counted_miss(strict: bool) -> None:
    hints = {"max_prompt_length": 4, "max_generated_length": 4}
    config = EngineConfig(block_size=4, pad_decode_batches=True, max_num_seqs=2, strict_shapes=strict)
    engine = Engine(FakeModel(), config=config, hints=hints)
    engine.warmup()
    engine.add_request([1] * 12, GREEDY)
    if strict:
        with pytest.raises(ShapeNotWarmedError, match="workload_hints"):
            run(engine)
        return
    assert run(engine) == expected([1] * 12, 9)
    assert sum(engine.coverage.missed.values()) == 8, "every decode step"


@pytest.mark.parametrize("config", [{"strict_shapes": True, "pad_decode_batches": True}, {"fake_static_device": True}])
def test_a_strict_engine_that_was_never_warmed_up_says_so(config: dict[str, Any]) -> None:
    engine = Engine(
        tiny.make_model("llama"), config={"block_size": 4, "max_num_seqs": 2, "max_model_len": 32, **config}
    )
    engine.add_request([1] * 6, GREEDY)
    with pytest.raises(ShapeNotWarmedError, match=r"warm-up has not run; call warmup\(\) first, .* warmup=True"):
        run(engine)
    assert not engine.coverage.warmed


@pytest.mark.parametrize("strict", [True, False])
def test_a_warm_up_that_failed_has_not_run(strict: bool) -> None:
    engine = padded_engine(strict_shapes=strict)

    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.warmup(fail)
    assert not engine.is_warm
    engine.add_request([1] * 6, GREEDY)
    if strict:
        with pytest.raises(ShapeNotWarmedError, match="warm-up has not run"):
            run(engine)
    else:
        assert run(engine) == expected([1] * 6, 9)


def test_what_runs_before_warm_up_is_counted_as_missed(caplog: pytest.LogCaptureFixture) -> None:
    engine = padded_engine()
    engine.add_request([1] * 6, GREEDY)
    assert run(engine) == expected([1] * 6, 9)
    early = dict(engine.coverage.missed)
    assert early == {Bucket(StepKind.DECODE, 1, 1, blocks): count for blocks, count in ((2, 2), (4, 6))}
    assert not engine.coverage.warmed
    assert not engine.coverage.used
    engine.warmup()
    engine.add_request([1] * 6, GREEDY)
    run(engine)
    assert engine.coverage.used == set(early)
    assert engine.coverage.missed == early
    assert not caplog.records


@pytest.mark.parametrize("early", [True, False])
def test_code_made_before_warm_up_is_used_after_it(early: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Also for a shape that warm-up does not run; without it that shape runs eagerly."""
    guard = ShapeGuard(BucketTable(2, 8, 1, pads_decode=True, pads_prefill=False), strict=False)
    known, beyond = Bucket(StepKind.DECODE, 2, 1, 1), Bucket(StepKind.DECODE, 2, 1, 9)
    if early:
        assert guard.admits(beyond)
    with guard.warming():
        assert guard.admits(known)
    assert guard.admits(beyond) == early
    assert guard.coverage.missed == {beyond: 1 + early}
    assert len(caplog.records) == (not early)
    guard.reopen()
    assert not guard.coverage.missed
    assert guard.admits(known)
    assert guard.coverage.missed == {known: 1}


def test_an_unpadded_engine_has_nothing_to_warm() -> None:
    engine = Engine(FakeModel(), config={"block_size": 4})
    assert engine.warmup() == 0
    engine.add_request([1], GREEDY)
    while engine.has_work:
        engine.step()
    assert not engine.coverage.used
    assert not engine.coverage.missed


@torch.library.custom_op("cb_engine_tests::fail_if_negative", mutates_args=())
def fail_if_negative(x: torch.Tensor) -> torch.Tensor:
    if x.min() < 0:
        raise RuntimeError("a negative number")
    return x.clone()


@fail_if_negative.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("strict", [True, False])
def test_code_that_would_be_compiled_once_more_is_an_unknown_shape(strict: bool) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return fail_if_negative(x) + 1

    guard = ShapeGuard(BucketTable(2, 8, 1, pads_decode=True, pads_prefill=False), strict=strict)
    table = ForwardTable(
        forward, guard, compiled_kinds=frozenset({StepKind.DECODE}), compile_options={"backend": "eager"}
    )
    bucket = Bucket(StepKind.DECODE, 2, 1, 1)

    def run_with(x: torch.Tensor) -> list[float]:
        result: list[float] = table.get(bucket, is_static=True)(x).tolist()
        return result

    with guard.warming():
        assert run_with(torch.zeros(2)) == [1, 1]
    assert run_with(torch.ones(2)) == [2, 2]
    with pytest.raises(RuntimeError, match="a negative number"):  # an error of the forward's own stays what it is
        run_with(-torch.ones(2))
    if strict:
        with pytest.raises(ShapeNotWarmedError, match=r"num_seqs=2.* was warmed up for other arguments"):
            run_with(torch.ones(2, dtype=torch.int64))
    else:
        assert run_with(torch.ones(2, dtype=torch.int64)) == [2, 2]
