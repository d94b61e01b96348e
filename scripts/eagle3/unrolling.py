"""EAGLE-3's training-time test: a head's passes, one after the other, for all chains of a batch at once.

Owns the padded batch and the attention between passes. Does not know losses or optimizers.

The chain of position p starts from the target's states at p. Its pass s has the token p + s at position p + s - 1 and
predicts the token p + s + 1. It sees the first pass at positions up to p, and its own later ones:

    pass 1    k_0  k_1 .. k_p
    pass 2                    k'_p          of the same chain, at position p + 1
    pass 3                          k''_p   of the same chain, at position p + 2
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from cb_engine.attention.backend import AttentionParams
from cb_engine.runner.drafters.eagle3_head import Eagle3Head
from eagle3.examples import Example


@dataclass(frozen=True)
class PaddedBatch:
    """B sequences, padded on the right to L tokens each; fields as in `Example`. No row of padding is taught."""

    token_ids: torch.Tensor
    aux: torch.Tensor
    teacher_ids: torch.Tensor
    teacher_probs: torch.Tensor
    is_taught: torch.Tensor

    @classmethod
    def of(cls, examples: Sequence[Example]) -> PaddedBatch:
        """Pads examples to one length."""

        def padded(tensors: list[torch.Tensor]) -> torch.Tensor:
            return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)

        return cls(
            padded([e.token_ids for e in examples]),
            padded([e.aux for e in examples]),
            padded([e.teacher_ids for e in examples]),
            padded([e.teacher_probs for e in examples]),
            padded([e.is_taught for e in examples]),
        )


class ChainAttention:
    """What a head attends with during one unrolling; see the module docstring. Rows are a flattened batch."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._keys: list[torch.Tensor] = []  # [B, kv heads, 1, L, D] of each pass so far
        self._values: list[torch.Tensor] = []

    def __call__(
        self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """As `cb_engine.attention.interface.attend`."""
        q, k, v = (t.view(self._batch_size, -1, *t.shape[1:]).transpose(1, 2) for t in (query, key, value))
        if not self._keys:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=params.scale, enable_gqa=True)
        self._keys.append(k.unsqueeze(2))
        self._values.append(v.unsqueeze(2))
        if len(self._keys) > 1:
            grouped = q.reshape(self._batch_size, k.shape[1], -1, *q.shape[2:])
            out = self._later_pass(grouped, params.scale).flatten(1, 2)
        return out.transpose(1, 2).flatten(0, 1)

    def _later_pass(self, q: torch.Tensor, scale: float) -> torch.Tensor:
        """`q`: [B, kv heads, queries per head, L, D], as is what returns."""
        length = q.shape[-2]
        hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores = [(q @ self._keys[0].transpose(-1, -2)).masked_fill(hidden, -torch.inf)]
        scores += [(q * key).sum(-1, keepdim=True) for key in self._keys[1:]]
        weights = (torch.cat(scores, -1) * scale).softmax(-1, dtype=torch.float32).to(q.dtype)
        out = weights[..., :length] @ self._values[0]
        for i, value in enumerate(self._values[1:]):
            out = out + weights[..., length + i : length + i + 1] * value
        return out


def unroll(head: Eagle3Head, batch: PaddedBatch, num_passes: int) -> Iterator[torch.Tensor]:
    """The output of each pass, [B, L, H]: its row p belongs to the chain of position p. Those near the end of a
    sequence have no tokens to go on with and mean nothing."""
    batch_size, length = batch.token_ids.shape
    head.attend_with(ChainAttention(batch_size))
    device = head.target_ids.device
    hidden = head.fuse(batch.aux.to(device).flatten(0, 1).unsqueeze(0).to(head.norm.weight.dtype))
    positions = torch.arange(length, device=device).repeat(batch_size).unsqueeze(0)
    for number in range(1, num_passes + 1):
        ids = shifted(batch.token_ids, number).to(device).flatten().unsqueeze(0)
        with torch.no_grad():
            embeds = head.embed(ids)  # the target's own, which are not trained
        dtype = head.norm.weight.dtype  # the residual stays as exact as the weights under autocast
        hidden = head(embeds.to(dtype), hidden.to(dtype), positions + number - 1)
        yield hidden[0].view(batch_size, length, -1)


def arithmetic(head: Eagle3Head, batch: PaddedBatch) -> AbstractContextManager[Any]:
    """Matrix products in bf16 if the target computes in half precision, else as they are."""
    kind = head.target_ids.device.type
    return torch.autocast(kind, torch.bfloat16, enabled=batch.aux.dtype in (torch.bfloat16, torch.float16))


def shifted(rows: torch.Tensor, number: int) -> torch.Tensor:
    """Row p of each sequence [B, L, ...] becomes row p + number; zeros behind the end."""
    out = torch.zeros_like(rows)
    out[:, : max(0, rows.shape[1] - number)] = rows[:, number:]
    return out
