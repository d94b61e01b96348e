"""What an engine has done so far, as one frozen snapshot. Owns the step clock; reads everything else."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from cb_engine.kv_cache.block_manager import BlockManager
from cb_engine.scheduler.scheduler import Scheduler

_WINDOW = 64  # steps that the reported step time is the mean of


@dataclass(frozen=True)
class EngineStats:
    """A snapshot. Counts of tokens, drafts and preemptions are totals since the engine was made.

    Blocks are summed over all layer groups; `live + cached + free` is every block there is.
    """

    num_running: int
    num_waiting: int
    live_blocks: int
    cached_blocks: int
    free_blocks: int
    num_preemptions: int
    prefix_hit_tokens: int
    prompt_tokens: int
    generated_tokens: int
    num_steps: int
    step_time_ms: float  # mean of the latest steps, 0 before the first
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
    """Times the latest steps."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_WINDOW)
        self.num_steps = 0

    def record(self, started: float) -> None:
        """Takes in a step that began at `started` (`time.perf_counter()`) and ends now."""
        self._times.append(time.perf_counter() - started)
        self.num_steps += 1

    @property
    def mean_ms(self) -> float:
        """Mean of the latest steps in milliseconds."""
        return 1e3 * sum(self._times) / len(self._times) if self._times else 0.0


def take_stats(scheduler: Scheduler, blocks: BlockManager, clock: StepClock) -> EngineStats:
    """Reads all counters; cheap enough for every step."""
    counters = scheduler.counters
    return EngineStats(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        live_blocks=blocks.num_live_blocks,
        cached_blocks=blocks.num_cached_blocks,
        free_blocks=blocks.num_free_blocks,
        num_preemptions=counters.num_preemptions,
        prefix_hit_tokens=counters.prefix_hit_tokens,
        prompt_tokens=counters.prompt_tokens,
        generated_tokens=counters.generated_tokens,
        num_steps=clock.num_steps,
        step_time_ms=clock.mean_ms,
        weight_version=blocks.weight_version,
        num_drafts=counters.num_drafts,
        num_draft_tokens=counters.draft_tokens,
        num_accepted_tokens=sum(counters.accepted_per_position),
        accepted_per_position=tuple(counters.accepted_per_position),
    )
