"""What each step computes and what its outcome means, with the model's answers made by hand. Blocks hold 4 tokens."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler_rig import EOS, Rig

from cb_engine.outputs import TokenLogprob
from cb_engine.request import Request, Status
from cb_engine.scheduler.output import ModelOutput, SampledToken

Policy = Any  # cb_engine.config.RunningPolicy, for parametrised tests


# ---- the budget --------------------------------------------------------------------------------------------------


def test_a_prompt_is_computed_at_once_and_then_token_by_token():
    rig = Rig()
    request = rig.add(5, "a", max_tokens=3)
    assert rig.step() == {"a": (0, 5)}
    assert request.output_token_ids == [7]
    assert rig.step() == {"a": (5, 1)}
    assert rig.step() == {"a": (6, 1)}
    assert (request.finish_reason, request.stop_reason) == ("length", "max_tokens")
    assert request.output_token_ids == [7, 7, 7]
    assert rig.step() == {}
    assert rig.blocks.num_live_blocks == 0
    assert not rig.scheduler.has_work


def test_prompts_are_cut_to_the_chunk_and_to_the_budget():
    rig = Rig(budget=10, chunk=6)
    rig.add(14, "a")
    rig.add(9, "b")
    assert rig.step() == {"a": (0, 6), "b": (0, 4)}
    assert rig.step() == {"a": (6, 6), "b": (4, 4)}
    assert rig.step() == {"b": (8, 1), "a": (12, 2)}


def test_a_chunk_that_does_not_reach_the_end_of_the_prompt_samples_nothing():
    rig = Rig(budget=4)
    request = rig.add(10, "a")
    rig.schedule()
    assert not rig.plan.scheduled[0].samples
    assert rig.answer() == []
    assert (request.num_computed_tokens, request.output_token_ids) == (4, [])


def test_decodes_come_first_and_a_long_prompt_takes_what_is_left():
    rig = Rig(budget=8)
    for name in ("a", "b", "c"):
        rig.add(2, name)
    rig.step()
    rig.add(100, "long")
    for start in range(0, 50, 5):
        plan = rig.step()
        assert plan == {n: (plan[n][0], 1) for n in ("a", "b", "c")} | {"long": (start, 5)}
        assert list(plan) == ["a", "b", "c", "long"]


def test_a_step_of_single_tokens_is_a_decode_step():
    rig = Rig()
    rig.add(3)
    rig.schedule()
    assert not rig.plan.is_decode
    rig.answer()
    rig.schedule()
    assert rig.plan.is_decode


def test_a_plan_lists_decodes_before_prompts_with_tables_in_the_same_order():
    rig = Rig(windows=(None, 64))
    rig.add(5, "early")
    rig.step()
    rig.add(9, "urgent", priority=-1)
    assert list(rig.schedule()) == ["early", "urgent"]
    for table in rig.plan.block_tables:
        assert table.shape == (2, 3)  # 9 tokens lie in 3 blocks
        assert [(row != 0).sum() for row in table] == [2, 3]


def test_no_more_than_max_num_seqs_run_at_once():
    rig = Rig(seqs=2)
    for name in ("a", "b", "c"):
        rig.add(3, name, max_tokens=2)
    assert list(rig.step()) == ["a", "b"]
    assert (rig.scheduler.num_running, rig.scheduler.num_waiting) == (2, 1)
    assert list(rig.step()) == ["a", "b"]
    assert list(rig.step()) == ["c"]


def test_prefill_first_lets_new_prompts_in_before_decodes():
    rig = Rig(budget=8, prefill_first=True)
    for name in ("a", "b"):
        rig.add(2, name)
    rig.step()
    rig.add(20, "long")
    # On admission a prompt leaves the running decodes their token; once it runs it takes the whole budget.
    assert rig.step() == {"a": (2, 1), "b": (2, 1), "long": (0, 6)}
    assert rig.step() == {"long": (6, 8)}
    assert rig.step() == {"a": (3, 1), "b": (3, 1), "long": (14, 6)}


def test_prefill_first_ends_with_everything_done():
    rig = Rig(blocks=7, budget=8, seqs=3, prefill_first=True, caching=True)
    requests = [rig.add(n, max_tokens=6) for n in (3, 17, 5, 9, 2)]
    rig.drain()
    assert {r.finish_reason for r in requests} == {"length"}
    assert [len(r.output_token_ids) for r in requests] == [6] * 5


# ---- order and preemption ----------------------------------------------------------------------------------------


def test_urgent_requests_are_admitted_first():
    rig = Rig(seqs=1)
    rig.add(2, "late", priority=3)
    rig.add(2, "normal", max_tokens=1)
    rig.add(2, "urgent", priority=-3, max_tokens=1)
    assert [list(rig.step()) for _ in range(3)] == [["urgent"], ["normal"], ["late"]]


def test_nobody_overtakes_the_first_in_line():
    rig = Rig(blocks=4)
    rig.add(8, "running")
    rig.step()
    rig.add(12, "big")  # 3 blocks, and 2 are free
    rig.add(1, "small")
    assert list(rig.step()) == ["running"]


def test_a_request_must_fit_whole_before_its_first_chunk_runs():
    rig = Rig(blocks=4, budget=4)
    rig.add(3, "a")
    rig.step()
    rig.add(16, "b")
    assert list(rig.step()) == ["a"]


def test_admission_leaves_every_running_request_a_block_to_grow():
    rig = Rig(blocks=4)
    rig.add(2, "a")
    rig.step()
    rig.add(9, "b")  # 3 blocks are free: all of them
    assert list(rig.step()) == ["a"]
    rig.scheduler.abort("b")
    rig.add(8, "c")
    assert list(rig.step()) == ["a", "c"]


def test_the_latest_of_the_least_urgent_gives_its_blocks_back():
    rig = Rig(blocks=3)
    for name, priority in (("least-early", 1), ("least-late", 1), ("urgent", 0)):
        rig.add(4, name, priority=priority)
    # Admission in one step looks at the blocks alone: all three fill their block, and each wants another.
    assert list(rig.step()) == ["urgent", "least-early", "least-late"]
    assert rig.step() == {"urgent": (4, 1)}
    assert [r.num_preemptions for r in rig.scheduler.unfinished()] == [1, 1, 0]


def test_a_preempted_request_keeps_its_tokens_and_is_recomputed():
    rig = Rig(blocks=3)
    a = rig.add(4, "a", max_tokens=5)
    b = rig.add(6, "b", max_tokens=4)
    rig.step({"a": 1, "b": 2})
    assert rig.step() == {"a": (4, 1)}  # it took b's second block: b is out
    assert (b.status, b.num_computed_tokens, b.output_token_ids) == (Status.PREEMPTED, 0, [2])
    assert rig.scheduler.counters.num_preemptions == 1
    while not a.is_finished:
        rig.step()
    assert rig.step({"b": 3}) == {"b": (0, 7)}
    assert b.output_token_ids == [2, 3]
    rig.drain()
    assert (b.output_token_ids, b.finish_reason, b.num_preemptions) == ([2, 3, 7, 7], "length", 1)


def test_a_preempted_request_comes_back_before_those_that_arrived_after_it():
    rig = Rig(blocks=3)
    a = rig.add(4, "a", max_tokens=2)
    rig.add(6, "b", max_tokens=4)
    rig.step()
    rig.add(2, "c")
    assert list(rig.step()) == ["a"]
    assert a.is_finished
    assert list(rig.step()) == ["b", "c"]


def test_nobody_is_admitted_in_the_step_of_a_preemption():
    rig = Rig(blocks=4)
    rig.add(4, "a")
    rig.add(9, "b")
    rig.step()
    rig.add(2, "c", priority=-1)
    assert list(rig.step()) == ["a"]  # b left three blocks and a took one of them: c would have had room
    assert rig.blocks.num_free_blocks == 2
    assert list(rig.step()) == ["a", "c"]


def test_a_request_that_cannot_grow_because_it_is_the_least_urgent_preempts_itself():
    rig = Rig(blocks=2)
    rig.add(3, "urgent")
    late = rig.add(4, "late", priority=1)
    rig.step()
    assert rig.step() == {"urgent": (3, 1)}  # it still fits its block; late would need a second one
    assert late.status is Status.PREEMPTED


def test_a_victim_that_was_planned_already_leaves_the_plan():
    rig = Rig(blocks=6, budget=8, chunk=4)
    late = rig.add(2, "late", priority=1)
    rig.step()
    rig.add(16, "urgent")
    rig.add(8, "mid")
    assert rig.step() == {"late": (2, 1), "urgent": (0, 4), "mid": (0, 3)}
    assert rig.step() == {"late": (3, 1), "urgent": (4, 4), "mid": (3, 3)}
    # All six blocks would be held once late has its second; then urgent, whose turn comes later, needs its third.
    assert rig.step() == {"urgent": (8, 4), "mid": (6, 2)}
    assert (late.status, late.output_token_ids) == (Status.PREEMPTED, [7, 7, 7])


def test_a_request_that_outgrows_the_pool_alone_ends_with_a_named_length():
    rig = Rig(blocks=2)
    request = rig.add(3, "a")
    for _ in range(6):
        rig.step()
    assert request.num_tokens == 9  # 8 are in the cache, the ninth would need a third block
    assert rig.step() == {}
    assert (request.finish_reason, request.stop_reason) == ("length", "kv_cache_capacity")
    assert request.output_token_ids == [7] * 6
    assert rig.scheduler.take_ended() == [request]
    assert rig.scheduler.take_ended() == []
    assert rig.blocks.num_live_blocks == 0


def test_an_urgent_newcomer_does_not_preempt_what_runs():
    rig = Rig(blocks=2)
    running = rig.add(8, "a", max_tokens=1)
    rig.schedule()
    rig.add(4, "urgent", priority=-9)
    rig.answer()
    assert running.is_finished
    assert rig.step() == {"urgent": (0, 4)}


@pytest.mark.parametrize("caching", [False, True])
def test_a_long_prompt_is_admitted_to_a_window_pool_that_holds_a_window_and_a_chunk(caching: bool):
    # A window of 8 and chunks of 8 hold at most 15 tokens, 5 blocks; that the prompt has 12 blocks does not matter.
    rig = Rig(windows=(None, 8), blocks=(16, 5), budget=8, seqs=1, caching=caching)
    assert rig.blocks.capacity_shortage(49, chunk=8) is None  # so the intake lets it pass
    request = rig.add(48, max_tokens=3)
    rig.drain()
    assert request.output_token_ids == [7, 7, 7]


def test_a_preempted_request_comes_back_even_if_no_whole_chunk_fits_the_window_pool():
    # Decoding under a window of 4 needs 2 blocks; recomputing 21 tokens in one chunk would need 6, and there are 4.
    rig = Rig(windows=(None, 4), blocks=(11, 4), budget=64, seqs=2)
    assert rig.blocks.capacity_shortage(4, chunk=64) is None  # so the intake lets both pass
    first, second = rig.add(3, max_tokens=25), rig.add(3, max_tokens=25)
    rig.drain()
    assert second.num_preemptions > 0
    assert [r.finish_reason for r in (first, second)] == ["length", "length"]


# ---- aborts ------------------------------------------------------------------------------------------------------


def aborted(rig: Rig, request: Request) -> None:
    """Aborts and verifies that this is the request's only end."""
    assert rig.scheduler.abort(request.request_id) is request
    assert (request.status, request.finish_reason) == (Status.FINISHED, "abort")
    assert rig.scheduler.abort(request.request_id) is None
    assert rig.scheduler.take_ended() == [request]
    assert request not in rig.scheduler.unfinished()
    rig.blocks.check()


