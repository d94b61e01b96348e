"""The manager: life, pauses, streams, handlers, failures."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from fake_model import FakeModel, expected

import cb_engine
from cb_engine import EngineError, EngineStoppedError, GenerationOutput, RequestStatus, SamplingParams

LONG = SamplingParams(temperature=0.0, max_tokens=300)


@pytest.fixture
def model() -> Any:
    return cb_engine.attach(FakeModel())


def explode(positions: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("the device is gone")


class TestLife:
    def test_requests_before_start_wait_for_it(self, model: Any) -> None:
        manager = model.init_continuous_batching()
        request_id = manager.add_request([1, 2], max_new_tokens=3)
        assert not manager.is_running()
        assert manager.get_result(request_id, timeout=0.0) is None
        manager.start()
        assert manager.get_result(request_id).generated_tokens == expected([1, 2], 3)
        manager.stop()
        assert not manager.is_running()

    def test_stop_finishes_accepted_work_and_hard_stop_aborts_it(self, model: Any) -> None:
        for hard, reason in ((False, "length"), (True, "abort")):
            manager = model.init_continuous_batching()
            manager.start()
            request_id = manager.add_request([1, 2], sampling_params=LONG)
            manager.stop(hard_stop=hard)
            output = manager.get_result(request_id)
            assert output.finish_reason == reason
            assert output.generated_tokens == expected([1, 2], len(output.generated_tokens))

    def test_a_manager_can_be_started_again_until_it_is_destroyed(self, model: Any) -> None:
        manager = model.init_continuous_batching(continuous_batching_config={"block_size": 2})
        for hits in (0, 2):
            manager.start()
            output = manager.get_result(manager.add_request([1, 2, 3], max_new_tokens=2))
            assert output.num_cached_tokens == hits
            manager.stop(keep_for_next_session=True)
        manager.destroy()
        for call in (manager.start, lambda: manager.add_request([1])):
            with pytest.raises(EngineStoppedError, match="destroyed"):
                call()

    def test_nothing_keeps_a_finished_engine_alive(self, model: Any) -> None:
        with model.continuous_batching_context_manager() as manager:
            manager.add_request([1], max_new_tokens=1)
        engine = weakref.ref(manager.engine)
        del manager
        gc.collect()
        assert engine() is None

    def test_an_error_in_the_block_aborts_the_work(self, model: Any) -> None:
        managers: list[Any] = []

        def use() -> None:
            with model.continuous_batching_context_manager() as manager:
                managers.append(manager)
                manager.add_request([1, 2], request_id="long", sampling_params=LONG)
                raise KeyError("the caller's own")

        with pytest.raises(KeyError):
            use()
        assert not managers[0].is_running()


class TestPause:
    def test_nothing_moves_inside_and_all_goes_on_after(self, model: Any) -> None:
        with model.continuous_batching_context_manager() as manager:
            request_id = manager.add_request([1, 2], sampling_params=LONG)
            for _ in range(5):
                with manager.pause():
                    before = manager.stats()
                    assert manager.stats() == before
                    with manager.pause():  # holders may overlap
                        pass
                    assert manager.stats() == before
            assert manager.get_result(request_id).generated_tokens == expected([1, 2], 300)

    def test_weights_can_be_changed_inside(self, model: Any) -> None:
        with model.continuous_batching_context_manager() as manager:
            request_id = manager.add_request([1, 2], sampling_params=LONG)
            with manager.pause():
                manager.weights_changed()
            output = manager.get_result(request_id)
        assert output.generated_tokens == expected([1, 2], 300)
        assert output.weight_version[-1] == 1

    def test_misuse_is_named(self, model: Any) -> None:
        manager = model.init_continuous_batching()
        with pytest.raises(RuntimeError, match="start"), manager.pause():
            pass
        manager.start()
        with manager.pause(), pytest.raises(RuntimeError, match="leave the pause first"):
            manager.stop()
        with manager.pause():
            stopper = threading.Thread(target=manager.stop)
            stopper.start()
            assert manager.is_running(), "a stop from elsewhere waits for the pause to end"
        stopper.join(30)
        assert not manager.is_running()

    def test_a_dead_engine_cannot_be_paused(self, model: Any) -> None:
        manager = model.init_continuous_batching()
        model.hook.append(explode)
        manager.start()
        manager.add_requests([[1], [2]], max_new_tokens=2)
        manager.join(0.0)
        with pytest.raises(EngineError, match="the device is gone"), manager.pause():
            pass


class TestOutputs:
    def test_snapshots_are_copies_and_cumulative(self, model: Any) -> None:
        with model.continuous_batching_context_manager() as manager:
            request_id = manager.add_request([4, 2], max_new_tokens=5, streaming=True)
            outputs = list(manager.request_id_iter(request_id))
        answer = expected([4, 2], 5)
        assert [o.generated_tokens for o in outputs] == [answer[:n] for n in range(1, 6)]
        assert [o.status for o in outputs] == [RequestStatus.DECODING] * 4 + [RequestStatus.FINISHED]
        assert [o.finish_reason for o in outputs] == [None] * 4 + ["length"]

    def test_by_id_and_by_anybody_never_steal(self, model: Any) -> None:
        with model.continuous_batching_context_manager() as manager:
            ids = manager.add_requests([[i + 1] for i in range(6)], max_new_tokens=4)
            mine = manager.get_result(ids[3])
            others = [manager.get_result() for _ in range(5)]
        assert mine.request_id == ids[3]
        assert sorted(o.request_id for o in others) == sorted(set(ids) - {ids[3]})
        with pytest.raises(ValueError, match="unknown"):
            manager.get_result(ids[3])
        assert manager.get_result() is None, "the manager has stopped and all is taken"

    def test_iterating_the_manager_ends_with_it(self, model: Any) -> None:
        manager = model.init_continuous_batching()
        manager.start()
        ids = manager.add_requests([[1], [2], [3]], max_new_tokens=2)
        manager.stop()
        assert sorted(o.request_id for o in manager) == sorted(ids)

    def test_handlers_are_called_on_their_own_loops(self, model: Any) -> None:
        with model.continuous_batching_context_manager() as manager:

            async def collect(prompt: list[int]) -> list[tuple[int, int]]:
                seen: list[tuple[int, int]] = []
                done = asyncio.Event()

                def handle(output: GenerationOutput) -> None:
                    seen.append((len(output.generated_tokens), threading.get_ident()))
                    if output.is_finished():
                        done.set()

                request_id = manager.add_request(prompt, max_new_tokens=3, streaming=True)
                manager.register_result_handler(request_id, handle)
                await asyncio.wait_for(done.wait(), 30)
                return seen

            results: list[list[tuple[int, int]]] = []
            idents: list[int] = []

            def run_loop(prompt: list[int]) -> None:
                idents.append(threading.get_ident())
                results.append(asyncio.run(collect(prompt)))

            threads = [threading.Thread(target=run_loop, args=([i + 1],)) for i in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
        assert [[n for n, _ in result] for result in results] == [[1, 2, 3]] * 2
        assert {ident for result in results for _, ident in result} == set(idents)
        with pytest.raises(RuntimeError, match="event loop"):
            manager.register_result_handler("x", print)

    def test_duplicate_ids_are_refused_while_in_use(self, model: Any) -> None:
        with model.continuous_batching_context_manager() as manager:
            manager.add_request([1], request_id="a", max_new_tokens=2)
            with pytest.raises(ValueError, match="'a' is in use"):
                manager.add_request([2], request_id="a", max_new_tokens=2)
            assert manager.get_result("a").generated_tokens == expected([1], 2)
            manager.add_request([2], request_id="a", max_new_tokens=2)
            assert manager.get_result("a").generated_tokens == expected([2], 2)


class TestFailure:
    def test_everybody_gets_an_end_and_the_next_call_a_named_error(self, model: Any) -> None:
        manager = model.init_continuous_batching()
        manager.add_requests([[1], [2]], max_new_tokens=2)
        model.hook.append(explode)
        manager.start()
        ends = [manager.get_result() for _ in range(2)]
        assert {o.finish_reason for o in ends} == {"error"}
        assert all("the device is gone" in o.error for o in ends)
        for call in (manager.get_result, manager.start, lambda: manager.add_request([1])):
            with pytest.raises(EngineError, match="the device is gone"):
                call()
        manager.stop()

    def test_concurrent_calls_share_a_persistent_manager(self, model: Any) -> None:
        prompts = [[[i + 1, j] for j in range(5)] for i in range(4)]
        results: dict[int, list[list[int]]] = {}

        def call(index: int) -> None:
            outputs = model.generate_batch(prompts[index], max_new_tokens=20, persistent_manager=True)
            results[index] = [o.generated_tokens for o in outputs.values()]

        call(0)
        threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert results == {i: [expected(p, 20) for p in prompts[i]] for i in range(4)}
