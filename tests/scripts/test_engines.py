"""Each engine of the benchmark runs each kind of workload, and gives the tokens it owes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.engines import make_engines
from bench.workloads import Workload
from cb_engine.models import load_model

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
PLAIN = Workload("gsm8k_default", PROMPTS, 6)
SAMPLING = Workload("multi_return_seq", PROMPTS, 6, temperature=0.8, top_p=0.9, n=2)
POOL = Workload("few_blocks", PROMPTS, 6, pool_tokens=4096)


@pytest.mark.parametrize("work", [PLAIN, SAMPLING], ids=["greedy", "n=2"])
@pytest.mark.parametrize("name", ["cb_engine", "static"])
def test_every_sample_gets_all_its_tokens(tiny_model: Path, name: str, work: Workload) -> None:
    (engine,) = make_engines([name], static_batch=4)
    assert engine.cannot(work) is None
    outcome = engine.run(load_model(str(tiny_model))[0], work, 0)
    assert outcome.tokens == work.expected_tokens
    assert outcome.seconds > 0


@pytest.mark.parametrize("name", ["cb_engine", "transformers"])
def test_a_small_pool(tiny_model: Path, name: str) -> None:
    (engine,) = make_engines([name])
    assert engine.run(load_model(str(tiny_model))[0], POOL, 0).tokens == POOL.expected_tokens


def test_the_general_path(tiny_model: Path) -> None:
    work = Workload("gsm8k_no_fast_decode", PROMPTS, 6, fast_decode=False)
    (engine,) = make_engines(["cb_engine"])
    assert engine.run(load_model(str(tiny_model))[0], work, 0).tokens == work.expected_tokens


def test_rows_that_padded_generate_does_not_have() -> None:
    (engine,) = make_engines(["static"])
    assert "no block pool" in (engine.cannot(POOL) or "")
    assert "one path only" in (engine.cannot(Workload("gsm8k_no_fast_decode", PROMPTS, 6, fast_decode=False)) or "")
    assert engine.cannot(Workload("gsm8k_compile", PROMPTS, 6, compile=True)) is not None
    assert engine.cannot(Workload("rollouts_1024", PROMPTS, 6, compile=None)) is None


def test_engines_keep_the_given_order_and_are_known() -> None:
    assert [e.name for e in make_engines(["static", "cb_engine", "static"])] == ["static", "cb_engine"]
    with pytest.raises(ValueError, match="unknown engine 'vllm'; known ones: cb_engine, transformers, static"):
        make_engines(["vllm"])