def test_abort_while_waiting():
    rig = Rig()
    request = rig.add(5)
    aborted(rig, request)
    assert rig.step() == {}


def test_abort_in_the_middle_of_the_prompt():
    rig = Rig(budget=4)
    request = rig.add(10)
    rig.step()
    aborted(rig, request)
    assert rig.blocks.num_live_blocks == 0
    assert request.output_token_ids == []


def test_abort_while_decoding_keeps_the_tokens():
    rig = Rig()
    request = rig.add(5)
    rig.step()
    rig.step()
    aborted(rig, request)
    assert request.output_token_ids == [7, 7]


def test_abort_while_preempted():
    rig = Rig(blocks=3)
    rig.add(4, "a")
    b = rig.add(6, "b")
    rig.step()
    rig.step()
    assert b.status is Status.PREEMPTED
    aborted(rig, b)
    assert b.output_token_ids == [7]


def test_what_a_step_computed_for_a_request_aborted_meanwhile_is_dropped():
    rig = Rig()
    gone, stays = rig.add(5, "gone"), rig.add(5, "stays")
    rig.step()
    rig.schedule()
    aborted(rig, gone)
    assert rig.answer() == ["stays"]
    assert (gone.output_token_ids, stays.output_token_ids) == ([7], [7, 7])
    assert gone.finish_reason == "abort"


