"""Feeding an engine: windows, refusals, interrupts, a failing engine. The model's answers can be worked out."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fake_model import FakeModel, expected

import cb_engine
from cb_engine.cli import feed
from cb_engine.cli.answers import Answer
from cb_engine.cli.encoding import Encoder
from cb_engine.cli.feed import Feed, Tally
from cb_engine.cli.prompts import PromptLine
from cb_engine.cli.report import Reporter

ENCODER = Encoder(tokenizer=None, own_sampling=None, changes={"temperature": 0.0, "max_tokens": 4})
REPORTER = Reporter(tokenizer=None, return_token_ids=True)


@contextmanager
def running(model: FakeModel | None = None, **config: Any) -> Iterator[Any]:
    manager = cb_engine.attach(model or FakeModel()).init_continuous_batching(continuous_batching_config=config)
    manager.start()
    try:
        yield manager
    finally:
        manager.destroy()


def lines(count: int) -> Iterator[PromptLine]:
    return (PromptLine(index=i, id=f"id{i}", prompt=[i % 90 + 1, 2]) for i in range(count))


class Sink:
    """Keeps answers, and done with each at once."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, Answer]] = []

    def __call__(self, position: int, answer: Answer) -> int:
        self.answers.append((position, answer))
        return 1

    @property
    def indexes(self) -> list[int]:
        return sorted(answer["index"] for _, answer in self.answers)


def run(manager: Any, source: Iterable[PromptLine], window: int = 8, encoder: Encoder = ENCODER) -> tuple[Tally, Sink]:
    sink = Sink()
    return Feed(manager, encoder, REPORTER, sink, window).run(source), sink


def test_every_line_gets_its_answer() -> None:
    with running() as manager:
        tally, sink = run(manager, lines(30))
    assert tally == Tally(answered=30)
    for position, answer in sink.answers:
        assert position == answer["index"]
        assert answer["id"] == f"id{position}"
        assert answer["token_ids"] == expected([position % 90 + 1, 2], 4)
        assert answer["finish_reason"] == "length"
        assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 4, "cached_tokens": 0}
    assert sink.indexes == list(range(30))


def test_no_more_lines_are_read_than_the_window_holds() -> None:
    """A line more than fits is read: its reader waits with it in hand."""
    ahead = 0
    read = 0
    sink = Sink()

    def source() -> Iterator[PromptLine]:
        nonlocal read, ahead
        for line in lines(60):
            read += 1
            ahead = max(ahead, read - len(sink.answers))
            yield line

    with running() as manager:
        Feed(manager, ENCODER, REPORTER, sink, window=5).run(source())
    assert len(sink.answers) == 60
    assert 5 <= ahead <= 6


def test_answers_that_are_held_back_keep_their_room() -> None:
    """What an ordered writer holds counts as on its way, or its memory would have no bound."""
    read = 0
    released = 0
    held: list[Answer] = []

    def source() -> Iterator[PromptLine]:
        nonlocal read
        for line in lines(40):
            read += 1
            yield line

    def hold(position: int, answer: Answer) -> int:
        nonlocal released
        held.append(answer)
        if len(held) < 6:
            return 0
        assert read - released <= 7  # six in the window, one in the reader's hand
        done = len(held)
        released += done
        held.clear()
        return done

    with running() as manager:
        tally = Feed(manager, ENCODER, REPORTER, hold, window=6).run(source())
    assert tally.answered == 40
    assert released == 36


def test_a_bad_line_is_refused_alone() -> None:
    bad = [
        PromptLine(index=1, id=1, error="the line is not JSON"),
        PromptLine(index=2, id=2, prompt=[1000]),
        PromptLine(index=3, id=3, prompt=[1], changes={"top_p": 7}),
    ]
    good = PromptLine(index=0, id=0, prompt=[3, 4])
    with running() as manager:
        tally, sink = run(manager, [good, *bad])
    answers = {answer["index"]: answer for _, answer in sink.answers}
    assert answers[0]["token_ids"] == expected([3, 4], 4)
    assert answers[1] == {"id": 1, "index": 1, "error": "the line is not JSON"}
    assert answers[2] == {"id": 2, "index": 2, "error": "token id 1000 is outside the vocabulary of 97"}
    assert answers[3]["error"] == "top_p must be above 0 and at most 1, got 7.0; use 1 to turn it off"
    assert (tally.answered, tally.failed) == (1, 3)
    assert tally.first_failure == "line 2: the line is not JSON"


