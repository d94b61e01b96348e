"""How a transformers attention layer reaches the paged cache.

Owns the entry in transformers' `AttentionInterface` (registered under `ATTENTION_NAME`, transformers' own way to add
an implementation: no function of it is replaced) and the step that is bound while a forward runs. A model whose
config names another implementation never comes here, so the user's model is not touched.
Does not know what a bound step does with the layer's tensors: a `StepContext` is the paged cache, or a probe.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface

from cb_engine.attention.backend import AttentionParams, NativeInputs

ATTENTION_NAME = "cb_engine"

# Keyword arguments that models pass along and that say nothing the engine has not planned itself.
_HARMLESS_KWARGS = frozenset(
    {"position_ids", "use_cache", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    | {"output_attentions", "output_hidden_states", "return_dict", "is_causal", "num_items_in_batch"}
    | {"output_router_logits"}
)


class StepContext(Protocol):
    """What a layer's attention is handed to while a forward runs."""

    def attend(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Attention of one layer over [T, heads, head_dim] packed tokens; returns [T, num_heads, head_dim]."""

    def native_inputs(self, layer_idx: int) -> NativeInputs | None:
        """The layer's cache and the step for a native operator that attends by itself, or None where `attend` is the
        only way."""


_bound = threading.local()


@contextmanager
def bind(context: StepContext) -> Iterator[None]:
    """Binds a step to this thread for the duration of a forward; steps do not nest."""
    if getattr(_bound, "context", None) is not None:
        raise RuntimeError("a step is bound to this thread already")
    _bound.context = context
    try:
        yield
    finally:
        _bound.context = None


def _bound_context() -> StepContext:
    context: StepContext | None = getattr(_bound, "context", None)
    if context is None:
        raise RuntimeError(
            f"attention implementation {ATTENTION_NAME!r} ran outside a step of the engine; it belongs to the engine's "
            "own copy of the module tree and must not be set on a model"
        )
    return context


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: [1, heads, T, head_dim] in, [1, T, heads, head_dim] out."""
    unknown = {k for k, v in kwargs.items() if v is not None and k not in _HARMLESS_KWARGS}
    if unknown or attention_mask is not None or dropout:
        what = sorted(unknown) or ["attention_mask" if attention_mask is not None else "dropout"]
        raise NotImplementedError(f"attention arguments that paged attention does not know: {', '.join(what)}")
    if getattr(module, "is_causal", True) is False:
        raise NotImplementedError("attention that sees later tokens (is_causal=False)")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer_idx: int = module.layer_idx  # type: ignore[assignment]
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    return attend(layer_idx, q, k, v, AttentionParams(scale, sliding_window, softcap, s_aux)).unsqueeze(0), None


def attend(
    layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
) -> torch.Tensor:
    """`StepContext.attend` of the bound step, also from code that is being compiled."""
    if torch.compiler.is_compiling():
        out: torch.Tensor = torch.ops.cb_engine.attend(
            query, key, value, layer_idx, params.scale, params.window, params.softcap, params.sinks
        )
        return out
    return _bound_context().attend(layer_idx, query, key, value, params)


def native_inputs(layer_idx: int) -> NativeInputs | None:
    """`StepContext.native_inputs` of the bound step."""
    return _bound_context().native_inputs(layer_idx)


@torch.library.custom_op("cb_engine::attend", mutates_args=())
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer_idx: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The same for compiled code, to which the cache and the step's metadata are opaque.

    The cache that it writes is read by no other operator, so the compiler need not know of it.
    """
    return _bound_context().attend(layer_idx, query, key, value, AttentionParams(scale, window, softcap, sinks))


@_attend.register_fake
def _attend_fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer_idx: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


AttentionInterface.register(ATTENTION_NAME, attention_forward)