def test_unknown_ids_are_passed_over_and_ids_in_use_refused():
    rig = Rig()
    assert rig.scheduler.abort("nobody") is None
    rig.add(3, "a", max_tokens=1)
    with pytest.raises(ValueError, match="'a' is in use"):
        rig.add(3, "a")
    rig.step()
    rig.add(3, "a")  # it has finished: the id is free again


# ---- ends --------------------------------------------------------------------------------------------------------


def test_eos_ends_a_request_and_is_part_of_its_output():
    rig = Rig()
    request = rig.add(3, "a")
    rig.step()
    rig.step({"a": EOS})
    assert (request.finish_reason, request.stop_reason, request.output_token_ids) == ("stop", EOS, [7, EOS])


def test_eos_as_the_last_allowed_token_is_a_stop_not_a_length():
    rig = Rig()
    request = rig.add(3, "a", max_tokens=2)
    rig.step()
    rig.step({"a": EOS})
    assert (request.finish_reason, request.stop_reason) == ("stop", EOS)


def test_stop_token_ids_end_a_request_also_where_eos_is_ignored():
    rig = Rig()
    request = rig.add(3, "a", ignore_eos=True, stop_token_ids=[11])
    rig.step({"a": EOS})
    assert not request.is_finished
    rig.step({"a": 11})
    assert (request.finish_reason, request.stop_reason) == ("stop", 11)


