"""The edits of `edits.py`, and the masks of grammars, as dense tensors, for devices whose shapes may not follow what a
request asks for.

Owns: their making on the host, and their application. The order is that of `sampler.py`: logit_bias, then penalties,
then masks, which win over all that adds.
Does not know: temperature, cuts, draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cb_engine.grammar.masks import TokenMasks
from cb_engine.sampling.blocks import to_device
from cb_engine.sampling.edits import BannedWords
from cb_engine.sampling.penalties import Penalties
from cb_engine.sampling.state import SamplingState
from cb_engine.sampling.token_masks import num_bytes, penalty_of

_NEG_INF = float("-inf")
_Floats = npt.NDArray[np.float32]
Masked = list[tuple[int, int]]  # row, token


class DenseEdits(NamedTuple):
    """What happens to `[R, V]` logits, in order; the first three are fp32 of that shape."""

    bias: Tensor  # added
    factor: Tensor  # then positive logits are divided by it, and negative ones multiplied
    addend: Tensor  # then added; where it is -inf, nothing brings the token back
    allowed: Tensor  # [R, bytes] uint8: nor where its bit is not set, see `TokenMasks`

    def apply(self, logits: Tensor) -> Tensor:
        """Return edited `logits [R, V]` fp32."""
        scores = logits + self.bias
        scores = torch.where(scores < 0, scores * self.factor, scores / self.factor) + self.addend
        return scores.masked_fill(self.addend == _NEG_INF, _NEG_INF) + penalty_of(self.allowed, logits.shape[1])


class BatchEdits:
    """The edits of one batch, whose rows beyond the states are left alone. What no step changes is made once."""

    def __init__(
        self,
        states: Sequence[SamplingState],
        shape: tuple[int, int],
        device: torch.device,
        penalties: Penalties,
    ) -> None:
        self._states = states
        self._shape = shape
        self._device = device
        self._penalties = penalties
        self._minimum = [row for row, state in enumerate(states) if state.params.min_tokens]
        self._words = [
            (row, BannedWords(longer))
            for row, state in enumerate(states)
            if (longer := [word for word in state.bad_words_ids if len(word) > 1])
        ]
        self._penalised = [row for row, state in enumerate(states) if _has_penalty(state)]
        self._is_fixed = bool(self._penalised) or any(_has_fixed_edit(state) for state in states)
        self._fixed: tuple[DenseEdits, _Floats] | None = None

    def pending(self) -> Masked | None:
        """Return what is masked in this step only; None if this step edits nothing at all."""
        masked: Masked = []
        for row in self._minimum:
            if self._states[row].must_go_on:
                # An EOS id beyond the logits cannot be generated.
                masked += [
                    (row, token_id) for token_id in self._states[row].stop_token_ids if token_id < self._shape[1]
                ]
        for row, words in self._words:
            masked += [(row, token_id) for token_id in words.completions(self._states[row])]
        return masked if masked or self._is_fixed else None

    def dense(self, masked: Masked, masks: TokenMasks | None = None) -> DenseEdits:
        """Return all edits of this step on the device.

        Args:
            masked: what `pending` returned; nothing in place of None.
            masks: what the grammars of some rows allow.
        """
        if self._fixed is None:
            self._fixed = self._make_fixed()
        edits, fixed_addend = self._fixed
        if masks is not None:
            edits = edits._replace(allowed=self._allowed(masks))
        if not masked and not self._penalised:
            return edits
        factor, addend = edits.factor, fixed_addend.copy()
        if self._penalised:
            factor = self._penalise(addend)
        if masked:
            rows, token_ids = zip(*masked, strict=True)
            addend[rows, token_ids] = _NEG_INF
        return edits._replace(factor=factor, addend=self._to_device(addend))

    def _make_fixed(self) -> tuple[DenseEdits, _Floats]:
        """Edits that no output changes, and the host's copy of what is added last."""
        bias, addend = (np.zeros(self._shape, np.float32) for _ in range(2))
        for row, state in enumerate(self._states):
            for token_id, value in (state.params.logit_bias or {}).items():
                bias[row, token_id] = value
            if (allowed := state.params.allowed_token_ids) is not None:
                addend[row] = _NEG_INF
                addend[row, list(allowed)] = 0
            addend[row, [word[0] for word in state.bad_words_ids if len(word) == 1]] = _NEG_INF
        factor = torch.ones(self._shape, device=self._device)
        edits = DenseEdits(self._to_device(bias), factor, self._to_device(addend), self._allowed(None))
        return edits, addend

    def _allowed(self, masks: TokenMasks | None) -> Tensor:
        """The tokens that grammars allow: all in rows that have none."""
        rows, vocab_size = self._shape
        allowed = np.full((rows, num_bytes(vocab_size)), 255, np.uint8)
        if masks is not None:
            allowed[list(masks.rows)] = masks.bits[:, : allowed.shape[1]]
        return to_device(torch.from_numpy(allowed), self._device)

    def _penalise(self, addend: _Floats) -> Tensor:
        """Subtract presence and frequency from `addend`, in place; return the factor of the repetition penalty."""
        factor = np.ones(self._shape, np.float32)
        states = [self._states[row] for row in self._penalised]
        for part in self._penalties.row_counts(self._penalised, states, self._shape[1]):
            params, counts = part.params, part.counts
            where = (np.asarray(part.rows)[:, None], part.tokens)
            has = counts > 0
            amount = params.frequency_penalty * counts + params.presence_penalty * has
            has[:, : part.num_shared] = True
            factor[where] = np.where(has, params.repetition_penalty, 1.0)
            addend[where] -= amount.astype(np.float32)
        return self._to_device(factor)

    def _to_device(self, values: _Floats) -> Tensor:
        return to_device(torch.from_numpy(values), self._device)


def _has_penalty(state: SamplingState) -> bool:
    params = state.params
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _has_fixed_edit(state: SamplingState) -> bool:
    params = state.params
    return (
        bool(params.logit_bias) or params.allowed_token_ids is not None or any(len(w) == 1 for w in state.bad_words_ids)
    )
