"""From a step's logits to the tokens of each request: sampling, acceptance of drafts, log-probabilities.

Owns each request's SamplingStates. Does not know models or caches. The rows of a step's logits are, request by request,
those that predict prompt tokens and those that are sampled (see `input_batch._wanted_rows`):

    r0: decode    r1: three drafts          r2: end of a prompt with prompt_logprobs     padding
    [ s           s  s  s  s                p p p p s                                    ...      ]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, overload
from weakref import WeakKeyDictionary

import numpy as np
import torch

from cb_engine.grammar.masks import MaskAsk, MaskMaker, TokenMasks
from cb_engine.outputs import TokenLogprob
from cb_engine.request import Request
from cb_engine.runner.buckets import Bucket, StepKind
from cb_engine.runner.executor import Executor
from cb_engine.runner.input_batch import prompt_logprob_rows
from cb_engine.runner.logprobs import candidate_entries, prompt_entries
from cb_engine.sampling import SamplerOutput, SamplingState
from cb_engine.sampling.acceptance import NOTHING, accept
from cb_engine.scheduler.output import NOT_FINITE, NOTHING_LEFT, ModelOutput, SampledToken, ScheduledRequest


class TokenSampler(Protocol):
    """`Sampler` or `StaticSampler`."""

    def __call__(
        self, logits: torch.Tensor, states: Sequence[SamplingState], masks: TokenMasks | None = None
    ) -> SamplerOutput:
        """One token for each row."""

    def warmup(self, logits: torch.Tensor) -> None:
        """Runs what a call with such logits may run, reading no value."""


class _WithDrafts(Sequence[int]):
    """A live view: a request's output, and after it the first `count` of its drafts."""

    __slots__ = ("_count", "_drafts", "_output")

    def __init__(self, output: Sequence[int], drafts: Sequence[int], count: int) -> None:
        self._output, self._drafts, self._count = output, drafts, count

    def __len__(self) -> int:
        return len(self._output) + self._count

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        known, size = len(self._output), len(self)
        if isinstance(index, slice):
            start, stop, step = index.indices(size)
            if step != 1:
                return [self[at] for at in range(start, stop, step)]
            first = list(self._output[start : min(stop, known)])
            return first + list(self._drafts[max(0, start - known) : max(0, stop - known)])
        at = range(size)[index]
        return self._output[at] if at < known else self._drafts[at - known]


class _States:
    """The states of one request: of its next token, and of the tokens behind its drafts."""

    def __init__(self, request: Request) -> None:
        self._drafts: list[int] = []
        self._first = SamplingState(
            params=request.sampling_params,
            seed=request.seed,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=request.output_token_ids,
            stop_token_ids=request.stop_token_ids,
            bad_words_ids=request.bad_words_ids,
        )
        self._all = [self._first]

    def of(self, drafts: Sequence[int]) -> list[SamplingState]:
        """One for each row of a request that verifies these drafts."""
        self._drafts[:] = drafts
        first = self._first
        while len(self._all) <= len(drafts):
            output = _WithDrafts(first.output_token_ids, self._drafts, len(self._all))
            self._all.append(
                SamplingState(
                    params=first.params,
                    seed=first.seed,
                    prompt_token_ids=first.prompt_token_ids,
                    output_token_ids=output,
                    stop_token_ids=first.stop_token_ids,
                    bad_words_ids=first.bad_words_ids,
                    first=first,
                )
            )
        return self._all[: 1 + len(drafts)]


