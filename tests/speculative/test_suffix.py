"""The vote of all that was seen, against one taken in plain loops; who sees whose text, and how much of it is kept."""

from __future__ import annotations

import gc
import random
import weakref
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from cb_engine.request import Request
from cb_engine.sampling_params import SamplingParams
from cb_engine.speculative import suffix
from cb_engine.speculative.proposer import NO_DRAFT, Draft, DraftAsk
from cb_engine.speculative.suffix import SuffixProposer


def make_request(prompt: Sequence[int], name: str = "r", *, salt: str | None = None) -> Request:
    return Request(name, list(prompt), SamplingParams(cache_salt=salt), max_tokens=1000)


def make_proposer(**options: Any) -> SuffixProposer:
    """A small one: what it reserves at once is not what these tests are about."""
    return SuffixProposer(**{"max_indexed_tokens": 1 << 14, **options})


def grow(request: Request, token_ids: Sequence[int]) -> None:
    for token_id in token_ids:
        request.append_token(token_id, 0)


def draft_of(proposer: SuffixProposer, request: Request, count: int = 4) -> Draft:
    (draft,) = proposer.propose([DraftAsk(request, count)])
    return draft


def drafted(proposer: SuffixProposer, prompt: Sequence[int], count: int = 4, **options: Any) -> tuple[int, ...]:
    return draft_of(proposer, make_request(prompt, **options), count).token_ids


class PlainVote:
    """The rule, word for word; it remembers everything and looks through all of it, or the latest `capacity` places."""

    def __init__(self, min_match: int = 2, min_probability: float = 0.1, capacity: int = 1 << 30) -> None:
        self._capacity = capacity
        self._sizes = (min_match + 4, min_match)
        self._min_probability = min_probability
        self._places: list[tuple[Request, int]] = []  # in the order in which they got a follower
        self._num_indexed: dict[Request, int] = {}
        self._texts: dict[Request, list[int]] = {}  # as they were when it last looked
        self._prompts: dict[tuple[str | None, tuple[int, ...]], int] = {}  # -> number of its first place

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        for ask in asks:
            self._learn(ask.request)
        return [self._draft(ask.request, ask.max_tokens) for ask in asks]

    def forget(self, request: Request) -> None:
        if request in self._num_indexed:
            self._learn(request)

    def _learn(self, request: Request) -> None:
        if request not in self._num_indexed:
            prompt = (request.sampling_params.cache_salt, tuple(request.prompt_token_ids))
            is_known = self._prompts.get(prompt, -1) >= max(0, len(self._places) - self._capacity)
            self._num_indexed[request] = max(0, len(prompt[1]) - 1) if is_known else 0
            if not is_known:
                self._prompts[prompt] = len(self._places)
        self._texts[request] = list(request.token_ids)
        first = self._num_indexed[request] + 1
        self._places += [(request, end) for end in range(first, request.num_tokens)]
        self._num_indexed[request] = max(first, request.num_tokens) - 1

    def _draft(self, request: Request, count: int) -> Draft:
        text = request.token_ids
        for size in self._sizes:
            agreeing = [
                (other, end, in_common(text, self._texts[other][:end]))
                for other, end in reversed(self._places[-self._capacity :])
                if other.sampling_params.cache_salt == request.sampling_params.cache_salt
            ]
            found = [place for place in agreeing if place[2] >= size][:16]
            if found:
                return self._vote([(self._copy(o, end, count, request), weight) for o, end, weight in found], count)
        return NO_DRAFT

    def _copy(self, other: Request, end: int, count: int, request: Request) -> list[int]:
        text = list(self._texts[other])
        if other is request:  # it may read what it has written
            for place in range(end, end + count):
                text.append(text[place])
        return text[end : end + count]

    def _vote(self, voters: list[tuple[list[int], int]], count: int) -> Draft:
        draft: list[int] = []
        chance, first_chance = 1.0, 0.0
        while len(draft) < count:
            votes: dict[int, int] = {}
            for tokens, weight in voters:
                if tokens[: len(draft)] == draft and len(tokens) > len(draft):
                    votes[tokens[len(draft)]] = votes.get(tokens[len(draft)], 0) + weight
            if not votes:
                break
            best = max(votes.values())
            chance *= best / (sum(votes.values()) + 2)
            if chance < self._min_probability:
                break
            draft.append(next(token for token, weight in votes.items() if weight == best))
            first_chance = first_chance or chance
        return Draft(tuple(draft), int(10 * first_chance)) if draft else NO_DRAFT


def in_common(text: Sequence[int], other: Sequence[int]) -> int:
    """How many last tokens agree, up to 32."""
    count = 0
    while count < min(32, len(text), len(other)) and text[-1 - count] == other[-1 - count]:
        count += 1
    return count


