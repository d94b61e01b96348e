"""Drafting with a model: a pass over what is new to it, then a pass for every further token.

Owns the loop and its shapes. Does not know what the model is: subclasses say which rows are new and what goes in.

    first pass   the tokens that the drafter has not seen, the just sampled one last      -> d1
    next passes  d1 -> d2 -> ... -> dk, one token a request; they never leave the device

Keys and values go to the request's own blocks, at the positions of the tokens; those of wrong drafts are overwritten.
What comes before the first pass (a prompt, for the most part) is caught up with in passes of its own, whose outcome
nobody needs.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from cb_engine.kv_cache.block_manager import BlockCopy, Int32Array
from cb_engine.request import Request
from cb_engine.runner.buckets import Bucket, BucketTable, StepKind
from cb_engine.runner.drafters.computed import ComputedRows
from cb_engine.runner.executor import Executor
from cb_engine.runner.input_batch import InputBatch, PackedRows, pack_rows
from cb_engine.runner.paged_model import PagedModel
from cb_engine.scheduler.output import ScheduledRequest
from cb_engine.speculative.proposer import NO_DRAFT, Draft, DraftAsk

BlockTables = Callable[[Sequence[Request], int], Sequence[Int32Array]]  # see `BlockManager.block_tables`


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of one request: the drafter's positions `start` to `end`, of which it sees those from `visible` on.

    Behind a gap the rows close up to the beginning of the block that `visible` lies in, so that what is seen begins
    with a block: the row at position p lies where `slot(p)` says.
    """

    request: Request
    start: int
    end: int
    visible: int = 0

    @property
    def num_rows(self) -> int:
        """How many they are."""
        return self.end - self.start

    def slot(self, position: int, block_size: int) -> int:
        """The place in the request's blocks of its row at a position."""
        return position - self.visible % block_size


@dataclass(frozen=True)
class Passes:
    """What all passes of a drafter need. `tables` are the BlockManager's, read only.

    Attributes:
        group: that of the drafter's own layers, if it has any.
    """

    model: PagedModel
    executor: Executor
    buckets: BucketTable
    block_size: int
    tables: BlockTables
    num_groups: int
    group: int = 0

    @property
    def num_tokens(self) -> int:
        """k."""
        return self.buckets.drafts.num_tokens if self.buckets.drafts else 0


