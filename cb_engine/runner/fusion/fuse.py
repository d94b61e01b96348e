"""Replaces modules of a shadow tree by faster ones, and sees that nothing else changes.

A module is replaced only if its program is known (`known.py`) and its stand-in gives the same result on a probe: the
inputs that the module itself met in a forward of a few tokens, at positions near and far. In the end the whole tree
has to give the same logits, or nothing is replaced. Stand-ins that attend by themselves do so over a small cache, as
they will in steps. What does not qualify stays as it is, so every model runs, and the common ones run fast.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from cb_engine.attention.backend import AttentionMetadata, KVSpec, NativeInputs
from cb_engine.attention.interface import StepContext, bind
from cb_engine.attention.native_backend import NativeBackend
from cb_engine.device import free_memory
from cb_engine.runner.fusion.known import fused_attention, fused_layer, fused_mlp, fused_norm
from cb_engine.runner.fusion.linear import has_matrix_tiles, has_native_kernels, is_plain, packed_linear
from cb_engine.runner.fusion.programs import is_torch_untouched
from cb_engine.runner.probe import PlainAttention
from cb_engine.runner.shadow import ModuleT

logger = logging.getLogger(__name__)

_KEEP_FREE = 3  # pack only if the copies leave this many times their size free

# How far a stand-in may be from the module, relative to the largest value: a few roundings. And a tree from a tree,
# where roundings add up over the layers; a module left out or wrongly read shows as far more.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
_TREE_TOLERANCE = {torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.3}


@dataclass
class Fusion:
    """What was done to a shadow tree.

    Attributes:
        packed_bytes: what packed copies of weights take.
        fused: how many modules of each class were replaced.
    """

    packed_bytes: int = 0
    fused: Counter[str] = field(default_factory=Counter)


def fused_shadow(
    make: Callable[[], nn.Module], forward: Callable[[nn.Module], torch.Tensor], *, fuse: bool, pack: bool | None
) -> tuple[nn.Module, Fusion]:
    """A shadow tree with as much replaced as can be.

    Args:
        make: a new shadow tree.
        forward: the logits of a tree for a few tokens; a step is bound meanwhile.
        fuse: whether norms, MLPs, attention and layers may be replaced, where the native kernels can be had.
        pack: whether weights may be packed: no, yes, or None for "if memory allows". Without, only norms are fused.
    """
    shadow = make()
    linears = _plain_linears(shadow)
    size = _bytes(linears)
    pack = _may_pack(size, pack)
    if not linears or not (fuse or pack) or not is_torch_untouched():
        return shadow, Fusion()
    native = has_native_kernels()
    try:
        expected, calls, attention = _probe(shadow, forward)
    except Exception:  # a hook of the user's that expects other tokens, for example
        logger.warning("nothing is fused: the model does not run on the probe's tokens", exc_info=True)
        return shadow, Fusion()
    fusion = Fusion()
    if fuse and native:
        fusion.fused = _fuse_modules(shadow, calls, attention, pack)
    del calls
    if pack:
        _pack_linears(shadow, native)
        fusion.packed_bytes = size - _bytes(_plain_linears(shadow))
        if native and has_matrix_tiles(next(iter(linears)).weight.dtype):
            fusion.packed_bytes *= 2  # in both layouts
    reason = _difference(lambda: forward(shadow), expected, _CachedAttention(attention.keys), _TREE_TOLERANCE)
    if reason is None:
        return shadow, fusion
    logger.warning("nothing is fused: as a whole, the fused model is not the same: %s", reason)
    return make(), Fusion()


def packed_shadow(shadow: ModuleT, *, pack: bool | None) -> ModuleT:
    """The same tree with its linear layers packed, for one whose modules are this project's own.

    Args:
        pack: see `fused_shadow`.
    """
    linears = _plain_linears(shadow)
    if linears and _may_pack(_bytes(linears), pack) and is_torch_untouched():
        _pack_linears(shadow, has_native_kernels())
    return shadow


def _plain_linears(shadow: nn.Module) -> set[nn.Linear]:
    return {module for module in shadow.modules() if is_plain(module)}


def _bytes(linears: Iterable[nn.Linear]) -> int:
    return sum(linear.weight.nbytes for linear in linears)


def _may_pack(num_bytes: int, wish: bool | None) -> bool:
    return num_bytes * _KEEP_FREE <= free_memory(torch.device("cpu")) if wish is None else wish


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


def _fuse_modules(
    shadow: nn.Module, calls: Mapping[nn.Module, _Call], attention: PlainAttention, pack: bool
) -> Counter[str]:
    """Replaces modules, and counts their stand-ins by class."""
    makers: list[Callable[[nn.Module], nn.Module | None]] = [fused_norm]
    if pack:
        makers += [fused_mlp, lambda module: fused_attention(module, attention.params), fused_layer]
    context = _CachedAttention(attention.keys)
    chosen: dict[nn.Module, nn.Module] = {}
    for parent in reversed(list(shadow.modules())):  # children before parents, whose stand-ins are made of theirs
        for name, child in list(parent.named_children()):
            if child not in chosen:
                chosen[child] = _stand_in(child, makers, calls.get(child), context) or child
            parent._modules[name] = chosen[child]
    return Counter(type(new).__name__ for old, new in chosen.items() if new is not old)


def _stand_in(
    module: nn.Module,
    makers: Sequence[Callable[[nn.Module], nn.Module | None]],
    call: _Call | None,
    context: StepContext,
) -> nn.Module | None:
    """A module that has proved to give the same result, or None."""
    if call is None:
        return None
    for make in makers:
        candidate = make(module)
        if candidate is None:
            continue
        candidate.train(False)
        reason = _difference(partial(candidate, *call.args, **call.kwargs), call.output, context, _TOLERANCE)
        if reason is None:
            return candidate
        logger.warning("%s is not replaced by its fused form: %s", type(module).__name__, reason)
    return None


def _difference(
    compute: Callable[[], Any], expected: torch.Tensor, context: StepContext, tolerance: Mapping[torch.dtype, float]
) -> str | None:
    """What is wrong with an answer, or None."""
    try:
        with torch.no_grad(), bind(context):
            answer = _tensor_of(compute())
    except Exception as error:  # whatever it is, the module itself still works
        return f"{type(error).__name__}: {error}"
    if answer is None or answer.shape != expected.shape or answer.dtype != expected.dtype:
        return "its output has another form"
    worst = (answer.float() - expected.float()).abs().max().item()
    largest = expected.float().abs().max().item()
    if not worst <= tolerance.get(answer.dtype, 0.0) * largest:
        return f"its output differs by {worst:.2g}, the largest value being {largest:.2g}"
    return None


class _CachedAttention(PlainAttention):
    """A native cache of a block for each layer beside the plain attention of a probe.

    Args:
        keys: [T, num_kv_heads, head_dim] of each layer, as the probe has seen them.
    """

    def __init__(self, keys: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self._seen = dict(keys)

    def native_inputs(self, layer_idx: int) -> NativeInputs | None:
        """See `StepContext.native_inputs`; all tokens are one request's, in block 1."""
        backend, key = NativeBackend(), self._seen[layer_idx]
        num_tokens, num_kv_heads, head_dim = key.shape
        block_size = backend.preferred_block_size
        cache = backend.allocate(KVSpec(num_kv_heads, head_dim, key.dtype, block_size), 2, key.device)
        metadata = AttentionMetadata(
            slot_mapping=torch.arange(block_size, block_size + num_tokens),
            block_table=torch.ones(1, 1, dtype=torch.int32),
            query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32),
            seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
            max_query_len=num_tokens,
            max_seq_len=num_tokens,
        )
        return backend.native_inputs(cache, metadata)


# ---- the probe ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """What a module was called with, and what it answered."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: torch.Tensor


def _probe(
    shadow: nn.Module, forward: Callable[[nn.Module], torch.Tensor]
) -> tuple[torch.Tensor, dict[nn.Module, _Call], PlainAttention]:
    """Runs the tree once and returns its logits, every module's call, and what attention was given."""
    calls: dict[nn.Module, _Call] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        tensor = _tensor_of(output)
        if tensor is not None:
            calls[module] = _Call(args, kwargs, tensor)

    attention = PlainAttention()
    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in shadow.modules()]
    try:
        with bind(attention):
            logits = forward(shadow)
    finally:
        for hook in hooks:
            hook.remove()
    return logits, calls, attention


def _tensor_of(output: Any) -> torch.Tensor | None:
    first = output[0] if isinstance(output, tuple) and output else output
    return first if isinstance(first, torch.Tensor) else None
