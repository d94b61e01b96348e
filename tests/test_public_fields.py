"""No public field is accepted and ignored: each has a check here that fails if it had no effect.

The check tables are compared with the classes themselves, so that a new field without a check fails too.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import byte_tokenizer
import pytest
import tiny
import torch
from fake_model import FakeModel, expected
from scripted_model import ScriptedModel

import cb_engine
from cb_engine import Engine, EngineConfig, GenerationOutput, SamplingParams, WorkloadHints
from cb_engine.native import build
from cb_engine.runner.buckets import StepKind
from cb_engine.runner.fusion.linear import has_native_kernels

PROMPT = [5, 7, 11, 13, 17]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
RANDOM = SamplingParams(temperature=20.0, max_tokens=8, seed=1)  # the fake model leads by 10: this is nearly flat


def engine_of(model: Any = None, hints: WorkloadHints | None = None, **config: Any) -> Engine:
    return Engine(model or FakeModel(), config=EngineConfig(**{"block_size": 4, **config}), hints=hints)


def run(engine: Engine) -> dict[str, GenerationOutput]:
    ended: dict[str, GenerationOutput] = {}
    while engine.has_work:
        ended |= {o.request_id: o for o in engine.step() if o.is_finished()}
    return ended


def one(params: SamplingParams, prompt: list[int] = PROMPT, **engine: Any) -> GenerationOutput:
    core = engine_of(**engine)
    request_id = core.add_request(prompt, params)[-1]
    return run(core)[request_id]


def tokens(params: SamplingParams, **engine: Any) -> list[int]:
    return one(params, **engine).generated_tokens


def said(params: SamplingParams) -> GenerationOutput:
    """What a model that says "one two three" gives, with a tokenizer."""
    model = ScriptedModel(byte_tokenizer.ids_of("one two three"))
    engine = Engine(model, tokenizer=byte_tokenizer.make_tokenizer())
    engine.add_request([byte_tokenizer.BOS], params)
    return run(engine)["req_0"]


# ---- SamplingParams ------------------------------------------------------------------------------------------------


def check_n() -> None:
    engine = engine_of()
    assert len(engine.add_request(PROMPT, GREEDY.clone(n=3))) == len(run(engine)) == 3


def check_priority() -> None:
    engine = engine_of(max_num_seqs=1)
    engine.add_request(PROMPT, GREEDY, request_id="later")
    engine.add_request(PROMPT, GREEDY.clone(priority=-1), request_id="sooner")
    assert list(run(engine)) == ["sooner", "later"]


def check_request_seed() -> None:
    assert tokens(RANDOM) == tokens(RANDOM) != tokens(RANDOM.clone(seed=2))


def check_cache_salt() -> None:
    engine = engine_of()
    cached: list[int] = []
    for salt in (None, "a", "a", "b"):
        request_id = engine.add_request(PROMPT, GREEDY.clone(cache_salt=salt))[0]
        cached.append(run(engine)[request_id].num_cached_tokens)
    assert cached == [0, 0, 4, 0]


def check_penalty(name: str, value: float) -> None:
    # The fake model would repeat: for the prompt [0, 0] it says 0 for ever.
    model = FakeModel()
    model.bonus += 1.0  # a penalty divides: the others must be above zero to overtake
    plain, changed = (one(GREEDY.clone(**c), [0, 0], model=model).generated_tokens for c in ({}, {name: value}))
    assert set(plain) == {0}
    assert set(changed) != {0}


def check_logprobs_mode() -> None:
    values = [one(RANDOM.clone(logprobs=0, logprobs_mode=mode)).logprobs for mode in ("processed", "raw")]
    assert values[0] != values[1]


def check_special_tokens() -> None:
    script = [*byte_tokenizer.ids_of("one"), byte_tokenizer.BOS, *byte_tokenizer.ids_of("two")]
    texts = []
    for skip in (True, False):
        engine = Engine(ScriptedModel(script), tokenizer=byte_tokenizer.make_tokenizer())
        engine.add_request([5], SamplingParams(temperature=0.0, skip_special_tokens=skip))
        texts.append(run(engine)["req_0"].text)
    assert texts == ["onetwo", "one<s>two"], "the EOS that ended it is part of neither"


SAMPLING: dict[str, Callable[[], None]] = {
    "n": check_n,
    "temperature": lambda: _differ(tokens(GREEDY), tokens(RANDOM)),
    "top_p": lambda: _same(tokens(RANDOM.clone(top_p=1e-6)), tokens(GREEDY)),
    "top_k": lambda: _same(tokens(RANDOM.clone(top_k=1)), tokens(GREEDY)),
    "min_p": lambda: _same(tokens(RANDOM.clone(min_p=1.0)), tokens(GREEDY)),
    "repetition_penalty": lambda: check_penalty("repetition_penalty", 1e6),
    "presence_penalty": lambda: check_penalty("presence_penalty", 20.0),
    "frequency_penalty": lambda: check_penalty("frequency_penalty", 20.0),
    "seed": check_request_seed,
    "max_tokens": lambda: _same(len(tokens(GREEDY.clone(max_tokens=3))), 3),
    "min_tokens": lambda: _differ(
        len(tokens(GREEDY.clone(stop_token_ids=expected(PROMPT, 1)))),
        len(tokens(GREEDY.clone(stop_token_ids=expected(PROMPT, 1), min_tokens=4))),
    ),
    "stop": lambda: _same(said(SamplingParams(temperature=0.0, stop="two")).text, "one "),
    "stop_token_ids": lambda: _same(tokens(GREEDY.clone(stop_token_ids=expected(PROMPT, 2)[1:])), expected(PROMPT, 2)),
    "ignore_eos": lambda: _same(len(said(SamplingParams(temperature=0.0, ignore_eos=True)).generated_tokens), 511),
    "logprobs": lambda: _same(len(one(GREEDY.clone(logprobs=2)).top_logprobs or []), 8),
    "prompt_logprobs": lambda: _same(len(one(GREEDY.clone(prompt_logprobs=1)).prompt_logprobs or []), 5),
    "logprobs_mode": check_logprobs_mode,
    "logit_bias": lambda: _same(tokens(GREEDY.clone(logit_bias={3: 100.0})), [3] * 8),
    "allowed_token_ids": lambda: _same(set(tokens(RANDOM.clone(allowed_token_ids=[3, 4]))) - {3, 4}, set()),
    "bad_words": lambda: _differ(tokens(GREEDY.clone(bad_words=[expected(PROMPT, 1)])), tokens(GREEDY)),
    "priority": check_priority,
    "cache_salt": check_cache_salt,
    "structured": lambda: _same(
        said(SamplingParams(temperature=0.0, structured={"choice": ["one two", "x"]})).text, "one two"
    ),
    "speculative": lambda: _same(
        [drafted(GREEDY.clone(speculative=wanted)) > 0 for wanted in (True, False)], [True, False]
    ),
    "skip_special_tokens": check_special_tokens,
}


def drafted(params: SamplingParams, **settings: Any) -> int:
    """Draft tokens of a request whose output repeats itself."""
    speculative = {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False, **settings}
    return one(params.clone(logit_bias={3: 100.0}), speculative=speculative).num_draft_tokens


def _same(a: object, b: object) -> None:
    assert a == b


def _differ(a: object, b: object) -> None:
    assert a != b


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_params(name: str) -> None:
    SAMPLING[name]()


def test_every_sampling_field_is_checked() -> None:
    assert set(SAMPLING) == {f.name for f in dataclasses.fields(SamplingParams)}


# ---- EngineConfig --------------------------------------------------------------------------------------------------


def steps_to_finish(prompts: int = 3, **config: Any) -> int:
    engine = engine_of(**config)
    for i in range(prompts):
        engine.add_request([i + 1] * 12, GREEDY)
    run(engine)
    return engine.stats().num_steps


def check_block_size() -> None:
    engine = engine_of(block_size=2)
    engine.add_request(PROMPT, GREEDY)
    engine.step()
    assert engine.stats().live_blocks == 3


def check_max_memory_percent() -> None:
    sizes = []
    for percent in (1e-4, 2e-4):
        engine = engine_of(FakeModel(max_position_embeddings=10**7), max_memory_percent=percent)
        sizes.append(engine.stats().free_blocks)
    assert 1.5 < sizes[1] / sizes[0] < 2.5


def check_prefix_caching() -> None:
    for enabled, hit in ((True, 4), (False, 0)):
        engine = engine_of(enable_prefix_caching=enabled)
        for _ in range(2):
            request_id = engine.add_request(PROMPT, GREEDY)[0]
            output = run(engine)[request_id]
        assert output.num_cached_tokens == hit


def kinds_and_sizes(**config: Any) -> set[tuple[StepKind, int]]:
    """Shapes used by three requests of an engine whose steps are all padded and warmed."""
    engine = engine_of(max_num_seqs=8, **config)
    engine.warmup()
    for i in range(3):
        engine.add_request([i + 1] * 3, GREEDY)
    run(engine)
    return {(b.kind, b.num_seqs) for b in engine.coverage.used}


def check_compile(name: str, expected_kinds: set[StepKind]) -> None:
    compiled: list[str] = []

    def backend(module: Any, inputs: Any) -> Any:
        compiled.append("graph")
        return module.forward

    model, prompts, references = tiny.family("llama")
    config: dict[str, Any] = {name: True, "compile_options": {"backend": backend}, "max_num_seqs": 1}
    engine = Engine(model, config={**config, "max_model_len": 64, "block_size": 64, "max_num_batched_tokens": 16})
    engine.warmup()
    assert compiled, "the backend that was asked for compiled something"
    assert {b.kind for b in engine.coverage.warmed} == expected_kinds
    engine.add_request(prompts[1], SamplingParams(temperature=0.0, max_tokens=tiny.NEW_TOKENS))
    assert run(engine)["req_0"].generated_tokens == references[1]
    assert {b.kind for b in engine.coverage.used} == expected_kinds


def check_pack_weights() -> None:
    model = tiny.make_model("llama").to(torch.bfloat16)
    sizes = [engine_of(model, pack_weights=wanted).fusion.packed_bytes for wanted in (True, False)]
    assert (sizes[0] > 0) == (build.load() or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    assert sizes[1] == 0


def check_fuse_modules() -> None:
    model = tiny.make_model("llama")
    counts = [engine_of(model, fuse_modules=wanted).fusion.fused.total() for wanted in (True, False)]
    assert (counts[0] > 0) == has_native_kernels()
    assert counts[1] == 0


def check_strict_shapes() -> None:
    hints: WorkloadHints = {"max_prompt_length": 4, "max_generated_length": 4, "num_requests": 1}
    for strict in (False, True):
        engine = engine_of(hints=hints, strict_shapes=strict, pad_decode_batches=True)
        engine.warmup()
        engine.add_request(PROMPT * 4, GREEDY)  # longer than announced
        if strict:
            with pytest.raises(cb_engine.ShapeNotWarmedError):
                run(engine)
        else:
            assert run(engine)["req_0"].generated_tokens == expected(PROMPT * 4, 8)
            assert sum(engine.coverage.missed.values()) > 0


def check_attention_backend() -> None:
    assert engine_of(attention_backend="torch")._runner._backend.name == "torch"
    with pytest.raises(ValueError, match="attention_backend"):
        EngineConfig(attention_backend="flash")  # type: ignore[arg-type]


def check_fake_static_device() -> None:
    model, prompts, references = tiny.family("llama")
    engine = engine_of(model, fake_static_device=True, max_num_seqs=2, max_model_len=48)
    engine.warmup()
    engine.add_request(prompts[1], SamplingParams(temperature=0.0, max_tokens=tiny.NEW_TOKENS))
    assert run(engine)["req_0"].generated_tokens == references[1]
    assert engine._runner.executor.is_static


def check_scheduler_type() -> None:
    lengths = []
    for kind in ("fifo", "prefill_first"):
        engine = engine_of(scheduler_type=kind, max_num_batched_tokens=4, max_num_seqs=2)
        engine.add_request([1, 2], GREEDY, request_id="decoding", streaming=True)
        engine.step()
        engine.add_request([3] * 12, GREEDY)
        seen = [len(o.generated_tokens) for _ in range(3) for o in engine.step() if o.request_id == "decoding"]
        lengths.append(len(seen))
    assert lengths == [3, 1], "with prefill_first the prompt's later chunks take the whole budget"


def check_max_queue_size() -> None:
    # One prompt fills a step, so that those behind it wait although there are seats.
    engine = engine_of(max_queue_size=2, max_num_seqs=3, max_num_batched_tokens=8, max_prefill_chunk=8)
    prompts = iter([first, *range(10, 17)] for first in range(30, 50))
    long = SamplingParams(temperature=0.0, max_tokens=20)
    for _ in range(5):
        engine.add_request(next(prompts), long)
    for num_running in (0, 1, 2, 3):
        assert engine.stats().num_running == num_running
        with pytest.raises(cb_engine.QueueFullError, match="2 requests wait already, max_queue_size is 2"):
            engine.add_request(next(prompts), long)
        while engine.stats().num_running == num_running < 3:
            engine.step()
    run(engine)
    engine.add_request(next(prompts), long)


def check_max_queued_tokens() -> None:
    engine = engine_of(max_queued_tokens=len(PROMPT) + 1)
    for _ in range(2):
        engine.add_request(PROMPT, GREEDY)
    assert engine.num_queued_tokens == 2 * len(PROMPT)
    with pytest.raises(cb_engine.QueueFullError, match="max_queued_tokens is 6"):
        engine.add_request(PROMPT, GREEDY)
    run(engine)
    assert engine.num_queued_tokens == 0


def check_running_on_weight_change() -> None:
    ends = []
    for policy in ("recompute", "continue", "abort"):
        engine = engine_of(running_on_weight_change=policy)
        engine.add_request(PROMPT, GREEDY)
        engine.step()
        engine.weights_changed()
        output = run(engine)["req_0"]
        ends.append((output.finish_reason, output.num_preemptions))
    assert ends == [("length", 1), ("length", 0), ("abort", 0)]


def check_seed() -> None:
    free = RANDOM.clone(seed=None)
    assert tokens(free, seed=1) == tokens(free, seed=1) != tokens(free, seed=2)


ENGINE: dict[str, Callable[[], None]] = {
    "block_size": check_block_size,
    "num_blocks": lambda: _same(engine_of(num_blocks=7).stats().free_blocks, 7),
    "max_memory_percent": check_max_memory_percent,
    "max_num_seqs": lambda: _differ(steps_to_finish(max_num_seqs=1), steps_to_finish(max_num_seqs=3)),
    "max_num_batched_tokens": lambda: _differ(steps_to_finish(max_num_batched_tokens=12), steps_to_finish()),
    "max_prefill_chunk": lambda: _differ(steps_to_finish(max_prefill_chunk=3), steps_to_finish()),
    "max_model_len": lambda: _same(len(tokens(GREEDY, max_model_len=8)), 3),
    "enable_prefix_caching": check_prefix_caching,
    "decode_fast_path": lambda: _same(kinds_and_sizes(pad_decode_batches=True, decode_fast_path=False), set()),
    "pad_decode_batches": lambda: _same(kinds_and_sizes(pad_decode_batches=True), {(StepKind.DECODE, 4)}),
    "compile": lambda: check_compile("compile", {StepKind.DECODE}),
    "compile_prefill": lambda: check_compile("compile_prefill", {StepKind.PREFILL}),
    "compile_options": lambda: check_compile("compile", {StepKind.DECODE}),
    "pack_weights": check_pack_weights,
    "fuse_modules": check_fuse_modules,
    "strict_shapes": check_strict_shapes,
    "attention_backend": check_attention_backend,
    "speculative": lambda: _differ(drafted(GREEDY), 0),
    "fake_static_device": check_fake_static_device,
    "scheduler_type": check_scheduler_type,
    "max_queue_size": check_max_queue_size,
    "max_queued_tokens": check_max_queued_tokens,
    "running_on_weight_change": check_running_on_weight_change,
    "return_logprobs": lambda: _same(len(one(GREEDY, return_logprobs=True).logprobs), 8),
    "seed": check_seed,
}


@pytest.mark.parametrize("name", ENGINE)
def test_engine_config(name: str) -> None:
    ENGINE[name]()


def test_every_engine_field_is_checked() -> None:
    assert set(ENGINE) == {f.name for f in dataclasses.fields(EngineConfig)}


# ---- WorkloadHints -------------------------------------------------------------------------------------------------


def sized(**hints: int) -> cb_engine.Engine:
    return engine_of(hints=hints, pad_decode_batches=True)  # type: ignore[arg-type]


def test_hints_size_the_step_and_turn_the_fast_path_on() -> None:
    config = sized(max_prompt_length=10, max_generated_length=6, num_requests=5).config
    assert (config.max_num_seqs, config.expected_blocks_per_seq, config.decode_fast_path) == (5, 4, True)
    for change in ({"max_prompt_length": 14}, {"max_generated_length": 10}):
        hints = {"max_prompt_length": 10, "max_generated_length": 6, **change}
        assert sized(**hints).config.expected_blocks_per_seq == 5
    assert sized(num_requests=3).config.max_num_seqs == 3
    assert set(WorkloadHints.__annotations__) == {"max_prompt_length", "max_generated_length", "num_requests"}


# ---- generate_batch and add_request ---------------------------------------------------------------------------------


@pytest.fixture
def model() -> Any:
    return cb_engine.attach(FakeModel())


def persistent_of(model: Any) -> cb_engine.ContinuousBatchingManager:
    manager = model._cb_engine.persistent
    assert isinstance(manager, cb_engine.ContinuousBatchingManager)
    return manager


def batch(model: Any, **kwargs: Any) -> list[GenerationOutput]:
    return list(model.generate_batch([PROMPT, [3]], **{"max_new_tokens": 4, **kwargs}).values())


def test_generate_batch_arguments(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import GenerationConfig

    assert [len(o.generated_tokens) for o in batch(model)] == [4, 4]
    assert len(batch(model, generation_config=GenerationConfig(num_return_sequences=2, do_sample=True))) == 4
    assert batch(model, continuous_batching_config={"return_logprobs": True})[0].logprobs
    assert batch(model, record_timestamps=True)[0].timestamps
    assert batch(model)[0].timestamps is None
    capsys.readouterr()
    batch(model, progress_bar=True)
    assert "Generating: 100%" in capsys.readouterr().err
    batch(model)
    assert not capsys.readouterr().err
    with pytest.raises(ValueError, match="max_tokens"):
        batch(model, workload_hints={"max_tokens": 3})
    forced = SamplingParams(temperature=0.0, logit_bias={3: 100.0})
    assert batch(model, sampling_params=forced)[0].generated_tokens == [3] * 4
    assert batch(model, sampling_params=[forced, GREEDY])[1].generated_tokens == expected([3], 4)
    with pytest.raises(TypeError, match="max_new_token'"):
        batch(model, max_new_token=3)
    with pytest.raises(TypeError, match="sampling_params"):
        batch(model, sampling_params=forced, do_sample=True)


def test_generate_batch_persistence_and_warmup(model: Any) -> None:
    batch(model, persistent_manager=True)
    manager = persistent_of(model)
    batch(model, persistent_manager=True)
    assert persistent_of(model) is manager
    assert batch(model)[0].generated_tokens == expected(PROMPT, 4)
    batch(model, persistent_manager=True, continuous_batching_config={"block_size": 2})
    assert persistent_of(model) is not manager, "another config asks for another engine"
    model.destroy_cached_continuous_batching_manager()
    assert model._cb_engine.persistent is None
    padded = {"pad_decode_batches": True}
    for warmup in (True, False):
        batch(model, persistent_manager=True, warmup=warmup, continuous_batching_config=padded)
        assert bool(persistent_of(model).coverage().used) == warmup
        model.destroy_cached_continuous_batching_manager()


def test_add_request_arguments(model: Any) -> None:
    with model.continuous_batching_context_manager() as manager:
        add = manager.add_request

        def outputs(**kwargs: Any) -> list[GenerationOutput]:
            return list(manager.request_id_iter(add(PROMPT, **{"max_new_tokens": 4, **kwargs})))

        assert outputs(request_id="mine")[0].request_id == "mine"
        assert [len(o.generated_tokens) for o in outputs(streaming=True)] == [1, 2, 3, 4]
        assert len(outputs(record_timestamps=True)[0].timestamps or []) == 4
        assert outputs(eos_token_id=expected(PROMPT, 2)[1])[0].finish_reason == "stop"
        assert outputs(sampling_params=GREEDY.clone(logit_bias={3: 99.0}))[0].generated_tokens == [3] * 4
        assert outputs(temperature=20.0, seed=3)[0].generated_tokens != expected(PROMPT, 4)
        with pytest.raises(TypeError, match="temprature"):
            outputs(temprature=1.0)


def test_signatures_are_transformers_own() -> None:
    """Same names and defaults in the same positions; what is added comes after, by keyword."""
    from transformers import ContinuousBatchingManager, ContinuousMixin

    pairs: list[tuple[Any, Any]] = [
        (getattr(ContinuousMixin, name), getattr(cb_engine.attach(FakeModel()), name).func)
        for name in ("init_continuous_batching", "continuous_batching_context_manager", "generate_batch")
    ]
    for name in ("add_request", "add_requests", "get_result", "request_id_iter", "cancel_request", "stop", "join"):
        pairs.append((getattr(ContinuousBatchingManager, name), getattr(cb_engine.ContinuousBatchingManager, name)))
    for theirs, ours in pairs:
        own = inspect.signature(ours).parameters
        for position, (name, parameter) in enumerate(inspect.signature(theirs).parameters.items()):
            if parameter.kind is parameter.VAR_KEYWORD:
                continue
            assert list(own)[position] == name, ours
            assert own[name].default == parameter.default, (ours, name)


def test_output_fields_are_transformers_own() -> None:
    from transformers.generation.continuous_batching.requests import GenerationOutput as Theirs
    from transformers.generation.continuous_batching.requests import RequestStatus as TheirStatus

    names = [f.name for f in dataclasses.fields(Theirs)]
    assert [f.name for f in dataclasses.fields(GenerationOutput)][: len(names)] == names
    for status in TheirStatus:
        assert cb_engine.RequestStatus[status.name] == status
