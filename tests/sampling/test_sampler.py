"""Every option changes its own row, and its own row only; chance is fair and can be repeated."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from cb_engine.sampling import SamplingState
from cb_engine.sampling_params import SamplingParams
from tests.sampling.common import kept, make_sampler, peaky, sample, state

INF = float("inf")
NAN = float("nan")


def draws(logits: torch.Tensor, count: int, **fields: Any) -> Any:
    """Return `count` tokens sampled from one row of logits, one per seed."""
    states = [state(seed=seed, **fields) for seed in range(count)]
    return sample(logits.expand(count, -1), *states).token_ids


def greedy(logits: torch.Tensor, **fields: Any) -> Any:
    return sample(logits, state(temperature=0, **fields)).token_ids.item()


# -- chance


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2}], ids=str)
def test_draws_follow_the_distribution(fields):
    # Chi-square over 4000 draws and at most 8 tokens; beyond 40 lies 1 in 10^6 at 7 degrees of freedom.
    logits = torch.tensor([[2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5]])
    expected = kept(sample(logits, state(logprobs=8, **fields)))
    counts = draws(logits, 4000, **fields).bincount(minlength=8).tolist()
    chi_square = 0.0
    for token_id, count in enumerate(counts):
        if token_id not in expected:
            assert count == 0
            continue
        mean = 4000 * math.exp(expected[token_id])
        chi_square += (count - mean) ** 2 / mean
    assert chi_square < 40


def test_seed_decides_the_draw():
    logits = torch.zeros(1, 4096)
    assert draws(logits, 64).unique().numel() > 55
    first, again = (sample(logits, state(seed=9)).token_ids for _ in range(2))
    assert first.equal(again)


def test_each_position_has_a_draw_of_its_own():
    logits = torch.zeros(1, 4096)
    request = state(seed=3)
    seen = []
    for _ in range(50):
        seen.append(sample(logits, request).token_ids.item())
        request.output_token_ids.append(seen[-1])
    assert len(set(seen)) > 45
    # Preempted or replayed, a request goes the same way.
    assert [sample(logits, state(seed=3, output=tuple(seen[:n]))).token_ids.item() for n in range(50)] == seen


def test_temperature():
    logits = torch.tensor([[1.0, 0.0]])
    cold, hot = (draws(logits, 2000, temperature=t).float().mean().item() for t in (0.25, 4.0))
    assert cold < 0.05
    assert hot > 0.4


# -- the batch does not matter

MIXED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0.8},
    {"logprobs": 0},
    {"top_p": 0.9, "logprobs": 4},
    {"top_p": 0.999},
    {"top_k": 50, "logprobs": 2, "logprobs_mode": "raw"},
    {"top_k": 100, "top_p": 0.5},
    {"top_k": 500, "top_p": 0.9, "logprobs": 0},
    {"min_p": 0.1, "temperature": 1.5},
    {"repetition_penalty": 1.3, "top_p": 0.8, "logprobs": 1},
    {"frequency_penalty": 0.7, "presence_penalty": 0.1, "temperature": 0},
    {"logit_bias": {5: 3.0, 6: -INF}, "logprobs": 6},
    {"allowed_token_ids": (1, 2, 30, 400), "top_k": 3, "logprobs": 9},
    {"bad_words": ((7,), (3, 8)), "min_tokens": 9, "logprobs": 0},
]


def mixed_states() -> list[Any]:
    return [
        state(seed=row, prompt=(1, 2, 3, row), output=(5, row, 3), eos=(2,), **fields)
        for row, fields in enumerate(MIXED)
    ]


def row_results(sampler: Any, logits: torch.Tensor, states: Sequence[Any]) -> list[Any]:
    """Everything said of each row."""
    output = sampler(logits, states)
    tops = [None] * len(states) if output.top is None else output.top.rows()
    logprobs = [None if s.params.logprobs is None else output.logprobs[row].item() for row, s in enumerate(states)]
    return list(zip(output.token_ids.tolist(), output.failed.tolist(), logprobs, tops, strict=True))


def results(sampler: Any, logits: torch.Tensor, states: Sequence[Any]) -> dict[int, Any]:
    """The same, keyed by the seeds."""
    return {s.seed: found for s, found in zip(states, row_results(sampler, logits, states), strict=True)}


@pytest.mark.parametrize(
    ("vocab", "dtype", "threads"),
    [
        (1000, torch.float32, 1),
        (1000, torch.bfloat16, 1),  # bf16 logits are full of ties
        (2048, torch.float16, 1),
        (2048, torch.float32, 2),
        (40960, torch.float32, 2),  # long enough for torch to share one row among threads
    ],
    ids=str,
)
def test_a_row_is_the_same_to_the_bit_whatever_is_beside_it(vocab, dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        logits = peaky(len(MIXED), vocab).to(dtype)
        logits[5] = torch.randn(vocab, generator=torch.Generator().manual_seed(1)).to(dtype)
        states = mixed_states()
        alone: dict[int, Any] = {}
        for row, each in enumerate(states):
            alone |= results(make_sampler(), logits[row : row + 1], [each])
        rng = random.Random(0)
        shared = make_sampler()
        for _ in range(4):
            rows = rng.sample(range(len(MIXED)), rng.randint(1, len(MIXED)))
            expected = {row: alone[row] for row in rows}
            assert results(shared, logits[rows], [states[row] for row in rows]) == expected
    finally:
        torch.set_num_threads(before)


def test_a_large_batch_is_the_same_as_its_rows():
    logits = peaky(40, 1024)
    states = [state(seed=row, **MIXED[row % 3 + 2] | {"logprobs": 0}) for row in range(40)]
    whole = results(make_sampler(), logits, states)
    for row, each in enumerate(states):
        assert results(make_sampler(), logits[row : row + 1], [each])[row] == whole[row]


def test_logits_are_left_as_they_are():
    for dtype in (torch.float32, torch.bfloat16):
        logits = peaky(len(MIXED), 512).to(dtype)
        before = logits.clone()
        sample(logits, *mixed_states())
        assert logits.equal(before)


def test_a_plan_is_kept_for_the_same_states_in_the_same_order():
    logits = peaky(3, 256)
    states = [state(temperature=0), state(top_k=3), state()]
    sampler = make_sampler()
    sampler(logits, states)
    plan = sampler._plan
    sampler(logits, list(states))
    assert sampler._plan is plan
    for others in ([*states[:2], state()], states[::-1], states[:2]):
        sampler(logits, states)
        plan = sampler._plan
        sampler(logits[: len(others)], others)
        assert sampler._plan is not plan
        assert sampler._plan.requests is not plan.requests


def test_what_is_known_of_requests_serves_however_many_rows_they_have():
    rng = random.Random(0)
    requests = mixed_states()
    sampler = make_sampler()
    known = None
    for step in range(8):
        states = []
        for first in requests:
            drafts = rng.choices(range(1000), k=rng.choice((0, 0, 1, 4)))
            outputs = [[*first.output_token_ids, *drafts[: i + 1]] for i in range(len(drafts))]
            states += [first, *(replace(first, output_token_ids=output, first=first) for output in outputs)]
        logits = peaky(len(states), 1000, step)
        together = row_results(sampler, logits, states)
        for row, each in enumerate(states):
            alone = replace(each, output_token_ids=list(each.output_token_ids), first=None)
            assert row_results(make_sampler(), logits[row : row + 1], [alone]) == [together[row]]
        assert known is None or sampler._plan.requests is known
        known = sampler._plan.requests
        for first in requests:
            first.output_token_ids.append(rng.randrange(1000))


def test_a_strided_view_of_logits():
    wide = peaky(4, 600)
    states = [state(seed=row, frequency_penalty=0.1, output=(3,)) for row in range(2)]
    view = wide[::2, :512]
    assert sample(view, *states).token_ids.equal(sample(view.contiguous(), *states).token_ids)


# -- edits


def test_logit_bias_is_that_of_transformers():
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    bias = {3: 2.5, 10: -4.0, 49: 0.5}
    processor = SequenceBiasLogitsProcessor({(token_id,): value for token_id, value in bias.items()})
    expected = processor(torch.tensor([[1]]), logits).log_softmax(-1)[0]
    found = kept(sample(logits, state(logit_bias=bias, logprobs=50)))
    assert [found[i] for i in range(50)] == pytest.approx(expected.tolist(), abs=1e-5)
    assert greedy(logits, logit_bias={7: 100.0}) == 7


def test_allowed_token_ids():
    logits = torch.zeros(1, 100)
    assert set(draws(logits, 200, allowed_token_ids=(4, 90, 4)).tolist()) == {4, 90}


def test_bad_words_are_those_of_transformers():
    words = [[5], [1, 6], [2, 1, 7], [9, 9, 8], [1, 1]]
    processor = NoBadWordsLogitsProcessor(words)
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(0))
    histories = itertools.product((1, 2, 9), repeat=3)
    for prompt, output in ((h[:n], h[n:]) for h in histories for n in range(4)):
        expected = processor(torch.tensor([[*prompt, *output]]), logits.clone())[0]
        request = state(prompt=prompt, output=output, bad_words=[tuple(w) for w in words], logprobs=12)
        assert kept(sample(logits, request)).keys() == set(torch.where(expected > -INF)[0].tolist())


def test_min_tokens_masks_every_end_until_then():
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(0))
    for length in range(6):
        ids = torch.tensor([[1, 2, 3, *range(length)]])
        processor = MinNewTokensLengthLogitsProcessor(3, 4, [5, 6])
        expected = set(torch.where(processor(ids, logits.clone())[0] > -INF)[0].tolist())
        request = state(
            prompt=(1, 2, 3),
            output=tuple(range(length)),
            eos=(5,),
            stop_token_ids=(6,),
            min_tokens=4,
            logprobs=20,
        )
        assert kept(sample(logits, request)).keys() == expected


def test_min_tokens_wins_over_logit_bias():
    request = state(temperature=0, eos=(3,), logit_bias={3: 100.0}, min_tokens=4, prompt=tuple(range(9)))
    sampler = make_sampler()
    logits = peaky(1, 64)
    for _ in range(5):
        request.output_token_ids.append(sampler(logits, [request]).token_ids.item())
    assert [token_id == 3 for token_id in request.output_token_ids] == [False, False, False, False, True]


def test_bad_words_and_allowed_token_ids_win_over_logit_bias():
    logits = torch.zeros(1, 10)
    assert greedy(logits, logit_bias={3: 100.0}, bad_words=((3,),)) == 0
    assert greedy(logits, logit_bias={3: 100.0}, allowed_token_ids=(8,)) == 8


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"repetition_penalty": 2.0}, 2),
        ({"presence_penalty": 1.5}, 2),
        ({"frequency_penalty": 0.75}, 2),
        ({"repetition_penalty": 1.0}, 1),
        ({"frequency_penalty": 0.25}, 1),
    ],
    ids=str,
)
def test_penalties_take_part(fields, expected):
    logits = torch.tensor([[0.0, 3.0, 2.0, 0.0]])
    assert greedy(logits, output=(1, 1), **fields) == expected


def test_an_eos_beyond_the_logits_is_no_trouble():
    assert greedy(torch.zeros(1, 8), eos=(70,), min_tokens=2) == 0


def test_ids_of_a_padded_vocabulary_are_never_drawn():
    logits = torch.zeros(1, 70)  # padded to 128 inside
    assert draws(logits, 3000).max().item() == 69
    assert draws(logits, 300, top_k=100).max().item() <= 69


# -- what goes wrong


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("fields", MIXED, ids=str)
def test_a_bad_row_fails_alone(bad, fields):
    logits = peaky(3, 512)
    states = [state(seed=row, output=(5,), eos=(2,), **fields) for row in range(3)]
    expected = results(make_sampler(), logits, states)
    logits[1, 77] = bad
    output = sample(logits, *states)
    assert output.failed.tolist() == [False, True, False]
    assert 0 <= output.token_ids[1].item() < 512
    found = results(make_sampler(), logits, states)
    assert (found[0], found[2]) == (expected[0], expected[2])


def test_a_row_all_nan_fails():
    output = sample(torch.full((2, 64), NAN), state(temperature=0), state(top_p=0.5))
    assert output.failed.all()


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": dict.fromkeys(range(10), -INF)},
        {"allowed_token_ids": (3,), "bad_words": ((3,),)},
        {"allowed_token_ids": (2,), "eos": (2,), "min_tokens": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_left_to_choose_from_fails(fields, temperature):
    output = sample(torch.zeros(2, 10), state(temperature=temperature, **fields), state())
    assert output.failed.tolist() == [True, False]


def test_minus_infinity_in_the_logits_is_a_mask():
    logits = torch.zeros(1, 100)
    logits[0, 1:] = -INF
    for fields in MIXED[:12]:
        output = sample(logits, state(**fields))
        assert not output.failed.item()
        assert output.token_ids.item() == 0


def test_rows_and_states_must_match():
    with pytest.raises(ValueError, match="slice off the padding"):
        sample(torch.zeros(4, 8), state())
    with pytest.raises(ValueError, match="one row per state"):
        sample(torch.zeros(8), state())


def test_no_rows_at_all():
    output = sample(torch.zeros(0, 64))
    assert output.token_ids.shape == (0,)
    assert output.logprobs is None


def test_a_state_is_compared_by_identity():
    fields: Any = (0, (), (), frozenset(), ())
    assert SamplingState(SamplingParams(), *fields) != SamplingState(SamplingParams(), *fields)
