"""How a batch is divided among the ways to sample, worked out once per composition of the batch.

Owns: which row goes which way, and the rows' parameters as tensors on the logits' device. A plan is good for
as many steps as the same states come in the same order.
Does not know: logits, draws. It looks at nothing that changes from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from cb_engine.sampling.blocks import row_chunks, wide_dtype
from cb_engine.sampling.edits import LogitEdits
from cb_engine.sampling.penalties import Penalties
from cb_engine.sampling.state import SamplingState
from cb_engine.sampling.truncation import FEW, MANY, Cuts
from cb_engine.sampling_params import LogprobsMode, SamplingParams

# greedy: no draw. free: no cuts, and a kernel for it. few, many: everything needed is among the best tokens. share:
# so it is, but for the sum over the row, which top_p is a share of. whole: the row as it is.
Way = Literal["greedy", "free", "few", "many", "share", "whole"]


@dataclass(frozen=True)
class Rows:
    """Some rows of a batch, in order."""

    host: tuple[int, ...]
    index: Tensor
    everything: bool  # all rows of the batch: taking them copies nothing

    @classmethod
    def of(cls, rows: Sequence[int], total: int, device: torch.device) -> Rows:
        """Return the rows `rows` of a batch of `total`."""
        return cls(tuple(rows), torch.tensor(rows, dtype=torch.long, device=device), len(rows) == total)

    def take(self, values: Tensor) -> Tensor:
        """Return these rows of `values`."""
        return values if self.everything else values.index_select(0, self.index)


@dataclass(frozen=True)
class Group:
    """Rows that are sampled from their best tokens."""

    rows: Rows
    temperature: Tensor  # [rows] fp32
    cuts: Cuts  # [rows]
    candidates: int  # how many of the best tokens are looked at
    needs_sum: bool  # of the whole row


@dataclass(frozen=True)
class WholeGroup:
    """Rows that are sampled from all of their tokens."""

    rows: Rows
    temperature: Tensor  # [rows] fp32
    limited: Rows | None  # those of the rows, counted within them, that have a top_k, top_p or min_p
    cuts: Cuts  # [limited]
    max_top_k: int
    any_top_p: bool


class Plan:
    """The division of one batch."""

    def __init__(
        self,
        states: Sequence[SamplingState],
        vocab_size: int,
        device: torch.device,
        penalties: Penalties,
        *,
        native: bool,
    ) -> None:
        # Kept to compare identities with; holding them also keeps an identity from being used again.
        self.states = tuple(states)
        self.vocab_size = vocab_size
        self.device = device
        self.edits = LogitEdits(self.states, vocab_size, device, penalties)
        self.seeds = np.array([state.seed % 2**64 for state in states], dtype=np.uint64)
        params = [state.params for state in states]
        self.params = params
        self.temperature = torch.tensor([p.temperature or 1.0 for p in params], device=device)
        native = native and device.type == "cpu"
        ways = [_way(p, device, native) for p in params]
        self.greedy = self._rows([way == "greedy" for way in ways])
        self.free = self._rows([way == "free" for way in ways])
        # Nothing but best tokens and free draws, and nobody asks for more: one kernel does it all.
        self.is_plain = (
            native and {*ways} <= {"greedy", "free"} and all(p.logprobs is None for p in params) and bool(ways)
        )
        self.odds = torch.tensor([p.temperature for p in params], device=device)  # fp32; 0 is greedy, for the kernel
        self.whole_groups = self.group_whole([row for row, way in enumerate(ways) if way == "whole"])
        self.candidate_groups: list[Group] = []
        for way, candidates in (("few", FEW), ("many", MANY), ("share", MANY)):
            rows = self._rows([w == way for w in ways])
            if rows is not None:
                temperature = rows.take(self.temperature)
                cuts = self.cuts(rows.host)
                self.candidate_groups.append(Group(rows, temperature, cuts, candidates, way == "share"))
        self.counts = tuple(p.logprobs or 0 for p in params)
        self.processed = self._rows_by_count("processed")
        self.raw = self._rows_by_count("raw")
        self.greedy_processed = self._rows(
            [p.is_greedy and p.logprobs is not None and p.logprobs_mode == "processed" for p in params]
        )

    def fits(self, states: Sequence[SamplingState], vocab_size: int, device: torch.device) -> bool:
        """Whether the plan was made for these states, in this order."""
        return (
            len(states) == len(self.states)
            and vocab_size == self.vocab_size
            and device == self.device
            and all(a is b for a, b in zip(states, self.states, strict=True))
        )

    def rows(self, host: Sequence[int]) -> Rows:
        """Return some rows of this batch."""
        return Rows.of(host, len(self.states), self.device)

    def group_whole(self, host: Sequence[int]) -> list[WholeGroup]:
        """Return some rows as groups to be sampled whole, as many at a time as the device likes."""
        groups = []
        for part in row_chunks(len(host), self.device):
            rows = self.rows(sorted(host[part]))
            params = [self.params[row] for row in rows.host]
            limited = [at for at, p in enumerate(params) if p.top_k or p.top_p < 1.0 or p.min_p]
            groups.append(
                WholeGroup(
                    rows=rows,
                    temperature=rows.take(self.temperature),
                    limited=Rows.of(limited, len(params), self.device) if limited else None,
                    cuts=self.cuts([rows.host[at] for at in limited]),
                    max_top_k=max(p.top_k for p in params),
                    any_top_p=any(p.top_p < 1.0 for p in params),
                )
            )
        return groups

    def cuts(self, host: Sequence[int]) -> Cuts:
        """Return the limits of some rows."""
        params = [self.params[row] for row in host]
        return Cuts(
            top_k=torch.tensor([p.top_k for p in params], dtype=torch.long, device=self.device),
            top_p=torch.tensor([p.top_p for p in params], dtype=wide_dtype(self.device), device=self.device),
            min_p=torch.tensor([p.min_p for p in params], device=self.device),
        )

    def _rows(self, wanted: Sequence[bool]) -> Rows | None:
        host = [row for row, is_wanted in enumerate(wanted) if is_wanted]
        return self.rows(host) if host else None

    def _rows_by_count(self, mode: LogprobsMode) -> list[Rows]:
        # One for each number of best tokens asked for: which of two equal tokens is the last to be reported
        # must not depend on how many another row wants.
        asked = [p.logprobs if p.logprobs_mode == mode else None for p in self.params]
        counts = sorted({count for count in asked if count is not None})
        return [self.rows([row for row, count in enumerate(asked) if count == wanted]) for wanted in counts]


def _way(params: SamplingParams, device: torch.device, native: bool) -> Way:
    if params.is_greedy:
        return "greedy"
    if native and not params.top_k and not params.min_p and params.top_p >= 1.0:
        return "free"
    # Whether a row's candidates were enough is known on the device; only on a CPU does the host see it
    # without waiting.
    if device.type != "cpu" or params.top_k >= MANY:
        return "whole"
    if params.top_k:
        return "few" if params.top_k < FEW else "many"
    if params.top_p < 1.0:
        return "share"
    return "many" if params.min_p else "whole"
