"""Threads for work that takes time."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cb_engine.serve.errors import APIError
from cb_engine.serve.text_workers import TextWorkers


def test_work_is_done_in_other_threads_and_its_errors_come_back():
    async def main() -> None:
        workers = TextWorkers(10.0)
        assert await workers.run(lambda x: x + 1, 2) == 3
        assert await workers.run(threading.get_ident) != threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            await workers.run(lambda: 1 // 0)
        workers.close()

    asyncio.run(main())


def test_what_takes_too_long_is_given_up_and_others_go_on():
    release = threading.Event()

    async def main() -> None:
        workers = TextWorkers(0.05)
        for _ in range(6):  # more than there are threads
            with pytest.raises(APIError) as caught:
                await workers.run(release.wait, 30)
            assert caught.value.status == 400
        assert await workers.run(lambda: "quick") == "quick"
        for _ in range(2):
            with pytest.raises(APIError):
                await workers.run(release.wait, 30)
        with pytest.raises(APIError) as caught:  # enough is enough
            await workers.run(lambda: "quick")
        assert caught.value.status == 503
        release.set()
        for _ in range(200):
            try:
                assert await workers.run(lambda: "quick") == "quick"
                break
            except APIError:
                await asyncio.sleep(0.01)
        else:
            pytest.fail("threads that have ended are still counted")
        workers.close()

    asyncio.run(main())


def test_a_caller_that_goes_away_leaves_the_work_alone():
    done = threading.Event()

    def slow() -> None:
        done.wait(10)

    async def main() -> None:
        workers = TextWorkers(10.0)
        task = asyncio.ensure_future(workers.run(slow))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        done.set()
        assert await workers.run(lambda: 1) == 1
        workers.close()

    asyncio.run(main())