class ChainDrafter(ABC):
    """See the module docstring. Implements `Proposer`.

    Attributes:
        shift: the row at position p takes the token at p + shift.
        catch_up_seconds: see `Proposer`: what went to rows before the first pass.
    """

    shift: int

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self._all_passes = passes.executor.is_static  # whether to run them all, needed or not
        self.catch_up_seconds = 0.0

    @abstractmethod
    def _first_spans(self, requests: Sequence[Request]) -> list[Span | None]:
        """The rows of the first pass, None for a request that cannot be drafted now. All rows before are computed when
        it returns."""

    def _first_inputs(self, spans: Sequence[Span], bucket: Bucket) -> tuple[torch.Tensor, ...]:
        """What else a pass over known tokens takes for these rows, padded to the bucket."""
        return ()

    def _drafted(self, spans: Sequence[Span], token_ids: Sequence[Sequence[int]]) -> None:  # noqa: B027 (not all need it)
        """Notes what was drafted."""

    def observe(self, scheduled: Sequence[ScheduledRequest]) -> None:  # noqa: B027 (not all need it)
        """The target has just computed these rows, in this order."""

    def copied(self, copies: Sequence[BlockCopy]) -> None:  # noqa: B027 (not all need it)
        """These blocks are copied before anything else happens, in this order."""

    def weights_changed(self, *, own: bool) -> None:  # noqa: B027 (not all need it)
        """The target has other weights from now on; `own`: the drafter too."""

    def forget(self, request: Request) -> None:  # noqa: B027 (not all need it)
        """See `Proposer.forget`."""

    @torch.inference_mode()
    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """See `Proposer.propose`."""
        self.catch_up_seconds = 0.0
        found = self._first_spans([ask.request for ask in asks])
        pairs = [(span, ask.max_tokens) for span, ask in zip(found, asks, strict=True) if span is not None]
        if not pairs:
            return [NO_DRAFT] * len(asks)
        spans, limits = [span for span, _ in pairs], [limit for _, limit in pairs]
        read = self._passes.executor.read(self._chain(spans, limits))
        chains = [tuple(ids[:limit]) for ids, limit in zip(read, limits, strict=False)]
        self._drafted(spans, chains)
        drafts = iter(chains)
        return [NO_DRAFT if span is None else Draft(next(drafts)) for span in found]

    def _parts(self, span: Span) -> tuple[Span, Span]:
        """The rows to catch up with, and those of the first pass."""
        width = self._passes.buckets.width(StepKind.DRAFT_FIRST)
        middle = span.start if span.num_rows <= width else span.end - 1
        return replace(span, end=middle), replace(span, start=middle)

    def _prefill(self, spans: Sequence[Span]) -> None:
        """Computes rows whose logits nobody needs, as many at a time as a step may have."""
        started = time.perf_counter()
        most = self._passes.buckets.max_num_batched_tokens
        seqs = self._passes.buckets.max_num_seqs
        part: list[Span] = []
        room, last = most, None
        for whole in spans:
            span = whole
            while span.num_rows:
                piece = replace(span, end=min(span.end, span.start + room))
                part.append(piece)
                span, room = replace(span, start=piece.end), room - piece.num_rows
                if not room or len(part) == seqs:
                    last = self._run(StepKind.DRAFT_PREFILL, part)
                    part, room = [], most
        if part:
            last = self._run(StepKind.DRAFT_PREFILL, part)
        if last is not None:
            self._passes.executor.read(last[0])  # waits, so that what follows is timed by itself
            self.catch_up_seconds += time.perf_counter() - started

    def _run(self, kind: StepKind, spans: Sequence[Span]) -> tuple[torch.Tensor, ...]:
        """A pass over rows whose tokens are known: the ids that follow each span, and what the next pass feeds on."""
        lengths = [span.num_rows for span in spans]
        token_ids = [t for s in spans for t in s.request.token_ids[s.start + self.shift : s.end + self.shift]]
        batch = self._batch(kind, spans, lengths, token_ids, [n - 1 for n in np.cumsum(lengths).tolist()])
        out: tuple[torch.Tensor, ...] = self._passes.model.run(batch, *self._first_inputs(spans, batch.bucket))
        return out

    def _chain(self, spans: Sequence[Span], limits: Sequence[int]) -> torch.Tensor:
        """[B, k] token ids, padding rows last."""
        ids, *carry = self._run(StepKind.DRAFT_FIRST, spans)
        if not self._passes.buckets.pads(StepKind.DRAFT_NEXT):  # the first pass may be padded all the same
            ids, *carry = (tensor[: len(spans)] for tensor in (ids, *carry))
        chain = [ids]
        for number in range(1, self._passes.num_tokens if self._all_passes else max(limits)):
            at = [replace(span, start=span.end + number - 1, end=span.end + number) for span in spans]
            active = [int(number < limit) for limit in limits]
            batch = self._batch(StepKind.DRAFT_NEXT, at, active, [0] * sum(active), [])
            ids, *carry = self._passes.model.run(batch, *carry, input_ids=ids.unsqueeze(0))
            chain.append(ids)
        drafts: torch.Tensor = self._passes.executor.run("collect", torch.stack, chain, 1)
        return drafts

    def _batch(
        self,
        kind: StepKind,
        spans: Sequence[Span],
        lengths: Sequence[int],
        token_ids: Sequence[int],
        wanted: Sequence[int],
    ) -> InputBatch:
        passes, size = self._passes, self._passes.block_size
        # A request that computes nothing in this pass may be past the end of what it can ever hold.
        width = max((-(-span.end // size) for span, count in zip(spans, lengths, strict=True) if count), default=1)
        first = [span.visible // size if count else 0 for span, count in zip(spans, lengths, strict=True)]
        tables = [_shifted(t, first) for t in passes.tables([span.request for span in spans], width)]
        bucket = passes.buckets.pad(kind, len(spans), sum(lengths), width)
        hidden = np.array([span.visible for span in spans])
        rows = PackedRows(np.array([span.start for span in spans]) - hidden, np.array(lengths), token_ids, hidden)
        static = passes.executor.is_static
        # All rows of a pass of single tokens are wanted, those of padding too: its shape is the next one's.
        wanted = range(bucket.num_seqs) if kind is StepKind.DRAFT_NEXT else wanted
        return pack_rows(rows, tables, bucket, size, wanted, num_logits=bucket.num_seqs, static_sizes=static)

    # ---- warm-up ---------------------------------------------------------------------------------------------

    def warm(self, bucket: Bucket) -> None:
        """Runs a shape of the drafter's on padding alone."""
        passes = self._passes
        rows = PackedRows(np.zeros(0, np.int64), np.zeros(0, np.int64), [])
        tables = [np.zeros((0, 0), np.int32)] * passes.num_groups
        num = bucket.num_seqs
        batch = pack_rows(rows, tables, bucket, passes.block_size, range(num), static_sizes=passes.executor.is_static)
        if bucket.kind is not StepKind.DRAFT_NEXT:
            ids, *_ = passes.model.run(batch, *self._first_inputs([], bucket))
            if bucket.kind is StepKind.DRAFT_FIRST:
                passes.executor.run("collect", torch.stack, [ids] * passes.num_tokens, 1)
            return
        ids = torch.zeros(1, num, dtype=torch.int64, device=passes.model.input_device)
        passes.model.run(batch, *self._next_inputs(bucket), input_ids=ids)

    def _next_inputs(self, bucket: Bucket) -> tuple[torch.Tensor, ...]:
        """Padding in the place of what a next pass is fed with beside ids."""
        return ()


class OwnCacheDrafter(ChainDrafter):
    """A drafter whose layers have keys and values of their own, in the blocks of the requests."""

    def __init__(self, passes: Passes) -> None:
        super().__init__(passes)
        self._rows = ComputedRows(passes.block_size)
        self._tables: dict[Request, Int32Array] = {}  # of a `propose`

    def copied(self, copies: Sequence[BlockCopy]) -> None:
        """See `ChainDrafter.copied`."""
        for copy in copies:
            if copy.group == self._passes.group:
                self._rows.copy(copy.src, copy.dst)

    def forget(self, request: Request) -> None:
        """See `Proposer.forget`."""
        self._rows.forget(request)

    def _take_tables(self, requests: Sequence[Request]) -> None:
        """Looks up their blocks, as far as tokens and drafts go."""
        size = self._passes.block_size
        longest = max((request.num_tokens for request in requests), default=0)
        tables = self._passes.tables(requests, -(-(longest + self._passes.num_tokens) // size))
        self._tables = dict(zip(requests, tables[self._passes.group], strict=True))


def _shifted(table: Int32Array, first: Sequence[int]) -> Int32Array:
    """Each row of a block table without its `first` entries."""
    if not any(first):
        return table
    shifted = np.zeros_like(table)
    for row, skip in enumerate(first):
        shifted[row, : table.shape[1] - skip] = table[row, skip:]
    return shifted
