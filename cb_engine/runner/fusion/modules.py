"""Modules that take the place of a model's own on the shadow tree, with the same calls and results.

Each is made from a module whose program is known (`fuse.py` decides that) and rounds where that program rounds. The
operators are those of `cb_engine/native/dense.cpp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from cb_engine.attention.backend import AttentionParams
from cb_engine.attention.interface import attend, kernel_inputs
from cb_engine.attention.native_backend import kernel_params
from cb_engine.runner.fusion.linear import Epilogue, NativeWeight


class FusedNorm(nn.Module):
    """RMS norm in one operation.

    Args:
        weight: [dim], the model's own.
        offset: added to the weight; Gemma's norms store their distance from one.
        round_first: Llama's norms round to the model's dtype before the weight comes, others after it.
    """

    def __init__(self, weight: nn.Parameter, eps: float, *, offset: float, round_first: bool) -> None:
        super().__init__()
        self.weight = weight
        self._norm = torch.ops.cb_engine.rms_norm.default
        self.settings = (weight, eps, offset, round_first)  # at hand: a module's own parameters take a search

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., dim] to [..., dim]."""
        out: torch.Tensor = self._norm(hidden_states, *self.settings)
        return out


class FusedMLP(nn.Module):
    """`down(act(gate(x)) * up(x))` in two products."""

    def __init__(self, gate_up: NativeWeight, activation: Epilogue, down: NativeWeight) -> None:
        super().__init__()
        self.gate_up, self.activation, self.down = gate_up, activation, down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., dim] to [..., dim]."""
        return self.down(self.gate_up(x, self.activation))

    def added_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`residual + forward(x)`."""
        return self.down(self.gate_up(x, self.activation), Epilogue.ADD, residual)


class FusedAttention(nn.Module):
    """Attention with one product for queries, keys and values, which are rotated in place.

    Args:
        qkv, out: its weights.
        params: what it hands to the attention function.
        heads: how many of queries, keys and values.
        q_norm, k_norm: norms over each head, if it has them.
        rotates: False where it knows no positions.
    """

    def __init__(
        self,
        qkv: NativeWeight,
        out: NativeWeight,
        params: AttentionParams,
        *,
        layer_idx: int,
        head_dim: int,
        heads: Sequence[int],
        q_norm: nn.Module | None,
        k_norm: nn.Module | None,
        rotates: bool,
    ) -> None:
        super().__init__()
        self._rotary = torch.ops.cb_engine.rotary_.default
        self.qkv, self.out, self.params = qkv, out, params
        self.layer_idx, self.head_dim, self.heads = layer_idx, head_dim, list(heads)
        self.q_norm, self.k_norm = q_norm, k_norm
        self.rotates = rotates

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """[1, T, dim] to [1, T, dim], and no attention weights."""
        refuse_foreign(attention_mask, cache)
        return self.out(self._attended(hidden_states, position_embeddings)), None

    def added_to(
        self,
        residual: torch.Tensor,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """`residual + forward(hidden_states)[0]`."""
        return self.out(self._attended(hidden_states, position_embeddings), Epilogue.ADD, residual)

    def _attended(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        """Heads side by side, [1, T, heads * head_dim]."""
        qkv = self.qkv(hidden_states).view(hidden_states.shape[1], -1, self.head_dim)
        query, key, value = torch.split_with_sizes(qkv, self.heads, dim=1)
        rotated: tuple[torch.Tensor, ...] = (qkv.narrow(1, 0, self.heads[0] + self.heads[1]),)
        if self.q_norm is not None and self.k_norm is not None:
            rotated = query, key = self.q_norm(query), self.k_norm(key)
        if self.rotates and position_embeddings is not None:
            for heads in rotated:
                self._rotary(heads, *position_embeddings)
        return attend(self.layer_idx, query, key, value, self.params).view(1, len(query), -1)


class FusedDecoderLayer(nn.Module):
    """The layer of Llama and its many relatives, with the sums in the products' last lines.

    Norms and MLP may be fused or not. If they are, a step over the native cache takes one operator for the layer.
    """

    def __init__(
        self,
        input_layernorm: nn.Module,
        self_attn: FusedAttention,
        post_attention_layernorm: nn.Module,
        mlp: nn.Module,
    ) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = input_layernorm, self_attn
        self.post_attention_layernorm, self.mlp = post_attention_layernorm, mlp
        self._layer = torch.ops.cb_engine.decoder_layer.default
        self._settings = self._layer_settings()

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """[1, T, dim] to [1, T, dim]."""
        refuse_foreign(attention_mask, cache)
        inputs = kernel_inputs(self.self_attn.layer_idx) if self._settings is not None else None
        if self._settings is not None and inputs is not None:
            cos, sin = (self.self_attn.rotates and position_embeddings) or (None, None)
            out: torch.Tensor = self._layer(hidden_states, cos, sin, *inputs, *self._settings)
            return out
        normed = self.input_layernorm(hidden_states)
        hidden_states = self.self_attn.added_to(hidden_states, normed, position_embeddings)
        normed = self.post_attention_layernorm(hidden_states)
        if isinstance(self.mlp, FusedMLP):
            return self.mlp.added_to(hidden_states, normed)
        return hidden_states.add(self.mlp(normed))

    def _layer_settings(self) -> tuple[Any, ...] | None:
        """What `cb_engine::decoder_layer` takes behind the inputs of a step, or None if a part is not fused."""
        before, attention, after, mlp = self.input_layernorm, self.self_attn, self.post_attention_layernorm, self.mlp
        if not (isinstance(before, FusedNorm) and isinstance(after, FusedNorm) and isinstance(mlp, FusedMLP)):
            return None
        q_norm, k_norm = map(_settings_of, (attention.q_norm, attention.k_norm))
        if q_norm is None or k_norm is None or attention.heads[1] != attention.heads[2]:
            return None
        return (
            *before.settings,
            *(attention.qkv.packed, attention.qkv.bias, attention.heads[0], attention.heads[1], attention.head_dim),
            *(*q_norm, *k_norm),
            *kernel_params(attention.params),
            *(attention.out.packed, attention.out.bias),
            *after.settings,
            *(mlp.gate_up.packed, mlp.gate_up.columns, mlp.gate_up.bias, mlp.activation),
            *(mlp.down.packed, mlp.down.bias),
        )


def _settings_of(norm: nn.Module | None) -> tuple[Any, ...] | None:
    """Those of a norm, or of none at all; None if it is not fused."""
    if norm is None:
        return (None, 0.0, 0.0, False)
    return norm.settings if isinstance(norm, FusedNorm) else None


def refuse_foreign(attention_mask: torch.Tensor | None, cache: object) -> None:
    """Paged attention has its own masks and its own cache."""
    if attention_mask is not None or cache is not None:
        raise NotImplementedError("attention masks and caches from outside: paged attention has its own")
