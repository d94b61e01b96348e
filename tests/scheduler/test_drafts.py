"""Drafts in a plan and in the counter, without a model. Blocks hold 4 tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from scheduler_rig import EOS, Rig

from cb_engine.scheduler.output import ModelOutput, SampledToken


def answer(rig: Rig, tokens: Mapping[str, Sequence[int]]) -> None:
    """What the model samples, for each request as many tokens as it keeps."""
    sampled = {name: [SampledToken(t) for t in ids] for name, ids in tokens.items()}
    rig.scheduler.update_from_output(rig.plan, ModelOutput(sampled))
    rig.blocks.check()


def test_a_decode_verifies_its_drafts_and_moves_over_those_that_are_right():
    rig = Rig()
    request = rig.add(5, "a")
    rig.step({"a": 50})
    rig.scheduler.set_draft(request, [60, 61, 62])
    assert rig.schedule() == {"a": (5, 4)}
    (item,) = rig.plan.scheduled
    assert (item.draft_token_ids, item.samples, item.num_sampled_rows) == ((60, 61, 62), True, 4)
    assert rig.plan.is_verify
    assert not rig.plan.is_decode
    answer(rig, {"a": [60, 61, 99_999]})  # the third was wrong
    assert request.output_token_ids == [50, 60, 61, 99_999]
    assert request.num_computed_tokens == 8 == request.num_tokens - 1
    assert (request.num_draft_tokens, request.num_accepted_tokens) == (3, 2)
    assert request.draft_token_ids == ()
    assert rig.schedule() == {"a": (8, 1)}


def test_a_step_with_a_prompt_verifies_nothing_and_its_drafts_are_of_no_use_afterwards():
    rig = Rig()
    request = rig.add(5, "a")
    rig.step({"a": 50})
    rig.scheduler.set_draft(request, [60, 61])
    rig.add(6, "b")
    assert rig.step({"a": 51}) == {"a": (5, 1), "b": (0, 6)}
    assert request.draft_token_ids == ()
    assert rig.schedule() == {"a": (6, 1), "b": (6, 1)}


def test_drafts_share_what_the_budget_leaves():
    rig = Rig(budget=6)
    a, b = rig.add(2, "a"), rig.add(2, "b")
    rig.step()
    for request in (a, b):
        rig.scheduler.set_draft(request, [60, 61, 62])
    assert rig.schedule() == {"a": (2, 4), "b": (2, 2)}


def test_what_lies_behind_an_end_is_dropped():
    rig = Rig()
    request = rig.add(5, "a")
    rig.step({"a": 50})
    rig.scheduler.set_draft(request, [60, EOS, 62])
    rig.schedule()
    answer(rig, {"a": [60, EOS, 62, 63]})
    assert request.output_token_ids == [50, 60, EOS]
    assert (request.finish_reason, request.stop_reason) == ("stop", EOS)
    assert (request.num_draft_tokens, request.num_accepted_tokens) == (3, 2)
    counters = rig.scheduler.counters
    assert (counters.num_drafts, counters.draft_tokens, counters.accepted_per_position) == (1, 3, [1, 1])


@pytest.mark.parametrize(("num_tokens", "accepted"), [(1, 0), (2, 1), (3, 2), (4, 3), (5, 3)])
def test_what_lies_behind_a_stop_string_is_dropped_and_not_counted(num_tokens: int, accepted: int):
    """The step before has given one token, this one gives three drafts that are right and one more."""
    rig = Rig()
    request = rig.add(5, "a")
    rig.step({"a": 50})
    rig.scheduler.set_draft(request, [60, 61, 62])
    rig.schedule()
    answer(rig, {"a": [60, 61, 62, 63]})
    rig.scheduler.stop_on_text(request, "!", num_tokens)
    assert request.output_token_ids == [50, 60, 61, 62, 63][:num_tokens]
    assert request.num_accepted_tokens == accepted == sum(rig.scheduler.counters.accepted_per_position)
    assert rig.scheduler.counters.generated_tokens == num_tokens


def test_asks_end_where_the_request_does_and_leave_out_who_does_not_want_any():
    rig = Rig()
    rig.add(5, "a", max_tokens=4)
    rig.add(5, "b")
    rig.add(5, "c", speculative=False)
    rig.step()
    asks = rig.scheduler.draftable(5, 9, with_blocks=False)
    assert [(ask.request.request_id, ask.max_tokens) for ask in asks] == [("a", 2), ("b", 5)]
    rig.step()
    rig.step()
    asks = rig.scheduler.draftable(5, 9, with_blocks=False)
    assert [ask.request.request_id for ask in asks][:1] == ["b"], "one token is left to a: no draft could come of use"


def test_nothing_is_drafted_for_a_step_that_will_compute_a_prompt():
    rig = Rig(seqs=2, budget=8)
    rig.add(5, "a")
    rig.step()

    def asked() -> list[str]:
        return [ask.request.request_id for ask in rig.scheduler.draftable(3, 9, with_blocks=True)]

    assert asked() == ["a"]
    rig.add(12, "b", max_tokens=2)
    assert asked() == [], "b will be admitted"
    rig.step()
    assert asked() == [], "half of its prompt is left"
    rig.step()
    rig.add(4, "c")
    assert asked() == ["a"], "c has to wait for b's seat, and one token is left to b"
    rig.step()
    assert asked() == [], "b has ended"


def test_who_waits_for_blocks_keeps_nobody_from_drafting():
    rig = Rig(blocks=6, seqs=4)
    a = rig.add(7, "a")
    rig.step()
    b = rig.add(17, "b")
    assert rig.step() == {"a": (7, 1)}
    assert [ask.request for ask in rig.scheduler.draftable(3, 9, with_blocks=True)] == [a]
    assert not b.num_computed_tokens


def test_nobody_is_preempted_for_drafts_and_newcomers_take_their_blocks_back():
    rig = Rig(blocks=7, seqs=4)
    a, b = rig.add(7, "a"), rig.add(7, "b")
    rig.step()
    assert rig.blocks.num_live_blocks == 4
    asks = rig.scheduler.draftable(6, 9, with_blocks=True)
    # Three blocks are left and two requests run, so one may be given away: it has room for four drafts of a.
    assert [(ask.request.request_id, ask.max_tokens) for ask in asks] == [("a", 4)]
    assert rig.blocks.num_live_blocks == 5
    rig.scheduler.set_draft(a, [60] * 4)
    rig.add(4, "c")
    assert rig.step() == {"a": (7, 1), "b": (7, 1), "c": (0, 4)}
    assert a.num_preemptions == b.num_preemptions == 0


def test_blocks_that_only_drafts_hold_go_before_anybody_is_preempted():
    rig = Rig(blocks=6, seqs=3)
    a, b = rig.add(7, "a"), rig.add(7, "b")
    rig.step()
    rig.scheduler.set_draft(a, [60] * 4)
    rig.schedule()
    assert rig.blocks.num_live_blocks == 4, "two must remain for the two that run"
    rig.answer()
    rig.drain()
    assert (a.num_preemptions, b.num_preemptions) != (0, 0), "six blocks do not hold both to their ends"


@pytest.mark.parametrize("num_right", range(5))
def test_a_request_that_was_preempted_has_no_drafts(num_right: int):
    rig = Rig()
    request = rig.add(5, "a")
    rig.step()
    rig.scheduler.set_draft(request, [60, 61, 62, 63])
    rig.schedule()
    answer(rig, {"a": [60, 61, 62, 63, 64][: num_right + 1]})
    rig.scheduler.set_draft(request, [70])
    rig.scheduler.change_weights(1, "recompute")
    assert request.draft_token_ids == ()
    assert rig.schedule() == {"a": (0, 6 + num_right + 1)}


def test_an_aborted_request_is_not_verified_any_more():
    rig = Rig()
    request = rig.add(5, "a")
    rig.step()
    rig.scheduler.set_draft(request, [60, 61])
    rig.schedule()
    rig.scheduler.abort("a")
    answer(rig, {"a": [60, 61, 62]})
    assert request.output_token_ids == [7]
    assert rig.blocks.num_live_blocks == 0


def test_full_blocks_of_accepted_drafts_are_found_later():
    rig = Rig(caching=True)
    request = rig.add([1, 2, 3], "a")
    rig.step({"a": 4})
    rig.scheduler.set_draft(request, [5, 6, 7, 8, 9])
    rig.schedule()
    answer(rig, {"a": [5, 6, 7, 8, 0]})
    rig.scheduler.abort("a")
    rig.add([1, 2, 3, 4, 5, 6, 7, 8, 9, 9], "b")
    assert rig.schedule() == {"b": (8, 2)}, "both blocks that were right, and no row that was not"
