"""The asyncio face of the engine."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest
from fake_model import FakeModel, expected

import cb_engine
from cb_engine import AsyncEngine, SamplingParams
from cb_engine.intake import RequestOptions
from cb_engine.outputs import join_deltas

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def manager(**config: Any) -> Any:
    return cb_engine.attach(FakeModel()).init_continuous_batching(continuous_batching_config=config)


def test_many_streams_at_once() -> None:
    async def read(engine: AsyncEngine, first: int) -> list[list[int]]:
        return [o.generated_tokens async for o in engine.generate([first, 2], GREEDY)]

    async def main() -> list[list[list[int]]]:
        async with AsyncEngine(manager()) as engine:
            return list(await asyncio.gather(*(read(engine, i + 1) for i in range(10))))

    for index, snapshots in enumerate(asyncio.run(main())):
        answer = expected([index + 1, 2], 6)
        assert snapshots == [answer[:n] for n in range(1, 7)]


def test_samples_of_one_prompt_end_once_each() -> None:
    async def main() -> list[str]:
        async with AsyncEngine(manager()) as engine:
            return [o.request_id async for o in engine.generate([1], GREEDY.clone(n=3), streaming=False)]

    assert sorted(asyncio.run(main())) == ["req_0", "req_0__child#0", "req_0__child#1"]


def test_a_dropped_iterator_aborts_its_request() -> None:
    async def main() -> cb_engine.EngineStats:
        async with AsyncEngine(manager()) as engine:
            stream = engine.generate([1, 2], GREEDY.clone(max_tokens=500))
            async for _ in stream:
                break
            await stream.aclose()
            async for _ in engine.generate([3], GREEDY, streaming=False):
                pass
            return engine.stats()

    stats = asyncio.run(main())
    assert stats.num_running == stats.live_blocks == 0
    assert stats.generated_tokens < 400


def test_bad_requests_and_a_stopped_engine() -> None:
    async def main() -> None:
        engine = AsyncEngine(manager())
        with pytest.raises(cb_engine.EngineStoppedError):
            engine.check_health()
        async with engine:
            engine.check_health()
            with pytest.raises(ValueError, match="empty"):
                async for _ in engine.generate([], GREEDY):
                    pass
        with pytest.raises(cb_engine.EngineStoppedError):
            async for _ in engine.generate([1], GREEDY):
                pass

    asyncio.run(main())


def test_an_engine_keeps_no_event_loop_alive() -> None:
    engine = AsyncEngine(manager())
    loops = []

    async def ask() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        async for _ in engine.generate([1], GREEDY):
            pass

    asyncio.run(engine.start())
    for _ in range(3):
        asyncio.run(ask())
    asyncio.run(engine.stop())
    gc.collect()
    assert [loop() for loop in loops] == [None] * 3


def test_deltas_of_a_reader_who_is_behind_come_as_one() -> None:
    async def main() -> None:
        async with AsyncEngine(manager()) as engine:
            options = RequestOptions(streaming=True, deltas=True, record_timestamps=True)
            requests = engine.make_requests([1, 2], GREEDY, options)
            with engine.submit(requests) as stream:
                await asyncio.sleep(0.3)
                batch = await anext(stream)
                joined = join_deltas(batch)
                assert joined.generated_tokens == expected([1, 2], 6)[: len(joined.generated_tokens)]
                assert joined.prompt_ids == [1, 2]
                assert len(joined.timestamps or ()) == len(joined.generated_tokens) == len(joined.weight_version)

    asyncio.run(main())
