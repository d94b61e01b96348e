"""Repetition, presence and frequency penalties.

Owns: how often each token occurred in each request, brought up to date by the tokens that are new. Drafts are added to
the numbers of the rows behind them and not to those of the request, so nothing is taken back when they are wrong.
Does not know: the order in which logits are edited, or anything of a request but its tokens and its
penalties.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cb_engine.sampling.blocks import to_device
from cb_engine.sampling.state import SamplingState
from cb_engine.sampling_params import SamplingParams

# How many of the last tokens counted are compared with the output before the count is trusted. A request whose output
# shrank or differs here is counted anew.
_GUARD = 32

Ints = npt.NDArray[np.int64]


class RowCounts(NamedTuple):
    """What rows of one request have said before."""

    rows: Sequence[int]
    params: SamplingParams
    tokens: Ints  # [S], each once, in no order
    counts: Ints  # [rows, S]: how often the row's output has each
    num_shared: int  # so many of the tokens all rows have; each of the others only those in which it is counted


class TokenCounts:
    """Which tokens a request has, and how often its output has each. A token keeps the slot it is given."""

    def __init__(self, state: SamplingState, vocab_size: int) -> None:
        # Only a repetition penalty looks at the prompt.
        prompt = state.prompt_token_ids if state.params.repetition_penalty != 1.0 else ()
        unique = np.unique(np.asarray(prompt, dtype=np.int64))
        # A prompt may hold ids beyond the logits (placeholders of images); they cannot be generated, nor
        # penalised.
        unique = unique[unique < vocab_size]
        self._vocab_size = vocab_size
        self._slots = {token_id: slot for slot, token_id in enumerate(unique.tolist())}
        self._tokens = unique
        self._counts = np.zeros(len(unique), dtype=np.int64)
        self._size = len(unique)
        self._seen = 0
        self._guard: list[int] = []

    def follow(self, output: Sequence[int]) -> bool:
        """Counts the tokens of `output` that are new.

        Returns:
            False, and nothing is counted, if it does not begin with those that have been counted.
        """
        start = self._seen - len(self._guard)
        if len(output) < self._seen or list(output[start : self._seen]) != self._guard:
            return False
        new = list(output[self._seen :])
        for token_id in new:
            if token_id >= self._vocab_size:
                continue
            slot = self._slots.setdefault(token_id, self._size)
            if slot == self._size:
                self._append(token_id)
            self._counts[slot] += 1
        self._seen += len(new)
        self._guard = (self._guard + new)[-_GUARD:]
        return True

    def behind(self, drafts: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
        """The tokens [S], and how often the output has each with each of some drafts after it, [drafts, S].

        Tokens that only drafts have come last.
        """
        tokens, counts = self._tokens[: self._size], self._counts[: self._size]
        if not any(drafts):
            return tokens, np.broadcast_to(counts, (len(drafts), len(counts)))
        new: dict[int, int] = {}
        rows, slots = [], []
        for row, draft in enumerate(drafts):
            for token_id in draft:
                if token_id < self._vocab_size:
                    slot = self._slots.get(token_id)
                    rows.append(row)
                    slots.append(new.setdefault(token_id, self._size + len(new)) if slot is None else slot)
        together = np.zeros((len(drafts), self._size + len(new)), dtype=np.int64)
        together[:, : self._size] = counts
        np.add.at(together, (rows, slots), 1)
        return np.concatenate([tokens, np.fromiter(new, np.int64, len(new))]), together

    def _append(self, token_id: int) -> None:
        if self._size == len(self._tokens):
            room = max(64, self._size)  # doubling, so that a token costs the same however many there are
            self._tokens = np.concatenate([self._tokens, np.zeros(room, dtype=np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.int64)])
        self._tokens[self._size] = token_id
        self._size += 1

    def __len__(self) -> int:
        """How many different tokens the request has."""
        return self._size


class Penalties:
    """Applies the penalties of the requests that have any; forgets a request's counts when its first state dies."""

    def __init__(self) -> None:
        self._counts: WeakKeyDictionary[SamplingState, TokenCounts] = WeakKeyDictionary()

    def apply(self, scores: Tensor, rows: Sequence[int], states: Sequence[SamplingState]) -> None:
        """Penalise, in place, what the requests have said before.

        A repetition penalty divides positive logits and multiplies negative ones, once per token; then
        frequency times the count, and presence, are subtracted.

        Args:
            scores: `[R, V]` fp32, contiguous.
            rows: the rows that have penalties.
            states: the states of those rows, in their order.
        """
        vocab_size = scores.shape[1]
        parts = self.row_counts(rows, states, vocab_size)
        sizes = [part.counts.size for part in parts]
        if not any(sizes):
            return

        def spread(values: Sequence[float]) -> npt.NDArray[np.float64]:
            return np.repeat(np.asarray(values, dtype=np.float64), sizes)

        counts = np.concatenate([part.counts.ravel() for part in parts])
        presence = spread([part.params.presence_penalty for part in parts])
        frequency = spread([part.params.frequency_penalty for part in parts])
        starts = [np.asarray(part.rows)[:, None] * vocab_size for part in parts]
        where = np.concatenate([(part.tokens + start).ravel() for part, start in zip(parts, starts, strict=True)])
        index = to_device(torch.from_numpy(where), scores.device)
        repetition = spread([part.params.repetition_penalty for part in parts])
        repetition[_missing(parts)] = 1.0
        factor = torch.from_numpy(repetition.astype(np.float32))
        amount = torch.from_numpy((frequency * counts + presence * (counts > 0)).astype(np.float32))
        factor, amount = to_device(factor, scores.device), to_device(amount, scores.device)

        flat = scores.view(-1)
        before = flat.index_select(0, index)
        flat.index_copy_(0, index, torch.where(before < 0, before * factor, before / factor) - amount)

    def row_counts(self, rows: Sequence[int], states: Sequence[SamplingState], vocab_size: int) -> list[RowCounts]:
        """What each of the rows has said before, request by request; good until the outputs change.

        Args:
            rows: their numbers.
            states: the states of those rows, in their order.
        """
        parts = []
        for root, pairs in groupby(zip(rows, states, strict=True), key=lambda pair: pair[1].root):
            table = self._table(root, vocab_size)
            num_known = len(root.output_token_ids)
            numbers, of_request = zip(*pairs, strict=True)
            tokens, counts = table.behind(
                [() if state is root else state.output_token_ids[num_known:] for state in of_request]
            )
            parts.append(RowCounts(numbers, root.params, tokens, counts, len(table)))
        return parts

    def _table(self, root: SamplingState, vocab_size: int) -> TokenCounts:
        table = self._counts.get(root)
        if table is None or not table.follow(root.output_token_ids):
            table = self._counts[root] = TokenCounts(root, vocab_size)
            table.follow(root.output_token_ids)
        return table


def _missing(parts: Sequence[RowCounts]) -> list[int]:
    """Where a row does not have a token that another of its request has, in all counts one after the other."""
    missing: list[int] = []
    start = 0
    for part in parts:
        if part.num_shared < len(part.tokens):
            absent = part.counts == 0
            absent[:, : part.num_shared] = False
            missing += (np.flatnonzero(absent) + start).tolist()
        start += part.counts.size
    return missing
