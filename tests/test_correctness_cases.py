"""Failures that users of continuous-batching engines reported, one class of tests per report.

The numbers are those of the project's list of cases; each says what went wrong elsewhere and what has to hold here.
"""

from __future__ import annotations

import copy
import math
import threading
from typing import Any

import byte_tokenizer
import pytest
import tiny
import torch
from fake_model import FakeModel, expected
from scripted_model import ScriptedModel

import cb_engine
from cb_engine import Engine, EngineError, GenerationOutput, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def run(engine: Engine) -> dict[str, GenerationOutput]:
    """Runs to the end; every request ends exactly once and nothing is held afterwards."""
    ended: dict[str, GenerationOutput] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.request_id not in ended, "a terminal output is the last"
            if output.is_finished():
                ended[output.request_id] = output
        engine.check()
    stats = engine.stats()
    assert stats.live_blocks == stats.num_running == stats.num_waiting == 0
    return ended


def attached(model: Any, **kwargs: Any) -> Any:
    """An attached copy of a model, so that tests do not share attachments."""
    return cb_engine.attach(copy.deepcopy(model), **kwargs)


class TestPaddingLeaks:  # 1
    @pytest.mark.parametrize("pad", [True, False])
    def test_lengths_around_powers_of_two(self, pad: bool) -> None:
        model, _, _ = tiny.family("llama")
        prompts = tiny.make_prompts((31, 32, 33, 64, 65), seed=5)
        engine = Engine(model, config={"block_size": 16, "pad_decode_batches": pad}, eos_token_id=-1)
        params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=0, logprobs_mode="raw")
        ids = [engine.add_request(prompt, params)[0] for prompt in prompts]
        outputs = run(engine)
        for request_id, prompt in zip(ids, prompts, strict=True):
            assert outputs[request_id].generated_tokens == tiny.generate(model, prompt, 6)
            first = model(torch.tensor([prompt])).logits[0, -1].detach().float().log_softmax(-1).max()
            assert outputs[request_id].logprobs[0] == pytest.approx(float(first), abs=1e-5)


class TestModelIsLeftAlone:  # 2 and 3
    def test_forward_is_the_same_before_during_and_after(self) -> None:
        model = attached(tiny.family("gemma2")[0])
        ids = torch.tensor([tiny.make_prompts((20,))[0]])
        changed = ids.clone()
        changed[0, 10:] = 3
        before = model(ids).logits
        with model.continuous_batching_context_manager(generation_config=tiny.greedy_config(model)) as manager:
            manager.add_request(ids[0].tolist(), max_new_tokens=30)
            with manager.pause():
                assert torch.equal(model(ids).logits, before)
                assert torch.equal(model(changed).logits[:, :10], before[:, :10]), "causal as ever"
        assert torch.equal(model(ids).logits, before)
        assert model.config._attn_implementation == "eager"

    def test_generate_train_generate(self) -> None:
        model = attached(tiny.family("llama")[0]).train()
        prompts = tiny.make_prompts()
        config = tiny.greedy_config(model, max_new_tokens=8)
        for _ in range(2):
            outputs = model.generate_batch(prompts, generation_config=config)
            assert [o.prompt_ids for o in outputs.values()] == prompts
            assert all(len(o.generated_tokens) == 8 for o in outputs.values())
        assert model.training
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model(torch.tensor([prompts[-1]]), labels=torch.tensor([prompts[-1]])).loss.backward()
        assert all(p.grad is not None and not p.is_inference() for p in model.parameters())
        optimizer.step()
        outputs = model.generate_batch(prompts, generation_config=config)
        model.eval()
        assert [o.generated_tokens for o in outputs.values()] == [tiny.generate(model, p, 8) for p in prompts]


