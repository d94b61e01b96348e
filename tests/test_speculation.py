"""Greedy output with drafts equals that without, token for token: whatever the drafts are, in every setting."""

from __future__ import annotations

from itertools import product
from typing import Any

import drafting
import pytest
import tiny
from fake_model import FakeModel, expected

import cb_engine
from cb_engine import SamplingParams

SETTINGS = [
    {
        "decode_fast_path": fast,
        "enable_prefix_caching": prefix,
        "max_prefill_chunk": chunk,
        "num_blocks": num_blocks,
        "pad_decode_batches": pad,
    }
    for fast, prefix, chunk, (num_blocks, pad) in product(
        (True, False), (True, False), (None, 3, 4), ((None, False), (13, True))
    )
]


def drain(engine: cb_engine.Engine, ids: list[str]) -> list[cb_engine.GenerationOutput]:
    """Runs an engine to the end, checking its books after every step."""
    ended: dict[str, cb_engine.GenerationOutput] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.request_id not in ended
            ended[output.request_id] = output
        engine.check()
    stats = engine.stats()
    assert stats.live_blocks == stats.num_waiting == stats.num_running == 0
    return [ended[i] for i in ids]


def run(engine: cb_engine.Engine, prompts: list[list[int]], **params: Any) -> list[cb_engine.GenerationOutput]:
    engine.warmup()
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": tiny.NEW_TOKENS, **params})
    return drain(engine, [engine.add_request(prompt, sampling)[0] for prompt in prompts])


@pytest.mark.parametrize("guess", drafting.GUESSES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "gpt_oss", "mistral"])
def test_greedy_output_does_not_depend_on_drafts(
    monkeypatch: pytest.MonkeyPatch, family: str, guess: str
) -> None:
    model, prompts, references = tiny.family(family)
    for settings in SETTINGS:
        futures = {tuple(p): r for p, r in zip(prompts, references, strict=True)}
        oracle = drafting.Oracle(futures, drafting.GUESSES[guess])
        config = {"block_size": 4, "attention_backend": "torch", **settings}
        engine = drafting.oracle_engine(
            monkeypatch, oracle, model, config=config, hints={"num_requests": 8, "max_prompt_length": 30}, eos_token_id=-1
        )
        outputs = run(engine, prompts)
        assert [o.generated_tokens for o in outputs] == references, settings
        drafted, accepted = sum(o.num_draft_tokens for o in outputs), sum(o.num_accepted_tokens for o in outputs)
        assert drafted > 0
        assert {"right": accepted == drafted, "wrong": accepted == 0, "random": accepted < drafted}[guess]
        assert len(oracle.ended) == len(prompts)