def play(rng: random.Random, proposers: Sequence[Any], alphabet: int, salts: Sequence[str | None]) -> list[list[Draft]]:
    """Requests come, grow and go; every proposer is asked the same. Prompts are drawn from a few."""
    prompts = [rng.choices(range(alphabet), k=rng.choice((0, 1, 2, 9, 40))) for _ in range(4)]
    running: list[Request] = []
    told: list[list[Draft]] = [[] for _ in proposers]
    for step in range(60):
        while len(running) < 4:
            running.append(make_request(rng.choice(prompts), f"r{step}.{len(running)}", salt=rng.choice(salts)))
        for request in running:
            grow(request, rng.choices(range(alphabet), k=rng.randrange(4)))
        asks = [DraftAsk(request, rng.randint(1, 6)) for request in rng.sample(running, rng.randint(1, 4))]
        for proposer, drafts in zip(proposers, told, strict=True):
            drafts += proposer.propose(asks)
        if rng.random() < 0.2:
            ended = running.pop(rng.randrange(len(running)))
            for proposer in proposers:
                proposer.forget(ended)
    return told


# ---- the rule ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alphabet", [2, 3, 6])
@pytest.mark.parametrize(("min_match", "min_probability"), [(2, 0.1), (1, 0.01), (3, 0.3), (5, 0.1)])
def test_it_drafts_what_a_plain_vote_drafts(alphabet: int, min_match: int, min_probability: float) -> None:
    options: dict[str, Any] = {"min_match": min_match, "min_probability": min_probability}
    lengths: set[int] = set()
    for seed in range(4):
        proposers = (make_proposer(**options), PlainVote(**options))
        found, wanted = play(random.Random(seed), proposers, alphabet, [None, "b", "a"])
        assert found == wanted
        lengths |= {len(draft.token_ids) for draft in wanted}
    assert len(lengths) > 2


@pytest.mark.parametrize("capacity", [30, 200])
def test_a_full_index_is_a_vote_of_the_latest_places(capacity: int) -> None:
    for seed in range(8):
        proposer = make_proposer(max_indexed_tokens=capacity)
        index = proposer._index  # with a table in which no two contexts meet
        index._heads, index._mask = [array("q", bytes(8 << 16)) for _ in range(2)], (1 << 16) - 1
        found, wanted = play(random.Random(seed), (proposer, PlainVote(capacity=capacity)), 3, [None, "a"])
        assert found == wanted
        assert sum(draft is not NO_DRAFT for draft in wanted) > 40


@pytest.mark.parametrize("seed", range(5))
def test_learning_bit_by_bit_is_learning_at_once(seed: int) -> None:
    rng = random.Random(seed)
    proposer, request = make_proposer(), make_request(rng.choices(range(3), k=5))
    for _ in range(60):
        assert draft_of(proposer, request) == draft_of(make_proposer(), request)
        grow(request, rng.choices(range(3), k=rng.randrange(4)))


def test_running_requests_learn_from_each_other_in_the_same_step() -> None:
    proposer = make_proposer()
    ahead, behind = make_request([1, 2, 3, 4, 5], "a"), make_request([9, 1, 2, 3], "b")
    drafts = proposer.propose([DraftAsk(behind, 4), DraftAsk(ahead, 4)])
    assert [draft.token_ids for draft in drafts] == [(4, 5), ()]


def test_only_its_own_text_is_continued_past_its_end() -> None:
    proposer = make_proposer(min_probability=1e-9)
    assert drafted(proposer, [1, 2, 3, 1, 2], 6) == (3, 1, 2, 3, 1, 2)
    proposer = make_proposer(min_probability=1e-9)
    draft_of(proposer, make_request([1, 2, 3], "a"))
    assert drafted(proposer, [1, 2], 6) == (3,)


@pytest.mark.parametrize("period", range(1, 6))
def test_a_text_in_a_loop_goes_on(period: int) -> None:
    loop = list(range(10, 10 + period))
    text = [1, 2, *loop * 9, *loop[:1]]
    assert drafted(make_proposer(min_probability=1e-9), text, 13) == tuple(loop[(1 + i) % period] for i in range(13))


def test_longer_agreement_outweighs_more_places() -> None:
    proposer = make_proposer()
    draft_of(proposer, make_request([*range(20), 77], "a"))
    for i in range(16):
        draft_of(proposer, make_request([18, 19, 88 + i], str(i)))
    assert drafted(proposer, range(20), 1) == (77,), "the places of a longer context are asked alone"
    assert drafted(proposer, [18, 19], 1) == (), "sixteen opinions, none of them likely enough"