class TestEveryReaderGetsItsOwn:  # 4
    def test_eight_threads_iterate_eight_streams(self) -> None:
        model = cb_engine.attach(FakeModel())
        seen: dict[int, list[list[int]]] = {}
        with model.continuous_batching_context_manager() as manager:

            def read(index: int) -> None:
                request_id = manager.add_request([index + 1], max_new_tokens=5 + index, streaming=True)
                seen[index] = [o.generated_tokens for o in manager.request_id_iter(request_id)]

            threads = [threading.Thread(target=read, args=(i,)) for i in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        for index in range(8):
            answer = expected([index + 1], 5 + index)
            assert seen[index] == [answer[:n] for n in range(1, len(answer) + 1)]


class TestWeightsChange:  # 5
    def test_between_two_calls_of_a_persistent_manager(self) -> None:
        model = attached(tiny.family("llama")[0])
        prompt = tiny.make_prompts((30,))[0]
        config = tiny.greedy_config(model, max_new_tokens=8)
        settings = {"block_size": 4}

        def call() -> GenerationOutput:
            outputs = model.generate_batch([prompt], config, settings, persistent_manager=True)
            return next(iter(outputs.values()))

        first, second = call(), call()
        assert second.num_cached_tokens == 28, "unchanged weights hit the cache"
        with torch.no_grad():
            model.model.layers[0].self_attn.v_proj.weight.mul_(1.5)
        third = call()
        assert third.num_cached_tokens == 0
        assert first.generated_tokens == second.generated_tokens
        assert third.generated_tokens == tiny.generate(model, prompt, 8) != first.generated_tokens
        assert (set(second.weight_version), set(third.weight_version)) == ({0}, {1})
        model.model.layers[0].self_attn.v_proj.weight.data.mul_(1.5)  # invisible to torch's counters
        cb_engine.weights_changed(model)
        assert call().generated_tokens == tiny.generate(model, prompt, 8)
        cb_engine.detach(model)

    def test_a_new_call_always_sees_writes_through_data(self) -> None:
        model = attached(tiny.family("llama")[0])
        prompt = tiny.make_prompts((30,))[0]
        config = tiny.greedy_config(model, max_new_tokens=8)
        model.generate_batch([prompt], config)
        model.model.embed_tokens.weight.data.mul_(-1.5)
        output = next(iter(model.generate_batch([prompt], config).values()))
        assert output.generated_tokens == tiny.generate(model, prompt, 8)

    @pytest.mark.parametrize("policy", ["recompute", "continue", "abort"])
    def test_while_a_request_is_half_decoded(self, policy: str) -> None:
        model = copy.deepcopy(tiny.family("llama")[0])
        prompt = tiny.make_prompts((9,))[0]
        engine = Engine(model, config={"block_size": 4, "running_on_weight_change": policy}, eos_token_id=-1)
        engine.add_request(prompt, GREEDY)
        for _ in range(5):
            engine.step()
        engine.update_weights({"model.norm.weight": model.model.norm.weight * -1})
        output = run(engine)["req_0"]
        if policy == "abort":
            assert (output.finish_reason, len(output.generated_tokens)) == ("abort", 5)
            return
        assert output.weight_version == [0] * 5 + [1] * 7
        if policy == "recompute":
            assert output.num_preemptions == 1
        # The norm comes after all keys and values, so both policies have the same right answer here.
        so_far = output.generated_tokens[:5]
        assert output.generated_tokens[5:] == tiny.generate(model, prompt + so_far, 7)
        again = engine.add_request(prompt, GREEDY)[0]
        assert run(engine)[again].num_cached_tokens <= 8, "nothing older than the change is hit"


class TestPromptLogprobs:  # 7
    def test_with_a_prefix_in_the_cache(self) -> None:
        model, _, _ = tiny.family("llama")
        prompt = tiny.make_prompts((33,), seed=3)[0]
        logprobs = model(torch.tensor([prompt])).logits[0].detach().float().log_softmax(-1)
        engine = Engine(model, config={"block_size": 8, "max_prefill_chunk": 7}, eos_token_id=-1)
        params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=1)
        for _ in range(2):
            request_id = engine.add_request(prompt, params)[0]
            entries = run(engine)[request_id].prompt_logprobs
            assert entries is not None
            assert len(entries) == len(prompt)
            assert entries[0] is None
            for position in range(1, len(prompt)):
                own = {e.token_id: e.logprob for e in entries[position] or []}
                assert own[prompt[position]] == pytest.approx(float(logprobs[position - 1, prompt[position]]), abs=1e-5)
                assert max(own.values()) == pytest.approx(float(logprobs[position - 1].max()), abs=1e-5)
            engine.add_request(prompt, GREEDY)
            run(engine)


