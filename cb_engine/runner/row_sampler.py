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

import torch

from cb_engine.outputs import TokenLogprob
from cb_engine.request import Request
from cb_engine.runner.buckets import Bucket, StepKind
from cb_engine.runner.executor import Executor
from cb_engine.runner.input_batch import prompt_logprob_rows
from cb_engine.runner.logprobs import candidate_entries, prompt_entries
from cb_engine.sampling import SamplerOutput, SamplingState
from cb_engine.sampling.acceptance import NOTHING, accept
from cb_engine.scheduler.output import ModelOutput, SampledToken, ScheduledRequest


class TokenSampler(Protocol):
    """`Sampler` or `StaticSampler`."""

    def __call__(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> SamplerOutput:
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
                )
            )
        return self._all[: 1 + len(drafts)]


class RowSampler:
    """See the module docstring."""

    def __init__(self, sampler: TokenSampler, executor: Executor) -> None:
        self._sampler = sampler
        self._executor = executor
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
        sampled = self._sampler(self._wanted(logits, rows, num_rows), states)
        if any(item.draft_token_ids for item in scheduled):
            kept = self._accepted(scheduled, sampled, shape)
        else:
            ids, failed = self._executor.read(sampled.token_ids), self._executor.read(sampled.failed)
            kept = [[NOTHING if failed[row] else ids[row]] for row in range(len(states))]
        return ModelOutput(self._tokens(scheduled, sampled, kept), entries)

    def warm(self, logits: torch.Tensor, num_rows: int, bucket: Bucket) -> None:
        """Runs what `sample` may run on a step of this shape, reading no value.

        Args:
            logits: [R, vocab], of such a step.
            num_rows: rows to sample from.
        """
        wanted = logits
        if logits.shape[0] != num_rows:
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
        for item in scheduled:
            if item.request.sampling_params.prompt_logprobs is not None:
                num_prompt_rows = len(prompt_logprob_rows(item))
                chosen = logits[row : row + num_prompt_rows]
                # How many rows a prompt has is no shape that a static device knows.
                entries[item.request.request_id] = prompt_entries(item, chosen.cpu() if self._is_static else chosen)
                row += num_prompt_rows
            if item.samples:
                states += self._states_of(item)
                rows.extend(range(row, row + item.num_sampled_rows))
                row += item.num_sampled_rows
        return entries, states, rows

    @property
    def _is_static(self) -> bool:
        return self._executor.is_static

    def _wanted(self, logits: torch.Tensor, rows: Sequence[int], num_rows: int) -> torch.Tensor:
        size = num_rows or len(rows)
        if rows[-1] == len(rows) - 1 and (not self._is_static or logits.shape[0] == size):
            return logits[:size]
        index = torch.tensor([*rows, *[0] * (size - len(rows))], dtype=torch.int64).to(logits.device)
        chosen: torch.Tensor = self._executor.run("select_rows", torch.index_select, logits, 0, index)
        return chosen

    def _accepted(
        self, scheduled: Sequence[ScheduledRequest], sampled: SamplerOutput, shape: tuple[int, int]
    ) -> list[list[int]]:
        """What is kept of each request's tokens, `NOTHING` beyond; rows of padding come last."""
        num_seqs, width = shape
        rows = torch.zeros(num_seqs, width, dtype=torch.int64)
        drafts = torch.full((num_seqs, width - 1), NOTHING, dtype=torch.int64)
        row = 0
        for index, item in enumerate(scheduled):
            count = item.num_sampled_rows
            rows[index, :count] = torch.arange(row, row + count)
            rows[index, count:] = row
            if item.draft_token_ids:
                drafts[index, : count - 1] = torch.tensor(item.draft_token_ids)
            row += count
        device = sampled.token_ids.device
        kept = self._executor.run(
            "accept", accept, sampled.token_ids, sampled.failed, rows.to(device), drafts.to(device)
        )
        result: list[list[int]] = self._executor.read(kept)
        return result

    def _tokens(
        self, scheduled: Sequence[ScheduledRequest], sampled: SamplerOutput, kept: Sequence[Sequence[int]]
    ) -> dict[str, list[SampledToken]]:
        logprobs = None if sampled.logprobs is None else self._executor.read(sampled.logprobs)
        tokens: dict[str, list[SampledToken]] = {}
        row = 0
        for item, ids in zip((item for item in scheduled if item.samples), kept, strict=False):
            request = item.request
            good = [token_id for token_id in ids if token_id != NOTHING]
            if not good:
                tokens[request.request_id] = [SampledToken(NOTHING, failed=_NOTHING_TO_DRAW)]
            elif logprobs is None or request.sampling_params.logprobs is None:
                tokens[request.request_id] = [SampledToken(token_id) for token_id in good]
            else:
                tokens[request.request_id] = [
                    SampledToken(token_id, logprobs[at], candidate_entries(sampled, at, token_id, logprobs[at]))
                    for at, token_id in enumerate(good, start=row)
                ]
            row += item.num_sampled_rows
        return tokens

    def _states_of(self, item: ScheduledRequest) -> list[SamplingState]:
        states = self._states.get(item.request)
        if states is None:
            states = self._states[item.request] = _States(item.request)
        return states.of(item.draft_token_ids)


_NOTHING_TO_DRAW = (
    "the logits held NaN or infinity, or logit_bias, allowed_token_ids and bad_words together left no token"
)