def test_nothing_stops_a_request_within_min_tokens():
    rig = Rig()
    request = rig.add(3, "a", min_tokens=2, stop_token_ids=[11])
    rig.step({"a": EOS})
    rig.step({"a": 11})
    assert not request.is_finished
    rig.step({"a": 11})
    assert request.output_token_ids == [EOS, 11, 11]
    assert (request.finish_reason, request.stop_reason) == ("stop", 11)


def test_a_limit_set_by_the_model_is_named_so():
    rig = Rig()
    request = rig.make(3, max_tokens=1)
    request.limited_by_model = True
    rig.scheduler.add(request)
    rig.step()
    assert (request.finish_reason, request.stop_reason) == ("length", "max_model_len")


@pytest.mark.parametrize("budget", [64, 2])
def test_max_tokens_0_computes_the_prompt_and_generates_nothing(budget: int):
    rig = Rig(budget=budget)
    request = rig.add(5, max_tokens=0, prompt_logprobs=0)
    rig.drain()
    assert (request.finish_reason, request.output_token_ids) == ("length", [])
    assert len(request.prompt_logprobs) == 5


def test_a_stop_string_wins_over_a_length_met_by_the_same_token():
    rig = Rig()
    request = rig.add(3, max_tokens=1)
    rig.step()
    assert request.finish_reason == "length"
    rig.scheduler.stop_on_text(request, "END", 1)
    assert (request.finish_reason, request.stop_reason) == ("stop", "END")


def test_a_stop_string_ends_a_running_request_and_leaves_other_ends_alone():
    rig = Rig()
    a, b, c = rig.add(3, "a"), rig.add(3, "b"), rig.add(3, "c")
    rig.step({"b": EOS})
    rig.scheduler.stop_on_text(a, "END", 1)
    assert (a.finish_reason, a.stop_reason) == ("stop", "END")
    rig.scheduler.stop_on_text(b, "END", 1)
    assert b.stop_reason == EOS
    rig.scheduler.abort("c")
    rig.scheduler.stop_on_text(c, "END", 1)
    assert (c.finish_reason, c.stop_reason) == ("abort", None)
    assert rig.blocks.num_live_blocks == 0