def test_a_request_that_fails_tells_what_it_had() -> None:
    model = FakeModel()
    with running(model, max_num_seqs=1) as manager:
        model.hook.append(lambda positions, logits: torch.where(positions[:, None] == 4, float("nan"), logits))
        tally, sink = run(manager, [PromptLine(index=0, id=0, prompt=[3, 4, 5])])
    [(_, answer)] = sink.answers
    assert answer["finish_reason"] == "error"
    assert answer["token_ids"] == expected([3, 4, 5], 2)
    assert "error" in answer
    assert tally.failed == 1


def test_samples_of_a_line_come_together() -> None:
    line = PromptLine(index=0, id=0, prompt=[3, 4], changes={"n": 3})
    with running() as manager:
        _, sink = run(manager, [line])
    [(_, answer)] = sink.answers
    assert [choice["token_ids"] for choice in answer["choices"]] == [expected([3, 4], 4)] * 3
    assert answer["usage"]["completion_tokens"] == 12
    assert "text" not in answer


def test_the_runs_seed_makes_each_line_its_own() -> None:
    encoder = Encoder(tokenizer=None, own_sampling=None, changes={}, seed=7)
    seeds = [encoder.params(1, {}, index).seed for index in (0, 1, 0)]
    assert seeds[0] == seeds[2] != seeds[1]
    assert encoder.params(1, {"seed": 5}, 1).seed == 5
    assert Encoder(tokenizer=None, own_sampling=None, changes={}).params(1, {}).seed is None


def test_an_answer_has_an_end_also_where_nobody_said_so() -> None:
    encoder = Encoder(tokenizer=None, own_sampling=None, changes={})
    assert encoder.params(1, {}).max_tokens == 1024
    assert encoder.params(1, {"min_tokens": 2000}).max_tokens == 2000
    assert encoder.params(1, {"max_tokens": 3}).max_tokens == 3


def test_ctrl_c_ends_the_run_with_what_is_done() -> None:
    """The input waits for ever, as a pipe may, and one request would run for long."""
    goes_on = threading.Event()
    sink = Sink()
    interrupted = threading.Event()

    def source() -> Iterator[PromptLine]:
        yield from lines(3)
        yield PromptLine(index=3, id=3, prompt=[1], changes={"max_tokens": 500})
        goes_on.wait()
        yield PromptLine(index=4, id=4, prompt=[1])

    def deliver(position: int, answer: Answer) -> int:
        sink(position, answer)
        if len(sink.answers) == 3 and not interrupted.is_set():
            interrupted.set()
            os.kill(os.getpid(), signal.SIGINT)
        return 1

    before = signal.getsignal(signal.SIGINT)
    slow = FakeModel()
    slow.hook.append(lambda positions, logits: (threading.Event().wait(0.002), logits)[1])
    with running(slow) as manager:
        tally = Feed(manager, ENCODER, REPORTER, deliver, window=8).run(source())
        goes_on.set()
    assert tally.interrupted
    assert sink.indexes == [0, 1, 2]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_failed_engine_blames_no_line() -> None:
    model = FakeModel()
    calls = 0

    def fail(positions: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls >= 12:
            raise RuntimeError("the device is gone")
        return logits

    with running(model, max_num_seqs=2) as manager:
        model.hook.append(fail)
        tally, sink = run(manager, lines(20), window=4)
    assert tally.engine_failure == "no request of the step could be computed: RuntimeError: the device is gone"
    assert tally.failed == 0
    assert 0 < tally.answered == len(sink.answers) < 20
    assert all("error" not in answer for _, answer in sink.answers)


def test_an_engine_that_takes_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "_END_WAIT", 1000.0)
    with running() as manager:
        manager.destroy()
        tally, sink = run(manager, lines(3))
    assert tally.engine_failure == "the manager was destroyed; make a new one"
    assert (tally.failed, sink.answers) == (0, [])


def test_an_input_that_cannot_be_read_further_is_an_error() -> None:
    def source() -> Iterator[PromptLine]:
        yield from lines(1)
        raise OSError("the disk is gone")

    with running() as manager, pytest.raises(OSError, match="the disk is gone"):
        run(manager, source())