class TestPreemption:  # 8
    def test_tight_pool_equals_roomy_pool(self) -> None:
        prompts = [[i + 1, i + 2, i + 3] for i in range(8)]
        params = SamplingParams(temperature=0.0, max_tokens=40, logprobs=0)

        def outputs(num_blocks: int) -> list[GenerationOutput]:
            engine = Engine(FakeModel(), config={"block_size": 4, "num_blocks": num_blocks})
            ids = [engine.add_request(p, params, record_timestamps=True)[0] for p in prompts]
            ended = run(engine)
            return [ended[i] for i in ids]

        roomy, tight = outputs(200), outputs(12)
        assert sum(o.num_preemptions for o in tight) > 0
        assert sum(o.num_preemptions for o in roomy) == 0
        for a, b, prompt in zip(roomy, tight, prompts, strict=True):
            assert a.generated_tokens == b.generated_tokens == expected(prompt, 40)
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-6)
            assert len(b.logprobs) == len(b.weight_version) == len(b.timestamps or []) == 40
            assert b.prompt_ids == prompt
            assert b.timestamps == sorted(b.timestamps or [])
            assert b.created_time <= b.lifespan[0] <= b.lifespan[1]

    def test_a_stream_never_repeats_or_shortens(self) -> None:
        engine = Engine(FakeModel(), config={"block_size": 4, "num_blocks": 34})
        long = engine.add_request([1, 2, 3], GREEDY.clone(max_tokens=120, priority=1), streaming=True)[0]
        lengths: list[int] = []
        for step in range(1000):
            if step == 100:
                engine.add_request([9, 9, 9], GREEDY.clone(max_tokens=60))
            for output in engine.step():
                if output.request_id == long:
                    lengths.append(len(output.generated_tokens))
                    last = output
            if not engine.has_work:
                break
        assert lengths == list(range(1, 121))
        assert last.num_preemptions > 0
        assert last.generated_tokens == expected([1, 2, 3], 120)


class TestAbort:  # 9; every state of it is fuzzed in scheduler/test_state_machine.py
    def test_each_state(self) -> None:
        engine = Engine(FakeModel(), config={"block_size": 4, "max_num_seqs": 3, "max_prefill_chunk": 4})
        engine.add_request([1] * 4, GREEDY, request_id="decoding")
        engine.add_request([2] * 9, GREEDY, request_id="prefilling")
        engine.add_request([3] * 2, GREEDY.clone(n=2), request_id="forked")
        engine.add_request([4] * 2, GREEDY, request_id="waiting")
        engine.step()
        for request_id in ("decoding", "prefilling", "forked", "waiting", "unknown"):
            engine.abort(request_id)
        engine.abort("waiting")
        outputs = run(engine)
        assert set(outputs) == {"decoding", "prefilling", "forked", "forked__child#0", "waiting"}
        assert outputs["decoding"].generated_tokens == expected([1] * 4, 1)
        for request_id in ("decoding", "prefilling", "forked", "waiting"):
            assert outputs[request_id].finish_reason == "abort"
        assert outputs["forked__child#0"].finish_reason == "length"

    def test_cancelling_an_id_ends_all_its_samples_and_their_iterators(self) -> None:
        model = cb_engine.attach(FakeModel())
        with model.continuous_batching_context_manager() as manager:
            params = SamplingParams(n=3, max_tokens=400, temperature=0.0)
            manager.add_request([1, 2], request_id="many", sampling_params=params)
            ids = ("many__child#0", "many__child#1", "many")
            iterators = [manager.request_id_iter(i) for i in ids]
            manager.cancel_request("many")
            ends = [list(iterator)[-1] for iterator in iterators]
        assert [e.request_id for e in ends] == list(ids)
        assert {e.finish_reason for e in ends} == {"abort"}

    def test_waiting_requests_run_after_the_survivors_were_cancelled(self) -> None:
        engine = Engine(FakeModel(), config={"block_size": 4, "num_blocks": 8})
        for i in range(4):
            engine.add_request([i + 1, 2, 3], GREEDY.clone(max_tokens=25), request_id=str(i))
        while not engine.stats().num_preemptions:
            engine.step()
        running = engine.stats().num_running
        for i in range(running):
            engine.abort(str(i))
        outputs = run(engine)
        for i in range(running, 4):
            assert outputs[str(i)].generated_tokens == expected([i + 1, 2, 3], 25)


