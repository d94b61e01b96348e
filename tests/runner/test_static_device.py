"""The device that is played: what it tells apart, what it refuses, and what it gives in compile-only mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from cb_engine.attention.backend import AttentionMetadata
from cb_engine.errors import ShapeNotWarmedError
from cb_engine.runner.executor import Executor
from cb_engine.runner.static_device import FakeStaticDevice, StaticDeviceError


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None


@dataclass(frozen=True)
class Box:
    tensor: Tensor
    size: int


class Color(StrEnum):
    RED = "red"
    BLUE = "blue"


@torch.library.custom_op("cb_engine_tests::count_positive", mutates_args=())
def count_positive(x: Tensor) -> Tensor:
    return torch.tensor(len(x[x > 0].tolist()))


def nothing(*args: object) -> None:
    """A function that computes nothing."""


def compiles(*calls: tuple[Any, ...]) -> int:
    """How many graphs the calls need, each a tuple of arguments."""
    device = FakeStaticDevice()
    for args in calls:
        device.run("f", nothing, *args)
    assert len(device.keys) == device.num_compiles
    return device.num_compiles


def test_it_is_an_executor() -> None:
    device: Executor = FakeStaticDevice()
    assert device.is_static
    assert device.read(device.run("add", torch.add, torch.ones(2), torch.ones(2))) == [2.0, 2.0]


# -- keys


def test_tensors_count_by_shape_and_dtype() -> None:
    assert compiles((torch.zeros(2, 3),), (torch.ones(2, 3),)) == 1
    assert compiles((torch.zeros(2, 3),), (torch.zeros(3, 2),), (torch.zeros(2, 3).long(),)) == 3


def test_everything_else_counts_by_value() -> None:
    assert compiles((1,), (2,), (True,), (1.0,), ("1",), (None,)) == 6
    assert compiles((float("nan"),), (float("nan"),)) == 1
    assert compiles((Color.RED,), (Color.BLUE,), (Color.RED,)) == 2
    assert compiles(((torch.zeros(2), 7),), ((torch.ones(2), 8),)) == 2


def test_containers_count_by_what_they_hold() -> None:
    a, b = torch.zeros(2), torch.zeros(3)
    assert compiles((Pair(a, a),), (Pair(a, b),), (Pair(a, None),), (Pair(a, a.clone()),)) == 3
    assert compiles(([a, b],), ([a],), ((a,),), ((),)) == 4
    assert compiles(({"x": a},), ({"y": a},), ({"x": b},), ({"x": a.clone()},)) == 3
    assert compiles((Box(a, 1),), (Box(a, 2),), (Box(b, 1),), (Box(a.clone(), 1),)) == 3
    assert compiles(({"cpu": [Box(a, 1)]},), ({"cpu": [Box(a, 2)]},)) == 2


def test_the_hosts_sizes_in_attention_metadata_make_a_key() -> None:
    def metadata(longest: int) -> AttentionMetadata:
        i32 = torch.zeros(2, dtype=torch.int32)
        return AttentionMetadata(i32.long(), i32.view(2, 1), torch.zeros(3).int(), i32, 1, longest)

    assert compiles((metadata(4),), (metadata(4),)) == 1
    assert compiles((metadata(4),), (metadata(5),)) == 2


def test_the_name_is_part_of_the_key_and_the_function_is_not() -> None:
    device = FakeStaticDevice()
    for name in ("f", "g"):
        device.run(name, nothing, torch.zeros(2))
        device.run(name, lambda x: x, torch.zeros(2))
    assert device.num_compiles == 2


@pytest.mark.parametrize(
    "value", [object(), nothing, np.zeros(2), torch.nn.Linear(1, 1), {1, 2}], ids=lambda value: type(value).__name__
)
def test_what_has_no_value_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=rf"f: args\[1\]\[0\]\.second is a {type(value).__name__}"):
        FakeStaticDevice().run("f", nothing, 0, [Pair(torch.zeros(1), value)])


# -- freeze


def test_a_frozen_device_takes_known_calls_only() -> None:
    device = FakeStaticDevice()
    for rows in (4, 8):
        device.run("f", nothing, torch.zeros(rows, 2), Box(torch.zeros(rows), 1))
    device.run("other", nothing, torch.zeros(5, 2), Box(torch.zeros(5), 1))
    assert not any(device.keys.values())
    device.freeze()
    device.run("f", nothing, torch.ones(8, 2), Box(torch.zeros(8), 1))
    with pytest.raises(ShapeNotWarmedError) as error:
        device.run("f", nothing, torch.zeros(8, 3), Box(torch.zeros(8), 1))
    # The nearest known call of the function is named, and only what differs from it.
    assert "args[0] is float32[8, 3] on cpu, warmed as float32[8, 2] on cpu" in str(error.value)
    assert "args[1]" not in str(error.value)
    with pytest.raises(ShapeNotWarmedError, match=r"f was .* args\[1\]\.size is int 2, warmed as int 1"):
        device.run("f", nothing, torch.zeros(8, 2), Box(torch.zeros(8), 2))
    with pytest.raises(ShapeNotWarmedError, match=r"args\[2\] is int 3, warmed as absent"):
        device.run("f", nothing, torch.zeros(8, 2), Box(torch.zeros(8), 1), 3)
    with pytest.raises(ShapeNotWarmedError, match="new was not run in warm-up"):
        device.run("new", nothing)
    assert device.num_compiles == 3
    assert sorted(device.keys.values()) == [0, 0, 1]


def test_a_device_is_frozen_but_in_warm_up() -> None:
    device = FakeStaticDevice()
    device.freeze()
    with pytest.raises(ShapeNotWarmedError, match=r"f is not known, since warm-up has not run; call warmup\(\) first"):
        device.run("f", nothing, 1)
    for known in (1, 2):
        with device.warming():
            device.run("f", nothing, known)
        with pytest.raises(ShapeNotWarmedError, match="was not warmed up"):
            device.run("f", nothing, 3)
    device.run("f", nothing, 1)
    assert sorted(device.keys.values()) == [0, 1]


def test_a_function_that_failed_is_not_known() -> None:
    device = FakeStaticDevice()
    with pytest.raises(StaticDeviceError):
        device.run("f", torch.nonzero, torch.zeros(2))
    device.freeze()
    with pytest.raises(ShapeNotWarmedError):
        device.run("f", nothing, torch.zeros(2))


# -- what no graph can hold

X = torch.arange(4.0)
MASK = X > 1
REFUSED: dict[str, Callable[[], Any]] = {
    "nonzero": lambda: X.nonzero(),
    "where": lambda: torch.where(MASK),
    "masked_select": lambda: X.masked_select(MASK),
    "index": lambda: X[MASK],
    "index_put_": lambda: X.clone().__setitem__(MASK, 1.0),
    "unique": lambda: torch.unique(X),
    "unique_consecutive": lambda: torch.unique_consecutive(X),
    "repeat_interleave": lambda: X.repeat_interleave(torch.tensor([1, 2, 0, 1])),
    "bincount": lambda: X.long().bincount(),
    "equal": lambda: X.equal(X),
    "_local_scalar_dense|item": lambda: X.sum().item(),
    "_local_scalar_dense|item|is_nonzero": lambda: 1 if X[0] > 0 else 2,
    "item|_local_scalar_dense": lambda: X[int(X[1]) :],
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "__array__|numpy": lambda: np.asarray(X),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("names", REFUSED)
def test_what_depends_on_values_is_refused_by_name(names: str, inference: bool) -> None:
    names_inside = names.replace("where", "nonzero")  # what it is made of
    with torch.inference_mode(inference), pytest.raises(StaticDeviceError, match=rf"pick .*({names_inside})"):
        FakeStaticDevice().run("pick", REFUSED[names])


@pytest.mark.parametrize("inference", [False, True])
def test_static_functions_give_what_they_always_give(inference: bool) -> None:
    def function(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        positions = torch.tensor([2, 0])
        cache = torch.zeros(4)
        cache.index_put_((positions,), x[0, :2])
        ranked = torch.nn.functional.linear(x, weight).softmax(-1).sort(-1, descending=True).values
        kept = torch.where(x > 0, x, 0).masked_fill(x > 1, 3)
        return ranked, kept, x[:, positions], cache, x.cumsum(1), x.topk(2).indices

    generator = torch.Generator().manual_seed(0)
    args = (torch.randn(3, 4, generator=generator), torch.randn(5, 4, generator=generator))
    with torch.inference_mode(inference):
        expected = function(*args)
        device = FakeStaticDevice()
        for found, value in zip(device.run("f", function, *args), expected, strict=True):
            torch.testing.assert_close(device.to_host(found), value)


@pytest.mark.parametrize("inference", [False, True])
def test_an_operator_of_ones_own_is_opaque(inference: bool) -> None:
    with torch.inference_mode(inference):
        device = FakeStaticDevice()
        assert device.read(device.run("count", torch.ops.cb_engine_tests.count_positive, X)) == 3


def test_rules_hold_inside_only() -> None:
    FakeStaticDevice().run("f", nothing)
    assert X[MASK].tolist() == [2.0, 3.0]


# -- what happens beside the device

BESIDE: dict[str, Callable[[Tensor], Any]] = {
    "a part of it": lambda x: x[:2],
    "a row of it": lambda x: x[0],
    "narrow": lambda x: x.narrow(0, 0, 1),
    "arithmetic": lambda x: x + 1,
    "arithmetic from the right": lambda x: torch.ones(4) * x,
    "in place": lambda x: x.fill_(1),
    "into another": lambda x: torch.zeros(4).copy_(x),
    "as an index": lambda x: torch.zeros(9)[x.view(4)],
    "in a list": lambda x: torch.stack([torch.zeros(4), x]),
    "out": lambda x: torch.add(torch.ones(4), 1, out=x),
    "tolist": lambda x: x.tolist(),
    "item": lambda x: x[0].item(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "iteration": lambda x: list(x),
    "truth": lambda x: bool(x[0]),
    "of another shape": lambda x: x.unsqueeze(0)[0],
    "contiguous": lambda x: x.contiguous(),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("what", BESIDE)
def test_nobody_touches_a_result_beside_the_device(what: str, inference: bool) -> None:
    device = FakeStaticDevice()
    with torch.inference_mode(inference):
        (result,) = device.run("f", lambda x: (x.clone(),), X)
        adopted = device.adopt(Box(X.clone(), 1)).tensor
        for tensor in (result, adopted):
            with pytest.raises(StaticDeviceError, match="outside of what the executor runs and reads"):
                BESIDE[what](tensor)
            assert device.read(tensor) == X.tolist(), "nothing was done"


def test_what_costs_nothing_may_be_asked() -> None:
    device = FakeStaticDevice()
    result = device.run("f", torch.clone, X)
    assert (result.shape, result.dtype, result.device, len(result)) == (X.shape, X.dtype, X.device, 4)
    assert result.numel() == result.size(0) == 4
    assert result.dim() == result.ndim == 1
    assert device.read(result.unsqueeze(0)) == [X.tolist()]
    assert device.read(result.view(2, 2)) == X.view(2, 2).tolist()
    assert "3." in repr(result)


def test_functions_take_results_and_what_they_close_over() -> None:
    device = FakeStaticDevice()
    cache = device.adopt(torch.zeros(4))
    first = device.run("f", torch.add, X, 1)
    device.run("put", lambda x: cache[1:].copy_(x[:3]), first)
    assert device.read(cache) == [0.0, 1.0, 2.0, 3.0]
    host = device.to_host(cache)
    assert type(host) is Tensor
    assert host[1:].sum() == 6


# -- reads and compile-only mode


def test_reads_are_counted() -> None:
    device = FakeStaticDevice()
    assert device.read(torch.tensor([[1, 2]])) == [[1, 2]]
    assert device.read(torch.tensor(1.5)) == 1.5
    assert device.to_host(torch.ones(2)).equal(torch.ones(2))
    assert device.num_reads == 3


def test_compile_only_gives_garbage_of_the_right_make() -> None:
    def function(x: Tensor) -> Any:
        ids = x.long() + 5
        return Pair(x, None), [ids, ids.int()], {"mask": x > 7}, Box(x.to(torch.bfloat16), 3)

    device = FakeStaticDevice()
    x = torch.ones(40, 2)
    with device.compile_only():
        pair, ids, masks, box = device.run("f", function, x)
        with pytest.raises(StaticDeviceError, match="compile-only"):
            device.read(x)
        with pytest.raises(StaticDeviceError, match="compile-only"):
            device.to_host(x)
    assert device.num_reads == 0
    assert isinstance(pair, Pair)
    assert pair.second is None
    assert pair.first.shape == x.shape
    assert device.to_host(pair.first).isnan().all()
    for found, dtype in ((ids[0], torch.int64), (ids[1], torch.int32), (masks["mask"], torch.bool)):
        assert (found.shape, found.dtype) == (x.shape, dtype)
        assert set(device.to_host(found).flatten().tolist()) == {0, 1}
    assert (box.tensor.dtype, box.size) == (torch.bfloat16, 3)
    assert device.to_host(box.tensor).isnan().all()
    assert x.sum() == 80  # what went in is untouched
    assert device.num_compiles == 1
    device.freeze()
    assert device.to_host(device.run("f", function, x)[0].first).equal(x)  # compiled, it computes


def test_garbage_is_the_same_for_the_same_seed() -> None:
    def garbage(seed: int) -> list[int]:
        device = FakeStaticDevice(seed=seed)
        with device.compile_only():
            found = device.run("f", torch.zeros_like, torch.zeros(64, dtype=torch.long))
        return list(device.read(found))

    assert garbage(1) == garbage(1)
    assert garbage(1) != garbage(2)


def test_a_result_that_no_graph_can_give_is_refused() -> None:
    device = FakeStaticDevice()
    with device.compile_only(), pytest.raises(TypeError, match="returned a object"):
        device.run("f", object)
