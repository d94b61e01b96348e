"""What the engine has to know of a device, in one place. Owns no state; everything is asked for afresh."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path

import psutil
import torch

from cb_engine.config import DeviceDefaults


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on the device the tensor would live on."""
    if device.type == "cpu":
        return min(int(psutil.virtual_memory().available), _cgroup_headroom())
    module = getattr(torch, device.type, None)
    if module is None or not hasattr(module, "mem_get_info"):
        raise ValueError(f"the free memory of {device} is not known to torch; give num_blocks")
    free, _ = module.mem_get_info(device)
    if hasattr(module, "memory_reserved"):  # what torch has cached and does not use is free as well
        free += module.memory_reserved(device) - module.memory_allocated(device)
    return int(free)


def release_idle_workers() -> None:
    """Lets go of the OpenMP workers that the calling thread's earlier parallel work has left behind.

    OpenMP keeps a pool of workers per thread that ever ran parallel work. If the pools together outnumber the cores,
    libgomp's workers sleep between parallel regions instead of spinning for a moment, which costs a decode step of
    some thousand regions a third of its speed. The pool comes back by itself when the thread needs it again.
    """
    library = _libgomp()
    if library is not None:
        library.omp_pause_resource_all(1)  # omp_pause_soft: nothing but idle resources


def release_host_memory() -> None:
    """Gives freed memory back to the system; glibc may keep it, scattered, and take more for the next large tensors."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


@cache
def _libgomp() -> ctypes.CDLL | None:
    """The libgomp that torch has loaded, if it uses one and that one is recent enough (OpenMP 5.0)."""
    try:
        mapped = Path("/proc/self/maps").read_text().split()
        library = ctypes.CDLL(next(path for path in mapped if "libgomp" in path))
        return library if hasattr(library, "omp_pause_resource_all") else None
    except (OSError, StopIteration):
        return None


def _cgroup_headroom() -> int:
    """What a container's memory limit leaves; practically infinite without one."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        inactive = next(
            (
                int(line.split()[1])
                for line in (root / "memory.stat").read_text().splitlines()
                if "inactive_file" in line
            ),
            0,
        )
    except (OSError, ValueError):
        return 1 << 62
    return (1 << 62) if limit == "max" else max(0, int(limit) - used + inactive)


def device_defaults(device: torch.device) -> DeviceDefaults:
    """What suits the device.

    Memory: all but a reserve on an accelerator, less on a host that other programs use too (transformers' values).
    Tokens: enough to fill the arithmetic, few enough not to delay the decodes beside a prompt.
    Padding: on a CPU, 33 rows padded to 64 would nearly double the work and buy nothing.
    """
    if device.type == "cpu":
        return DeviceDefaults(memory_percent=0.6, max_num_seqs=256, max_num_batched_tokens=1024, pads=False)
    percent = 0.6 if device.type == "mps" else 0.9
    return DeviceDefaults(memory_percent=percent, max_num_seqs=1024, max_num_batched_tokens=8192, pads=True)
