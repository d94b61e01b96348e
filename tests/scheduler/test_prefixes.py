"""Prompts that begin alike: cached prefixes, forks of siblings, and waiting for a prompt under way."""

from __future__ import annotations

import pytest
from scheduler_rig import Rig

from cb_engine.request import Status
from cb_engine.scheduler.scheduler import make_fork_groups


def test_a_cached_prefix_is_not_computed_again():
    rig = Rig(caching=True)
    rig.add(10, "a", max_tokens=1)
    rig.step()
    b = rig.add(10, "b", max_tokens=1)
    assert rig.step() == {"b": (8, 2)}
    assert b.num_cached_tokens == 8
    assert rig.scheduler.counters.prefix_hit_tokens == 8


def test_a_preempted_request_finds_its_own_blocks_again_and_they_are_no_cached_tokens():
    rig = Rig(caching=True)
    request = rig.add(10, "a")
    rig.step()
    rig.scheduler.change_weights(0, "recompute")  # the same version: only the preemption matters here
    assert rig.step() == {"a": (8, 3)}
    assert request.num_cached_tokens == 0
    assert rig.scheduler.counters.prefix_hit_tokens == 0


@pytest.mark.parametrize("caching", [False, True])
def test_siblings_wait_for_the_prompt_and_then_fork_it(caching: bool):
    rig = Rig(budget=8, caching=caching)
    rig.add_group(11, 3)
    assert rig.step() == {"r1": (0, 8)}
    assert rig.step() == {"r1": (8, 2)}  # the last token waits for the siblings; nobody recomputes what r1 does
    assert rig.step() == {"r1": (10, 1), "r2": (10, 1), "r3": (10, 1)}
    # r2 and r3 each copied the third block, which r1 goes on writing into.
    [table] = rig.plan.block_tables
    assert len({tuple(row[:2]) for row in table.tolist()}) == 1
    assert len({row[2] for row in table.tolist()}) == 3
    assert {(c.src, c.dst) for c in rig.plan.block_copies} == {(table[0, 2], table[1, 2]), (table[0, 2], table[2, 2])}


def test_a_forked_prompt_counts_as_cached():
    rig = Rig()
    _, sibling = rig.add_group(11, 2)
    rig.step()
    rig.step()
    assert sibling.num_cached_tokens == 10


def test_a_prompt_of_one_token_needs_no_fork():
    rig = Rig()
    rig.add_group(1, 2)
    rig.drain()


def test_others_may_pass_while_siblings_wait():
    rig = Rig(budget=8)
    rig.add_group(11, 2)
    rig.add([1, 2], "other")
    rig.step()
    assert rig.step() == {"r1": (8, 2), "other": (0, 2)}


@pytest.mark.parametrize("caching", [False, True])
def test_when_the_leader_is_aborted_in_its_prompt_another_takes_over(caching: bool):
    rig = Rig(budget=8, caching=caching)
    leader, second, third = rig.add_group(18, 3, max_tokens=2)
    rig.step()
    rig.scheduler.abort(leader.request_id)
    plan = rig.step()
    assert list(plan) == [second.request_id]
    assert plan[second.request_id][0] == (8 if caching else 0)
    assert third.status is Status.WAITING
    rig.drain()
    assert [r.finish_reason for r in (leader, second, third)] == ["abort", "length", "length"]


@pytest.mark.parametrize(("caching", "start"), [(False, 0), (True, 8)])
def test_siblings_of_a_leader_that_has_finished_compute_for_themselves(caching: bool, start: int):
    rig = Rig(seqs=1, caching=caching)
    leader, sibling = rig.add_group(10, 2, max_tokens=1)
    rig.step()
    rig.step()
    assert leader.is_finished
    assert rig.step() == {sibling.request_id: (start, 10 - start)}
    assert sibling.finish_reason == "length"


def test_siblings_that_end_with_their_first_token_still_compute_the_prompt_once():
    rig = Rig(seqs=50, blocks=200)
    requests = rig.add_group(10, 50, max_tokens=1)
    assert rig.step() == {requests[0].request_id: (0, 9)}
    assert rig.step() == {r.request_id: (9, 1) for r in requests}
    assert all(r.is_finished for r in requests)


def test_any_sibling_that_has_the_prompt_may_be_forked():
    rig = Rig(seqs=2)
    first, second, third = rig.add_group(10, 3, max_tokens=3)
    rig.step()
    rig.step()
    rig.scheduler.abort(first.request_id)
    assert rig.step() == {second.request_id: (10, 1), third.request_id: (9, 1)}


