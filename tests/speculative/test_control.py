"""The switch, told of a device that is played: it finds what pays, and what does not costs next to nothing."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from cb_engine.speculative.control import Acceptance, DraftController, Mean, StepCosts
from cb_engine.speculative.proposer import Draft

Cost = Callable[[int, int], float]  # (requests, rows) -> seconds


def flat(requests: int, rows: int) -> float:
    """Rows are free: a small batch on a machine that waits for memory."""
    return 0.010 + 0.0001 * rows


def proportional(requests: int, rows: int) -> float:
    """Rows cost all there is: a large batch."""
    return 0.010 * rows


def play(
    controller: DraftController,
    cost: Cost,
    *,
    k: int,
    right: float,
    requests: int = 8,
    steps: int = 2000,
    drafting: float = 0.0,
    seed: int = 0,
) -> tuple[float, float]:
    """Tokens a second with the switch and without any drafts; every draft token is right with probability `right`."""
    rng = random.Random(seed)
    tokens, seconds = 0, 0.0
    lengths, drafts = [0] * requests, [Draft()] * requests
    for _ in range(steps):
        rows = requests + sum(lengths)
        spent = cost(requests, rows) * rng.uniform(0.95, 1.05)
        controller.saw_step(requests, rows, spent)
        for draft, length in zip(drafts, lengths, strict=True):
            hits = 0
            while hits < max(length, min(1, len(draft.token_ids))) and rng.random() < right:
                hits += 1
            tokens += 1 + min(hits, length)
            if draft.token_ids:
                controller.saw_draft(draft.kind, max(1, length), hits)
        seconds += spent
        drafts, lengths = [Draft()] * requests, [0] * requests
        asked, num_tokens = controller.to_draft(requests)
        if asked:
            drafts = [Draft(tuple(range(num_tokens)))] * asked + [Draft()] * (requests - asked)
            seconds += drafting * num_tokens / k
            if drafting:
                controller.saw_drafting(asked, num_tokens, drafting * num_tokens / k)
            lengths = controller.choose(drafts, requests)
    return tokens / seconds, requests / cost(requests, requests)


def controller(k: int = 3, *, fixed: bool = False, costs_time: bool = False) -> DraftController:
    return DraftController(k, adaptive=True, fixed_width=fixed, costs_time=costs_time)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("costs_time", [False, True])
def test_what_pays_is_found(fixed: bool, costs_time: bool) -> None:
    drafting = 0.001 if costs_time else 0.0
    rate, plain = play(controller(fixed=fixed, costs_time=costs_time), flat, k=3, right=0.8, drafting=drafting)
    assert rate > 2.0 * plain


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(("cost", "right", "drafting"), [(proportional, 0.5, 0.0), (flat, 0.0, 0.0), (flat, 0.3, 0.02)])
def test_what_does_not_pay_costs_little(fixed: bool, cost: Cost, right: float, drafting: float) -> None:
    switch = controller(fixed=fixed, costs_time=drafting > 0)
    rate, plain = play(switch, cost, k=3, right=right, drafting=drafting)
    assert rate > 0.97 * plain


@pytest.mark.parametrize("right", [0.6, 0.7, 0.8])
@pytest.mark.parametrize("costs_time", [False, True])
def test_a_wide_step_that_is_nearly_free_is_tried(right: float, costs_time: bool) -> None:
    """Nine rows for each of eight requests in 1.6 times the time of one: nobody can know before it was tried."""
    drafting = 0.001 if costs_time else 0.0
    rate, plain = play(controller(8, fixed=True, costs_time=costs_time), flat, k=8, right=right, drafting=drafting)
    best = sum(right**i for i in range(9)) * flat(8, 8) / (flat(8, 72) + drafting)
    assert rate > 0.9 * best * plain


def test_a_wide_step_that_costs_all_there_is_is_tried_seldom() -> None:
    for steps in (200, 2000):
        switch = controller(8, fixed=True)
        rate, plain = play(switch, proportional, k=8, right=0.7, steps=steps)
        assert rate > 0.95 * plain


@pytest.mark.parametrize("requests", [1, 3, 32, 256])
def test_the_choice_is_the_best_there_is_by_what_is_known(requests: int) -> None:
    """Against every possible number of draft tokens, by figures of three widths; cheap enough for every step."""
    switch, k = controller(8), 8
    for rows, seconds in ((requests, 0.010), (2 * requests, 0.011), (4 * requests, 0.018), (9 * requests, 0.05)):
        for _ in range(3):
            switch.saw_step(requests, rows, seconds)
    for kind in range(5):
        for _ in range(20):
            switch.saw_draft(kind, k, kind + 1)
    drafts = [Draft(tuple(range(k)), i % 5) for i in range(requests)]
    chosen = sum(switch.choose(drafts, requests))
    ranked = sorted((p for d in drafts for p in switch.acceptance.odds(d.kind, k)), reverse=True)
    rates = [requests / 0.010] + [
        (requests + sum(ranked[:n])) / (0.010 * switch.costs.ratios(requests, [requests + n])[0])
        for n in range(1, len(ranked) + 1)
    ]
    assert rates[chosen] > 0.98 * max(rates)
    assert chosen > 0


def test_it_switches_on_again_when_drafts_begin_to_be_right() -> None:
    for costs_time in (False, True):
        switch = controller(costs_time=costs_time)
        drafting = 0.001 if costs_time else 0.0
        rate, plain = play(switch, flat, k=3, right=0.0, steps=600, drafting=drafting)
        assert rate < 1.05 * plain
        play(switch, flat, k=3, right=0.9, steps=1500, drafting=drafting)  # till it is noticed
        rate, plain = play(switch, flat, k=3, right=0.9, steps=500, drafting=drafting)
        assert rate > 2.0 * plain


def test_one_slow_step_does_not_switch_it_off() -> None:
    """The first step with drafts meets code that has never run, and takes three times as long as it should."""
    slow = iter([0.03])
    rate, plain = play(controller(), lambda b, r: next(slow, 0.01) if r > b else 0.01, k=3, right=0.8)
    assert rate > 2.0 * plain


def test_drafts_are_cut_where_rows_begin_to_cost() -> None:
    """Eight rows are free and each further one costs an eighth: what is chosen stays at eight."""

    def cost(requests: int, rows: int) -> float:
        return 0.01 * max(1.0, 1 + (rows - 8) / 4)

    switch = controller(k=15)
    play(switch, cost, k=15, right=0.8, requests=1, steps=500)
    (length,) = switch.choose([Draft(tuple(range(15)))], 1)
    assert 5 <= length <= 8


def test_better_drafts_go_first() -> None:
    switch = controller(k=2)
    for _ in range(50):
        switch.saw_step(4, 4, 0.010)
        switch.saw_step(4, 6, 0.0105)
        switch.saw_step(4, 8, 0.030)
        switch.saw_draft(9, 2, 2)
        switch.saw_draft(1, 2, 0)
    assert switch.choose([Draft((1, 2), 1), Draft((1, 2), 9), Draft(), Draft((3, 4), 1)], 4) == [0, 2, 0, 0]


def test_without_adaptation_everything_is_verified() -> None:
    switch = DraftController(3, adaptive=False, fixed_width=False, costs_time=True)
    assert switch.to_draft(5) == (5, 3)
    assert switch.choose([Draft((1, 2, 3)), Draft((4,)), Draft()], 3) == [3, 1, 0]


def test_nothing_is_verified_before_there_is_a_plain_step_to_compare_with() -> None:
    switch = controller()
    assert switch.to_draft(5) == (5, 3), "it costs nothing"
    assert switch.choose([Draft((1, 2))], 2) == [0]
    switch.saw_step(2, 2, 0.01)
    assert switch.choose([Draft((1, 2))], 2) == [2]


def test_a_proposer_that_costs_time_is_probed_with_single_tokens_which_are_not_verified() -> None:
    switch = controller(costs_time=True)
    for _ in range(3):
        assert switch.to_draft(5) == (2, 1)
        switch.saw_drafting(2, 1, 0.0001)
        assert switch.choose([Draft((1,)), Draft((2,))], 5) == [0, 0]
        switch.saw_step(5, 5, 0.01)
        switch.saw_draft(0, 1, 1)
    assert switch.to_draft(5) == (5, 3), "all six were right"
    switch.saw_drafting(5, 3, 0.0005)
    assert min(switch.choose([Draft((1, 2, 3))] * 5, 5)) > 0


@pytest.mark.parametrize("requests", [1, 8])
def test_a_short_run_with_a_useless_drafter_loses_little(requests: int) -> None:
    """200 steps, a drafter that takes as long as a step and is always wrong."""
    for k in (2, 3, 8):
        switch = controller(k, costs_time=True)
        rate, plain = play(switch, flat, k=k, right=0.0, requests=requests, steps=200, drafting=0.010)
        assert rate > 0.965 * plain


def test_odds_are_those_observed_and_fall_along_a_draft() -> None:
    acceptance = Acceptance()
    rng = random.Random(0)
    for _ in range(2000):
        hits = 0
        while hits < 4 and rng.random() < (0.9, 0.5, 0.8, 0.2)[hits]:
            hits += 1
        acceptance.add(0, 4, hits)
    odds = acceptance.odds(0, 6)
    assert odds[:4] == pytest.approx([0.9, 0.45, 0.36, 0.072], abs=0.12)
    assert odds == sorted(odds, reverse=True)
    assert len(odds) == 6
    # An unknown kind is hoped to be as good as the next lower one.
    acceptance.add(2, 1, 0)
    assert acceptance.odds(1, 1)[0] == pytest.approx(0.9, abs=0.1)


def test_costs_between_and_beyond_what_was_measured() -> None:
    costs = StepCosts()
    assert costs.plain(3) is None
    costs.add(4, 8, 9.0)  # nothing to relate it to yet
    costs.add(4, 4, 1.0)
    costs.add(4, 4, 1.0)
    assert costs.plain(5) == 1.0
    assert costs.ratios(4, [8]) == [1.0], "unknown rows may be free, up to twice as many"
    assert costs.ratios(4, [16]) == [2.0]
    costs.add(4, 8, 1.5)
    assert costs.ratios(4, [8]) == [1.5]
    assert costs.ratios(4, [6]) == [1.25]
    assert costs.ratios(4, [16]) == [1.5]
    assert costs.ratios(4, [32]) == [3.0]
    costs.forget(4)
    assert costs.ratios(4, [8]) == [1.0]


def test_a_mean_is_not_spoilt_by_an_outlier() -> None:
    mean = Mean()
    for value in (5.0, 1.0, 1.0, 1.0):
        mean.add(value)
    assert mean.value == 1.0
    mean.add(100.0)
    assert mean.value < 1.3