def say(text: str | list[int], params: SamplingParams, **options: Any) -> tuple[GenerationOutput, list[str]]:
    """What comes out when the model says a text: the terminal output, and the texts streamed on the way."""
    script = byte_tokenizer.ids_of(text) if isinstance(text, str) else text
    engine = Engine(ScriptedModel(script), tokenizer=byte_tokenizer.make_tokenizer(), config={"block_size": 4})
    engine.add_request([byte_tokenizer.BOS], params, streaming=True, **options)
    outputs: list[GenerationOutput] = []
    while engine.has_work:
        outputs += engine.step()
    engine_once = Engine(ScriptedModel(script), tokenizer=byte_tokenizer.make_tokenizer(), config={"block_size": 4})
    engine_once.add_request([byte_tokenizer.BOS], params, **options)
    assert run(engine_once)["req_0"].text == outputs[-1].text, "streamed and not streamed agree"
    return outputs[-1], [o.text or "" for o in outputs]


class TestStopStrings:  # 10
    params = SamplingParams(temperature=0.0, stop=("beta gamma",), max_tokens=100)

    def test_over_token_edges(self) -> None:
        output, texts = say("alpha beta gamma delta", self.params)
        assert (output.text, output.finish_reason, output.stop_reason) == ("alpha ", "stop", "beta gamma")
        assert all("alpha ".startswith(text) for text in texts), "nothing of the stop is ever shown"

    def test_a_beginning_that_never_completes_is_shown_in_the_end(self) -> None:
        output, _ = say("alpha beta gam", self.params)
        assert (output.text, output.finish_reason, output.stop_reason) == ("alpha beta gam", "stop", byte_tokenizer.EOS)

    def test_the_earliest_of_several_wins(self) -> None:
        output, _ = say("one two three", self.params.clone(stop=("three", "two", "wo t")))
        assert (output.text, output.stop_reason) == ("one ", "two")

    def test_on_the_last_allowed_token(self) -> None:
        output, _ = say("abcdef", self.params.clone(stop=("cd",), max_tokens=4))
        assert (output.text, output.finish_reason, output.stop_reason) == ("ab", "stop", "cd")

    def test_not_before_the_minimum(self) -> None:
        output, _ = say("stop and stop", self.params.clone(stop=("stop",), min_tokens=6))
        assert (output.text, output.finish_reason) == ("stop and ", "stop")


class TestCharactersOverTokens:  # 11
    @pytest.mark.parametrize("text", ["déjà vu à Zürich", "a 🎉 b 👩‍🔬 c", "안녕하세요 세계"])
    def test_no_half_character_is_ever_shown(self, text: str) -> None:
        output, texts = say(text, SamplingParams(temperature=0.0, max_tokens=100))
        assert output.text == text
        for shown in texts:
            assert "\ufffd" not in shown
            assert text.startswith(shown)

    def test_the_limit_inside_a_character(self) -> None:
        output, _ = say("ab🎉", SamplingParams(temperature=0.0, max_tokens=4))
        assert (output.text, output.finish_reason, len(output.generated_tokens)) == ("ab", "length", 4)


class TestMinimumLengthAndEos:  # 12
    model = FakeModel()

    def first(self, prompt: list[int], params: SamplingParams, eos: Any) -> GenerationOutput:
        engine = Engine(self.model, config={"block_size": 4}, eos_token_id=eos)
        engine.add_request(prompt, params)
        return run(engine)["req_0"]

    @pytest.mark.parametrize("prompt", [[5], list(range(1, 12))])
    def test_min_tokens_counts_output_only(self, prompt: list[int]) -> None:
        params = SamplingParams(temperature=0.0, min_tokens=4, max_tokens=20, logit_bias={96: 100.0})
        output = self.first(prompt, params, 96)
        assert len(output.generated_tokens) == 5
        assert output.generated_tokens[-1] == 96
        assert 96 not in output.generated_tokens[:4]
        assert (output.finish_reason, output.stop_reason) == ("stop", 96)

    def test_any_of_several_eos_ids_ends(self) -> None:
        tokens = expected([5, 7], 12)  # 19 76 89 ...
        for eos in (tokens[0], tokens[2]):
            output = self.first([5, 7], GREEDY, [96, eos])
            assert output.generated_tokens == tokens[: tokens.index(eos) + 1]

    def test_ignore_eos_runs_to_the_limit(self) -> None:
        tokens = expected([5, 7], 12)
        output = self.first([5, 7], GREEDY.clone(ignore_eos=True), tokens[1])
        assert (output.generated_tokens, output.finish_reason) == (tokens, "length")

    def test_eos_as_the_last_allowed_token_is_a_stop(self) -> None:
        tokens = expected([5, 7], 3)
        output = self.first([5, 7], GREEDY.clone(max_tokens=3), tokens[2])
        assert (output.generated_tokens, output.finish_reason) == (tokens, "stop")

    def test_eos_in_the_prompt_is_no_end(self) -> None:
        assert self.first([5, 96, 7], GREEDY, 96).generated_tokens == expected([5, 96, 7], 12)