def test_a_sibling_that_the_window_has_passed_computes_for_itself():
    rig = Rig(windows=(None, 4), seqs=2)
    first, second = rig.add_group(9, 2)
    blocker = rig.add([1], "blocker", priority=-1)
    rig.step()
    for _ in range(4):
        rig.step()
    assert second.status is Status.WAITING
    rig.scheduler.abort(blocker.request_id)
    assert rig.step()[second.request_id] == (0, 9)
    assert first.status is Status.RUNNING


def test_a_sibling_that_wants_prompt_logprobs_computes_the_whole_prompt():
    rig = Rig(caching=True)
    _, sibling = rig.add_group(9, 2, prompt_logprobs=0)
    rig.step()
    assert rig.step()[sibling.request_id] == (0, 9)


def test_equal_prompts_with_other_salts_are_no_siblings():
    rig = Rig()
    a, b, c = rig.make(5, cache_salt="x"), rig.make(5, cache_salt="y"), rig.make(5, cache_salt="x")
    make_fork_groups([a, b, c])
    assert a.fork_group is c.fork_group
    assert a.fork_group is not b.fork_group


# ---- part of a block ---------------------------------------------------------------------------------------------


def test_a_prompt_that_leaves_a_cached_one_within_a_block_copies_the_block():
    rig = Rig(caching=True)
    rig.add([1, 2, 3, 4, 5, 6, 7, 8], "a", max_tokens=1)
    rig.step()
    b = rig.add([1, 2, 3, 4, 5, 6, 70, 80, 90], "b", max_tokens=1)
    assert rig.schedule() == {"b": (6, 3)}
    [copy] = rig.plan.block_copies
    assert copy.dst == rig.plan.block_tables[0][0, 1]
    assert copy.src != copy.dst
    rig.answer()
    assert b.num_cached_tokens == 6
    again = rig.add([1, 2, 3, 4, 5, 6, 7, 8, 9], "c", max_tokens=1)  # the block that was copied is still what it was
    assert rig.step() == {"c": (8, 1)}
    assert again.num_cached_tokens == 8


@pytest.mark.parametrize("windows", [(None,), (None, 8), (8,)])
def test_a_pool_too_small_for_the_copy_does_without(windows: tuple[int | None, ...]):
    """Alone, a prompt may take every block there is; the copy would need one more."""
    rig = Rig(caching=True, blocks=3, windows=windows)
    rig.add([1, 2, 3, 4], "a", max_tokens=1)
    rig.step()
    b = rig.add([1, 2, 3, *range(50, 58)], "b", max_tokens=2)
    rig.drain()
    assert (b.finish_reason, b.stop_reason) == ("length", "max_tokens")
    assert b.num_cached_tokens == 0


# ---- prompts that begin like one under way -----------------------------------------------------------------------


def test_a_prompt_waits_for_another_that_begins_like_it():
    rig = Rig(caching=True)
    rig.add([1, 2, 3, 4, 5, 6, 7, 8, 10], "a")
    rig.add([1, 2, 3, 4, 5, 6, 7, 8, 20], "b")
    rig.add([9, 9, 9], "other")
    rig.add([1, 2, 3, 4, 5, 6, 30, 40, 50], "c")
    assert rig.step() == {"a": (0, 9), "other": (0, 3)}
    assert rig.step() == {"a": (9, 1), "other": (3, 1), "b": (8, 1), "c": (6, 3)}
    assert rig.scheduler.counters.prefix_hit_tokens == 14


def test_a_prompt_waits_until_all_it_shares_is_computed():
    rig = Rig(caching=True, budget=8)
    rig.add([*range(20), 100], "a", max_tokens=1)
    rig.add([*range(20), 200], "b", max_tokens=1)
    assert [rig.step() for _ in range(3)] == [{"a": (0, 8)}, {"a": (8, 8)}, {"a": (16, 5)}]
    assert rig.step() == {"b": (20, 1)}


@pytest.mark.parametrize(
    ("options", "caching"),
    [({}, False), ({"cache_salt": "mine"}, True), ({"prompt_logprobs": 0}, True)],
    ids=["no cache", "another salt", "prompt logprobs"],
)
def test_nobody_waits_for_blocks_that_it_cannot_use(options: dict[str, object], caching: bool):
    rig = Rig(caching=caching)
    rig.add([*range(8), 100], "a")
    rig.add([*range(8), 200], "b", **options)
    assert rig.step() == {"a": (0, 9), "b": (0, 9)}


def test_nobody_waits_for_few_tokens():
    rig = Rig(caching=True)
    rig.add([*range(4), *range(100, 140)], "a")
    rig.add([*range(4), *range(200, 240)], "b", max_tokens=1)  # one token in eleven
    rig.schedule()
    assert [s.num_tokens for s in rig.plan.scheduled] == [44, 20]


