"""Between two steps: what a proposer is asked, what is learnt of its drafts, and that a bad one harms nobody."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import drafting
import pytest
import tiny
from fake_model import VOCAB, FakeModel, expected

from cb_engine import Engine, GenerationOutput, SamplingParams
from cb_engine.errors import ShapeNotWarmedError
from cb_engine.request import Request
from cb_engine.runner.static_device import StaticDeviceError
from cb_engine.speculative.proposer import Draft, DraftAsk

PROMPTS = [[1, 2], [3, 4, 5], [6], [9, 8, 7, 6, 5]]
MAX_TOKENS = 12
REFERENCES = [expected(p, MAX_TOKENS) for p in PROMPTS]
FUTURES = {tuple(p): r for p, r in zip(PROMPTS, REFERENCES, strict=True)}


class Scripted:
    """Answers with whatever a test makes of right drafts; notes what it was asked and told."""

    def __init__(self, answer: Callable[[list[Draft], Sequence[DraftAsk]], Any] = lambda drafts, asks: drafts) -> None:
        self._answer = answer
        self._oracle = drafting.Oracle(FUTURES, drafting.always_right)
        self.asks: list[Sequence[DraftAsk]] = []
        self.ended: list[Request] = []

    def propose(self, asks: Sequence[DraftAsk]) -> Any:
        self.asks.append(asks)
        return self._answer(self._oracle.propose(asks), asks)

    def forget(self, request: Request) -> None:
        self.ended.append(request)


def make_engine(monkeypatch: pytest.MonkeyPatch, proposer: Any, k: int = 3, **options: Any) -> Engine:
    config = {"block_size": 4, "max_model_len": 32, **options.pop("config", {})}
    return drafting.oracle_engine(monkeypatch, proposer, FakeModel(), k, config=config, **options)


def run(engine: Engine, **params: Any) -> list[GenerationOutput]:
    """All prompts to their ends, books checked after every step."""
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": MAX_TOKENS, **params})
    ids = [engine.add_request(prompt, sampling)[0] for prompt in PROMPTS]
    return drain(engine, ids)


def drain(engine: Engine, ids: Sequence[str]) -> list[GenerationOutput]:
    outputs: dict[str, GenerationOutput] = {}
    while engine.has_work:
        outputs.update({output.request_id: output for output in engine.step()})
        engine.check()
    assert engine.stats().live_blocks == 0
    return [outputs[i] for i in ids]


def texts(outputs: Sequence[GenerationOutput]) -> list[list[int]]:
    assert {output.error for output in outputs} == {None}
    return [output.generated_tokens for output in outputs]


# ---- what is asked and learnt --------------------------------------------------------------------------------------


def test_asks_never_reach_beyond_the_end_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = Scripted()
    engine = make_engine(monkeypatch, proposer, 5)
    assert texts(run(engine)) == REFERENCES
    asks = [ask for asks in proposer.asks for ask in asks]
    assert {ask.max_tokens for ask in asks} <= set(range(1, 6))
    assert engine.stats().num_accepted_tokens == engine.stats().num_draft_tokens > 20
    assert sorted(map(id, proposer.ended)) == sorted({id(ask.request) for ask in asks})
    assert not engine._speculator._drafts


def test_who_opts_out_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = Scripted()
    engine = make_engine(monkeypatch, proposer)
    ids = []
    for index, prompt in enumerate(PROMPTS):
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, speculative=index % 2 == 0)
        ids += engine.add_request(prompt, params)
    outputs = drain(engine, ids)
    assert texts(outputs) == REFERENCES
    assert [output.num_draft_tokens > 0 for output in outputs] == [True, False, True, False]
    asked = {tuple(ask.request.prompt_token_ids) for asks in proposer.asks for ask in asks}
    assert asked == {tuple(PROMPTS[0]), tuple(PROMPTS[2])}


@pytest.mark.parametrize("guess", ["right", "wrong"])
def test_the_switch_learns_what_became_of_every_draft(monkeypatch: pytest.MonkeyPatch, guess: str) -> None:
    oracle = drafting.Oracle(FUTURES, drafting.GUESSES[guess])
    engine = make_engine(monkeypatch, oracle)
    seen: list[tuple[int, int, int]] = []
    monkeypatch.setattr(engine._speculator._controller, "saw_draft", lambda *numbers: seen.append(numbers))
    outputs = run(engine)
    stats = engine.stats()
    assert {kind for kind, _, _ in seen} == {0}
    assert sum(offered for _, offered, _ in seen) == stats.num_draft_tokens == sum(o.num_draft_tokens for o in outputs)
    assert sum(right for _, _, right in seen) == stats.num_accepted_tokens
    assert (stats.num_accepted_tokens > 0) == (guess == "right")


def test_of_drafts_that_are_not_verified_the_first_token_is_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of each is wrong, and nobody looks at it."""

    def answer(drafts: list[Draft], asks: Sequence[DraftAsk]) -> list[Draft]:
        return [
            Draft((*d.token_ids[:1], 0), 4) if len(a.request.token_ids) % 2 else d
            for d, a in zip(drafts, asks, strict=True)
        ]

    engine = make_engine(monkeypatch, Scripted(answer))
    controller = engine._speculator._controller
    seen: list[tuple[int, int, int]] = []
    monkeypatch.setattr(controller, "choose", lambda drafts, num_requests: [0] * len(drafts))
    monkeypatch.setattr(controller, "saw_draft", lambda *numbers: seen.append(numbers))
    assert texts(run(engine)) == REFERENCES
    assert set(seen) == {(4, 1, 1), (0, 1, 1)}
    assert engine.stats().num_draft_tokens == 0


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize("reason", ["length", "abort", "error"])
def test_however_a_request_ends_nothing_is_kept_of_it(method: str, reason: str) -> None:
    model = FakeModel()
    speculative = {"method": method, "adaptive": False}
    engine = Engine(model, config={"block_size": 4, "speculative": speculative})
    ids = [engine.add_request(p, SamplingParams(temperature=0.0, max_tokens=20))[0] for p in PROMPTS]
    for _ in range(4):
        engine.step()
    proposer: Any = engine._speculator._proposer
    of_requests = proposer._indices if method == "ngram" else proposer._logs
    assert len(of_requests) == len(PROMPTS)
    if reason == "abort":
        for request_id in ids:
            engine.abort(request_id)
    if reason == "error":
        model.hook.append(lambda positions, logits: logits * float("nan"))
    assert {output.finish_reason for output in drain(engine, ids)} == {reason}
    assert not of_requests
    assert not engine._speculator._drafts


