"""Which drafts were right.

Owns: the rule by which a verified draft becomes output. Does not know: how a token was sampled, requests, proposers.

Every row of a verify step is sampled as it would be without drafts: row i of a request gives the token that follows its
first i drafts, drawn from the target's own distribution with the request's own number for that position. A draft is
right if it is that token.

    drafts        d1 d2 d3
    sampled    s1 s2 s3 s4        s1 == d1, s2 == d2, s3 != d3:  s1 s2 s3 are output, s4 is dropped

This is rejection sampling for proposers that name one token (Leviathan et al. 2023, with q one-hot): d is accepted with
probability p(d), and what replaces it is drawn from p without d. It needs no second draw, and a request gives the very
tokens that it gives without speculation, seeds included.
"""

from __future__ import annotations

import torch
from torch import Tensor

NOTHING = -1  # a draft that is none, and an output that is none


def accept(token_ids: Tensor, failed: Tensor, rows: Tensor, drafts: Tensor) -> Tensor:
    """Keeps what was sampled up to the first wrong draft. Fixed shapes, no value is read.

    Args:
        token_ids, failed: [R] int64 and bool, of all rows that were sampled.
        rows: [B, W] int64: which of them belong to request b, in order; any row where there are no more.
        drafts: [B, W - 1] int64; `NOTHING` where there are no more.

    Returns:
        [B, W] int64: the tokens of each request, then `NOTHING`. A row that failed ends the tokens before it.
    """
    sampled = token_ids.index_select(0, rows.flatten()).view(rows.shape)
    sound = ~failed.index_select(0, rows.flatten()).view(rows.shape)
    right = (drafts == sampled[:, :-1]).to(torch.int32).cumprod(1).sum(1, keepdim=True)
    kept = torch.arange(rows.shape[1], device=rows.device).unsqueeze(0) <= right
    kept = kept & (sound.to(torch.int32).cumprod(1) > 0)
    return torch.where(kept, sampled, NOTHING)
