"""Log-probabilities, of sampled tokens and of prompts.

Owns: their meaning. Processed: of the distribution that the token was drawn from, after every edit,
temperature and cut; for a greedy row, after the edits. Raw: log_softmax of the model's logits. Both in fp32.
Does not know: how a token was chosen, or whose it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cb_engine.sampling import blocks
from cb_engine.sampling.plan import Rows
from cb_engine.sampling.truncation import partition, scale

# Rows of a prompt that are normalised at a time: the fp32 copy stays at some 12 MB however long the prompt
# is.
_PROMPT_ROWS = 64
_NEG_INF = float("-inf")


@dataclass(frozen=True)
class Distributions:
    """What some rows were drawn from: any entry can be read, and none has to be written out."""

    logits: Tensor  # [R, V] fp32, padded to blocks
    maxima: Tensor  # their block maxima
    peak: Tensor  # [R] fp32, the rows' maxima
    temperature: Tensor  # [R] fp32
    thresholds: Tensor  # [R] fp32, the lowest scaled logit that was kept
    log_sums: Tensor  # [R] fp32, log of the sum of exp over the scaled logits kept

    @classmethod
    def uncut(cls, logits: Tensor, maxima: Tensor) -> Distributions:
        """Return the plain softmax of padded `logits [R, V]` fp32, given their block maxima."""
        peak = maxima.amax(-1)
        ones = torch.ones_like(peak)
        log_sums = partition(logits, peak, ones).log()
        return cls(logits, maxima, peak, ones, torch.full_like(peak, float("-inf")), log_sums)

    def take(self, rows: Rows) -> Distributions:
        """Return those of some rows."""
        fields = (self.logits, self.maxima, self.peak, self.temperature, self.thresholds, self.log_sums)
        return Distributions(*(rows.take(field) for field in fields))

    def logprobs(self, token_ids: Tensor) -> Tensor:
        """Return the log-probabilities `[R]` of one kept token per row, `token_ids [R]`."""
        logits = self.logits.gather(1, token_ids.unsqueeze(1))
        return scale(logits, self.peak, self.temperature).squeeze(1) - self.log_sums

    def top(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the `count` best tokens and their log-probabilities, `[R, count]`, `-inf` if cut off."""
        values, token_ids = blocks.topk(self.logits, self.maxima, min(count, self.logits.shape[1]))
        scores = scale(values, self.peak, self.temperature)
        kept = scores >= self.thresholds.unsqueeze(1)
        return token_ids, (scores - self.log_sums.unsqueeze(1)).where(kept, float("-inf"))


@dataclass(frozen=True)
class TopLogprobs:
    """The best tokens of the rows that asked for them, best first."""

    counts: tuple[int, ...]  # how many each row asked for
    token_ids: Tensor  # [R, max(counts)] int64
    logprobs: Tensor  # [R, max(counts)] fp32; -inf where a row has no such token

    def rows(self, read: Callable[[Tensor], Any] = Tensor.tolist) -> list[list[tuple[int, float]] | None]:
        """Return each row's (token id, log-probability) pairs, None for one that did not ask. Waits for the device.

        There are fewer pairs than asked for where fewer tokens were kept.

        Args:
            read: gives a tensor's values as Python numbers.
        """
        return [
            [(i, v) for i, v in zip(ids[:count], values[:count], strict=True) if v != _NEG_INF] if count else None
            for count, ids, values in zip(self.counts, read(self.token_ids), read(self.logprobs), strict=True)
        ]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> TopLogprobs:
        """Return a copy whose tensors are on `device`."""
        token_ids = self.token_ids.to(device, non_blocking=non_blocking)
        return TopLogprobs(self.counts, token_ids, self.logprobs.to(device, non_blocking=non_blocking))


@dataclass(frozen=True)
class PromptLogprobs:
    """The raw log-probabilities of `P` tokens of prompts, given what comes before each."""

    logprobs: Tensor  # [P] fp32
    top_token_ids: Tensor  # [P, N] int64, best first
    top_logprobs: Tensor  # [P, N] fp32


@torch.no_grad()
def prompt_logprobs(logits: Tensor, target_ids: Tensor, top_n: int) -> PromptLogprobs:
    """Score tokens that were given, not sampled.

    Args:
        logits: `[P, V]`, any float dtype; row `i` is the model's answer before token `i` is seen.
        target_ids: the tokens that do come, `[P]` int64.
        top_n: how many of the best tokens to report beside each, at most `V` of them; 0 for none.

    Returns:
        Log-softmax values in fp32. A row of NaN gives NaN.

    Raises:
        ValueError: if the shapes do not fit.
    """
    if logits.dim() != 2 or target_ids.shape != logits.shape[:1]:
        raise ValueError(
            f"prompt_logprobs needs logits [P, V] and target_ids [P], got {tuple(logits.shape)} and "
            f"{tuple(target_ids.shape)}; pass one target per row"
        )
    count = min(top_n, logits.shape[1])
    chosen = logits.new_empty(logits.shape[0], dtype=torch.float32)
    best_ids = target_ids.new_empty((logits.shape[0], count))
    best = logits.new_empty((logits.shape[0], count), dtype=torch.float32)
    for start in range(0, logits.shape[0], _PROMPT_ROWS):
        part = slice(start, start + _PROMPT_ROWS)
        logprobs = logits[part].float().log_softmax(-1)
        chosen[part] = logprobs.gather(1, target_ids[part].unsqueeze(1)).squeeze(1)
        if count:
            best[part], best_ids[part] = logprobs.topk(count)
    return PromptLogprobs(chosen, best_ids, best)