# ---- bad proposers -------------------------------------------------------------------------------------------------


def too_many(drafts: list[Draft], asks: Sequence[DraftAsk]) -> Any:
    return [Draft(draft.token_ids + (5,) * 40) for draft in drafts]


def endless(drafts: list[Draft], asks: Sequence[DraftAsk]) -> Any:
    return [Draft(tuple(FUTURES[tuple(a.request.prompt_token_ids)][len(a.request.output_token_ids) :])) for a in asks]


def beyond_the_vocabulary(drafts: list[Draft], asks: Sequence[DraftAsk]) -> Any:
    return [Draft((VOCAB, *draft.token_ids)) for draft in drafts]


def far_beyond(drafts: list[Draft], asks: Sequence[DraftAsk]) -> Any:
    return [Draft((*draft.token_ids[:1], 1 << 70)) for draft in drafts]


def negative(drafts: list[Draft], asks: Sequence[DraftAsk]) -> Any:
    return [Draft((*draft.token_ids[:1], -1, *draft.token_ids[1:])) for draft in drafts]


def in_lists(drafts: list[Draft], asks: Sequence[DraftAsk]) -> Any:
    return [Draft(list(draft.token_ids)) for draft in drafts]


@pytest.mark.parametrize(
    ("answer", "some_are_right"),
    [
        (too_many, True),
        (endless, True),
        (beyond_the_vocabulary, False),
        (far_beyond, True),
        (negative, True),
        (in_lists, True),
    ],
)
@pytest.mark.parametrize("config", [{}, {"pad_decode_batches": True, "strict_shapes": True}, {"num_blocks": 9}])
def test_only_what_the_model_can_take_of_a_draft_is_verified(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, answer: Any, some_are_right: bool, config: Any
) -> None:
    proposer = Scripted(answer)
    engine = make_engine(monkeypatch, proposer, config=config)
    engine.warmup()
    outputs = run(engine, max_tokens=MAX_TOKENS)
    assert texts(outputs) == REFERENCES
    assert not [record for record in caplog.records if record.name.startswith("cb_engine")]
    stats = engine.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens, "all that is left is right"
    assert (stats.num_accepted_tokens > 0) == some_are_right
    assert len(proposer.asks) > 2, "it is asked again"


@pytest.mark.parametrize("max_model_len", range(7, 12))
def test_drafts_beyond_the_maximum_length_are_not_verified(monkeypatch: pytest.MonkeyPatch, max_model_len: int) -> None:
    engine = make_engine(monkeypatch, Scripted(too_many), 8, config={"max_model_len": max_model_len})
    outputs = run(engine, max_tokens=None)
    wanted = [expected(p, max_model_len - len(p)) for p in PROMPTS]
    assert texts(outputs) == wanted
    assert {output.stop_reason for output in outputs} == {"max_model_len"}


def failing(drafts: list[Draft], asks: Sequence[DraftAsk]) -> Any:
    raise RuntimeError("no idea")


