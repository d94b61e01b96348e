"""Which attention backend serves a device. The only place where backends are named."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from cb_engine.attention.backend import AttentionBackend
from cb_engine.attention.torch_backend import TorchBackend


def select_backend(name: str, devices: Iterable[torch.device]) -> AttentionBackend:
    """Returns the backend for layers on these devices.

    Args:
        name: "torch", "native" or "auto": native kernels on a CPU where they can be built, else plain PyTorch.

    Raises:
        ValueError: "native" was asked for and cannot be had.
    """
    on_cpu = all(device.type == "cpu" for device in devices)
    if name == "torch" or (name == "auto" and not on_cpu):
        return TorchBackend()
    from cb_engine.attention.native import build  # imported late: looking for a compiler costs time
    from cb_engine.attention.native_backend import NativeBackend

    if on_cpu and build.load():
        return NativeBackend()
    if name == "native":
        raise ValueError(
            "attention_backend='native' needs all layers on the CPU and a C++ compiler; install one (g++ or clang++), "
            "or use 'auto'"
        )
    return TorchBackend()