class TestLengthLimits:  # 13
    def engine(self) -> Engine:
        return Engine(FakeModel(), config={"block_size": 4, "max_model_len": 20})

    def test_the_maximum_length_is_never_exceeded(self) -> None:
        engine = self.engine()
        engine.add_request([3] * 7, GREEDY.clone(max_tokens=50))
        output = run(engine)["req_0"]
        assert output.generated_tokens == expected([3] * 7, 13)
        assert (output.finish_reason, output.stop_reason) == ("length", "max_model_len")

    def test_a_prompt_of_the_maximum_length_is_refused(self) -> None:
        with pytest.raises(ValueError, match="20 tokens and the maximum length is 20"):
            self.engine().add_request([3] * 20, GREEDY)

    def test_one_token_and_none(self) -> None:
        engine = self.engine()
        engine.add_request([3, 4], GREEDY.clone(max_tokens=1), request_id="one")
        engine.add_request([3, 4], GREEDY.clone(max_tokens=0), request_id="none")
        outputs = run(engine)
        assert (outputs["one"].generated_tokens, outputs["none"].generated_tokens) == (expected([3, 4], 1), [])
        assert {o.finish_reason for o in outputs.values()} == {"length"}

    def test_resuming_an_aborted_request_with_what_is_left(self) -> None:
        engine = self.engine()
        engine.add_request([3, 4], GREEDY.clone(max_tokens=10))
        for _ in range(5):
            engine.step()
        engine.abort("req_0")
        partial = run(engine)["req_0"].generated_tokens
        engine.add_request([3, 4, *partial], GREEDY.clone(max_tokens=10 - len(partial)), request_id="rest")
        assert partial + run(engine)["rest"].generated_tokens == expected([3, 4], 10)


class TestChunkedPrefill:  # 14
    @pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
    def test_lengths_around_a_block_over_a_pool_full_of_nan(self, family: str) -> None:
        model, _, _ = tiny.family(family)
        prompts = tiny.make_prompts((7, 8, 9, 16), seed=4)
        answers = [tiny.generate(model, p, 6) for p in prompts]
        for backend in ("torch", "auto"):
            for chunk in (1, 2, 3, 5, 8):
                config = {"block_size": 8, "max_prefill_chunk": chunk, "attention_backend": backend}
                engine = Engine(model, config=config, hints={"num_requests": 5}, eos_token_id=-1)
                with torch.inference_mode():
                    for cache in engine._runner._caches[False].values():
                        cache.k.fill_(math.nan)
                        cache.v.fill_(math.nan)
                ids = [engine.add_request(p, GREEDY.clone(max_tokens=6))[0] for p in prompts]
                outputs = run(engine)
                assert [outputs[i].generated_tokens for i in ids] == answers

    def test_a_long_prompt_beside_many_decodes(self) -> None:
        engine = Engine(FakeModel(), config={"block_size": 4, "max_num_batched_tokens": 12, "max_num_seqs": 8})
        for i in range(7):
            engine.add_request([i + 1, 2], GREEDY.clone(max_tokens=20), request_id=str(i))
        engine.step()
        long = [(3 * i) % 97 for i in range(60)]
        engine.add_request(long, GREEDY, request_id="long")
        outputs = run(engine)
        assert outputs["long"].generated_tokens == expected(long, 12)
        for i in range(7):
            assert outputs[str(i)].generated_tokens == expected([i + 1, 2], 20)


