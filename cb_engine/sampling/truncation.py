"""top_k, top_p and min_p as one number per row: the lowest score that is still kept.

Owns: which tokens a draw may choose from. All three cuts keep the best tokens and drop the rest, so together
they are one threshold, and nothing has to be scattered back into the vocabulary. They compose as in
transformers' `generate`: top_k, then top_p over what is left, then min_p. Tokens of equal score stay or go
together.
Does not know: requests, batches, draws. Scores are what `scale` makes: 0 for a row's best token, negative for
the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cb_engine.sampling.blocks import row_chunks

# How many of the best tokens are looked at before the whole row is. Fixed, since a number that followed the
# batch would let a row's neighbours decide how its sums are rounded.
FEW = 64
MANY = 128


@dataclass(frozen=True)
class Cuts:
    """The limits of some rows, `[R]` each."""

    top_k: Tensor  # int64, 0: off
    top_p: Tensor  # wide dtype, 1: off
    min_p: Tensor  # fp32, 0: off

    def take(self, index: Tensor) -> Cuts:
        """Return the limits of the rows in `index`."""
        return Cuts(*(t.index_select(0, index) for t in (self.top_k, self.top_p, self.min_p)))


@dataclass(frozen=True)
class Candidates:
    """A cut through the best tokens of some rows."""

    weights: Tensor  # [R, C] wide, exp(scores); 0 for what is cut off
    thresholds: Tensor  # [R] fp32
    complete: Tensor  # [R] bool: every token at or above the threshold is among the candidates


def scale(logits: Tensor, peak: Tensor, temperature: Tensor) -> Tensor:
    """Return `(logits - peak) / temperature`: at most 0, so that no temperature makes it overflow.

    Args:
        logits: `[R, C]` fp32.
        peak: the rows' maxima, `[R]` fp32.
        temperature: `[R]` fp32, above 0.
    """
    return (logits - peak.unsqueeze(1)).div_(temperature.unsqueeze(1))


def partition(logits: Tensor, peak: Tensor, temperature: Tensor) -> Tensor:
    """Return the sums of `exp` over the scaled rows, `[R]` fp32; arguments as for `scale`.

    By way of softmax, whose best token has exactly one part of the sum: it works row by row, so that no
    neighbour changes a bit, and is faster than `logsumexp`.
    """
    sums = torch.empty_like(peak)
    for part in row_chunks(logits.shape[0], logits.device):
        sums[part] = scale(logits[part], peak[part], temperature[part]).softmax(-1).amax(-1).reciprocal()
    return sums


def cut_candidates(scores: Tensor, cuts: Cuts, total: Tensor | None, vocab: int) -> Candidates:
    """Cut rows through the best of their tokens, without looking at the others.

    Args:
        scores: the best scores, `[R, C]` fp32, best first.
        cuts: the rows' limits.
        total: `partition` of the rows, `[R]` wide; None if no row has a top_p without a top_k below `C`.
        vocab: how many tokens there are; with `C == vocab` every cut is complete.
    """
    width = scores.shape[1]
    weights = scores.to(cuts.top_p.dtype).exp()
    thresholds = scores.new_full(scores.shape[:1], float("-inf"))
    if total is None:
        thresholds = _kth(scores, cuts.top_k)
        weights = weights.where(scores >= thresholds.unsqueeze(1), 0.0)
        total = weights.cumsum(-1)[:, -1]
    thresholds = torch.maximum(thresholds, _nucleus(scores, weights, cuts.top_p, total))
    thresholds = torch.maximum(thresholds, cuts.min_p.log())
    last = scores[:, -1]
    complete = (last < thresholds) | (last == float("-inf")) | (width == vocab)
    weights = weights.where(scores >= thresholds.unsqueeze(1), 0.0)
    return Candidates(weights, thresholds, complete)


def cut_rows(scores: Tensor, cuts: Cuts, *, max_top_k: int, any_top_p: bool) -> Tensor:
    """Return the thresholds `[R]` of whole rows, whatever their limits.

    Args:
        scores: `[R, V]` fp32.
        cuts: the rows' limits.
        max_top_k: the largest top_k among them, known to the host.
        any_top_p: whether any of them has a top_p, known to the host.
    """
    thresholds = cuts.min_p.log()
    if any_top_p:
        ranked = _sort_descending(scores)
        kth = _kth(ranked, cuts.top_k)
        weights = ranked.to(cuts.top_p.dtype).exp().where(ranked >= kth.unsqueeze(1), 0.0)
        nucleus = _nucleus(ranked, weights, cuts.top_p, weights.cumsum(-1)[:, -1])
        return torch.maximum(thresholds, torch.maximum(kth, nucleus))
    if max_top_k:
        best = scores.topk(min(max_top_k, scores.shape[1])).values
        return torch.maximum(thresholds, _kth(best, cuts.top_k))
    return thresholds


def _kth(ranked: Tensor, top_k: Tensor) -> Tensor:
    """Return the `top_k`-th best score of every row, `-inf` where top_k is off."""
    at = top_k.clamp(1, ranked.shape[1]).unsqueeze(1) - 1
    return ranked.gather(1, at).squeeze(1).where(top_k > 0, float("-inf"))


def _nucleus(ranked: Tensor, weights: Tensor, top_p: Tensor, total: Tensor) -> Tensor:
    """Return the score of the last token before which less than `top_p` of `total` lies; `-inf` if off."""
    before = weights.cumsum(-1) - weights
    kept = (before < (top_p * total).unsqueeze(1)).sum(-1).clamp(min=1)
    return ranked.gather(1, kept.unsqueeze(1) - 1).squeeze(1).where(top_p < 1.0, float("-inf"))


def _sort_descending(scores: Tensor) -> Tensor:
    if scores.device.type != "cpu":
        return scores.sort(-1, descending=True).values
    # numpy sorts plain numbers with vector instructions, three times faster than torch, which also tracks
    # where they were.
    return torch.from_numpy(np.sort(scores.numpy(), axis=-1)).flip(-1)
