"""What a request changes in its logits before anything is chosen.

Owns: logit_bias, penalties, allowed_token_ids, bad_words and min_tokens, and their order: what adds comes
first and what masks comes last, so that no bias, however large, brings back a masked token.
Does not know: temperature, cuts, draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cb_engine.sampling.blocks import to_device
from cb_engine.sampling.penalties import Penalties
from cb_engine.sampling.state import SamplingState

_NEG_INF = float("-inf")


class BannedWords:
    """The bad words of one request that are longer than a token, found by the token before their last."""

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self._by_last: dict[int, list[tuple[list[int], int]]] = {}
        for word in words:
            self._by_last.setdefault(word[-2], []).append((list(word[:-1]), word[-1]))

    def completions(self, state: SamplingState) -> list[int]:
        """Return the tokens that would complete a bad word, begun in the prompt or later, as in transformers."""
        last = _tail(state, 1)
        endings = self._by_last.get(last[0], ()) if last else ()
        return [token_id for prefix, token_id in endings if _tail(state, len(prefix)) == prefix]


def _tail(state: SamplingState, length: int) -> list[int]:
    tail = list(state.output_token_ids[-length:])
    missing = length - len(tail)
    return [*state.prompt_token_ids[-missing:], *tail] if missing else tail


class LogitEdits:
    """The edits of one batch, built once per composition; only what depends on the output is found anew.

    Args:
        states: of all rows.
        rows: those that have edits, see `has_edit`.
    """

    def __init__(
        self,
        states: Sequence[SamplingState],
        rows: Sequence[int],
        vocab_size: int,
        device: torch.device,
        penalties: Penalties,
    ) -> None:
        self._states = states
        self._vocab_size = vocab_size
        self._device = device
        self._penalties = penalties
        self._penalised: list[int] = []
        self._minimum: list[tuple[int, list[int]]] = []  # row, flat indices of its stop tokens
        self._words: list[tuple[int, BannedWords]] = []
        biased: list[int] = []
        biases: list[float] = []
        allowed: list[int] = []
        allowed_rows: list[int] = []
        banned: list[int] = []
        words: dict[SamplingState, BannedWords] = {}  # one for all rows of a request
        for row in rows:
            state, start = states[row], row * vocab_size
            params = state.params
            for token_id, bias in (params.logit_bias or {}).items():
                biased.append(start + token_id)
                biases.append(bias)
            if _has_penalty(state):
                self._penalised.append(row)
            if params.allowed_token_ids is not None:
                allowed_rows.append(row)
                allowed += [start + token_id for token_id in dict.fromkeys(params.allowed_token_ids)]
            banned += [start + word[0] for word in state.bad_words_ids if len(word) == 1]
            if longer := [word for word in state.bad_words_ids if len(word) > 1]:
                if state.root not in words:
                    words[state.root] = BannedWords(longer)
                self._words.append((row, words[state.root]))
            if params.min_tokens:
                # An EOS id beyond the logits cannot be generated.
                self._minimum.append((row, [start + t for t in state.stop_token_ids if t < vocab_size]))
        self._bias_index, self._biases = self._flat(biased), torch.tensor(biases, device=device)
        self._allowed, self._allowed_rows = self._flat(allowed), self._flat(allowed_rows)
        self._banned = self._flat(banned)
        self._fixed = bool(biased or self._penalised or allowed_rows or banned)

    def _flat(self, index: list[int]) -> Tensor:
        return to_device(torch.tensor(index, dtype=torch.long), self._device)

    def pending(self) -> list[int] | None:
        """Return the flat indices masked in this step only; None if this step edits nothing at all."""
        masked: list[int] = []
        for row, stops in self._minimum:
            if self._states[row].must_go_on:
                masked += stops
        for row, words in self._words:
            start = row * self._vocab_size
            masked += [start + token_id for token_id in words.completions(self._states[row])]
        return masked if masked or self._fixed else None

    def apply(self, scores: Tensor, masked: list[int]) -> None:
        """Edit logits in place.

        Args:
            scores: `[R, V]` fp32, contiguous, the caller's to change.
            masked: what `pending` returned.
        """
        flat = scores.view(-1)
        if self._biases.numel():
            biased = flat.index_select(0, self._bias_index) + self._biases
            flat.index_copy_(0, self._bias_index, biased)
        if self._penalised:
            self._penalties.apply(scores, self._penalised, [self._states[row] for row in self._penalised])
        if self._allowed.numel():
            kept = flat.index_select(0, self._allowed)
            scores.index_fill_(0, self._allowed_rows, _NEG_INF)
            flat.index_copy_(0, self._allowed, kept)
        if self._banned.numel():
            flat.index_fill_(0, self._banned, _NEG_INF)
        if masked:
            flat.index_fill_(0, self._flat(masked), _NEG_INF)


def has_edit(state: SamplingState) -> bool:
    """Whether a request may change its logits in any step."""
    params = state.params
    return (
        _has_penalty(state)
        or bool(params.logit_bias or state.bad_words_ids or params.min_tokens)
        or params.allowed_token_ids is not None
    )


def _has_penalty(state: SamplingState) -> bool:
    params = state.params
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