def test_an_error_ends_its_request_alone_with_what_it_has():
    rig = Rig()
    bad, good = rig.add(3, "bad"), rig.add(3, "good")
    rig.step()
    rig.schedule()
    assert rig.answer(errors={"bad": "it broke"}) == ["bad", "good"]
    assert (bad.finish_reason, bad.error, bad.output_token_ids) == ("error", "it broke", [7])
    assert good.output_token_ids == [7, 7]


def test_logits_that_leave_nothing_to_draw_end_a_request_and_its_step_is_not_cached():
    rig = Rig(caching=True)
    bad = rig.add(8, "bad")
    rig.schedule()
    assert rig.answer(failed=["bad"]) == ["bad"]
    assert (bad.finish_reason, bad.error, bad.output_token_ids) == ("error", "NaN", [])
    assert rig.blocks.num_cached_blocks == 0


def test_fail_ends_a_request_outside_a_step():
    rig = Rig()
    request = rig.add(3)
    rig.scheduler.fail(request, "the engine broke")
    assert (request.finish_reason, request.error) == ("error", "the engine broke")
    assert rig.scheduler.has_work  # it is still to be delivered
    assert rig.scheduler.take_ended() == [request]
    assert not rig.scheduler.has_work


def test_unfinished_lists_all_in_order_of_arrival():
    rig = Rig(seqs=1)
    requests = [rig.add(2, priority=-i) for i in range(3)]
    rig.step()
    assert rig.scheduler.unfinished() == requests


# ---- weights -----------------------------------------------------------------------------------------------------


def two_running_one_waiting(**options: Any) -> tuple[Rig, Request, Request, Request]:
    """One decoding, one in its prompt, one waiting."""
    rig = Rig(seqs=2, budget=6, **options)
    decoding, prefilling, waiting = rig.add(5, "d"), rig.add(range(200, 220), "p"), rig.add(range(300, 304), "w")
    rig.step()
    rig.step()
    assert (prefilling.num_computed_tokens, waiting.status) == (6, Status.WAITING)
    return rig, decoding, prefilling, waiting


def test_recompute_starts_running_requests_anew_and_keeps_their_tokens():
    rig, decoding, _, _ = two_running_one_waiting(caching=True)
    rig.scheduler.change_weights(1, "recompute")
    assert rig.blocks.num_live_blocks == 0
    assert rig.step() == {"d": (0, 6)}  # 5 prompt tokens and 2 outputs: nothing computed before is used
    assert rig.step({"d": 8}) == {"d": (6, 1), "p": (0, 5)}
    assert decoding.output_token_ids == [7, 7, 8]
    assert decoding.weight_versions == [0, 0, 1]
    rig.drain()


def test_continue_goes_on_where_it_was():
    rig, decoding, _, _ = two_running_one_waiting(caching=True)
    rig.scheduler.change_weights(1, "continue")
    assert rig.step() == {"d": (6, 1), "p": (6, 5)}
    assert decoding.weight_versions == [0, 0, 1]
    rig.drain()


def test_continue_caches_nothing_of_requests_that_ran_through_the_change():
    rig = Rig(caching=True)
    old = rig.add(12, max_tokens=6)
    rig.step()
    rig.scheduler.change_weights(1, "continue")
    rig.drain()
    assert old.finish_reason == "length"
    same = rig.add(12, "same", max_tokens=1)
    assert rig.step() == {"same": (0, 12)}
    assert same.num_cached_tokens == 0


def test_abort_ends_what_runs_and_leaves_what_waits():
    rig, decoding, prefilling, waiting = two_running_one_waiting()
    rig.scheduler.change_weights(1, "abort")
    assert rig.scheduler.take_ended() == [decoding, prefilling]
    assert (decoding.finish_reason, decoding.output_token_ids) == ("abort", [7, 7])
    assert rig.step() == {"w": (0, 4)}
    assert waiting.weight_versions == [1]


