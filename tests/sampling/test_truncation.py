"""Which tokens top_k, top_p and min_p keep, against transformers' warpers, on every path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from cb_engine.sampling import sampler
from cb_engine.sampling.plan import Plan
from tests.sampling.common import kept, make_sampler, peaky, sample, state

VOCABS = [5, 64, 500, 2048]
CASES: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 70},
    {"top_k": 200},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_p": 1e-9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 300, "top_p": 0.95},
    {"temperature": 1.7, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.3, "top_p": 0.95, "min_p": 0.1},
]


def reference(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> dict[int, float]:
    """The log-probabilities of one row that transformers would draw from."""
    scores = TemperatureLogitsWarper(float(temperature))(None, logits.unsqueeze(0))
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1.0:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    logprobs = scores.log_softmax(-1)[0]
    return {i: v for i, v in enumerate(logprobs.tolist()) if v != float("-inf")}


def assert_same(found: dict[int, float], expected: dict[int, float]) -> None:
    assert found.keys() == expected.keys()
    for token_id, logprob in expected.items():
        assert found[token_id] == pytest.approx(logprob, abs=2e-5)


@pytest.mark.parametrize("fields", CASES, ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
def test_the_distribution_is_that_of_transformers(vocab, fields):
    flat = torch.randn(1, vocab, generator=torch.Generator().manual_seed(vocab))
    for logits in (flat, peaky(1, max(vocab, 20))[:, :vocab]):
        output = sample(logits, state(logprobs=vocab, **fields))
        found = kept(output)
        assert_same(found, reference(logits[0], **fields))
        assert sum(torch.tensor(list(found.values())).exp().tolist()) == pytest.approx(1.0, abs=1e-5)
        token_id = output.token_ids.item()
        assert output.logprobs.item() == pytest.approx(found[token_id], abs=1e-6)


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_the_best_tokens_give_what_the_whole_row_gives(fields):
    """The short cut over candidates and the sort of whole rows: the same cut, and the same 50 tokens."""
    logits = torch.cat([peaky(3, 2048), torch.randn(1, 2048, generator=torch.Generator().manual_seed(5))])
    states = [state(seed=row, logprobs=2048, **fields) for row in range(4)]
    short: Any = make_sampler()
    whole: Any = make_sampler()
    whole._plan = Plan.of(states, 2048, logits.device, whole._penalties, native=False)
    whole._plan.candidate_groups.clear()
    whole._plan.whole_groups = whole._plan.group_whole(range(4))
    plan = whole._plan
    for _ in range(50):
        a, b = short(logits, states), whole(logits, states)
        assert whole._plan is plan
        assert a.token_ids.equal(b.token_ids)
        torch.testing.assert_close(a.logprobs, b.logprobs, atol=1e-5, rtol=0)
        for each in states:
            each.output_token_ids.append(0)
    for row in range(4):
        assert_same(kept(a, row), kept(b, row))


def test_only_rows_with_too_few_candidates_are_looked_at_whole(monkeypatch):
    seen = []
    monkeypatch.setattr(sampler, "_draw_from_rows", lambda draft, group: seen.extend(group.rows.host))
    logits = peaky(4, 2048)
    logits[2] = torch.randn(2048, generator=torch.Generator().manual_seed(5))
    sample(logits, *[state(top_p=0.9) for _ in range(4)])
    assert seen == [2]


def test_ties_at_the_edge_stay_together():
    logits = torch.zeros(1, 1000)
    logits[0, 500:] = 1.0
    assert kept(sample(logits, state(top_k=10, logprobs=1000))).keys() == set(range(500, 1000))
    assert kept(sample(logits, state(top_p=0.01, logprobs=1000))).keys() == set(range(500, 1000))
    # As transformers does with top_k, whose ties then all count for top_p.
    expected = reference(logits[0], top_k=10)
    assert_same(kept(sample(logits, state(top_k=10, logprobs=1000))), expected)


def test_few_tokens_left_by_a_mask_need_no_whole_row(monkeypatch):
    monkeypatch.setattr(sampler, "_draw_from_rows", lambda draft, group: pytest.fail("whole row"))
    output = sample(peaky(1, 2048), state(top_k=50, allowed_token_ids=(4, 1000)))
    assert output.token_ids.item() in (4, 1000)


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e30])
@pytest.mark.parametrize("fields", [{}, {"top_k": 5}, {"top_p": 0.9}], ids=str)
def test_no_temperature_overflows(temperature, fields):
    logits = peaky(1, 256) * 1000
    output = sample(logits, state(temperature=temperature, logprobs=0, **fields))
    assert not output.failed.item()
    assert output.logprobs.isfinite().all()
    if temperature < 1:
        assert output.token_ids.item() == logits.argmax().item()
