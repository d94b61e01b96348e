"""Replaces modules of a shadow tree by faster ones, and sees that nothing else changes.

A module is replaced only if its program is known (`known.py`) and its stand-in gives the same result on a probe: the
inputs that the module itself met in a forward of a few tokens, at positions near and far. What does not qualify stays
as it is, so every model runs, and the common ones run fast.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from cb_engine.attention.backend import AttentionParams
from cb_engine.attention.interface import bind
from cb_engine.device import free_memory
from cb_engine.runner.fusion.known import fused_attention, fused_layer, fused_mlp, fused_norm
from cb_engine.runner.fusion.linear import has_native_kernels, is_plain, packed_linear
from cb_engine.runner.probe import PlainAttention

logger = logging.getLogger(__name__)

_KEEP_FREE = 3  # pack only if the copies leave this many times their size free

# How far a stand-in may be from the module, relative to the largest value: a few roundings.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


@dataclass
class Fusion:
    """What was done to a shadow tree.

    Attributes:
        packed_bytes: what packed copies of weights take.
        fused: how many modules of each class were replaced.
    """

    packed_bytes: int = 0
    fused: Counter[str] = field(default_factory=Counter)


def fuse_shadow(shadow: nn.Module, forward: Callable[[nn.Module], None], *, fuse: bool, pack: bool | None) -> Fusion:
    """Replaces what can be replaced, in place.

    Args:
        shadow: a shadow tree.
        forward: runs a tree on a few tokens; a step is bound meanwhile.
        fuse: whether norms, MLPs, attention and layers may be replaced, where the native kernels can be had.
        pack: whether weights may be packed: no, yes, or None for "if memory allows". Without, only norms are fused.
    """
    linears = {module for module in shadow.modules() if is_plain(module)}
    size = sum(linear.weight.nbytes for linear in linears)
    if pack is None:
        pack = size * _KEEP_FREE <= free_memory(torch.device("cpu"))
    native = bool(linears) and has_native_kernels()
    fusion = Fusion()
    if fuse and native:
        _fuse_modules(shadow, forward, pack, fusion)
    if pack:
        _pack_linears(shadow, native)
        fusion.packed_bytes = size - sum(m.weight.nbytes for m in shadow.modules() if is_plain(m))
    return fusion


def _pack_linears(shadow: nn.Module, native: bool) -> None:
    """Packs the linear layers that no fused module has taken."""
    packed: dict[nn.Linear, nn.Module | None] = {}
    for parent in list(shadow.modules()):
        for name, child in list(parent.named_children()):
            if not is_plain(child):
                continue
            if child not in packed:
                packed[child] = packed_linear(child, native=native)
            parent._modules[name] = packed[child] or child


def _fuse_modules(shadow: nn.Module, forward: Callable[[nn.Module], None], pack: bool, fusion: Fusion) -> None:
    calls, params = _probe(shadow, forward)
    makers: list[Callable[[nn.Module], nn.Module | None]] = [fused_norm]
    if pack:
        makers += [fused_mlp, lambda module: fused_attention(module, params), fused_layer]
    chosen: dict[nn.Module, nn.Module] = {}
    for parent in reversed(list(shadow.modules())):  # children before parents, whose stand-ins are made of theirs
        for name, child in list(parent.named_children()):
            if child not in chosen:
                chosen[child] = _stand_in(child, makers, calls.get(child)) or child
                fusion.fused[type(chosen[child]).__name__] += chosen[child] is not child
            parent._modules[name] = chosen[child]
    fusion.fused = +fusion.fused  # without zeros


def _stand_in(
    module: nn.Module, makers: Sequence[Callable[[nn.Module], nn.Module | None]], call: _Call | None
) -> nn.Module | None:
    """A module that has proved to give the same result, or None."""
    if call is None:
        return None
    for make in makers:
        candidate = make(module)
        if candidate is None:
            continue
        candidate.train(False)
        reason = _difference(candidate, call)
        if reason is None:
            return candidate
        logger.warning("%s is not replaced by its fused form: %s", type(module).__name__, reason)
    return None


def _difference(candidate: nn.Module, call: _Call) -> str | None:
    """What is wrong with a candidate's answer, or None."""
    try:
        with bind(PlainAttention()):
            answer = _tensor_of(candidate(*call.args, **call.kwargs))
    except Exception as error:  # whatever it is, the module itself still works
        return f"{type(error).__name__}: {error}"
    if answer is None or answer.shape != call.output.shape or answer.dtype != call.output.dtype:
        return "its output has another form"
    worst = (answer.float() - call.output.float()).abs().max().item()
    largest = call.output.float().abs().max().item()
    if not worst <= _TOLERANCE[answer.dtype] * largest:
        return f"its output differs by {worst:.2g}, the largest value being {largest:.2g}"
    return None


# ---- the probe ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """What a module was called with, and what it answered."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: torch.Tensor


class _Recorder(PlainAttention):
    """Notes what each layer hands to the attention function."""

    def __init__(self) -> None:
        self.params: dict[int, AttentionParams] = {}

    def attend(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        self.params[layer_idx] = params
        return super().attend(layer_idx, query, key, value, params)


def _probe(
    shadow: nn.Module, forward: Callable[[nn.Module], None]
) -> tuple[dict[nn.Module, _Call], dict[int, AttentionParams]]:
    """Runs the tree once and returns every module's call, and what attention was given."""
    calls: dict[nn.Module, _Call] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        tensor = _tensor_of(output)
        if tensor is not None:
            calls[module] = _Call(args, kwargs, tensor)

    recorder = _Recorder()
    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in shadow.modules()]
    try:
        with bind(recorder):
            forward(shadow)
    finally:
        for hook in hooks:
            hook.remove()
    return calls, recorder.params


def _tensor_of(output: Any) -> torch.Tensor | None:
    first = output[0] if isinstance(output, tuple) and output else output
    return first if isinstance(first, torch.Tensor) else None
