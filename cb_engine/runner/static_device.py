"""A device with static shapes, played on the CPU: what HPU graphs ask of the engine, without the hardware.

Owns: which calls have been seen, and the rules that a function has to keep. Does not know what the functions compute.

`wrap_in_hpu_graph` records a graph for every hash of a function's arguments and replays it later: tensors count by
shape, dtype and device, everything else by value. So here a call with a new key counts as a compile, which a frozen
device refuses but in warm-up. What no recording can hold is refused at all times: operators whose result's shape
depends on values, and values that the host reads in between. In compile-only mode a recording yields tensors in which
nothing was computed; here they hold garbage, which exposes whoever uses them.

What runs beside `run` is a graph of its own to such a device, which nobody has warmed up. So the tensors that functions
return, and those that were adopted, refuse every operator outside of them; what costs nothing goes on: to ask for their
shapes, and to give them another one.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cb_engine.errors import ShapeNotWarmedError, StaticShapeError

_Fields = list[tuple[str, object]]


class StaticDeviceError(StaticShapeError):
    """A function did what a device with static shapes cannot do, or a value was read that was never computed."""


@dataclasses.dataclass(frozen=True)
class CallKey:
    """What compiled code is kept by: a function's name and what its arguments look like, `(where, what)` for each."""

    name: str
    leaves: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, name: str, args: Sequence[object]) -> CallKey:
        """The key of a call.

        Raises:
            TypeError: an argument has no value to hash, an object of some class for one.
        """
        return cls(name, tuple(leaf for i, arg in enumerate(args) for leaf in _leaves(f"args[{i}]", arg, name)))

    def difference(self, other: CallKey) -> list[str]:
        """Where this key is not `other`, one entry for each place."""
        mine, theirs = dict(self.leaves), dict(other.leaves)
        return [
            f"{where} is {mine.get(where, 'absent')}, warmed as {theirs.get(where, 'absent')}"
            for where in dict.fromkeys([*mine, *theirs])
            if mine.get(where) != theirs.get(where)
        ]


