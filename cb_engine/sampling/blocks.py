"""Walking a vocabulary in blocks: the maximum, the k best, one draw.

Owns: the block size, and reductions that look at every block once and then at few blocks closely. Over 49152
logits that is several times faster on a CPU than `argmax`, `topk` and `cumsum` over the row, and no result
depends on how many rows there are.
Does not know: requests or sampling options.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64  # tokens; divides the vocabularies in use, so that padding is the exception
_CHUNK = 8  # rows


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the widest float a device sums in: some accelerators have no float64."""
    return torch.float64 if device.type in ("cpu", "cuda", "xpu") else torch.float32


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return a copy of the host's `values` on `device`.

    CUDA has staged ordinary memory when the call returns, so there the host need not wait for what is running.
    """
    return values.to(device, non_blocking=device.type == "cuda")


def row_chunks(rows: int, device: torch.device) -> list[slice]:
    """Return the slices in which to pass over `rows` whole rows.

    On a CPU a few at a time: what is written for them stays in the cache, and in memory that is already
    mapped, which makes three passes over 64 rows twice as fast. Elsewhere all at once.
    """
    step = _CHUNK if device.type == "cpu" else max(rows, 1)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def pad_to_blocks(scores: Tensor) -> Tensor:
    """Return `scores [R, V]` with columns of `-inf` appended up to a multiple of `BLOCK`, contiguous."""
    missing = -scores.shape[1] % BLOCK
    return F.pad(scores, (0, missing), value=float("-inf")) if missing else scores.contiguous()


def block_maxima(scores: Tensor) -> Tensor:
    """Return every block's maximum, `[R, V / BLOCK]`, of padded `scores [R, V]`; NaN wins over numbers."""
    return scores.view(len(scores), scores.shape[1] // BLOCK, BLOCK).amax(-1)


def _take_blocks(values: Tensor, blocks: Tensor) -> Tensor:
    """Return the blocks that `blocks [R, C]` names of `values [R, V]`, as `[R, C * BLOCK]`."""
    rows, width = values.shape
    first = torch.arange(rows, device=values.device).unsqueeze(1) * (width // BLOCK)
    return values.view(-1, BLOCK).index_select(0, (blocks + first).view(-1)).view(rows, -1)


def argmax(scores: Tensor, maxima: Tensor) -> Tensor:
    """Return the index of every row's maximum, the first of equals.

    Args:
        scores: `[R, V]` padded.
        maxima: `block_maxima(scores)`.

    Returns:
        `[R]` int64.
    """
    block = maxima.argmax(-1, keepdim=True)
    return _take_blocks(scores, block).argmax(-1) + block.squeeze(1) * BLOCK


def topk(scores: Tensor, maxima: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the `k` largest values of every row, largest first, and where they are.

    The k largest lie in the k blocks of largest maximum: a block left out would have k blocks, hence k
    values, not below all that it holds. Which of several equal values is returned is not defined.

    Args:
        scores: `[R, V]` padded.
        maxima: `block_maxima(scores)`.
        k: at most `V`.

    Returns:
        Values `[R, k]` in the dtype of `scores`, ids `[R, k]` int64.
    """
    if k * 2 >= maxima.shape[1]:  # most blocks would be looked at anyway
        values, ids = scores.topk(k)
        return values, ids
    blocks = maxima.topk(k, sorted=False).indices
    values, at = _take_blocks(scores, blocks).topk(k)
    return values, blocks.gather(1, at // BLOCK) * BLOCK + at % BLOCK


def draw(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one index per row, with odds as its weights: the inverse of the cumulated weights, in two steps.

    Args:
        weights: `[R, V]` fp32, padded, not negative.
        uniform: `[R]` in [0, 1), of the wide dtype.

    Returns:
        Indices `[R]` int64, never one of weight 0 unless the whole row is 0, and the rows' sums `[R]` in the
        wide dtype.
    """
    sums = weights.view(len(weights), weights.shape[1] // BLOCK, BLOCK).sum(-1).to(uniform.dtype)
    block, rest, total = _invert(sums, uniform)
    inside = _take_blocks(weights, block.unsqueeze(1)).to(uniform.dtype).cumsum(-1)
    return block * BLOCK + _first_above(inside, rest), total


def draw_small(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw like `draw` from few weights `[R, C]` of the wide dtype, in one step."""
    index, _, total = _invert(weights, uniform)
    return index, total


def _invert(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return, `[R]` each, the index drawn, how far into its weight the draw fell, and the row's sum."""
    cumulated = weights.cumsum(-1)
    total = cumulated[:, -1]
    target = uniform * total
    index = _first_above(cumulated, target)
    before = F.pad(cumulated, (1, 0)).gather(1, index.unsqueeze(1)).squeeze(1)
    return index, target - before, total


def _first_above(cumulated: Tensor, target: Tensor) -> Tensor:
    """Return where `cumulated [R, C]` first exceeds `target [R]`, or else where it grows for the last time.

    It grows at the first one too, given a target that is not negative; so what is found has a weight above 0.
    The second is for targets that rounding has pushed up to the row's sum or past it.
    """
    wanted = (cumulated <= target.unsqueeze(1)).sum(-1)
    last = (cumulated < cumulated[:, -1:]).sum(-1)
    return torch.minimum(wanted, last)
