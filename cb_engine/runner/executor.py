"""How a device runs the functions that a step is made of: forward, sampler, acceptance, drafter.

Owns nothing but the seam. A device with static shapes keeps a piece of compiled code for every kind of call and
refuses calls it has not seen in warm-up (`static_device.py`); an eager one just calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from cb_engine.errors import CBEngineError


class Executor(Protocol):
    """All device work of a step goes through `run`, all that the host learns of it through `read` and `to_host`."""

    @property
    def is_static(self) -> bool:
        """Whether every call has to have shapes that are known beforehand."""

    def run(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)` on the device.

        Args:
            name: of the function; together with the shapes of `args` it is the key of compiled code.
            args: tensors, and tuples, named tuples, lists and dicts of them, which count by shape and dtype; everything
                else counts by value.
        """

    def read(self, tensor: torch.Tensor) -> Any:
        """The tensor's values as Python numbers (`tolist`); waits for the device."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole tensor on the host, to be cut there into pieces of any size; waits for the device."""

    def adopt(self, value: Any) -> Any:
        """The same tensors, or container of tensors, as property of the device: from here on only functions that it
        runs touch them."""

    def compile_only(self) -> AbstractContextManager[None]:
        """Within, nothing need be computed, and nothing may be read."""

    def freeze(self) -> None:
        """From now on an unknown call is refused, where shapes are static."""

    def warming(self) -> AbstractContextManager[None]:
        """Within, unknown calls are those of warm-up and become known."""


class EagerExecutor:
    """A device that takes any shape at any time."""

    is_static = False

    def __init__(self) -> None:
        self._may_read = True

    def run(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """See `Executor.run`."""
        return function(*args)

    def read(self, tensor: torch.Tensor) -> Any:
        """See `Executor.read`."""
        self._check_may_read()
        return tensor.tolist()

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Executor.to_host`."""
        self._check_may_read()
        return tensor.cpu()

    def adopt(self, value: Any) -> Any:
        """See `Executor.adopt`; anybody may touch anything here."""
        return value

    def _check_may_read(self) -> None:
        if not self._may_read:
            raise CBEngineError("a value was read in compile-only mode")

    @contextmanager
    def compile_only(self) -> Iterator[None]:
        """See `Executor.compile_only`; everything is computed here."""
        before, self._may_read = self._may_read, False
        try:
            yield
        finally:
            self._may_read = before

    def freeze(self) -> None:
        """See `Executor.freeze`; nothing is compiled here."""

    def warming(self) -> AbstractContextManager[None]:
        """See `Executor.warming`."""
        return nullcontext()