@pytest.mark.parametrize("policy", ["recompute", "continue", "abort"])
def test_a_prefix_of_older_weights_is_not_hit(policy: Policy):
    rig = Rig(caching=True)
    rig.add(12, max_tokens=1)
    rig.step()
    waiting = rig.add(12, "waiting", max_tokens=1)  # its hashes may be known already
    rig.blocks.match_prefix(waiting)
    rig.scheduler.change_weights(1, policy)
    assert rig.step() == {"waiting": (0, 12)}


def test_after_continue_a_sibling_does_not_fork_the_old_weights_keys_and_values():
    rig = Rig(seqs=2, caching=True)
    _, sibling = rig.add_group(10, 2, max_tokens=20)
    rig.add([1], "blocker", priority=-1)
    rig.step()
    rig.scheduler.change_weights(1, "continue")
    rig.scheduler.abort("blocker")
    # The sibling starts under the new weights; the leader's blocks were computed under the old ones.
    assert rig.step()[sibling.request_id] == (0, 10)


def test_after_continue_no_old_keys_and_values_become_findable_through_a_fork():
    rig = Rig(seqs=2, caching=True)
    _, sibling = rig.add_group(10, 2, max_tokens=4)
    rig.add([1], "blocker", priority=-1)
    rig.step()
    rig.scheduler.change_weights(1, "continue")
    rig.scheduler.abort("blocker")
    forked = rig.step()[sibling.request_id] != (0, 10)
    rig.drain()
    rig.add(10, "fresh", max_tokens=1)  # puts the first two blocks into the cache, computed under the new weights
    rig.step()
    probe = rig.add([*sibling.token_ids[:12], 5], "probe", max_tokens=1)
    rig.step()
    # A forked third block holds the old keys and values of tokens 8 and 9.
    assert probe.num_cached_tokens == (8 if forked else 12)


# ---- prompt logprobs ---------------------------------------------------------------------------------------------


def positions(request: Request) -> list[float | None]:
    """What each prompt token's entry says of its position (the rig's model answers -position)."""
    return [None if entry is None else -entry[0].logprob for entry in request.prompt_logprobs]


@pytest.mark.parametrize("budget", [1, 3, 4, 9, 64])
def test_prompt_logprobs_of_all_chunks_add_up(budget: int):
    rig = Rig(budget=budget)
    request = rig.add(9, max_tokens=3, prompt_logprobs=0)
    rig.drain()
    assert positions(request) == [None, 1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_prompt_logprobs_of_a_recomputed_prompt_are_there_once(steps: int):
    rig = Rig(budget=4, caching=True)
    request = rig.add(9, max_tokens=4, prompt_logprobs=0)
    for _ in range(steps):
        rig.step()
    rig.scheduler.change_weights(1, "recompute")
    rig.drain()
    assert positions(request) == [None, 1, 2, 3, 4, 5, 6, 7, 8]


def test_prompt_logprobs_of_a_prompt_of_one_token():
    rig = Rig()
    request = rig.add(1, max_tokens=1, prompt_logprobs=0)
    rig.drain()
    assert positions(request) == [None]


# ---- what is recorded per token ----------------------------------------------------------------------------------


def test_logprobs_and_counters_are_recorded_per_token():
    rig = Rig()
    request = rig.add(3, "a", max_tokens=2)
    for value in (-0.5, -0.25):
        rig.schedule()
        entry = [TokenLogprob(7, value, 1)]
        rig.scheduler.update_from_output(rig.plan, ModelOutput({"a": [SampledToken(7, value, entry)]}))
    assert request.logprobs == [-0.5, -0.25]
    assert [e[0].logprob for e in request.top_logprobs] == [-0.5, -0.25]
    counters = rig.scheduler.counters
    assert (counters.prompt_tokens, counters.generated_tokens) == (3, 2)


def test_timestamps_are_recorded_where_wanted():
    rig = Rig()
    request = rig.make(3, max_tokens=3)
    request.record_timestamps = True
    other = rig.add(3, max_tokens=3)
    rig.scheduler.add(request)
    rig.drain()
    assert len(request.timestamps) == 3
    assert request.timestamps == sorted(request.timestamps)
    assert other.timestamps == []
    assert request.created_time <= request.first_scheduled_time <= request.finished_time
