"""How a batch is divided among the ways to sample, worked out once per composition of the batch.

Owns: which row goes which way, and the rows' parameters as tensors on the logits' device. A plan is good for
as many steps as the same states come in the same order. With drafts their number changes from step to step, so what
holds for all rows of a request is kept apart, as arrays that a plan takes its rows from.
Does not know: logits, draws. It looks at nothing that changes from step to step.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cb_engine.sampling.blocks import row_chunks, to_device, wide_dtype
from cb_engine.sampling.edits import LogitEdits, has_edit
from cb_engine.sampling.penalties import Penalties
from cb_engine.sampling.state import SamplingState
from cb_engine.sampling.truncation import FEW, MANY, Cuts
from cb_engine.sampling_params import SamplingParams

# greedy: no draw. free: no cuts, and a kernel for it. few, many: everything needed is among the best tokens. share:
# so it is, but for the sum over the row, which top_p is a share of. whole: the row as it is.
Way = Literal["greedy", "free", "few", "many", "share", "whole"]
_WAYS: tuple[Way, ...] = get_args(Way)


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


class Requests:
    """What holds for all rows of a request, as arrays with an entry for each request; good as long as the same ones
    come in the same order."""

    def __init__(self, roots: Sequence[SamplingState], device: torch.device, *, native: bool) -> None:
        # Kept to compare identities with; holding them also keeps an identity from being used again.
        self._roots = tuple(roots)
        self.device = device
        params = [root.params for root in roots]
        native = native and device.type == "cpu"
        self.seeds = np.array([root.seed % 2**64 for root in roots], dtype=np.uint64)
        self.temperature = np.array([p.temperature for p in params], dtype=np.float32)
        self.ways = np.array([_WAYS.index(_way(p, device, native)) for p in params], dtype=np.int64)
        self.top_k = np.array([p.top_k for p in params], dtype=np.int64)
        self.top_p = np.array([p.top_p for p in params], dtype=np.float64)
        self.min_p = np.array([p.min_p for p in params], dtype=np.float32)
        # How many log-probabilities are asked for beside the token's own; -1: none, and not that one either.
        self.logprobs = np.array([-1 if p.logprobs is None else p.logprobs for p in params], dtype=np.int64)
        self.are_raw = np.array([p.logprobs_mode == "raw" for p in params], dtype=bool)
        self.have_edits = np.array([has_edit(root) for root in roots], dtype=bool)
        # Nothing but best tokens and free draws, and nobody asks for more: one kernel does it all.
        plain = [_WAYS.index("greedy"), _WAYS.index("free")]
        self.are_plain = bool(native and params and np.isin(self.ways, plain).all() and not (self.logprobs >= 0).any())

    def fits(self, roots: Sequence[SamplingState], device: torch.device) -> bool:
        """Whether these are those of the requests, in this order."""
        return device == self.device and _are_same(roots, self._roots)


class Plan:
    """The division of one batch. What a step does not ask for is not made.

    Args:
        states: of the rows.
        requests: those of the rows, by their first rows' states.
        index: `[rows]`, the place of each row's request among them.
    """

    def __init__(
        self,
        states: Sequence[SamplingState],
        requests: Requests,
        index: npt.NDArray[np.int64],
        vocab_size: int,
        penalties: Penalties,
    ) -> None:
        self.states = tuple(states)  # kept like those of `Requests`
        self.vocab_size = vocab_size
        self.device = requests.device
        self._requests = requests
        self._index = index
        edited = np.flatnonzero(requests.have_edits[index]).tolist()
        self.edits = LogitEdits(self.states, edited, vocab_size, self.device, penalties)
        self.seeds = requests.seeds[index]
        self.is_plain = requests.are_plain

    @classmethod
    def of(
        cls,
        states: Sequence[SamplingState],
        vocab_size: int,
        device: torch.device,
        penalties: Penalties,
        *,
        native: bool,
        requests: Requests | None = None,
    ) -> Plan:
        """Return the plan of a batch.

        Args:
            requests: those of an earlier batch, used again if they fit.
        """
        roots = [state.root for state in states]
        places = {root: place for place, root in enumerate(dict.fromkeys(roots))}
        if requests is None or not requests.fits(list(places), device):
            requests = Requests(list(places), device, native=native)
        index = np.fromiter((places[root] for root in roots), np.int64, len(roots))
        return cls(states, requests, index, vocab_size, penalties)

    def fits(self, states: Sequence[SamplingState], vocab_size: int, device: torch.device) -> bool:
        """Whether the plan was made for these states, in this order."""
        return vocab_size == self.vocab_size and device == self.device and _are_same(states, self.states)

    @property
    def requests(self) -> Requests:
        """See `of`."""
        return self._requests

    @cached_property
    def odds(self) -> Tensor:
        """The temperatures, fp32; 0 is greedy, for the kernel."""
        return self._put(self._requests.temperature[self._index])

    @cached_property
    def temperature(self) -> Tensor:
        """The temperatures, fp32, above 0; of no meaning for greedy rows."""
        values = self._requests.temperature[self._index]
        return self._put(np.where(values == 0, np.float32(1), values))

    @cached_property
    def greedy(self) -> Rows | None:
        """Rows that take the best token."""
        return self._rows(self._go("greedy"))

    @cached_property
    def free(self) -> Rows | None:
        """Rows that the kernel draws for."""
        return self._rows(self._go("free"))

    @cached_property
    def whole_groups(self) -> list[WholeGroup]:
        """Rows that are sampled from all of their tokens."""
        return self.group_whole(np.flatnonzero(self._go("whole")).tolist())

    @cached_property
    def candidate_groups(self) -> list[Group]:
        """Rows that are sampled from their best tokens."""
        groups = []
        ways: tuple[tuple[Way, int], ...] = (("few", FEW), ("many", MANY), ("share", MANY))
        for way, candidates in ways:
            rows = self._rows(self._go(way))
            if rows is not None:
                temperature = rows.take(self.temperature)
                groups.append(Group(rows, temperature, self.cuts(rows.host), candidates, way == "share"))
        return groups

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many of the best tokens each row asks for."""
        return tuple(np.maximum(self._logprobs, 0).tolist())

    @cached_property
    def processed(self) -> list[Rows]:
        """Rows that ask for log-probabilities of what they chose from, apart by how many."""
        return self._rows_by_count(~self._are_raw)

    @cached_property
    def raw(self) -> list[Rows]:
        """Rows that ask for the model's own, likewise."""
        return self._rows_by_count(self._are_raw)

    @cached_property
    def greedy_processed(self) -> Rows | None:
        """Those of `processed` that take the best token."""
        return self._rows(self._go("greedy") & (self._logprobs >= 0) & ~self._are_raw)

    def rows(self, host: Sequence[int]) -> Rows:
        """Return some rows of this batch."""
        return Rows.of(host, len(self.states), self.device)

    def group_whole(self, host: Sequence[int]) -> list[WholeGroup]:
        """Return some rows as groups to be sampled whole, as many at a time as the device likes."""
        groups = []
        for part in row_chunks(len(host), self.device):
            rows = self.rows(sorted(host[part]))
            top_k, top_p, min_p = self._limits(rows.host)
            limited = np.flatnonzero((top_k > 0) | (top_p < 1.0) | (min_p > 0)).tolist()
            groups.append(
                WholeGroup(
                    rows=rows,
                    temperature=rows.take(self.temperature),
                    limited=Rows.of(limited, len(rows.host), self.device) if limited else None,
                    cuts=self.cuts([rows.host[at] for at in limited]),
                    max_top_k=int(top_k.max()),
                    any_top_p=bool((top_p < 1.0).any()),
                )
            )
        return groups

    def cuts(self, host: Sequence[int]) -> Cuts:
        """Return the limits of some rows."""
        top_k, top_p, min_p = self._limits(host)
        return Cuts(self._put(top_k), self._put(top_p, wide_dtype(self.device)), self._put(min_p))

    @property
    def _logprobs(self) -> npt.NDArray[np.int64]:
        return self._requests.logprobs[self._index]

    @property
    def _are_raw(self) -> npt.NDArray[np.bool_]:
        return self._requests.are_raw[self._index]

    def _limits(self, host: Sequence[int]) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
        at = self._index[np.asarray(host, dtype=np.int64)]
        return self._requests.top_k[at], self._requests.top_p[at], self._requests.min_p[at]

    def _go(self, way: Way) -> npt.NDArray[np.bool_]:
        going: npt.NDArray[np.bool_] = (self._requests.ways == _WAYS.index(way))[self._index]
        return going

    def _rows(self, wanted: npt.NDArray[np.bool_]) -> Rows | None:
        host = np.flatnonzero(wanted).tolist()
        return self.rows(host) if host else None

    def _rows_by_count(self, of_mode: npt.NDArray[np.bool_]) -> list[Rows]:
        # One for each number of best tokens asked for: which of two equal tokens is the last to be reported
        # must not depend on how many another row wants.
        asked = np.where(of_mode, self._logprobs, -1)
        counts = [count for count in np.unique(asked).tolist() if count >= 0]
        return [self.rows(np.flatnonzero(asked == count).tolist()) for count in counts]

    def _put(self, values: npt.NDArray[Any], dtype: torch.dtype | None = None) -> Tensor:
        return to_device(torch.from_numpy(values).to(dtype), self.device)


def _are_same(states: Sequence[SamplingState], others: Sequence[SamplingState]) -> bool:
    return len(states) == len(others) and all(map(operator.is_, states, others))


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
