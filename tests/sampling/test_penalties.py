"""Penalties against transformers' and a plain count, with and without drafts, and whatever becomes of an output."""

from __future__ import annotations

import gc
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from cb_engine.sampling.penalties import Penalties, RowCounts
from cb_engine.sampling.state import SamplingState
from tests.sampling.common import state


def applied(logits: torch.Tensor, *states: SamplingState) -> torch.Tensor:
    scores = logits.clone()
    Penalties().apply(scores, range(len(states)), states)
    return scores


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_repetition_penalty_covers_prompt_and_output_once(penalty):
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    prompt, output = (3, 3, 7, 49), (3, 11, 11)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([[*prompt, *output]]), logits.clone())
    assert applied(logits, state(prompt=prompt, output=output, repetition_penalty=penalty)).equal(expected)


def test_presence_and_frequency_count_the_output_only():
    logits = torch.zeros(2, 10)
    scores = applied(
        logits,
        state(prompt=(1, 2), output=(2, 5, 5), presence_penalty=0.5),
        state(prompt=(1, 2), output=(2, 5, 5), frequency_penalty=0.25),
    )
    assert scores[0].tolist() == [0, 0, -0.5, 0, 0, -0.5, 0, 0, 0, 0]
    assert scores[1].tolist() == [0, 0, -0.25, 0, 0, -0.5, 0, 0, 0, 0]


def test_repetition_comes_before_presence_and_frequency():
    scores = applied(
        torch.full((1, 4), 2.0),
        state(output=(1,), repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25),
    )
    assert scores[0].tolist() == [2.0, 0.25, 2.0, 2.0]


def test_tokens_beyond_the_logits_are_left_out():
    scores = applied(torch.ones(1, 4), state(prompt=(1, 9), output=(7,), repetition_penalty=2.0))
    assert scores[0].tolist() == [1.0, 0.5, 1.0, 1.0]


def test_counts_follow_an_output_that_grows_shrinks_and_changes():
    rng = random.Random(0)
    request = state(prompt=(1, 2), repetition_penalty=1.5, frequency_penalty=0.5)
    penalties = Penalties()
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(1))
    for _ in range(300):
        output = request.output_token_ids
        if rng.random() < 0.2:
            del output[max(0, len(output) - rng.randint(1, 5)) :]
        output.extend(rng.choices(range(30), k=rng.randint(0, 5)))
        scores = logits.clone()
        penalties.apply(scores, [0], [request])
        assert scores.equal(applied(logits, request))


def behind(first: SamplingState, drafts: list[int]) -> SamplingState:
    """The state of the row behind some drafts."""
    return replace(first, output_token_ids=[*first.output_token_ids, *drafts], first=first)


def rows_of(first: SamplingState, drafts: list[int]) -> list[SamplingState]:
    """The states of a request that verifies drafts."""
    return [first, *(behind(first, drafts[:count]) for count in range(1, len(drafts) + 1))]


def counted(part: RowCounts) -> list[dict[int, int]]:
    """What each row of a request has said, and how often."""
    assert len(set(part.tokens.tolist())) == len(part.tokens), "each once"
    return [
        {
            token_id: count
            for at, (token_id, count) in enumerate(zip(part.tokens.tolist(), counts, strict=True))
            if at < part.num_shared or count
        }
        for counts in part.counts.tolist()
    ]


@pytest.mark.parametrize("repetition", [1.0, 1.5])
def test_counts_are_those_of_the_output_whatever_becomes_of_drafts(repetition):
    """Drafts are counted in the rows behind them; the next step keeps some of them, and puts a token in their place.
    Ids from 20 on lie beyond the logits."""
    rng = random.Random(repetition)
    wanted_prompt = {1: 0, 2: 0} if repetition != 1.0 else {}
    for _ in range(10):
        penalties = Penalties()
        requests = [state(prompt=(1, 2, 2, 25), repetition_penalty=repetition, presence_penalty=1.0) for _ in range(3)]
        for _ in range(40):
            all_drafts = [rng.choices(range(23), k=rng.randint(0, 6)) for _ in requests]
            states = [row for pair in zip(requests, all_drafts, strict=True) for row in rows_of(*pair)]
            numbers = sorted(rng.sample(range(50), len(states)))
            parts = penalties.row_counts(numbers, states, 20)
            assert [row for part in parts for row in part.rows] == numbers
            for request, drafts, part in zip(requests, all_drafts, parts, strict=True):
                output = request.output_token_ids
                wanted = [Counter(t for t in [*output, *drafts[:i]] if t < 20) for i in range(len(drafts) + 1)]
                assert counted(part) == [{**wanted_prompt, **each} for each in wanted]
                output += [*drafts[: rng.randint(0, len(drafts))], rng.randrange(23)]
        assert len(penalties._counts) == len(requests), "one count for all rows of a request"


