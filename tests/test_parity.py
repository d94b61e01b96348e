"""Greedy `generate_batch` equals `generate`, token for token, in every setting and family."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import tiny

import cb_engine
from cb_engine import EngineConfig, SamplingParams

SETTINGS = [
    pytest.param(
        {
            "decode_fast_path": fast,
            "enable_prefix_caching": prefix,
            "max_prefill_chunk": chunk,
            "num_blocks": num_blocks,
            "pad_decode_batches": pad,
        },
        id=f"fast={fast}-prefix={prefix}-chunk={chunk}-blocks={num_blocks}-pad={pad}",
    )
    for fast, prefix, chunk, (num_blocks, pad) in product(
        (True, False), (True, False), (None, 3, 4), ((None, False), (13, True))
    )
]

ONLY_WINDOWS = ("mistral", "starcoder2")  # a window of 7 holds so few blocks that nothing need be preempted


def run(model: Any, prompts: list[list[int]], **settings: Any) -> tuple[list[list[int]], cb_engine.EngineStats]:
    """Runs an engine to the end, checking its books after every step."""
    config = EngineConfig(**{"block_size": 4, "attention_backend": "torch", **settings})
    engine = cb_engine.Engine(model, config=config, hints={"num_requests": 8, "max_prompt_length": 30}, eos_token_id=-1)
    engine.warmup()
    params = SamplingParams(temperature=0.0, max_tokens=tiny.NEW_TOKENS)
    ids = [engine.add_request(prompt, params)[0] for prompt in prompts]
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.request_id not in tokens
            tokens[output.request_id] = output.generated_tokens
        engine.check()
    stats = engine.stats()
    assert stats.live_blocks == 0
    assert stats.num_waiting == stats.num_running == 0
    return [tokens[i] for i in ids], stats


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_greedy_equals_generate(family: str, settings: dict[str, Any]) -> None:
    model, prompts, references = tiny.family(family)
    tokens, stats = run(model, prompts, **settings)
    assert tokens == references
    if settings["num_blocks"] is not None and family not in ONLY_WINDOWS:
        assert stats.num_preemptions > 0, "the tight pool has to preempt, or it tests nothing"


def run_compiled(model: Any, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    """Static shapes, captured by dynamo; the backend that runs them eagerly keeps this fast."""
    compiled = {"compile": True, "compile_options": {"backend": "eager"}, "strict_shapes": True}
    return run(model, prompts, max_num_seqs=3, max_model_len=48, **compiled, **settings)[0]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_compiled_equals_generate(family: str) -> None:
    model, prompts, references = tiny.family(family)
    assert run_compiled(model, prompts) == references


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [None, 13])
@pytest.mark.parametrize("chunk", [None, 3, 4])
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_compiled_equals_generate_in_every_setting(
    family: str, prefix: bool, chunk: int | None, num_blocks: int | None
) -> None:
    model, prompts, references = tiny.family(family)
    settings = {"enable_prefix_caching": prefix, "max_prefill_chunk": chunk, "num_blocks": num_blocks}
    assert run_compiled(model, prompts, **settings) == references


def test_inductor_equals_generate() -> None:
    model, prompts, references = tiny.family("llama")
    tokens, _ = run(model, prompts, compile=True, max_num_seqs=2, max_model_len=64, block_size=16)
    assert tokens == references


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_native_kernels_equal_generate(family: str) -> None:
    model, prompts, references = tiny.family(family)
    for settings in ({}, {"max_prefill_chunk": 3}, {"num_blocks": 13}):
        tokens, _ = run(model, prompts, attention_backend="auto", **settings)
        assert tokens == references


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_plain_modules_equal_generate(family: str) -> None:
    """Without packed weights and fused modules, which all other tests here have where the kernels can be built."""
    model, prompts, references = tiny.family(family)
    tokens, _ = run(model, prompts, pack_weights=False, fuse_modules=False)
    assert tokens == references
