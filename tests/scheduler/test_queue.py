"""The waiting line's order."""

from __future__ import annotations

import pytest

from cb_engine.request import Request
from cb_engine.sampling_params import SamplingParams
from cb_engine.scheduler.queue import WaitingQueue


def make_request(name: str, arrival: int, priority: int = 0) -> Request:
    return Request(name, [1], SamplingParams(priority=priority), max_tokens=1, arrival=arrival)


def names(queue: WaitingQueue) -> list[str]:
    return [r.request_id for r in queue]


def test_equal_priorities_go_by_arrival_whatever_the_order_of_pushes():
    queue = WaitingQueue()
    for name, arrival in (("b", 1), ("c", 2), ("a", 0)):
        queue.push(make_request(name, arrival))
    assert names(queue) == ["a", "b", "c"]
    assert len(queue) == 3


def test_a_lower_priority_value_goes_first():
    queue = WaitingQueue()
    for name, arrival, priority in (("late", 0, 5), ("mid", 1, 0), ("soon", 2, -1)):
        queue.push(make_request(name, arrival, priority))
    assert names(queue) == ["soon", "mid", "late"]


def test_a_request_that_comes_back_takes_its_old_place():
    queue = WaitingQueue()
    a, b, c = (make_request(name, i) for i, name in enumerate("abc"))
    for request in (a, b, c):
        queue.push(request)
    queue.remove(b)
    assert names(queue) == ["a", "c"]
    queue.push(b)
    assert names(queue) == ["a", "b", "c"]


def test_removal_is_by_identity_and_of_a_stranger_an_error():
    queue = WaitingQueue()
    queue.push(make_request("a", 0))
    with pytest.raises(ValueError, match="not in list"):
        queue.remove(make_request("a", 0))


def test_the_line_may_change_while_it_is_walked():
    queue = WaitingQueue()
    for i, name in enumerate("abc"):
        queue.push(make_request(name, i))
    for request in queue:
        queue.remove(request)
    assert len(queue) == 0