def test_how_sure_it_is_is_its_kind() -> None:
    proposer = make_proposer()
    first = draft_of(proposer, make_request([5, 6, 5, 6], "a"), 1)
    assert first == Draft((5,), 5), "two tokens agree, against a doubt of two"
    sure = draft_of(proposer, make_request([*range(10, 40), 1, *range(10, 40)], "b"), 1)
    assert sure == Draft((1,), 9)


def test_a_draft_ends_where_it_becomes_unlikely() -> None:
    text = [5, 6, 7, 8, 9, 5, 6]
    lengths = [
        len(drafted(make_proposer(min_probability=p), text, 5)) for p in (0.6, 0.5, 0.25, 0.125, 0.06, 0.03, 0.001)
    ]
    assert lengths == [0, 1, 2, 3, 4, 5, 5], "each token is right in half of all cases, as far as two agree"


@pytest.mark.parametrize("prompt", [[], [7], [7, 8], [7, 7]])
def test_a_text_that_repeats_nothing_has_no_draft(prompt: list[int]) -> None:
    proposer = make_proposer()
    assert draft_of(proposer, make_request(prompt)) is NO_DRAFT
    assert draft_of(proposer, make_request([7], "b")) is NO_DRAFT, "one token is too little"


def test_what_comes_after_an_empty_prompt_is_learnt() -> None:
    proposer, request = make_proposer(), make_request([])
    draft_of(proposer, request)
    grow(request, [1, 2, 3])
    draft_of(proposer, request)
    again = make_request([], "b")
    draft_of(proposer, again)
    grow(again, [1, 2])
    assert draft_of(proposer, again).token_ids == (3,)


def test_matches_end_where_texts_begin() -> None:
    """Two texts of equal length agree in all tokens they have, and in nothing before them."""
    proposer = make_proposer(min_match=3)
    draft_of(proposer, make_request([1, 2, 9], "a"))
    assert drafted(proposer, [1, 2]) == ()
    assert drafted(proposer, [0, 1, 2]) == ()