class FakeStaticDevice:
    """An `Executor`; see the module docstring.

    Attributes:
        keys: every call seen, with the number of its uses since `freeze()` or the end of warm-up.
        num_compiles: calls that needed a graph of their own.
        num_reads: how often the host has waited for a value.
        is_compile_only: see `compile_only`.
    """

    is_static = True

    def __init__(self, *, seed: int = 0) -> None:
        self.keys: Counter[CallKey] = Counter()
        self.num_compiles = 0
        self.num_reads = 0
        self.is_compile_only = False
        self._is_frozen = False
        self._generator = torch.Generator().manual_seed(seed)  # of the garbage

    def run(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """See `Executor.run`.

        Raises:
            ShapeNotWarmedError: the call is unknown, and this is no warm-up.
            StaticDeviceError: the function uses an operator that no graph can hold.
            TypeError: an argument or a result is nothing that a graph can take or give.
        """
        key = CallKey.of(name, args)
        if self._is_frozen and key not in self.keys:
            raise ShapeNotWarmedError(self._what_is_new(key))
        with _on_device(), _NoHostReads(name), _StaticShapesOnly(name):
            result = function(*args)
        self.num_compiles += key not in self.keys
        self.keys[key] += self._is_frozen
        return self.adopt(_map_tensors(result, self._garbage) if self.is_compile_only else result)

    def read(self, tensor: torch.Tensor) -> Any:
        """See `Executor.read`.

        Raises:
            StaticDeviceError: in compile-only mode, where there are no values.
        """
        return self.to_host(tensor).tolist()

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Executor.to_host`.

        Raises:
            StaticDeviceError: in compile-only mode, where there are no values.
        """
        if self.is_compile_only:
            raise StaticDeviceError("a value was read in compile-only mode, in which nothing is computed")
        self.num_reads += 1
        with _on_device():
            return tensor.as_subclass(torch.Tensor).cpu()

    def adopt(self, value: Any) -> Any:
        """See `Executor.adopt`."""
        with _on_device():
            return _map_tensors(value, lambda tensor: tensor.as_subclass(_DeviceTensor))

    def freeze(self) -> None:
        """See `Executor.freeze`."""
        self._is_frozen = True
        self.keys = Counter(dict.fromkeys(self.keys, 0))

    @contextmanager
    def warming(self) -> Iterator[None]:
        """See `Executor.warming`."""
        self._is_frozen = False
        try:
            yield
        finally:
            self.freeze()

    @contextmanager
    def compile_only(self) -> Iterator[None]:
        """Within, functions return tensors of the right shape and type that hold garbage, and nothing can be read."""
        before, self.is_compile_only = self.is_compile_only, True
        try:
            yield
        finally:
            self.is_compile_only = before

    def _what_is_new(self, key: CallKey) -> str:
        if not self.keys:
            return f"{key.name} is not known, since warm-up has not run; call warmup() first"
        differences = [key.difference(other) for other in self.keys if other.name == key.name]
        if not differences:
            return f"{key.name} was not run in warm-up"
        fewest = min(differences, key=lambda found: len(found))
        return f"{key.name} was not warmed up for this call; beside the nearest one, {'; '.join(fewest)}"

    def _garbage(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.as_subclass(torch.Tensor)
        if tensor.is_floating_point() or tensor.is_complex():
            return torch.full_like(tensor, float("nan"))
        # Legal as an index nearly everywhere, so that it spreads instead of failing in the next operator.
        values = torch.randint(0, 2, tensor.shape, generator=self._generator)
        return values.to(tensor.device, tensor.dtype)


class _Place(threading.local):
    is_on_device = False  # whether what this thread does now is done by the device


_place = _Place()


@contextmanager
def _on_device() -> Iterator[None]:
    before, _place.is_on_device = _place.is_on_device, True
    try:
        yield
    finally:
        _place.is_on_device = before


_QUERIES: set[Any] = {
    getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad")
} | {torch.Tensor.dim, torch.Tensor.size, torch.Tensor.numel, torch.Tensor.__len__, torch.Tensor.is_floating_point}
_QUERIES.add(torch.Tensor.__repr__)  # for whoever looks for a fault
# A view of another shape, which is not one of a part, is the same memory and no work.
_RESHAPES: set[Any] = {torch.Tensor.view, torch.Tensor.unsqueeze, torch.Tensor.squeeze}


class _DeviceTensor(torch.Tensor):
    """A tensor of the device's; see the module docstring."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not (_place.is_on_device or func in _QUERIES or func in _RESHAPES):
            name = getattr(func.__self__ if hasattr(func, "__self__") else func, "__name__", func)
            raise StaticDeviceError(f"{name} on a tensor of the device, outside of what the executor runs and reads")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return result.as_subclass(cls) if func in _RESHAPES and not _place.is_on_device else result


class _NoHostReads(TorchFunctionMode):
    """Refuses the ways to a tensor's memory that no operator sees; on a real device each of them waits for it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in ("tolist", "numpy", "__array__"):
            raise StaticDeviceError(f"{self._name} reads a tensor's values on the host: Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


class _StaticShapesOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operators whose result has a shape, or is a number, that depends on a tensor's values."""

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = name

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _depends_on_values(func, args):
            raise StaticDeviceError(f"{self._name} uses {func}, which depends on values; shapes have to be static")
        # In inference mode operators that are made of others arrive whole (`where(x)`, made of `nonzero`). What the
        # engine's own do inside, they do on the device.
        if func.namespace == "aten" and func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)


_ATEN = torch.ops.aten
_INDEXING = {_ATEN.index, _ATEN._unsafe_index, _ATEN.index_put, _ATEN.index_put_, _ATEN._index_put_impl_}
_VALUE_TAGS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def _depends_on_values(func: Any, args: Sequence[Any]) -> bool:
    if func.overloadpacket in _INDEXING:  # static with positions, not with masks
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return not _VALUE_TAGS.isdisjoint(func.tags)


def _fields(value: object) -> _Fields | None:
    """The parts of a container, each with what follows the container's name to name it; None if it is none."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", part) for name, part in zip(value._fields, value, strict=True)]
    if isinstance(value, (tuple, list)):
        return [(f"[{index}]", part) for index, part in enumerate(value)]
    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    return None


def _leaves(where: str, value: object, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, torch.Tensor):
        yield where, f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}"
        return
    kind = type(value).__name__
    if value is None or isinstance(value, (bool, int, float, str)):
        yield where, "None" if value is None else f"{kind} {value!r}"
        return
    fields = _fields(value)
    if fields is None:
        raise TypeError(
            f"{name}: {where} is a {kind}, which has no value to tell calls apart by; give tensors, numbers, strings, "
            "None, and tuples, lists, dicts and dataclasses of them"
        )
    yield where, f"{kind} of {len(fields)}"
    for suffix, part in fields:
        yield from _leaves(where + suffix, part, name)


def _map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure with other tensors."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    fields = _fields(value)
    if fields is None:
        raise TypeError(f"a function on the device returned a {type(value).__name__}, which is no tensor or container")
    parts = [_map_tensors(part, change) for _, part in fields]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **dict(zip(names, parts, strict=True)))
    if isinstance(value, dict):
        return dict(zip(value, parts, strict=True))
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
