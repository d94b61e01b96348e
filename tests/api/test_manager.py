"""The manager: life, pauses, streams, handlers, failures."""

from __future__ import annotations

import asyncio
import copy
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

    def test_warm_up_runs_a_step_of_nobodys_where_nothing_is_padded(self, model: Any) -> None:
        steps: list[int] = []

        def count(positions: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            steps.append(len(positions))
            return logits

        manager = model.init_continuous_batching()
        model.hook.append(count)
        manager.warmup()
        assert steps == [1]
        assert manager.warmed_up
        stats = manager.stats()
        assert (stats.num_steps, stats.live_blocks, stats.cached_blocks, stats.num_missed_shapes) == (0, 0, 0, 0)
        manager.start()
        request_id = manager.add_request([1, 2], max_new_tokens=3)
        assert manager.get_result(request_id).generated_tokens == expected([1, 2], 3)
        manager.stop()

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

    def test_a_finished_engine_lets_go_of_its_cache_without_the_collector(self, model: Any) -> None:
        gc.disable()
        try:
            with model.continuous_batching_context_manager() as manager:
                manager.add_request([1], max_new_tokens=1)
                cache = weakref.ref(next(iter(manager.engine._runner._caches[False].values())).k)
                assert cache() is not None
            assert cache() is None
        finally:
            gc.enable()
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


class TestCallsAtAStepsEdge:
    def test_a_call_ends_with_the_failure_that_came_before_its_turn(self, model: Any) -> None:
        entered, go_on = threading.Event(), threading.Event()

        def explode_later(positions: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            entered.set()
            go_on.wait(30)
            raise RuntimeError("the device is gone")

        manager = model.init_continuous_batching()
        manager.add_requests([[1], [2]], max_new_tokens=2)
        model.hook.append(explode_later)
        manager.start()
        assert entered.wait(30)
        errors: list[BaseException] = []

        def call() -> None:
            try:
                manager.weights_changed()
            except EngineError as error:
                errors.append(error)

        caller = threading.Thread(target=call)
        caller.start()
        while not manager._thread._calls:
            pass
        go_on.set()
        caller.join(30)
        assert "the device is gone" in str(errors[0])

    def test_starting_a_manager_that_is_about_to_stop_keeps_it_running(self, model: Any) -> None:
        manager = model.init_continuous_batching()
        manager.start()
        first = manager.add_request([1, 2], sampling_params=LONG)
        manager.stop(block=False)
        manager.start()
        second = manager.add_request([3], max_new_tokens=2)
        assert manager.get_result(second).generated_tokens == expected([3], 2)
        assert manager.get_result(first).generated_tokens == expected([1, 2], 300)
        manager.stop()

    def test_a_hard_stop_reaches_what_was_only_just_submitted(self, model: Any) -> None:
        manager = model.init_continuous_batching()
        ids = manager.add_requests([[1], [2]], sampling_params=LONG)
        manager.stop(block=False, hard_stop=True)
        manager._thread.start()
        assert {manager.get_result(i).finish_reason for i in ids} == {"abort"}
        manager.stop()


class TestPersistence:
    def test_one_engine_serves_calls_of_all_sizes(self, model: Any) -> None:
        managers = set()
        for length in range(1, 9):
            prompts = [[i + 1] * length for i in range(length)]
            outputs = model.generate_batch(prompts, max_new_tokens=5 * length, persistent_manager=True)
            managers.add(id(model._cb_engine.persistent))
            assert [o.generated_tokens for o in outputs.values()] == [expected(p, 5 * length) for p in prompts]
        assert len(managers) == 1
        assert model._cb_engine.persistent.engine.config.max_num_seqs > 8

    def test_concurrent_calls_of_different_sizes_do_not_end_each_other(self, model: Any) -> None:
        results: dict[int, list[Any]] = {}

        def call(index: int) -> None:
            prompt = [index + 1] * (3 * index + 1)
            for _ in range(3):
                outputs = model.generate_batch([prompt], max_new_tokens=40, persistent_manager=True)
                results.setdefault(index, []).extend(o.generated_tokens for o in outputs.values())

        threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert results == {i: [expected([i + 1] * (3 * i + 1), 40)] * 3 for i in range(4)}

    def test_concurrent_calls_with_other_configs_get_engines_of_their_own(self, model: Any) -> None:
        results: dict[int, list[Any]] = {0: [], 1: []}

        def call(index: int) -> None:
            for _ in range(4):
                outputs = model.generate_batch(
                    [[index + 1, 2]],
                    max_new_tokens=20,
                    persistent_manager=True,
                    continuous_batching_config={"block_size": 4 + 4 * index},
                )
                results[index] += [o.generated_tokens for o in outputs.values()]

        threads = [threading.Thread(target=call, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert results == {i: [expected([i + 1, 2], 20)] * 4 for i in range(2)}

    def test_results_can_be_read_after_the_session_until_the_next_begins(self, model: Any) -> None:
        with model.continuous_batching_context_manager(persistent_manager=True) as manager:
            request_id = manager.add_request([1], max_new_tokens=2)
        assert manager.get_result(request_id).generated_tokens == expected([1], 2)

    def test_destroying_a_manager_that_never_ran_ends_its_requests(self, model: Any) -> None:
        manager = model.init_continuous_batching()
        request_id = manager.add_request([1], max_new_tokens=2)
        manager.destroy()
        assert manager.get_result(request_id).finish_reason == "abort"

    def test_a_kept_manager_follows_the_settings_of_the_call_at_hand(self, model: Any) -> None:
        from transformers import GenerationConfig

        model.generate_batch([[1]], max_new_tokens=2, persistent_manager=True)
        config = GenerationConfig(max_new_tokens=5)
        with model.continuous_batching_context_manager(config, persistent_manager=True) as manager:
            assert len(manager.get_result(manager.add_request([1])).generated_tokens) == 5
            other = GenerationConfig(max_new_tokens=3)
            with pytest.raises(RuntimeError, match="generation_config"):
                model.init_continuous_batching(other)
            outputs = model.generate_batch([[1]], other)
        assert [len(o.generated_tokens) for o in outputs.values()] == [3]

    def test_a_config_that_its_owner_changes_is_a_new_config(self, model: Any) -> None:
        config: dict[str, Any] = {"block_size": 4}
        call = {"max_new_tokens": 2, "persistent_manager": True, "continuous_batching_config": config}
        model.generate_batch([[1]], **call)
        first = model._cb_engine.persistent
        model.generate_batch([[1]], **{**call, "continuous_batching_config": cb_engine.EngineConfig(block_size=4)})
        assert model._cb_engine.persistent is first, "the same settings in other words"
        config["return_logprobs"] = True
        assert next(iter(model.generate_batch([[1]], **call).values())).logprobs

    def test_a_call_leaves_a_manager_running_that_was_started_by_hand(self, model: Any) -> None:
        model.generate_batch([[1]], max_new_tokens=2, persistent_manager=True)
        manager = model.init_continuous_batching()
        manager.start()
        model.generate_batch([[2]], max_new_tokens=2)
        assert manager.is_running()
        assert manager.get_result(manager.add_request([3], max_new_tokens=2)).generated_tokens == expected([3], 2)
        manager.stop()

    def test_what_one_session_left_does_not_reach_the_next(self, model: Any) -> None:
        for prompt in ([1], [2]):
            with model.continuous_batching_context_manager(persistent_manager=True) as manager:
                taken = manager.add_request(prompt, max_new_tokens=2)
                assert manager.get_result().request_id == taken
                manager.add_request([9], max_new_tokens=2)


class TestOutsideCode:
    def test_a_receiver_that_raises_harms_nobody(self, model: Any) -> None:
        with model.continuous_batching_context_manager() as manager:

            def refuse(output: GenerationOutput) -> None:
                raise ValueError("no")

            requests = manager.make_all([[1]], [LONG.clone(max_tokens=2)], cb_engine.intake.RequestOptions())
            manager.submit_requests(requests, refuse)
            other = manager.add_request([2], max_new_tokens=3)
            assert manager.get_result(other).generated_tokens == expected([2], 3)

    def test_a_token_that_the_tokenizer_cannot_decode_fails_its_request_alone(self) -> None:
        import byte_tokenizer

        class Picky:
            def __init__(self) -> None:
                self.inner = byte_tokenizer.make_tokenizer()

            def __getattr__(self, name: str) -> Any:
                return getattr(self.inner, name)

            def decode(self, ids: Any, **kwargs: Any) -> str:
                raise ValueError("unknown id")

            def convert_ids_to_tokens(self, *args: Any, **kwargs: Any) -> Any:
                raise ValueError("unknown id")

        model = cb_engine.attach(FakeModel(), tokenizer=Picky())
        outputs = model.generate_batch([[1], [2]], max_new_tokens=3)
        for output, prompt in zip(outputs.values(), ([1], [2]), strict=True):
            assert output.finish_reason == "error"
            assert "unknown id" in output.error
            assert output.generated_tokens == expected(prompt, 3)
        cb_engine.attach(model)
        assert all(o.error is None for o in model.generate_batch([[1], [2]], max_new_tokens=3).values())

    def test_two_samples_of_one_prompt_that_fail_do_not_take_the_engine_down(self, model: Any) -> None:
        def explode_on_first(positions: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            if (positions == 5).any():  # the second token of both samples at once
                raise RuntimeError("boom")
            return logits

        model.hook.append(explode_on_first)
        params = [LONG.clone(n=2, max_tokens=4), LONG.clone(max_tokens=2)]
        config = {"max_num_seqs": 2}
        outputs = list(
            model.generate_batch([[1] * 5, [3]], sampling_params=params, continuous_batching_config=config).values()
        )
        assert [o.finish_reason for o in outputs] == ["error", "error", "length"]
        assert outputs[2].generated_tokens == expected([3], 2)

    @pytest.mark.parametrize("shared", [20, 32])
    def test_a_prompt_of_nan_that_never_samples_fails_nobody(self, shared: int) -> None:
        """Its blocks may be hit before anybody knows: whoever fails on them is computed again without."""
        import tiny

        model = copy.deepcopy(tiny.family("llama")[0])
        with torch.no_grad():
            model.get_input_embeddings().weight[-1] = float("nan")
        cb_engine.attach(model)
        head = [3 + i % 5 for i in range(shared)]
        bad = [*head, *[tiny.VOCAB - 1] * 50]
        params = cb_engine.SamplingParams(temperature=0.0, max_tokens=3)
        right = [tiny.generate(model, [*head, 9 + i], 3) for i in range(3)]
        with model.continuous_batching_context_manager() as manager:
            manager.add_request(bad, sampling_params=params.clone(max_tokens=0))
            bad_output = manager.get_result(timeout=30)
            assert bad_output is not None
            assert bad_output.finish_reason == "length"
            outputs = []
            for i in range(3):
                manager.add_request([*head, 9 + i], sampling_params=params, request_id=f"good {i}")
                outputs.append(manager.get_result(f"good {i}", timeout=30))
        assert [output and output.finish_reason for output in outputs] == ["length"] * 3
        assert [output and output.generated_tokens for output in outputs] == right

    @pytest.mark.parametrize("max_tokens", [0, 1])
    def test_a_prompt_that_just_fits_is_computed(self, max_tokens: int) -> None:
        """The only token that is sampled is never computed, so it needs no block."""
        model = FakeModel()
        cb_engine.attach(model)
        params = cb_engine.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        config = {"block_size": 4, "num_blocks": 2}
        (output,) = model.generate_batch([[1] * 8], sampling_params=params, continuous_batching_config=config).values()
        assert (output.finish_reason, len(output.generated_tokens)) == ("length", max_tokens)

    def test_ids_given_by_hand_do_not_meet_those_made_up(self, model: Any) -> None:
        with model.continuous_batching_context_manager() as manager:
            manager.add_request([1], request_id="req_1", max_new_tokens=1)
            ids = manager.add_requests([[2], [3], [4]], max_new_tokens=1)
            assert ids == ["req_2", "req_3", "req_4"]

    def test_one_string_is_not_taken_for_many_prompts(self, model: Any) -> None:
        with pytest.raises(TypeError, match="put it into a list"):
            model.generate_batch("Hi!", max_new_tokens=1)
        with pytest.raises(TypeError, match="input_ids"):
            model.generate_batch({"input_ids": [[1]]})
        with pytest.raises(TypeError, match="list of prompts"):
            model.generate_batch(None)
        assert len(model.generate_batch((p for p in ([1], [2])), max_new_tokens=1)) == 2
        for bad in ({"temperature": 0}, [SamplingParams(), None]):
            with pytest.raises(TypeError, match="sampling_params"):
                model.generate_batch([[1], [2]], sampling_params=bad)

    def test_an_attached_model_can_be_pickled(self) -> None:
        import pickle

        import tiny

        model = cb_engine.attach(tiny.make_model("llama"))
        twin = pickle.loads(pickle.dumps(model))
        config = tiny.greedy_config(model, max_new_tokens=4)
        prompt = tiny.make_prompts((5,))[0]
        tokens = [next(iter(m.generate_batch([prompt], config).values())).generated_tokens for m in (model, twin)]
        assert tokens[0] == tokens[1] == tiny.generate(model, prompt, 4)
        assert twin._cb_engine is not model._cb_engine