class TestLogprobs:  # 15
    def test_processed_and_raw(self) -> None:
        model, prompts, _ = tiny.family("llama")
        prompt = prompts[-1]
        common = {"temperature": 0.5, "top_k": 3, "seed": 5, "max_tokens": 6, "logprobs": 3}
        engine = Engine(model, config={"block_size": 4, "max_prefill_chunk": 7}, eos_token_id=-1)
        engine.add_request(prompt, SamplingParams(**common), request_id="processed")
        engine.add_request(prompt, SamplingParams(**common, logprobs_mode="raw"), request_id="raw")
        engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=6, logprobs=0), request_id="greedy")
        outputs = run(engine)
        processed, raw = outputs["processed"], outputs["raw"]
        assert processed.generated_tokens == raw.generated_tokens, "one seed, one draw"
        for output in outputs.values():
            ids = torch.tensor([prompt + output.generated_tokens])
            reference = model(ids).logits[0, len(prompt) - 1 : -1].detach().float().log_softmax(-1)
            for i, token in enumerate(output.generated_tokens):
                if output is not processed:
                    assert output.logprobs[i] == pytest.approx(float(reference[i, token]), abs=1e-5)
                assert math.isfinite(output.logprobs[i])
        assert processed.top_logprobs is not None
        for i, entries in enumerate(processed.top_logprobs):
            assert sum(math.exp(e.logprob) for e in entries) == pytest.approx(1.0, abs=1e-5)
            own = {e.token_id: e.logprob for e in entries}
            assert own[processed.generated_tokens[i]] == processed.logprobs[i]
            assert [e.rank for e in entries] == [1, 2, 3]


