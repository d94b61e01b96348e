"""The engine's own view of the user's model: other modules, the same weights.

Owns the shadow module tree and the fingerprint of what it was made from. Does not know steps or caches.
The user's model is read and never changed; its forward, backward and optimizer go on as if there were no engine.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from cb_engine.attention.interface import ATTENTION_NAME
from cb_engine.errors import UnsupportedModelError

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_PLAIN = (bool, int, float, str, type(None))
_INTERNALS = frozenset(nn.Module().__dict__)  # what every module has: parameters, hooks, the train flag
_SAMPLES = 64  # values of each tensor that a fingerprint holds


def make_shadow(model: ModuleT) -> ModuleT:
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
    version counters and `samples` can tell; equal `structure` means the same modules with the same code, hooks and
    plain settings."""

    tensors: tuple[tuple[Any, ...], ...]
    samples: tuple[bytes, ...]
    structure: tuple[tuple[Any, ...], ...]


def fingerprint(model: nn.Module) -> Fingerprint:
    """Reads the model's present state; costs some milliseconds for some hundred modules."""
    named = list(_named_tensors(model))
    tensors = tuple(
        (name, id(t), t.data_ptr(), 0 if t.is_inference() else t._version, t.dtype, t.device) for name, t in named
    )
    modules = list(model.named_modules())
    structure = tuple(_structure_of(name, module) for name, module in modules)
    configs = {id(config): config for _, module in modules if (config := module.__dict__.get("config")) is not None}
    settings = tuple(_plain_settings(vars(config)) for config in configs.values() if hasattr(config, "__dict__"))
    return Fingerprint(tensors, _samples([tensor for _, tensor in named]), (*structure, settings))


def _samples(tensors: Iterable[torch.Tensor]) -> tuple[bytes, ...]:
    """Some values of every tensor. torch's fused optimizers, and writes through `.data`, do not move the version
    counters; but they change so many values that some of these are among them."""
    together: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    with torch.no_grad():
        for tensor in tensors:
            if tensor.device.type == "meta" or not tensor.is_contiguous() or tensor.is_quantized:
                continue
            flat = tensor.detach().view(-1)
            step = max(1, flat.numel() // _SAMPLES)
            together.setdefault((tensor.device, tensor.dtype), []).append(flat[step // 2 :: step][:_SAMPLES])
        return tuple(
            torch.cat(parts).contiguous().view(torch.uint8).cpu().numpy().tobytes() for parts in together.values()
        )


def _structure_of(name: str, module: nn.Module) -> tuple[Any, ...]:
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    loose = tuple(
        (key, id(value), value._version)
        for key, value in module.__dict__.items()
        if isinstance(value, torch.Tensor) and not value.is_inference()
    )
    return name, type(module), type(module).forward, hooks, loose, _plain_settings(module.__dict__)


def _plain_settings(attributes: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The settings among a module's or a config's attributes: an adapter switched on is one of them."""
    settings: list[tuple[str, Any]] = []
    for name, value in attributes.items():
        if name in _INTERNALS or name.startswith("_cb_engine"):
            continue
        if isinstance(value, _PLAIN):
            settings.append((name, value))
        elif isinstance(value, list) and all(isinstance(item, _PLAIN) for item in value):
            settings.append((name, tuple(value)))
        elif isinstance(value, dict) and all(isinstance(item, _PLAIN) for item in value.values()):
            settings.append((name, tuple(value.items())))
    return tuple(settings)
