"""Repetition, presence and frequency penalties.

Owns: how often each token occurred in each request, brought up to date by the tokens that are new.
Does not know: the order in which logits are edited, or anything of a request but its tokens and its
penalties.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cb_engine.sampling.blocks import to_device
from cb_engine.sampling.state import SamplingState

# How many of the last tokens counted are compared with the output before the count is trusted, and can be taken back:
# drafts are counted before it is known whether they are right. A request that differs in all of them is counted anew.
_GUARD = 96


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
        self._size = self._num_prompt = len(unique)
        self._has_gaps = False  # whether a token that was taken back has left a slot without any
        self._seen = 0
        self._guard: list[int] = []

    def follow(self, output: Sequence[int]) -> bool:
        """Counts the tokens of `output` that are new, and takes back those that it no longer has.

        Returns:
            False, with the count of no use any more, if it differs by more than is remembered.
        """
        start = self._seen - len(self._guard)
        now = list(output[start : self._seen])
        num_equal = next((i for i, (a, b) in enumerate(zip(self._guard, now, strict=False)) if a != b), len(now))
        if num_equal == 0 and start > 0:
            return False
        for token_id in self._guard[num_equal:]:
            self._take_back(token_id)
        self._seen = start + num_equal
        self._guard = self._guard[:num_equal]
        self._extend(output)
        return True

    def _extend(self, output: Sequence[int]) -> None:
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

    def _take_back(self, token_id: int) -> None:
        slot = self._slots.get(token_id)
        if slot is not None:
            self._counts[slot] -= 1
            self._has_gaps |= self._counts[slot] == 0 and slot >= self._num_prompt

    def _append(self, token_id: int) -> None:
        if self._size == len(self._tokens):
            room = max(64, self._size)  # doubling, so that a token costs the same however many there are
            self._tokens = np.concatenate([self._tokens, np.zeros(room, dtype=np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.int64)])
        self._tokens[self._size] = token_id
        self._size += 1

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """The tokens of the request, each once, in no order."""
        return self._tokens[: self._size][self._occurring]

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """How often the output has each of `tokens`."""
        return self._counts[: self._size][self._occurring]

    @property
    def _occurring(self) -> slice | npt.NDArray[np.bool_]:
        if not self._has_gaps:
            return slice(None)
        occurring: npt.NDArray[np.bool_] = self._counts[: self._size] > 0
        occurring[: self._num_prompt] = True
        return occurring


class Penalties:
    """Applies the penalties of the requests that have any; forgets a request's counts when its state dies."""

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
        tables = [self._table(state, vocab_size) for state in states]
        sizes = [len(table.tokens) for table in tables]
        if not any(sizes):
            return

        def spread(values: Sequence[float]) -> npt.NDArray[np.float64]:
            return np.repeat(np.asarray(values, dtype=np.float64), sizes)

        counts = np.concatenate([table.counts for table in tables])
        presence = spread([state.params.presence_penalty for state in states])
        frequency = spread([state.params.frequency_penalty for state in states])
        where = np.concatenate([table.tokens + row * vocab_size for row, table in zip(rows, tables, strict=True)])
        index = to_device(torch.from_numpy(where), scores.device)
        factor = torch.from_numpy(spread([state.params.repetition_penalty for state in states]).astype(np.float32))
        amount = torch.from_numpy((frequency * counts + presence * (counts > 0)).astype(np.float32))
        factor, amount = to_device(factor, scores.device), to_device(amount, scores.device)

        flat = scores.view(-1)
        before = flat.index_select(0, index)
        flat.index_copy_(0, index, torch.where(before < 0, before * factor, before / factor) - amount)

    def counts_of(self, state: SamplingState, vocab_size: int) -> TokenCounts:
        """The tokens of a request, brought up to date; good until its output changes."""
        return self._table(state, vocab_size)

    def _table(self, state: SamplingState, vocab_size: int) -> TokenCounts:
        table = self._counts.get(state)
        if table is None or not table.follow(state.output_token_ids):
            table = self._counts[state] = TokenCounts(state, vocab_size)
            table.follow(state.output_token_ids)
        return table