class RowSampler:
    """See the module docstring."""

    def __init__(self, sampler: TokenSampler, executor: Executor) -> None:
        self._sampler = sampler
        self._executor = executor
        self._masks = MaskMaker(torch.get_num_threads())
        self._warm: set[int] = set()  # numbers of rows that have been warmed up
        self._states: WeakKeyDictionary[Request, _States] = WeakKeyDictionary()

    def sample(
        self, scheduled: Sequence[ScheduledRequest], logits: torch.Tensor, num_rows: int, shape: tuple[int, int]
    ) -> ModelOutput:
        """Draws the tokens of a step.

        Args:
            scheduled: its requests.
            logits: [R, vocab], the wanted rows, then padding.
            num_rows: how many rows to sample from, padding included; 0: as many as there are.
            shape: (B, W) of the tokens that come out, padding included: requests and tokens of each at the most.
        """
        entries, states, rows = self._split(scheduled, logits)
        if not states:
            return ModelOutput(prompt_logprobs=entries)
        sampling = [item for item in scheduled if item.samples]
        # The device may be computing still: masks are filled meanwhile.
        wanted = self._wanted(logits, rows, num_rows)
        sampled = self._sampler(wanted, states, self._masks_of(sampling))
        if any(item.draft_token_ids for item in sampling):
            kept = self._accepted(sampling, sampled, shape)
        else:
            ids, failed = self._executor.read(sampled.token_ids), self._executor.read(sampled.failed)
            kept = [[NOTHING if failed[row] else ids[row]] for row in range(len(states))]
        return ModelOutput(self._tokens(sampling, sampled, kept, wanted), entries)

    def warm(self, logits: torch.Tensor, num_rows: int, bucket: Bucket) -> None:
        """Runs what `sample` may run on a step of this shape, reading no value.

        Args:
            logits: [R, vocab], of such a step.
            num_rows: rows to sample from.
        """
        wanted = logits
        if self._is_static or logits.shape[0] != num_rows:  # rows of prompts may lie between those to sample from
            index = torch.zeros(num_rows, dtype=torch.int64, device=logits.device)
            wanted = self._executor.run("select_rows", torch.index_select, logits, 0, index)
        if num_rows not in self._warm:
            self._sampler.warmup(wanted)
            self._warm.add(num_rows)
        if bucket.kind is StepKind.VERIFY:
            ids = torch.zeros(num_rows, dtype=torch.int64, device=logits.device)
            rows = ids.view(bucket.num_seqs, bucket.width)
            self._executor.run("accept", accept, ids, ids > 0, rows, rows[:, 1:].contiguous())

    def _split(
        self, scheduled: Sequence[ScheduledRequest], logits: torch.Tensor
    ) -> tuple[dict[str, list[list[TokenLogprob]]], list[SamplingState], list[int]]:
        """The entries of prompt tokens, and the rows to sample from with their states."""
        entries: dict[str, list[list[TokenLogprob]]] = {}
        states: list[SamplingState] = []
        rows: list[int] = []
        row = 0
        if self._is_static and any(map(prompt_logprob_rows, scheduled)):
            # How many rows a prompt has is no shape that a static device knows.
            logits = self._executor.to_host(logits)
        for item in scheduled:
            if item.request.sampling_params.prompt_logprobs is not None:
                end = row + len(prompt_logprob_rows(item))
                entries[item.request.request_id] = prompt_entries(item, logits[row:end]) if end > row else []
                row = end
            if item.samples:
                states += self._states_of(item)
                rows.extend(range(row, row + item.num_sampled_rows))
                row += item.num_sampled_rows
        return entries, states, rows

    def _masks_of(self, scheduled: Sequence[ScheduledRequest]) -> TokenMasks | None:
        """What the grammars of the requests that sample allow; None if none of them has any."""
        asks: list[MaskAsk] = []
        row = 0
        for item in scheduled:
            if item.request.grammar is not None:
                asks.append(MaskAsk(item.request.grammar, row, item.draft_token_ids))
            row += item.num_sampled_rows
        return self._masks.make(asks) if asks else None

    @property
    def _is_static(self) -> bool:
        return self._executor.is_static

    def _wanted(self, logits: torch.Tensor, rows: Sequence[int], num_rows: int) -> torch.Tensor:
        size = num_rows or len(rows)
        if rows[-1] == len(rows) - 1:
            if logits.shape[0] == size:
                return logits
            if not self._is_static:
                return logits[:size]
        index = torch.tensor([*rows, *[0] * (size - len(rows))], dtype=torch.int64).to(logits.device)
        chosen: torch.Tensor = self._executor.run("select_rows", torch.index_select, logits, 0, index)
        return chosen

    def _accepted(
        self, scheduled: Sequence[ScheduledRequest], sampled: SamplerOutput, shape: tuple[int, int]
    ) -> list[list[int]]:
        """What is kept of the tokens of each request that samples, `NOTHING` beyond; rows of padding come last."""
        num_seqs, width = shape
        counts = np.zeros(num_seqs, np.int64)
        counts[: len(scheduled)] = [item.num_sampled_rows for item in scheduled]
        first = np.cumsum(counts) - counts
        place = np.arange(width)
        rows = np.where(place < counts[:, None], first[:, None] + place, 0)
        drafts = np.full((num_seqs, width - 1), NOTHING, np.int64)
        # A request's drafts are as many as its rows but one; by rows, as boolean indices are assigned.
        drafts[place[1:] < counts[:, None]] = [t for item in scheduled for t in item.draft_token_ids]
        device = sampled.token_ids.device
        kept = self._executor.run(
            "accept",
            accept,
            sampled.token_ids,
            sampled.failed,
            torch.from_numpy(rows).to(device),
            torch.from_numpy(drafts).to(device),
        )
        result: list[list[int]] = self._executor.read(kept)
        return result

    def _tokens(
        self,
        scheduled: Sequence[ScheduledRequest],
        sampled: SamplerOutput,
        kept: Sequence[Sequence[int]],
        logits: torch.Tensor,
    ) -> dict[str, list[SampledToken]]:
        read = self._executor.read
        logprobs = None if sampled.logprobs is None else read(sampled.logprobs)
        top = None if sampled.top is None else sampled.top.rows(read)
        tokens: dict[str, list[SampledToken]] = {}
        row = 0
        for item, ids in zip(scheduled, kept, strict=False):
            request = item.request
            good = [token_id for token_id in ids if token_id != NOTHING]
            if not good:
                tokens[request.request_id] = [SampledToken(NOTHING, failed=self._cause(logits, row))]
            elif logprobs is None or request.sampling_params.logprobs is None:
                tokens[request.request_id] = [SampledToken(token_id) for token_id in good]
            else:
                tokens[request.request_id] = [
                    SampledToken(
                        token_id,
                        logprobs[at],
                        candidate_entries(None if top is None else top[at], token_id, logprobs[at]),
                    )
                    for at, token_id in enumerate(good, start=row)
                ]
            row += item.num_sampled_rows
        return tokens

    def _cause(self, logits: torch.Tensor, row: int) -> str:
        """Why a row failed: the model's fault, or what is wished for leaves nothing."""
        return NOTHING_LEFT if self._executor.to_host(logits)[row].amax().isfinite() else NOT_FINITE

    def _states_of(self, item: ScheduledRequest) -> list[SamplingState]:
        states = self._states.get(item.request)
        if states is None:
            states = self._states[item.request] = _States(item.request)
        return states.of(item.draft_token_ids)
