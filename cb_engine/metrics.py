"""What an engine has done so far, as one frozen snapshot. Owns the step clock; reads everything else."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

from cb_engine.kv_cache.block_manager import BlockManager
from cb_engine.runner.forward import Coverage
from cb_engine.scheduler.scheduler import Scheduler

_WINDOW = 64  # steps that the reported step time is the mean of

STEP_TOKENS_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, float("inf"))


@dataclass(frozen=True)
class EngineStats:
    """A snapshot. Counts of tokens, drafts and preemptions are totals since the engine was made.

    Blocks are summed over all layer groups; `live + cached + free` is every block there is.
    """

    num_running: int
    num_waiting: int
    num_waiting_tokens: int  # of the prompts of these
    live_blocks: int
    cached_blocks: int
    free_blocks: int
    num_preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    prompt_tokens: int
    generated_tokens: int
    num_steps: int
    step_time_ms: float  # mean of the latest steps, 0 before the first
    last_step_time: float  # `time.perf_counter()` at the end of the latest step, 0 before the first
    step_tokens: int  # computed in all steps together
    steps_by_tokens: tuple[int, ...]  # steps of at most STEP_TOKENS_BOUNDS[i] tokens, and more than the bound before
    num_missed_shapes: int  # times that a padded step had a shape which warm-up had not run
    weight_version: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a request gets from a step that verifies drafts of its, on the average: 1 + accepted / drafts."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0


class StepClock:
    """Times the latest steps, and counts all by their size."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_WINDOW)
        self._by_tokens = [0] * len(STEP_TOKENS_BOUNDS)
        self.num_steps = 0
        self.num_tokens = 0
        self.last_time = 0.0

    def record(self, started: float, num_tokens: int) -> None:
        """Takes in a step of `num_tokens` that began at `started` (`time.perf_counter()`) and ends now."""
        self.last_time = time.perf_counter()
        self._times.append(self.last_time - started)
        self._by_tokens[bisect_left(STEP_TOKENS_BOUNDS, num_tokens)] += 1
        self.num_steps += 1
        self.num_tokens += num_tokens

    @property
    def by_tokens(self) -> tuple[int, ...]:
        """See `EngineStats.steps_by_tokens`."""
        return tuple(self._by_tokens)

    @property
    def mean_ms(self) -> float:
        """Mean of the latest steps in milliseconds."""
        return 1e3 * sum(self._times) / len(self._times) if self._times else 0.0


def take_stats(scheduler: Scheduler, blocks: BlockManager, clock: StepClock, coverage: Coverage) -> EngineStats:
    """Reads all counters; cheap enough for every step."""
    counters = scheduler.counters
    return EngineStats(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_waiting_tokens=scheduler.num_waiting_tokens,
        live_blocks=blocks.num_live_blocks,
        cached_blocks=blocks.num_cached_blocks,
        free_blocks=blocks.num_free_blocks,
        num_preemptions=counters.num_preemptions,
        prefix_query_tokens=counters.prefix_query_tokens,
        prefix_hit_tokens=counters.prefix_hit_tokens,
        prompt_tokens=counters.prompt_tokens,
        generated_tokens=counters.generated_tokens,
        num_steps=clock.num_steps,
        step_time_ms=clock.mean_ms,
        last_step_time=clock.last_time,
        step_tokens=clock.num_tokens,
        steps_by_tokens=clock.by_tokens,
        num_missed_shapes=sum(tuple(coverage.missed.values())),  # the engine may be counting
        weight_version=blocks.weight_version,
        num_drafts=counters.num_drafts,
        num_draft_tokens=counters.draft_tokens,
        num_accepted_tokens=sum(counters.accepted_per_position),
        accepted_per_position=tuple(counters.accepted_per_position),
    )