def test_a_list_that_is_another_one_is_read_anew() -> None:
    proposer = make_proposer()
    request = make_request([1, 2, 3, 1, 2])
    assert draft_of(proposer, request, 1).token_ids == (3,)
    request.token_ids = [6, 7, 8, 6, 7]
    assert draft_of(proposer, request, 1).token_ids == (8,)
    del request.token_ids[3:]
    grow(request, [4, 7, 8])
    assert draft_of(proposer, request, 1).token_ids == (6,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_match": 0}, "min_match=0: from 1 to 28"),
        ({"min_match": 29}, "min_match=29: from 1 to 28"),
        ({"min_probability": 0.0}, r"min_probability=0\.0: 0 < min_probability <= 1"),
        ({"min_probability": 1.5}, r"min_probability=1\.5"),
        ({"max_indexed_tokens": 0}, "max_indexed_tokens=0: at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SuffixProposer(**options)


# ---- who sees whose text -------------------------------------------------------------------------------------------


class Lone:
    """One proposer for each salt: what nobody can see of others."""

    def __init__(self) -> None:
        self._of: dict[str | None, SuffixProposer] = {}

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        drafts: dict[int, Draft] = {}
        for salt in {ask.request.sampling_params.cache_salt for ask in asks}:
            own = [i for i, ask in enumerate(asks) if ask.request.sampling_params.cache_salt == salt]
            proposer = self._of.setdefault(salt, make_proposer())
            drafts.update(zip(own, proposer.propose([asks[i] for i in own]), strict=True))
        return [drafts[i] for i in range(len(asks))]

    def forget(self, request: Request) -> None:
        self._of.setdefault(request.sampling_params.cache_salt, make_proposer()).forget(request)


@pytest.mark.parametrize("seed", range(4))
def test_a_request_with_a_salt_gets_the_drafts_it_would_get_without_the_others(seed: int) -> None:
    found, alone = play(random.Random(seed), (make_proposer(), Lone()), 3, [None, "c", "a", "b"])
    assert found == alone
    assert sum(draft is not NO_DRAFT for draft in found) > 40


@pytest.mark.parametrize("collide", [False, True])
@pytest.mark.parametrize(("mine", "yours"), [("a", "b"), ("a", None), (None, "a")])
def test_salts_are_compared_and_not_only_hashed(
    monkeypatch: pytest.MonkeyPatch, mine: str | None, yours: str | None, collide: bool
) -> None:
    if collide:
        monkeypatch.setattr(suffix._Log, "context", lambda self, end, size: size)
    proposer = make_proposer()
    secret = [1, 2, 3, 40, 50, 60]
    draft_of(proposer, make_request(secret, "a", salt=mine))
    assert drafted(proposer, [1, 2, 3], name="b", salt=yours) == ()
    assert drafted(proposer, [1, 2, 3], name="c", salt=mine) == (40, 50, 60)


# ---- what is kept --------------------------------------------------------------------------------------------------


def test_the_text_of_a_request_that_has_ended_stays_to_its_last_token() -> None:
    proposer, request = make_proposer(), make_request([1, 2, 3])
    draft_of(proposer, request)
    grow(request, [4, 5, 6])
    proposer.forget(request)
    proposer.forget(request)
    assert drafted(proposer, [2, 3]) == (4, 5, 6)
    assert not any(log is request for log in proposer._logs)


def test_what_is_cut_from_a_text_when_it_ends_is_not_read() -> None:
    """Tokens behind a stop string are dropped from the request, whatever had been copied of it before."""
    proposer, request = make_proposer(), make_request([1, 2, 3, 4])
    draft_of(proposer, request)
    del request.token_ids[2:]
    proposer.forget(request)
    proposer.forget(make_request([8, 9], "never asked for"))
    assert drafted(proposer, [1, 2]) == (3, 4)


def test_nothing_of_a_request_is_held_when_it_has_ended() -> None:
    class Tokens(list[int]):
        pass

    proposer, request = make_proposer(), make_request([1, 2, 3])
    request.token_ids = Tokens([1, 2, 3])
    tokens, dead = weakref.ref(request.token_ids), weakref.ref(request)
    draft_of(proposer, request)
    proposer.forget(request)
    assert not proposer._logs
    del request
    gc.collect()
    assert dead() is None
    assert tokens() is None
    assert drafted(proposer, [1, 2]) == (3,), "but a copy is"


def test_a_prompt_that_is_indexed_is_not_indexed_again() -> None:
    """A hundred samples of one prompt, and what it reads like is still found."""
    proposer = make_proposer(max_indexed_tokens=150)
    prompt = list(range(100))
    for i in range(100):
        sample = make_request(prompt, str(i))
        grow(sample, [200 + i])
        draft_of(proposer, sample)
        proposer.forget(sample)
    assert drafted(proposer, [3, 4, 5]) == (6, 7, 8, 9)


def test_the_oldest_text_makes_room() -> None:
    proposer = make_proposer(max_indexed_tokens=100)
    draft_of(proposer, make_request([1, 2, 3, 4, 5], "old"))
    for i in range(1000, 1095):
        draft_of(proposer, make_request([i, i], str(i)))
    assert drafted(proposer, [3, 4]) == (5,), "96 of 100 places are taken by newer ones"
    for i in range(1095, 1100):
        draft_of(proposer, make_request([i, i], str(i)))
    assert drafted(proposer, [3, 4]) == ()


@pytest.mark.parametrize("capacity", [1, 7, 64])
def test_a_small_index_finds_only_what_is_in_it(capacity: int) -> None:
    """Texts that share no token: what is drafted was indexed among the latest places, and what is there is drafted."""
    rng = random.Random(capacity)
    proposer = make_proposer(max_indexed_tokens=capacity, min_probability=1e-9)
    texts: list[list[int]] = []
    places: list[list[int]] = []  # the two tokens before each, in the order in which they were indexed

    def ask(text: list[int]) -> tuple[int, ...]:
        places.extend(text[max(0, end - 2) : end] for end in range(1, len(text)))
        return drafted(proposer, text, name=str(text))

    num_found = 0
    for i in range(150):
        texts.append([100 * i + j for j in range(rng.randint(3, 12))])
        assert ask(texts[-1]) == ()
        text = rng.choice(texts[-6:])
        end = rng.randrange(2, len(text))
        draft = ask([-1 - i, *text[:end]])
        assert list(draft) == text[end : end + len(draft)]
        assert bool(draft) <= (text[end - 2 : end] in places[-capacity:])
        num_found += bool(draft)
    assert (num_found > 10) == (capacity > 1)


def test_what_is_kept_of_ended_requests_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    class Log(suffix._Log):
        __hash__ = object.__hash__

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            alive.add(self)

    monkeypatch.setattr(suffix, "_Log", Log)
    proposer = make_proposer(max_indexed_tokens=64)
    for i in range(600):
        request = make_request([i, *range(i % 7)], str(i), salt=str(i))
        grow(request, [1, 2])
        draft_of(proposer, request)
        proposer.forget(request)
        assert len(alive) <= 64
        assert sum(len(log.tokens) for log in alive) <= 64 * 48
        assert len(proposer._prompts) <= 64
    index = proposer._index
    assert [len(cells) for cells in (*index._heads, *index._previous, index._logs, index._ends)] == [64] * 6
