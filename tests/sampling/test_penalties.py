"""Penalties against transformers' and a plain count, and counts that follow an output that shrinks."""

from __future__ import annotations

import gc
import random
from collections import Counter

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from cb_engine.sampling.penalties import Penalties, TokenCounts
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


def counted(table: TokenCounts) -> dict[int, int]:
    tokens = table.tokens.tolist()
    assert len(set(tokens)) == len(tokens), "each once"
    return dict(zip(tokens, table.counts.tolist(), strict=True))


@pytest.mark.parametrize("repetition", [1.0, 1.5])
def test_counts_are_those_of_the_output_whatever_becomes_of_drafts(repetition):
    """Drafts are counted with the rows behind them; the next step keeps some of them, and puts a token in their place.
    Ids from 20 on lie beyond the logits."""
    rng = random.Random(repetition)
    for _ in range(20):
        request = state(prompt=(1, 2, 2, 25), repetition_penalty=repetition, presence_penalty=1.0)
        table, output = TokenCounts(request, 20), request.output_token_ids
        wanted_prompt = {1: 0, 2: 0} if repetition != 1.0 else {}
        for _ in range(40):
            drafts = rng.choices(range(23), k=rng.randint(0, 6))
            for count in range(len(drafts) + 1):
                assert table.follow([*output, *drafts[:count]])
                wanted = Counter(t for t in [*output, *drafts[:count]] if t < 20)
                assert counted(table) == {**wanted_prompt, **wanted}
            output += [*drafts[: rng.randint(0, len(drafts))], rng.randrange(23)]


@pytest.mark.parametrize("order", [1, -1])
def test_rows_may_be_counted_in_any_order(order):
    request = state(frequency_penalty=1.0, output=tuple(range(7)))
    table = TokenCounts(request, 50)
    for drafts in [[], [9], [9, 9], [9, 9, 3]][::order] * 2:
        assert table.follow([*request.output_token_ids, *drafts])
        assert counted(table) == Counter([*range(7), *drafts])


@pytest.mark.parametrize("num_replaced", [1, 64, 95, 96, 200])
def test_what_differs_further_back_than_is_remembered_is_counted_anew(num_replaced):
    before = [i % 7 for i in range(300)]
    after = [*before[: 300 - num_replaced], *[10 + i % 3 for i in range(num_replaced)]]
    for shorter in (0, 1):  # it is also found out when the output ends before
        request = state(frequency_penalty=0.5, output=tuple(before))
        table, penalties = TokenCounts(request, 20), Penalties()
        assert table.follow(before)
        assert table.follow(after[: 300 - shorter]) == (num_replaced < 96)
        penalties.apply(torch.zeros(1, 20), [0], [request])
        request.output_token_ids[:] = after[: 300 - shorter]
        logits = torch.ones(1, 20)
        penalties.apply(logits, [0], [request])
        assert logits.equal(applied(torch.ones(1, 20), request))
        assert counted(penalties.counts_of(request, 20)) == Counter(request.output_token_ids)


def test_a_short_output_may_change_from_its_first_token_on():
    table = TokenCounts(state(presence_penalty=1.0), 20)
    for output in ([1, 2, 3], [4, 5], [], [6], [7, 1, 1]):
        assert table.follow(output)
        assert counted(table) == Counter(output)


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
    del request.output_token_ids[-4:]
    request.output_token_ids.extend([1, 2])
    penalties.apply(torch.zeros(1, 6000), [0], [request])
    assert Counting.touched < 200


def test_counts_die_with_their_request():
    penalties = Penalties()
    request = state(output=(1,), presence_penalty=1.0)
    penalties.apply(torch.zeros(1, 4), [0], [request])
    assert len(penalties._counts) == 1
    del request
    gc.collect()
    assert len(penalties._counts) == 0


def test_the_prompt_is_read_for_repetition_only():
    assert TokenCounts(state(prompt=(1, 2), presence_penalty=1.0), 10).tokens.tolist() == []
    assert TokenCounts(state(prompt=(2, 1, 2), repetition_penalty=2.0), 10).tokens.tolist() == [1, 2]
