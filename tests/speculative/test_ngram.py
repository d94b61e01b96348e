"""Prompt lookup against a search in plain loops, and what it keeps of a request."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest

from cb_engine.request import Request
from cb_engine.sampling_params import SamplingParams
from cb_engine.speculative.ngram import NgramProposer, read_on
from cb_engine.speculative.proposer import NO_DRAFT, Draft, DraftAsk


def make_request(prompt: Sequence[int], name: str = "r") -> Request:
    return Request(name, list(prompt), SamplingParams(), max_tokens=1000)


def grow(request: Request, token_ids: Sequence[int]) -> None:
    for token_id in token_ids:
        request.append_token(token_id, 0)


def draft_of(proposer: NgramProposer, request: Request, count: int = 4) -> Draft:
    (draft,) = proposer.propose([DraftAsk(request, count)])
    return draft


def drafted(prompt: Sequence[int], count: int = 4, *, least: int = 1, most: int = 3) -> tuple[int, ...]:
    return draft_of(NgramProposer(least, most), make_request(prompt), count).token_ids


def searched(tokens: Sequence[int], least: int, most: int, count: int) -> Draft:
    """The rule, word for word: the longest n-gram that ends the text and occurred before, where it did so last."""
    for size in range(most, least - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if list(tokens[end - size : end]) == list(tokens[-size:]):
                text = list(tokens)
                for place in range(end, end + count):  # it reads what it has written
                    text.append(text[place])
                return Draft(tuple(text[len(tokens) :]), size)
    return NO_DRAFT


# ---- the rule ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alphabet", [1, 2, 3, 6])
@pytest.mark.parametrize("sizes", [(1, 1), (1, 3), (2, 5), (3, 4), (1, 40)])
def test_it_finds_what_a_search_finds_however_the_text_grows(alphabet: int, sizes: tuple[int, int]) -> None:
    rng = random.Random(f"{alphabet} {sizes}")
    num_drafts = 0
    for _ in range(12):
        proposer = NgramProposer(*sizes)
        requests = [make_request(rng.choices(range(alphabet), k=rng.randrange(6)), str(i)) for i in range(3)]
        for _ in range(20):
            asked = rng.sample(requests, rng.randint(1, 3))
            for request in asked:
                grow(request, rng.choices(range(alphabet), k=rng.randrange(4)))
            asks = [DraftAsk(request, rng.randint(1, 9)) for request in asked]
            wanted = [searched(ask.request.token_ids, *sizes, ask.max_tokens) for ask in asks]
            assert proposer.propose(asks) == wanted
            assert NgramProposer(*sizes).propose(asks) == wanted, "learnt at once"
            num_drafts += sum(draft is not NO_DRAFT for draft in wanted)
    assert num_drafts > 20


def test_the_longest_match_wins_and_among_its_places_the_last() -> None:
    text = [1, 2, 3, 50, 1, 2, 3, 60, 9, 2, 3, 70, 1, 2, 3]
    assert drafted(text, 1) == (60,), "1 2 3 beats 2 3, which comes later"
    assert drafted(text, 1, most=2) == (70,), "2 3 was followed by 70 last"
    assert drafted(text[:7], 1) == (50,)


def test_no_match_is_shorter_or_longer_than_was_asked_for() -> None:
    text = [1, 2, 3, 4, 9, 3, 4]
    request = make_request(text)
    assert draft_of(NgramProposer(1, 5), request) == Draft((9, 3, 4, 9), 2)
    assert draft_of(NgramProposer(2, 2), request) == Draft((9, 3, 4, 9), 2)
    assert draft_of(NgramProposer(1, 1), request) == Draft((9, 3, 4, 9), 1)
    assert draft_of(NgramProposer(3, 5), request) is NO_DRAFT


@pytest.mark.parametrize("prompt", [[], [7], [7, 8], [7, 8, 9]])
def test_a_text_that_repeats_nothing_has_no_draft(prompt: list[int]) -> None:
    assert drafted(prompt) == ()


@pytest.mark.parametrize("period", range(1, 7))
def test_a_text_in_a_loop_goes_on_past_its_own_end(period: int) -> None:
    loop = list(range(10, 10 + period))
    text = [1, 2, *loop, *loop, *loop[:1]]
    goes_on = [loop[(1 + i) % period] for i in range(30)]
    assert drafted(text, 30) == tuple(goes_on)


def test_a_copy_from_close_to_the_end_repeats_what_it_has_read() -> None:
    assert read_on([1, 2, 3, 4], 1, 2) == (2, 3)
    assert read_on([1, 2, 3, 4], 2, 5) == (3, 4, 3, 4, 3)
    assert read_on([1, 2, 3, 4], 3, 3) == (4, 4, 4)
    assert read_on([1, 2, 3, 4], 0, 4) == (1, 2, 3, 4)


@pytest.mark.parametrize("count", [1, 2, 5, 100])
def test_a_draft_has_as_many_tokens_as_were_asked_for(count: int) -> None:
    assert len(drafted([5, 6, 7, 5, 6], count)) == count


@pytest.mark.parametrize("sizes", [(0, 3), (4, 3), (-1, -1)])
def test_sizes_that_make_no_sense_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"min_ngram={sizes[0]} and max_ngram={sizes[1]}"):
        NgramProposer(*sizes)


# ---- what is kept --------------------------------------------------------------------------------------------------


def test_requests_know_nothing_of_each_other() -> None:
    proposer = NgramProposer(1, 3)
    assert draft_of(proposer, make_request([1, 2, 3, 4, 1, 2])).token_ids == (3, 4, 1, 2)
    assert draft_of(proposer, make_request([1, 2])) is NO_DRAFT


def test_a_list_that_is_another_one_is_read_anew() -> None:
    proposer = NgramProposer(1, 3)
    request = make_request([1, 2, 3, 1])
    assert draft_of(proposer, request, 1).token_ids == (2,)
    request.token_ids = [1, 9, 8, 7, 1]
    assert draft_of(proposer, request, 1).token_ids == (9,)
    del request.token_ids[1:]
    assert draft_of(proposer, request, 1) is NO_DRAFT
    grow(request, [5, 1])
    assert draft_of(proposer, request, 1).token_ids == (5,)


def test_nothing_is_kept_of_a_request_that_has_ended() -> None:
    proposer = NgramProposer(1, 3)
    requests = [make_request([1, 2, 1], str(i)) for i in range(3)]
    proposer.propose([DraftAsk(request, 4) for request in requests])
    proposer.forget(requests[1])
    proposer.forget(requests[1])
    proposer.forget(make_request([1], "never asked for"))
    assert set(proposer._indices) == {requests[0], requests[2]}
    for request in requests:
        proposer.forget(request)
    assert not proposer._indices


def test_the_text_is_read_once() -> None:
    class Counting(list[int]):
        touched = 0

        def __getitem__(self, key: Any) -> Any:
            found = super().__getitem__(key)
            Counting.touched += len(found) if isinstance(key, slice) else 1
            return found

    proposer = NgramProposer(1, 4)
    request = make_request([])
    rng = random.Random(0)
    request.token_ids = Counting(rng.choices(range(50), k=5000))
    draft_of(proposer, request)
    Counting.touched = 0
    for _ in range(10):
        request.token_ids.append(rng.randrange(50))
        assert draft_of(proposer, request).token_ids
    assert Counting.touched < 800


def test_what_is_found_is_the_ngram_however_equal_hashes_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cb_engine.speculative.ngram.hash", lambda ngram: sum(ngram) % 3, raising=False)
    rng = random.Random(1)
    proposer, request = NgramProposer(1, 4), make_request([])
    for _ in range(150):
        grow(request, rng.choices(range(5), k=rng.randint(1, 3)))
        assert draft_of(proposer, request) == searched(request.token_ids, 1, 4, 4)


def test_an_index_takes_little_memory() -> None:
    rng = random.Random(0)
    proposer, request = NgramProposer(2, 5), make_request(rng.choices(range(100), k=5000))
    tracemalloc.start()
    try:
        draft_of(proposer, request)
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes < 4 * 13 * 5000
