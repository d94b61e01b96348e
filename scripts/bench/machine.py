"""The machine under the benchmark: what it is, and how much memory a run takes on it."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import threading
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType

import psutil
import torch

_SAMPLE_INTERVAL_S = 0.02


def describe_machine() -> dict[str, object]:
    """Everything that figures depend on, for the result file."""
    cuda = torch.cuda.is_available()
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "cb_engine": _own_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor()


def _own_version() -> str | None:
    try:
        return version("cb-engine")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return None


def release_memory() -> None:
    """Gives what is no longer used back, so that the next run does not profit from it unseen."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if platform.system() == "Linux" and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL("libc.so.6").malloc_trim(0)


class PeakMemory:
    """Peak memory of a `with` block beyond what was in use at its start; the loaded weights are not counted.

    On CUDA it is the allocator's own peak over all devices. On the CPU it is the process's resident set,
    looked at every 20 ms by a thread: pages that were free inside the process at the start are not seen.
    """

    def __init__(self) -> None:
        self.gigabytes = 0.0
        self._process = psutil.Process()
        self._stop = threading.Event()
        self._peak = 0

    def __enter__(self) -> PeakMemory:
        release_memory()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self._start = self._cuda_bytes()
            return self
        self._start = self._peak = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if torch.cuda.is_available():
            peak = sum(torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count()))
        else:
            self._stop.set()
            self._thread.join()
            peak = max(self._peak, self._process.memory_info().rss)
        self.gigabytes = max(0, peak - self._start) / 1e9

    def _watch(self) -> None:
        while not self._stop.wait(_SAMPLE_INTERVAL_S):
            self._peak = max(self._peak, self._process.memory_info().rss)

    @staticmethod
    def _cuda_bytes() -> int:
        return sum(torch.cuda.memory_allocated(i) for i in range(torch.cuda.device_count()))
