"""What a failed engine leaves behind in a server, and what threads that have computed something do."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import logging
import threading
import weakref
from typing import Any

import pytest
from server_rig import NAME, Gate, says, serving, starting

from cb_engine.api import async_engine
from cb_engine.engine import Engine
from cb_engine.serve import host


def test_a_failed_engine_is_gone_before_the_next_one_is_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The model fails in a step of several requests, as deep as it can, so its frames are in the traceback."""
    caplog.set_level(logging.CRITICAL + 1)  # pytest would keep the traceback
    model = says("x" * 50)
    gate = Gate(model)
    with serving(model) as rig, concurrent.futures.ThreadPoolExecutor() as pool:
        tree = weakref.ref(rig.context.host.manager.engine._runner._shadow)
        make = Engine.__init__
        alive: list[bool] = []

        def noting(self: Engine, *args: Any, **options: Any) -> None:
            alive.append(tree() is not None)
            make(self, *args, **options)

        monkeypatch.setattr(Engine, "__init__", noting)
        gate.open.clear()
        body = {"model": NAME, "max_tokens": 40, "temperature": 0}
        asked = [pool.submit(rig.post, "/v1/completions", {**body, "prompt": f"{i}"}) for i in range(3)]
        rig.wait_until(lambda: len(rig.context.under_way) == 3)
        gate.failures = 10
        gate.open.set()
        assert {future.result().status_code for future in asked} <= {500, 503}
        gate.failures = 0
        rig.wait_until(lambda: rig.context.host.num_restarts and rig.get("/health").status_code == 200)
    assert alive
    assert not any(alive)


def test_threads_that_have_computed_let_go_of_their_workers(monkeypatch: pytest.MonkeyPatch):
    """Their pools beside the engine's outnumber the cores, which slows all of its steps."""
    released: list[int] = []
    for module in (host, async_engine):
        monkeypatch.setattr(module, "release_idle_workers", lambda: released.append(threading.get_ident()))
    worked = asyncio.run(host._in_thread(threading.get_ident))
    assert released == [worked]
    released.clear()
    with serving():
        pass
    assert len(released) == 4  # model, attach, engine, warm-up
    assert threading.get_ident() not in released


def test_the_garbage_collector_leaves_running_servers_alone():
    """A full collection holds all requests up, for a quarter of a second with the modules that a server loads."""
    before = gc.get_freeze_count()
    with serving() as first:
        assert gc.get_freeze_count() > before + 100_000
        with serving():
            pass
        assert gc.get_freeze_count() > before + 100_000  # for the first one still
        assert len(gc.get_objects()) < gc.get_freeze_count() / 5
        assert first.get("/health").status_code == 200
    assert gc.get_freeze_count() == before


def test_a_server_that_never_came_up_changes_nothing_for_the_garbage_collector():
    def load() -> Any:
        raise OSError("no such model")

    with serving() as rig:
        with starting(load) as other:
            other.wait_until(lambda: other.server.should_exit)
        assert gc.get_freeze_count() > 100_000
        assert rig.get("/health").status_code == 200