@pytest.mark.parametrize("fields", [{"repetition_penalty": 1.7}, {"frequency_penalty": 0.6, "presence_penalty": 0.3}])
def test_rows_behind_drafts_are_penalised_as_if_the_drafts_had_been_said(fields):
    rng = random.Random(str(fields))
    penalties = Penalties()
    requests = [state(prompt=(1, 2, i), output=(3, 3, i), **fields) for i in range(4)]
    for _ in range(20):
        states = [row for first in requests for row in rows_of(first, rng.choices(range(30), k=rng.randint(0, 5)))]
        logits = torch.randn(len(states), 30, generator=torch.Generator().manual_seed(rng.randrange(99)))
        scores = logits.clone()
        penalties.apply(scores, range(len(states)), states)
        for row, each in enumerate(states):
            alone = state(prompt=tuple(each.prompt_token_ids), output=tuple(each.output_token_ids), **fields)
            assert scores[row : row + 1].equal(applied(logits[row : row + 1], alone))
        for first in requests:
            first.output_token_ids.extend(rng.choices(range(30), k=2))


@pytest.mark.parametrize("num_replaced", [1, 31, 32, 200])
def test_an_output_that_differs_from_what_was_counted_is_counted_anew(num_replaced):
    before = [i % 7 for i in range(300)]
    after = [*before[: 300 - num_replaced], *[10 + i % 3 for i in range(num_replaced)]]
    for shorter in (0, 1):  # it is also found out when the output ends before
        request = state(frequency_penalty=0.5, output=tuple(before))
        penalties = Penalties()
        penalties.apply(torch.zeros(1, 20), [0], [request])
        request.output_token_ids[:] = after[: 300 - shorter]
        logits = torch.ones(1, 20)
        penalties.apply(logits, [0], [request])
        assert logits.equal(applied(torch.ones(1, 20), request))
        (part,) = penalties.row_counts([0], [request], 20)
        assert counted(part) == [Counter(request.output_token_ids)]


def test_only_new_tokens_are_counted():
    class Counting(list):
        touched = 0

        def __getitem__(self, key):
            found = super().__getitem__(key)
            Counting.touched += len(found) if isinstance(key, slice) else 1
            return found

    request = state(frequency_penalty=1.0)
    request.output_token_ids = Counting(range(5000))
    penalties = Penalties()
    penalties.apply(torch.zeros(1, 6000), [0], [request])
    Counting.touched = 0
    request.output_token_ids.append(7)
    penalties.apply(torch.zeros(1, 6000), [0], [request])
    assert Counting.touched < 100
    Counting.touched = 0
    states = rows_of(request, [1, 2, 3, 4])
    penalties.apply(torch.zeros(5, 6000), range(5), states)
    assert Counting.touched < 100, "drafts cost no count of their own"


def test_counts_die_with_their_request():
    penalties = Penalties()
    request = state(output=(1,), presence_penalty=1.0)
    penalties.apply(torch.zeros(1, 4), [0], [request])
    assert len(penalties._counts) == 1
    del request
    gc.collect()
    assert len(penalties._counts) == 0


def test_the_prompt_is_read_for_repetition_only():
    def counted_of(request: SamplingState) -> list[dict[int, int]]:
        return [count for part in Penalties().row_counts([0], [request], 10) for count in counted(part)]

    assert counted_of(state(prompt=(1, 2), presence_penalty=1.0)) == [{}]
    assert counted_of(state(prompt=(2, 1, 2), repetition_penalty=2.0)) == [{1: 0, 2: 0}]
