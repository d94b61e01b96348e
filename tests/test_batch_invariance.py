"""With the native kernels, a request's log-probabilities are the same to the bit, whatever shares its steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny
import torch

from cb_engine import Engine, SamplingParams
from cb_engine.native import build

pytestmark = pytest.mark.skipif(not build.load(), reason="the native kernels cannot be built here")


@pytest.fixture(autouse=True)
def _without_matrix_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs that have them use other kernels, which promise less."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)


PROMPTS = tiny.make_prompts((1, 7, 30, 12, 33))
NEW_TOKENS = 12


def results(model: Any, prompts: list[list[int]], **config: Any) -> list[tuple[list[int], list[float], Any]]:
    """Tokens, their log-probabilities and those of the prompt, sampled with seeds."""
    engine = Engine(model, config={"block_size": 16, **config}, eos_token_id=-1)
    params = {"max_tokens": NEW_TOKENS, "logprobs": 0, "prompt_logprobs": 0}
    ids = [
        engine.add_request(prompt, SamplingParams(temperature=index % 2 * 0.9, seed=len(prompt), **params))[0]
        for index, prompt in enumerate(prompts, start=len(prompts[0]) % 2)
    ]
    outputs: dict[str, Any] = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
    return [(outputs[i].generated_tokens, outputs[i].logprobs, outputs[i].prompt_logprobs) for i in ids]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "smollm3"])
def test_results_do_not_depend_on_the_batch(family: str, dtype: torch.dtype) -> None:
    model = copy.deepcopy(tiny.family(family)[0]).to(dtype)
    together = results(model, PROMPTS)
    for config in ({"max_prefill_chunk": 5}, {"num_blocks": 6}, {"max_num_seqs": 2}, {"decode_fast_path": False}):
        assert results(model, PROMPTS, **config) == together, config
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert results(model, PROMPTS) == together
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_prefix_found_in_the_cache_is_what_would_have_been_computed(backend: str) -> None:
    """Whole blocks, parts of blocks that are copied, and prompts that wait for another: the same without, with native
    kernels to the bit."""
    model = tiny.family("llama")[0]
    beginning = tiny.make_prompts((44,))[0]
    ends = tiny.make_prompts((9, 30, 5, 17), seed=7)
    prompts = [beginning[: 44 - 3 * index] + end for index, end in enumerate(ends)]
    results: list[list[tuple[list[int], list[float]]]] = []
    hits: list[int] = []
    for caching in (False, True):
        config = {"block_size": 16, "enable_prefix_caching": caching, "attention_backend": backend}
        engine = Engine(model, config=config, eos_token_id=-1)
        for index, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, logprobs=0)
            engine.add_request(prompt, params, request_id=str(index))
        outputs: dict[str, Any] = {}
        while engine.has_work:
            outputs |= {output.request_id: output for output in engine.step()}
        done = [outputs[str(index)] for index in range(len(prompts))]
        results.append([(o.generated_tokens, o.logprobs if backend == "native" else []) for o in done])
        hits.append(engine.stats().prefix_hit_tokens)
    assert results[0] == results[1]
    assert hits == [0, 41 + 32 + 32]  # 38 and 35 tokens in common leave less than half a block
