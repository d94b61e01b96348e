"""Which attention backend serves a device. The only place where backends are named."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from cb_engine.attention.backend import AttentionBackend
from cb_engine.attention.static_backend import StaticBackend
from cb_engine.attention.torch_backend import TorchBackend

_NATIVE_DTYPES = {torch.float32, torch.bfloat16, torch.float16}


def select_backend(name: str, devices: Iterable[torch.device], dtypes: Iterable[torch.dtype]) -> AttentionBackend:
    """Returns the backend for layers on these devices, with keys and values of these types.

    Args:
        name: "torch", "native", "static" (PyTorch without data-dependent shapes, for devices that replay graphs), or
            "auto": native kernels on a CPU where they can be built, else plain PyTorch.

    Raises:
        ValueError: "native" was asked for and cannot be had.
    """
    if name == "static":
        return StaticBackend()
    fits = all(device.type == "cpu" for device in devices) and set(dtypes) <= _NATIVE_DTYPES
    if name == "torch" or (name == "auto" and not fits):
        return TorchBackend()
    from cb_engine.attention.native_backend import NativeBackend
    from cb_engine.native import build  # imported late: looking for a compiler costs time

    if fits and build.load():
        return NativeBackend()
    if name == "native":
        raise ValueError(
            "attention_backend='native' needs all layers on the CPU in fp32, bf16 or fp16, and a C++ compiler; "
            "install one (g++ or clang++), or use 'auto'"
        )
    return TorchBackend()