class TestFailuresStayAlone:  # 16
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_a_bad_row_of_logits(self, bad: float) -> None:
        model = FakeModel()

        def spoil(positions: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            return torch.where((positions == 11).unsqueeze(1), bad, logits)  # the fourth token of the long prompt

        model.hook.append(spoil)
        engine = Engine(model, config={"block_size": 4})
        engine.add_request([4] * 9, GREEDY, request_id="sick")
        engine.add_request([5, 6], GREEDY.clone(max_tokens=8), request_id="well")
        outputs = run(engine)
        assert outputs["sick"].finish_reason == "error"
        assert outputs["sick"].generated_tokens == expected([4] * 9, 3)
        assert "NaN" in (outputs["sick"].error or "")
        assert outputs["well"].generated_tokens == expected([5, 6], 8)
        model.hook.clear()
        engine.add_request([4] * 9, GREEDY, request_id="again")
        assert run(engine)["again"].generated_tokens == expected([4] * 9, 12)

    def test_a_bias_that_leaves_nothing(self) -> None:
        engine = Engine(FakeModel(), config={"block_size": 4})
        nothing = dict.fromkeys(range(97), -math.inf)
        engine.add_request([1], SamplingParams(logit_bias=nothing, max_tokens=3), request_id="none")
        engine.add_request([2], GREEDY, request_id="well")
        outputs = run(engine)
        assert outputs["none"].finish_reason == "error"
        assert outputs["well"].generated_tokens == expected([2], 12)

    def test_an_exception_in_one_request(self) -> None:
        model = FakeModel()

        def explode(positions: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            if (positions == 11).any():
                raise RuntimeError("boom")
            return logits

        model.hook.append(explode)
        engine = Engine(model, config={"block_size": 4})
        engine.add_request([4] * 9, GREEDY, request_id="sick")
        for i in range(5):
            engine.add_request([5, i], GREEDY.clone(max_tokens=8), request_id=str(i))
        outputs = run(engine)
        assert (outputs["sick"].finish_reason, outputs["sick"].error) == ("error", "RuntimeError: boom")
        assert outputs["sick"].generated_tokens == expected([4] * 9, 3)
        for i in range(5):
            assert outputs[str(i)].generated_tokens == expected([5, i], 8)

    def test_an_engine_that_fails_hands_over_what_was_finished(self) -> None:
        model = FakeModel()
        gone: list[bool] = []

        def explode(positions: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            if (positions >= 6).any():
                gone.append(True)
            if gone:  # from now on for everybody
                raise RuntimeError("the device is gone")
            return logits

        cb_engine.attach(model)
        model.hook.append(explode)
        params = [GREEDY.clone(max_tokens=2), GREEDY, GREEDY]
        with pytest.raises(EngineError, match="the device is gone") as caught:
            model.generate_batch([[1, 2], [3, 4], [5, 6]], sampling_params=params)
        assert {i: o.generated_tokens for i, o in caught.value.outputs.items()} == {"req_0": expected([1, 2], 2)}
        model.hook.clear()
        outputs = model.generate_batch([[1, 2]], sampling_params=GREEDY)
        assert outputs["req_0"].generated_tokens == expected([1, 2], 12), "the next call is well"


class TestPromptsThatCannotRun:  # 17
    def test_refused_at_the_door(self) -> None:
        engine = Engine(FakeModel(), config={"block_size": 4, "num_blocks": 4})
        for i in range(3):
            engine.add_request([i + 1], GREEDY.clone(max_tokens=6))
        for prompt, message in (([], "empty"), ([1] * 20, "KV blocks"), ([97], "vocabulary"), ([-1], "vocabulary")):
            with pytest.raises(ValueError, match=message):
                engine.add_request(prompt, GREEDY)
        outputs = run(engine)
        assert [outputs[f"req_{i}"].generated_tokens for i in range(3)] == [expected([i + 1], 6) for i in range(3)]

    def test_a_request_that_outgrows_the_pool(self) -> None:
        engine = Engine(FakeModel(), config={"block_size": 4, "num_blocks": 4})
        engine.add_request([1, 2], GREEDY.clone(max_tokens=50), request_id="long")
        engine.add_request([3], GREEDY.clone(max_tokens=5), request_id="short")
        outputs = run(engine)
        assert (outputs["long"].finish_reason, outputs["long"].stop_reason) == ("length", "kv_cache_capacity")
        # 16 slots hold 2 prompt tokens and 14 generated ones; the 15th was sampled before it needed a slot.
        assert outputs["long"].generated_tokens == expected([1, 2], 15)
        assert outputs["short"].generated_tokens == expected([3], 5)

    def test_one_bad_prompt_among_ten_stops_the_call_before_it_runs(self) -> None:
        model = cb_engine.attach(FakeModel())
        prompts: list[list[int]] = [[i + 1] for i in range(10)]
        prompts[6] = []
        with pytest.raises(ValueError, match=r"inputs\[6\]: the prompt is empty"):
            model.generate_batch(prompts, sampling_params=GREEDY)
        outputs = model.generate_batch(prompts[:6], sampling_params=GREEDY)
        assert [o.generated_tokens for o in outputs.values()] == [expected(p, 12) for p in prompts[:6]]


class TestBos:  # 18
    def test_text_gets_it_once_and_ids_as_given(self) -> None:
        model = ScriptedModel(byte_tokenizer.ids_of("ok"))
        cb_engine.attach(model, tokenizer=byte_tokenizer.make_tokenizer(add_bos=True))
        outputs = list(model.generate_batch(["hi", [5, 6], [1, 1, 5]], max_new_tokens=1).values())
        assert [o.prompt_ids for o in outputs] == [[1, *byte_tokenizer.ids_of("hi")], [5, 6], [1, 1, 5]]


class TestMixedSampling:  # "Mixed sampler batch", vllm#14657
    def test_each_request_is_what_it_is_alone(self) -> None:
        model, prompts, _ = tiny.family("llama")
        kinds = [
            GREEDY,
            SamplingParams(temperature=0.9, top_k=5, seed=1, max_tokens=12),
            SamplingParams(temperature=1.3, min_p=0.1, seed=2, max_tokens=12),
            SamplingParams(temperature=0.7, top_p=0.8, seed=3, max_tokens=12, repetition_penalty=1.3),
            SamplingParams(temperature=1.0, seed=4, max_tokens=12, frequency_penalty=0.5, presence_penalty=0.5),
        ]

        def outputs(params: list[SamplingParams], inputs: list[list[int]]) -> list[list[int]]:
            engine = Engine(model, config={"block_size": 4, "attention_backend": "torch"}, eos_token_id=-1)
            ids = [engine.add_request(p, s)[0] for p, s in zip(inputs, params, strict=True)]
            ended = run(engine)
            return [ended[i].generated_tokens for i in ids]

        together = outputs(kinds, prompts)
        assert together == [outputs([kind], [prompt])[0] for kind, prompt in zip(kinds, prompts, strict=True)]


class TestStoppedManagers:
    def test_a_request_after_the_end_is_a_named_error(self) -> None:
        model = cb_engine.attach(FakeModel())
        with model.continuous_batching_context_manager() as manager:
            manager.add_request([1], max_new_tokens=1)
        with pytest.raises(cb_engine.EngineStoppedError):
            manager.add_request([1], max_new_tokens=1)

    def test_a_hash_collision_serves_the_right_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("cb_engine.kv_cache.block_manager.hash_block", lambda parent, tokens: b"same")
        engine = Engine(FakeModel(), config={"block_size": 2})
        for round_trip in range(2):
            for i, prompt in enumerate(([1, 2, 3, 4, 5], [1, 2, 9, 4, 5], [7, 2, 3, 4, 5])):
                request_id = engine.add_request(prompt, GREEDY, request_id=f"{round_trip}-{i}")[0]
                assert run(engine)[request_id].generated_tokens == expected(prompt, 12)
