"""The engine's own view of the user's model: other modules, the same weights.

Owns the shadow module tree and the fingerprint of what it was made from. Does not know steps or caches.
The user's model is read and never changed; its forward, backward and optimizer go on as if there were no engine.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cb_engine.attention.interface import ATTENTION_NAME
from cb_engine.errors import UnsupportedModelError

_PLAIN = (bool, int, float, str, type(None))


def make_shadow(model: nn.Module) -> nn.Module:
    """Copies the module tree and config; every parameter and buffer of the copy *is* the model's own tensor.

    The copy is in eval mode and attends through the engine. Forward hooks and accelerate's hooks go along, bound
    to the copy; backward hooks stay behind.

    Raises:
        UnsupportedModelError: a module holds something that cannot be copied.
    """
    memo: dict[int, Any] = {id(tensor): tensor for _, tensor in _named_tensors(model)}
    for module in model.modules():
        for shared in _offload_maps(module):
            memo[id(shared)] = shared
        memo[id(module._backward_hooks)] = type(module._backward_hooks)()
        memo[id(module._backward_pre_hooks)] = type(module._backward_pre_hooks)()
    try:
        shadow = copy.deepcopy(model, memo)
    except Exception as error:
        raise UnsupportedModelError(
            f"the module tree of {type(model).__name__} cannot be copied ({type(error).__name__}: {error}); remove "
            "what was stored on its modules, or attach before storing it"
        ) from error
    shadow.train(False)
    for module in shadow.modules():
        if hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable"):
            del module.__dict__[
                "forward"
            ]  # `model.forward = torch.compile(model.forward)` is bound to the user's model
        if getattr(module, "gradient_checkpointing", False):
            setattr(module, "gradient_checkpointing", False)  # noqa: B010 (a Module's attributes are typed as modules)
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = ATTENTION_NAME
    return shadow


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _offload_maps(module: nn.Module) -> Iterator[object]:
    """The stores of accelerate's offloaded weights: shared, since a copy would double the weights."""
    pending = [getattr(module, "_hf_hook", None)]
    while pending:
        hook = pending.pop()
        pending.extend(getattr(hook, "hooks", ()))
        for name in ("weights_map", "tied_params_map"):
            store = getattr(hook, name, None)
            if store is not None:
                yield store


@dataclass(frozen=True)
class Fingerprint:
    """What a shadow was made from. Equal `tensors` mean the same values in the same storage, as far as torch's
    version counters can tell; equal `structure` means the same modules with the same plain settings."""

    tensors: tuple[tuple[Any, ...], ...]
    structure: tuple[tuple[Any, ...], ...]


def fingerprint(model: nn.Module) -> Fingerprint:
    """Reads the model's present state; costs a few milliseconds for some hundred modules."""
    tensors = tuple(
        (name, id(t), t.data_ptr(), 0 if t.is_inference() else t._version, t.dtype, t.device)
        for name, t in _named_tensors(model)
    )
    structure = tuple((name, type(module), _plain_settings(module)) for name, module in model.named_modules())
    return Fingerprint(tensors, structure)


def _plain_settings(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """A module's own settings, as far as they are plain values: an adapter switched on is one of them."""
    settings: list[tuple[str, Any]] = []
    for name, value in module.__dict__.items():
        if name == "training" or name.startswith("_cb_engine"):
            continue
        if isinstance(value, _PLAIN):
            settings.append((name, value))
        elif isinstance(value, list) and all(isinstance(item, _PLAIN) for item in value):
            settings.append((name, tuple(value)))
        elif isinstance(value, dict) and all(isinstance(item, _PLAIN) for item in value.values()):
            settings.append((name, tuple(value.items())))
    return tuple(settings)