BROKEN: dict[str, Callable[[list[Draft], Sequence[DraftAsk]], Any]] = {
    "raises": failing,
    "too few": lambda drafts, asks: drafts[:-1],
    "too many": lambda drafts, asks: [*drafts, Draft((1,))],
    "none at all": lambda drafts, asks: None,
    "no drafts": lambda drafts, asks: [None for _ in drafts],
    "no tokens": lambda drafts, asks: [Draft(None) for _ in drafts],  # type: ignore[arg-type]
    "tokens that are none": lambda drafts, asks: [Draft((1, None)) for _ in drafts],  # type: ignore[arg-type]
    "a kind that is none": lambda drafts, asks: [Draft((1,), "sure") for _ in drafts],  # type: ignore[arg-type]
}


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("answer", BROKEN)
def test_a_proposer_that_fails_is_switched_off_and_nobody_else_notices(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, answer: str, adaptive: bool
) -> None:
    """It fails when some drafts are out already; they are verified, and no more are asked for."""
    num_calls = 3
    proposer = Scripted(
        lambda drafts, asks: BROKEN[answer](drafts, asks) if len(proposer.asks) == num_calls else drafts
    )
    engine = make_engine(monkeypatch, proposer, speculative={"adaptive": adaptive})
    outputs = run(engine)
    assert texts(outputs) == REFERENCES
    (record,) = [record for record in caplog.records if record.name.startswith("cb_engine")]
    assert (record.levelno, record.getMessage()) == (
        logging.ERROR,
        "speculation is off from here on: the proposer failed",
    )
    assert record.exc_info
    assert len(proposer.asks) == num_calls
    assert len(proposer.ended) == len(PROMPTS), "it still learns who has ended"
    assert texts(run(engine)) == REFERENCES
    assert len(proposer.asks) == num_calls


def test_a_proposer_that_cannot_forget_is_switched_off_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Elephant(Scripted):
        def forget(self, request: Request) -> None:
            raise KeyError(request.request_id)

    proposer = Elephant()
    engine = make_engine(monkeypatch, proposer)
    assert texts(run(engine)) == REFERENCES
    num_asks = len(proposer.asks)
    assert texts(run(engine)) == REFERENCES
    assert len(proposer.asks) == num_asks
    assert caplog.text.count("speculation is off") == 1


@pytest.mark.parametrize("error", [ShapeNotWarmedError, StaticDeviceError])
def test_a_shape_that_is_not_known_is_no_fault_of_a_proposer(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(drafts: list[Draft], asks: Sequence[DraftAsk]) -> Any:
        raise error("a new shape")

    engine = make_engine(monkeypatch, Scripted(fail))
    with pytest.raises(error, match="a new shape"):
        run(engine)


def test_what_ended_in_the_step_that_broke_the_engine_is_handed_over_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step itself was right: the device failed while it drafted."""
    broken: list[bool] = []

    def answer(drafts: list[Draft], asks: Sequence[DraftAsk]) -> list[Draft]:
        if broken:
            raise ShapeNotWarmedError("a new shape")
        return drafts

    engine = make_engine(monkeypatch, Scripted(answer))
    short = engine.add_request(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=5))[0]
    long = engine.add_request(PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS))[0]
    assert engine.step() == []  # both prompts
    broken.append(True)
    with pytest.raises(ShapeNotWarmedError):
        engine.step()  # the last four tokens of the short one
    outputs = {output.request_id: output for output in engine.fail_all("it broke")}
    assert (outputs[short].finish_reason, outputs[short].generated_tokens) == ("length", REFERENCES[0][:5])
    assert (outputs[long].finish_reason, outputs[long].error) == ("error", "it broke")
    assert outputs[long].generated_tokens == REFERENCES[1][:5]
    assert engine.stats().live_blocks == 0


def test_only_drafts_that_came_are_timed_and_reading_a_text_is_no_part_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A drafter that is still reading a prompt drafts nothing for it, and a probe waits for it."""
    model, prompts, references = tiny.family("llama")
    speculative = {"method": "draft_model", "model": model, "num_speculative_tokens": 3}
    config = {"block_size": 4, "max_num_batched_tokens": 8, "max_num_seqs": 2, "speculative": speculative}
    engine = Engine(model, config=config, eos_token_id=-1)
    seen: list[tuple[int, int, float]] = []
    controller = engine._speculator._controller
    saw_drafting = controller.saw_drafting

    def note(*numbers: Any) -> None:
        seen.append(numbers)
        saw_drafting(*numbers)

    monkeypatch.setattr(controller, "saw_drafting", note)
    drafter = engine._runner.drafter
    propose, came = drafter.propose, []

    def slow_to_read(asks: Sequence[DraftAsk]) -> list[Draft]:
        drafts = propose(asks)
        came.append((sum(bool(d.token_ids) for d in drafts), max((len(d.token_ids) for d in drafts), default=0)))
        drafter.catch_up_seconds += 1000.0
        return drafts

    monkeypatch.setattr(drafter, "propose", slow_to_read)
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    request_id = engine.add_request(prompts[longest], SamplingParams(temperature=0.0, max_tokens=tiny.NEW_TOKENS))[0]
    (output,) = drain(engine, [request_id])
    assert output.generated_tokens == references[longest]
    assert [numbers[:2] for numbers in seen] == [counts for counts in came if counts[0]]
    assert (0, 0) in came, "the prompt takes it several rounds"
    assert all(numbers[2] < -900 for numbers in seen), "what it says of reading is left out"