def test_nobody_waits_for_blocks_of_old_weights():
    rig = Rig(caching=True, budget=8)
    rig.add([*range(12), 100], "a")
    rig.step()
    rig.scheduler.change_weights(1, "continue")
    rig.add([*range(12), 200], "b")
    assert rig.step() == {"a": (8, 5), "b": (0, 3)}


def test_who_waits_goes_on_when_the_one_it_waits_for_is_gone():
    rig = Rig(caching=True, budget=4)
    leader = rig.add([*range(8), 100], "a")
    rig.add([*range(8), 200], "b", max_tokens=1)
    assert rig.step() == {"a": (0, 4)}
    rig.scheduler.abort(leader.request_id)
    assert rig.step() == {"b": (4, 4)}
    rig.drain()


def test_a_line_of_followers_is_served_in_order():
    rig = Rig(caching=True, seqs=2)
    for index in range(6):
        rig.add([*range(8), 100 + index], f"r{index}", max_tokens=2)
    served: list[str] = []
    for _ in range(20):
        served += [name for name in rig.step() if name not in served]
    assert served == [f"r{index}" for index in range(6)]
    assert rig.scheduler.unfinished() == []
    assert rig.scheduler.counters.prefix_hit_tokens == 5 * 8


def test_siblings_of_a_follower_wait_with_it_and_keep_no_seats():
    rig = Rig(caching=True)
    rig.add([*range(8), 100], "a")
    rig.add_group([*range(8), 200], 10)
    rig.add([50, 51, 52], "other")
    assert rig.step() == {"a": (0, 9), "other": (0, 3)}
    rig.drain()


def test_nobody_waits_for_the_less_urgent():
    rig = Rig(caching=True, budget=8)
    rig.add([*range(16), 100], "low", priority=10)
    rig.step()
    rig.add([*range(16), 200], "high", priority=0)
    assert rig.step() == {"low": (8, 8)}  # it has the budget
    rig = Rig(caching=True, budget=12, chunk=8)
    rig.add([*range(16), 100], "low", priority=10)
    rig.step()
    rig.add([*range(16), 200], "high", priority=0)
    assert rig.step() == {"low": (8, 8), "high": (8, 4)}


def test_nobody_waits_for_what_is_computed_already_and_gone():
    """The leader's first blocks are behind its window and evicted: they will not come again."""
    rig = Rig(caching=True, windows=(4,), blocks=12, budget=8, chunk=4)
    rig.add([*range(40), 100], "leader", max_tokens=1)
    for _ in range(5):
        rig.step()
    rig.blocks.reset_prefix_cache()
    rig.add([*range(8), 200, 201], "b", max_tokens=1)
    assert rig.step() == {"leader": (20, 4), "b": (0, 4)}


# ---- blocks that turn out to be spoiled --------------------------------------------------------------------------


@pytest.mark.parametrize("num_common", [8, 6])
def test_who_fails_on_blocks_of_others_gets_another_try_without_them(num_common: int):
    """Whole blocks, and part of one that was copied."""
    rig = Rig(caching=True)
    rig.add([1, 2, 3, 4, 5, 6, 7, 8, 9], "spoiled", max_tokens=0)
    rig.step()
    victim = rig.add([*[1, 2, 3, 4, 5, 6, 7, 8][:num_common], 70, 71], "victim", max_tokens=1)
    assert rig.schedule() == {"victim": (num_common, 2)}
    assert rig.answer(failed=["victim"]) == []
    assert rig.step() == {"victim": (0, num_common + 2)}
    assert (victim.finish_reason, victim.output_token_ids, victim.num_preemptions) == ("length", [7], 1)
    rig.add([*[1, 2, 3, 4, 5, 6, 7, 8][:num_common], 80, 81], "next", max_tokens=1)
    assert rig.step()["next"][0] in (4, num_common), "hits what the victim has computed, or nothing"
    assert rig.blocks.num_live_blocks == 0


def test_who_fails_without_hits_or_twice_has_failed():
    rig = Rig(caching=True)
    alone = rig.add([1, 2, 3, 4, 5], "alone")
    rig.schedule()
    assert rig.answer(failed=["alone"]) == ["alone"]
    assert alone.finish_reason == "error"
    rig.add([1, 2, 3, 4, 5], "first", max_tokens=1)
    rig.step()
    second = rig.add([1, 2, 3, 4, 5], "second")
    rig.schedule()
    assert rig.answer(failed=["second"]) == []
    assert rig.schedule() == {"second": (0, 5)}
    assert rig.answer(failed=["second"]) == ["second"]
    assert (second.finish_reason, second.error) == ("error", "NaN")
