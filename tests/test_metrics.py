"""The snapshot of an engine's counters."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from cb_engine.kv_cache.block_manager import BlockManager, KVGroup
from cb_engine.metrics import STEP_TOKENS_BOUNDS, StepClock, take_stats
from cb_engine.request import Request
from cb_engine.runner.buckets import Bucket, StepKind
from cb_engine.runner.forward import Coverage
from cb_engine.sampling_params import SamplingParams
from cb_engine.scheduler.output import ModelOutput, SampledToken
from cb_engine.scheduler.scheduler import Scheduler, SchedulerConfig


@pytest.fixture
def clock_at(monkeypatch):
    """Sets what `time.perf_counter` says to the metrics."""
    now = {"s": 0.0}
    monkeypatch.setattr("cb_engine.metrics.time", SimpleNamespace(perf_counter=lambda: now["s"]))
    return now


def test_the_step_time_is_0_before_the_first_step():
    clock = StepClock()
    assert (clock.mean_ms, clock.num_steps) == (0.0, 0)


def test_the_step_time_is_the_mean_in_milliseconds(clock_at):
    clock = StepClock()
    for started, ended in ((0.0, 0.25), (1.0, 1.75)):
        clock_at["s"] = ended
        clock.record(started, 3)
    assert clock.mean_ms == pytest.approx(500.0)
    assert clock.num_steps == 2


def test_only_the_latest_steps_count_and_all_are_counted(clock_at):
    clock = StepClock()
    clock_at["s"] = 100.0
    clock.record(0.0, 1)
    for _ in range(64):
        clock.record(99.0, 1000000)
    assert clock.mean_ms == pytest.approx(1000.0)
    assert clock.num_steps == 65


def test_steps_are_counted_by_their_size():
    clock = StepClock()
    for num_tokens in (1, 3, 4, 5, 16384, 16385):
        clock.record(0.0, num_tokens)
    counts = dict(zip(STEP_TOKENS_BOUNDS, clock.by_tokens, strict=True))
    assert {bound: n for bound, n in counts.items() if n} == {1: 1, 4: 2, 8: 1, 16384: 1, float("inf"): 1}
    assert clock.num_tokens == 1 + 3 + 4 + 5 + 16384 + 16385


def test_the_time_of_the_latest_step_is_kept(clock_at):
    clock = StepClock()
    assert clock.last_time == 0.0
    clock_at["s"] = 7.5
    clock.record(7.0, 1)
    assert clock.last_time == 7.5


def test_shapes_that_warm_up_has_not_run_are_told():
    scheduler, blocks = make_scheduler()
    coverage = Coverage()
    for size in (1, 1, 2):
        coverage.missed[Bucket(StepKind.DECODE, size, 1, 1)] += 1
    assert take_stats(scheduler, blocks, StepClock(), coverage).num_missed_shapes == 3


def make_scheduler(**limits: Any) -> tuple[Scheduler, BlockManager]:
    blocks = BlockManager(
        [KVGroup(None, 9), KVGroup(64, 5)], block_size=4, max_num_seqs=2, max_model_len=64, enable_prefix_caching=True
    )
    return Scheduler(SchedulerConfig(2, 32, 32), blocks), blocks


def test_a_snapshot_tells_what_was_done():
    scheduler, blocks = make_scheduler()
    prompts = [[0, 1, 2, 3, 4], [9, 8, 7, 6, 5], [0, 1, 2, 3, 40]]
    for arrival in range(3):
        scheduler.add(
            Request(f"r{arrival}", prompts[arrival], SamplingParams(), max_tokens=2 - arrival % 2, arrival=arrival)
        )
    before = take_stats(scheduler, blocks, StepClock(), Coverage())
    assert (before.num_running, before.num_waiting, before.prompt_tokens) == (0, 3, 15)
    assert (before.num_waiting_tokens, before.prefix_query_tokens) == (15, 0)
    assert (before.live_blocks, before.cached_blocks, before.free_blocks) == (0, 0, 8 + 4)

    plan = scheduler.schedule()
    scheduler.update_from_output(plan, ModelOutput({f"r{i}": [SampledToken(7)] for i in range(2)}))
    stats = take_stats(scheduler, blocks, StepClock(), Coverage())
    # r0 goes on with 2 blocks in each group; r1 has ended and left its first block behind.
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (1, 1, 5)
    assert stats.prefix_query_tokens == 10
    assert (stats.live_blocks, stats.cached_blocks, stats.free_blocks) == (4, 2, 6)
    assert (stats.generated_tokens, stats.prefix_hit_tokens, stats.num_preemptions) == (2, 0, 0)

    plan = scheduler.schedule()  # r0's last token, and r2, which hits r0's first block
    scheduler.update_from_output(plan, ModelOutput({"r0": [SampledToken(7)], "r2": [SampledToken(7)]}))
    stats = take_stats(scheduler, blocks, StepClock(), Coverage())
    assert (stats.prefix_hit_tokens, stats.generated_tokens) == (4, 4)
    assert (stats.num_running, stats.weight_version) == (1, 0)


def test_preemptions_and_the_weight_version_are_told():
    scheduler, blocks = make_scheduler()
    scheduler.add(Request("r", [1, 2, 3], SamplingParams(), max_tokens=5))
    scheduler.update_from_output(scheduler.schedule(), ModelOutput({"r": [SampledToken(7)]}))
    scheduler.change_weights(4, "recompute")
    stats = take_stats(scheduler, blocks, StepClock(), Coverage())
    assert (stats.num_preemptions, stats.weight_version) == (1, 4)
    assert (stats.num_running, stats.num_waiting) == (0, 1)


def test_a_snapshot_is_frozen_and_has_the_published_names():
    scheduler, blocks = make_scheduler()
    stats = take_stats(scheduler, blocks, StepClock(), Coverage())
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.num_running = 3  # type: ignore[misc]
    names = {f.name for f in dataclasses.fields(stats)}
    assert names >= {
        *("num_running", "num_waiting", "live_blocks", "cached_blocks", "free_blocks", "num_preemptions"),
        *("prefix_hit_tokens", "prompt_tokens", "generated_tokens", "step_time_ms"),
    }
