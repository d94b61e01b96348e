"""The eager device: it calls, it reads, and it does not read where a static one could not."""

from __future__ import annotations

import pytest
import torch

from cb_engine.errors import CBEngineError
from cb_engine.runner.executor import EagerExecutor, Executor


def test_a_call_is_a_call() -> None:
    executor: Executor = EagerExecutor()
    assert not executor.is_static
    seen: list[tuple[object, ...]] = []

    def function(*args: object) -> str:
        seen.append(args)
        return "result"

    tensor = torch.ones(2)
    assert executor.run("name", function, tensor, 7, None) == "result"
    assert seen == [(tensor, 7, None)]
    assert executor.run("name", function) == "result"


def test_any_shape_at_any_time() -> None:
    executor = EagerExecutor()
    executor.run("add", torch.add, torch.ones(2), 1)
    executor.freeze()
    with executor.warming():
        executor.run("add", torch.add, torch.ones(1), 1)
    assert executor.run("add", torch.add, torch.ones(3), 1).tolist() == [2.0, 2.0, 2.0]
    assert executor.run("pick", torch.nonzero, torch.ones(1)).tolist() == [[0]]


def test_an_error_is_the_callers() -> None:
    with pytest.raises(ZeroDivisionError):
        EagerExecutor().run("divide", lambda: 1 / 0)


def test_values_are_python_numbers() -> None:
    read = EagerExecutor().read
    assert read(torch.tensor([[1, 2]])) == [[1, 2]]
    assert type(read(torch.tensor(1.5))) is float
    assert type(read(torch.tensor([True]))[0]) is bool


def test_a_tensor_on_the_host_is_the_same_tensor() -> None:
    executor, x = EagerExecutor(), torch.arange(4)
    assert executor.to_host(x)[1:].tolist() == [1, 2, 3]
    assert executor.adopt((x, None))[0] is x


def test_nothing_is_read_in_compile_only_mode_and_all_is_computed() -> None:
    executor = EagerExecutor()
    x = torch.ones(1)
    with executor.compile_only():
        assert executor.run("add", torch.add, x, 1).equal(x + 1)
        with executor.compile_only(), pytest.raises(CBEngineError, match="compile-only"):
            executor.read(x)
        with pytest.raises(CBEngineError, match="compile-only"):
            executor.read(x)
        with pytest.raises(CBEngineError, match="compile-only"):
            executor.to_host(x)
    assert executor.read(x) == [1.0]
    with pytest.raises(RuntimeError, match="stop"), executor.compile_only():
        raise RuntimeError("stop")
    assert executor.read(x) == [1.0]
