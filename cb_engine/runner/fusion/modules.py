"""Modules that take the place of a model's own on the shadow tree, with the same calls and results.

Each is made from a module whose program is known (`fuse.py` decides that) and rounds where that program rounds. The
operators are those of `cb_engine/native`; `FusedDecoderLayer` has a twin there, `layer.cpp`, which changes with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from cb_engine.attention.backend import AttentionParams, NativeInputs, NativeParams
from cb_engine.attention.interface import attend, native_inputs
from cb_engine.runner.fusion.linear import Epilogue, NativeWeight, has_matrix_tiles, prefers_tiles


class NormSettings(NamedTuple):
    """A norm as the native operators take it; without a weight there is none."""

    weight: torch.Tensor | None = None
    eps: float = 0.0
    offset: float = 0.0
    round_first: bool = False


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
        # At hand: a module's own parameters take a search.
        self.settings = NormSettings(weight, eps, offset, round_first)

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
        num_heads, num_kv_heads: how many of queries, and of keys and of values.
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
        num_heads: int,
        num_kv_heads: int,
        q_norm: nn.Module | None,
        k_norm: nn.Module | None,
        rotates: bool,
    ) -> None:
        super().__init__()
        self._rotary = torch.ops.cb_engine.rotary_.default
        self.qkv, self.out, self.params = qkv, out, params
        self.layer_idx, self.head_dim = layer_idx, head_dim
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
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
        num_tokens, sizes = hidden_states.shape[1], [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        qkv = self.qkv(hidden_states).view(num_tokens, sum(sizes), self.head_dim)
        query, key, value = torch.split_with_sizes(qkv, sizes, dim=1)
        rotated: tuple[torch.Tensor, ...] = (qkv.narrow(1, 0, self.num_heads + self.num_kv_heads),)
        if self.q_norm is not None and self.k_norm is not None:
            rotated = query, key = self.q_norm(query), self.k_norm(key)
        if self.rotates and position_embeddings is not None:
            for heads in rotated:
                self._rotary(heads, *position_embeddings)
        attended = attend(self.layer_idx, query, key, value, self.params)
        return attended.view(1, num_tokens, self.num_heads * self.head_dim)


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
        # In the operator's own order, at hand for every step; empty if it cannot serve this layer.
        self._settings = in_order(self._layer, self._layer_settings())
        self._has_tiles = has_matrix_tiles(self.self_attn.qkv.packed.dtype)

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
        whole = self._settings and not (self._has_tiles and prefers_tiles(hidden_states))
        inputs = native_inputs(self.self_attn.layer_idx) if whole else None
        if inputs is not None:
            return self._whole(hidden_states, position_embeddings, inputs)
        normed = self.input_layernorm(hidden_states)
        hidden_states = self.self_attn.added_to(hidden_states, normed, position_embeddings)
        normed = self.post_attention_layernorm(hidden_states)
        if isinstance(self.mlp, FusedMLP):
            return self.mlp.added_to(hidden_states, normed)
        return hidden_states.add(self.mlp(normed))

    def _whole(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None,
        inputs: NativeInputs,
    ) -> torch.Tensor:
        """The same in one operator."""
        cos = sin = None
        if position_embeddings is not None and self.self_attn.rotates:
            cos, sin = position_embeddings
        out: torch.Tensor = self._layer(hidden_states, cos, sin, *inputs, *self._settings)
        return out

    def _layer_settings(self) -> dict[str, Any]:
        """What `cb_engine::decoder_layer` takes beside the inputs of a step; nothing if a part is not fused."""
        attention, mlp = self.self_attn, self.mlp
        norms = {"input": self.input_layernorm, "post": self.post_attention_layernorm}
        norms |= {name: norm for name, norm in (("q", attention.q_norm), ("k", attention.k_norm)) if norm is not None}
        fused = {name: norm.settings for name, norm in norms.items() if isinstance(norm, FusedNorm)}
        if len(fused) < len(norms) or not isinstance(mlp, FusedMLP):
            return {}
        settings: dict[str, Any] = {
            "qkv_weight": attention.qkv.packed,
            "qkv_bias": attention.qkv.bias,
            "num_heads": attention.num_heads,
            "num_kv_heads": attention.num_kv_heads,
            "head_dim": attention.head_dim,
            "out_weight": attention.out.packed,
            "out_bias": attention.out.bias,
            "gate_up_weight": mlp.gate_up.packed,
            "gate_up_columns": mlp.gate_up.columns,
            "gate_up_bias": mlp.gate_up.bias,
            "activation": mlp.activation,
            "down_weight": mlp.down.packed,
            "down_bias": mlp.down.bias,
            **NativeParams.of(attention.params)._asdict(),
        }
        for name in ("input", "post", "q", "k"):
            weight, *rest = fused.get(name, NormSettings())
            settings[f"{name}_norm"] = weight
            settings |= zip((f"{name}_eps", f"{name}_offset", f"{name}_round_first"), rest, strict=True)
        return settings


def in_order(operator: Any, settings: Mapping[str, Any]) -> tuple[Any, ...]:
    """Values of an operator's last arguments, given by name, in the order of its schema."""
    arguments = operator._schema.arguments
    return tuple(settings[argument.name] for argument in arguments[len(arguments) - len(settings) :])


def refuse_foreign(attention_mask: torch.Tensor | None, cache: object) -> None:
    """Paged attention has its own masks and its own cache."""
    if attention_mask is not None or cache is not None:
        raise NotImplementedError("attention masks and caches from outside: paged attention has its own")
