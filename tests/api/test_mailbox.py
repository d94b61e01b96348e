"""Where outputs go: readers by id, readers of anybody, claims, sinks, and the end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cb_engine.api.mailbox import Mailbox
from cb_engine.outputs import GenerationOutput, RequestStatus


def partial(request_id: str, count: int = 1) -> GenerationOutput:
    return GenerationOutput(request_id, generated_tokens=list(range(count)), status=RequestStatus.DECODING)


def final(request_id: str, status: RequestStatus = RequestStatus.FINISHED) -> GenerationOutput:
    return GenerationOutput(request_id, status=status)


def opened(*ids: str) -> Mailbox:
    mailbox = Mailbox()
    mailbox.open(ids)
    return mailbox


def taken(mailbox: Mailbox, request_id: str | None = None) -> str | None:
    """The id of the next output that is there already."""
    output = mailbox.take(request_id, timeout=0)
    return None if output is None else output.request_id


# ---- reading -----------------------------------------------------------------------------------------------------


def test_anybody_gets_outputs_in_order_of_delivery():
    mailbox = opened("a", "b", "c")
    mailbox.deliver([final("b"), final("c")])
    mailbox.deliver([final("a")])
    assert [taken(mailbox) for _ in range(4)] == ["b", "c", "a", None]


def test_a_reader_of_an_id_gets_its_outputs_only_and_in_order():
    mailbox = opened("a", "b")
    first, last, other = partial("a"), final("a"), final("b")
    mailbox.deliver([other, first, last])
    assert mailbox.take("a", timeout=0) is first
    assert mailbox.take("a", timeout=0) is last
    assert mailbox.take("a", timeout=0) is None
    assert mailbox.take(timeout=0) is other


def test_anybody_skips_what_a_reader_of_its_id_has_taken():
    mailbox = opened("a", "b")
    mailbox.deliver([partial("a", 1), partial("a", 2), final("b"), final("a")])
    assert taken(mailbox, "a") == "a"
    assert [taken(mailbox) for _ in range(4)] == ["a", "b", "a", None]


def test_a_claimed_id_is_not_handed_to_anybody():
    mailbox = opened("a", "b")
    mailbox.claim("a")
    mailbox.deliver([partial("a"), final("b"), final("a")])
    assert taken(mailbox) == "b"
    assert taken(mailbox) is None
    assert [taken(mailbox, "a") for _ in range(3)] == ["a", "a", None]


def test_a_claim_also_covers_what_is_waiting_already():
    mailbox = opened("a", "b")
    mailbox.deliver([partial("a"), partial("b")])
    mailbox.claim("a")
    assert [taken(mailbox), taken(mailbox)] == ["b", None]


def test_claimed_outputs_do_not_change_the_order_of_the_others():
    mailbox = opened(*"abcd")
    for claimed in "ac":
        mailbox.claim(claimed)
    mailbox.deliver([final("a"), final("b"), final("c"), final("d")])
    assert [taken(mailbox) for _ in range(3)] == ["b", "d", None]


@pytest.mark.parametrize("request_id", [None, "a"])
@pytest.mark.parametrize("timeout", [0, 0.001, -1])
def test_a_timeout_ends_the_wait_with_none(request_id: str | None, timeout: float):
    assert opened("a").take(request_id, timeout=timeout) is None


def test_a_reader_that_waits_is_woken_by_its_output():
    mailbox = opened("a", "b")
    with ThreadPoolExecutor(2) as pool:
        for_a, anybody = pool.submit(mailbox.take, "a"), pool.submit(mailbox.take)
        mailbox.deliver([final("b")])
        got = anybody.result(timeout=30)
        assert got is not None
        assert got.request_id == "b"
        mailbox.deliver([final("a")])
        got = for_a.result(timeout=30)
        assert got is not None
        assert got.request_id == "a"


# ---- ids ---------------------------------------------------------------------------------------------------------


def test_an_id_is_open_until_its_terminal_output_is_taken():
    mailbox = opened("a")
    assert mailbox.is_open("a")
    mailbox.deliver([partial("a")])
    taken(mailbox)
    mailbox.deliver([final("a")])
    assert mailbox.open_ids() == ["a"]
    taken(mailbox)
    assert not mailbox.is_open("a")
    assert mailbox.open_ids() == []


@pytest.mark.parametrize("status", [RequestStatus.FINISHED, RequestStatus.FAILED, RequestStatus.ABORTED])
def test_every_terminal_status_closes_an_id(status: RequestStatus):
    mailbox = opened("a")
    mailbox.deliver([final("a", status)])
    taken(mailbox, "a")
    assert not mailbox.is_open("a")


def test_an_id_in_use_is_refused_and_none_of_the_call_is_opened():
    mailbox = opened("a")
    with pytest.raises(ValueError, match="'a' is in use"):
        mailbox.open(["b", "a"])
    assert mailbox.open_ids() == ["a"]


def test_an_id_can_be_used_again_once_its_end_was_taken():
    mailbox = opened("a")
    mailbox.claim("a")
    mailbox.deliver([final("a")])
    taken(mailbox, "a")
    mailbox.open(["a"])
    mailbox.deliver([final("a")])
    assert taken(mailbox) == "a"  # the old claim is gone with the old request


def test_an_id_that_is_used_again_queues_behind_those_before_it():
    mailbox = opened("a", "b")
    mailbox.deliver([final("a")])
    taken(mailbox, "a")
    mailbox.deliver([final("b")])
    mailbox.open(["a"])
    mailbox.deliver([final("a")])
    assert [taken(mailbox), taken(mailbox)] == ["b", "a"]


def test_what_readers_of_ids_have_taken_leaves_no_trace():
    mailbox = Mailbox()
    for number in range(50):
        mailbox.open([f"r{number}"])
        mailbox.claim(f"r{number}")
        mailbox.deliver([partial(f"r{number}"), final(f"r{number}")])
        taken(mailbox, f"r{number}")
        taken(mailbox, f"r{number}")
    left = {name: len(value) for name, value in vars(mailbox).items() if hasattr(value, "__len__")}
    assert left == dict.fromkeys(left, 0)  # a server that streams for weeks must not grow


def test_undelivered_ids_are_those_that_no_terminal_output_waits_for():
    mailbox = opened("nothing", "partial", "done", "taken")
    mailbox.deliver([partial("partial"), partial("done"), final("done"), final("taken")])
    taken(mailbox, "taken")
    assert sorted(mailbox.undelivered_ids()) == ["nothing", "partial"]


def test_withdrawn_ids_are_free_again():
    mailbox = Mailbox()
    seen: list[GenerationOutput] = []
    mailbox.open(["a", "b"], sink=seen.append)
    mailbox.withdraw(["a", "b", "unknown"])
    assert mailbox.open_ids() == []
    mailbox.open(["a"])
    mailbox.deliver([final("a")])
    assert (seen, taken(mailbox)) == ([], "a")


@pytest.mark.parametrize("verb", ["claim", "register"])
def test_unknown_and_ended_ids_are_refused(verb: str):
    mailbox = opened("a")
    mailbox.deliver([final("a")])
    taken(mailbox)
    for request_id in ("a", "unknown"):
        with pytest.raises(ValueError, match=f"'{request_id}' is unknown"):
            mailbox.claim(request_id) if verb == "claim" else mailbox.register(request_id, print)


# ---- sinks -------------------------------------------------------------------------------------------------------


def test_a_sink_gets_everything_of_its_ids_and_nothing_reaches_the_mailbox():
    mailbox = opened("other")
    seen: list[GenerationOutput] = []
    mailbox.open(["a", "b"], sink=seen.append)
    mailbox.deliver([partial("a"), final("b"), final("other"), final("a")])
    assert [(o.request_id, o.is_finished()) for o in seen] == [("a", False), ("b", True), ("a", True)]
    assert mailbox.open_ids() == ["other"]
    assert [taken(mailbox), taken(mailbox)] == ["other", None]


def test_a_sink_registered_late_gets_what_waits_first():
    mailbox = opened("a", "b")
    mailbox.deliver([partial("a", 1), final("b"), partial("a", 2)])
    counts: list[int] = []
    mailbox.register("a", lambda output: counts.append(len(output.generated_tokens)))
    assert counts == [1, 2]
    mailbox.deliver([partial("a", 3), final("a")])
    assert counts == [1, 2, 3, 0]
    assert not mailbox.is_open("a")
    assert [taken(mailbox), taken(mailbox)] == ["b", None]


def test_a_sink_registered_after_the_end_gets_the_end_and_closes_the_id():
    mailbox = opened("a")
    mailbox.deliver([final("a")])
    seen: list[str] = []
    mailbox.register("a", lambda output: seen.append(output.request_id))
    assert seen == ["a"]
    assert not mailbox.is_open("a")
    mailbox.open(["a"])
    mailbox.deliver([final("a")])
    assert seen == ["a"]  # the sink went with the old request


# ---- the end -----------------------------------------------------------------------------------------------------


def test_after_close_readers_get_what_is_there_and_then_none():
    mailbox = opened("a", "b")
    mailbox.deliver([final("a")])
    mailbox.close()
    assert mailbox.take() is not None
    assert mailbox.take() is None
    assert mailbox.take("b") is None


def test_close_wakes_everybody():
    mailbox = opened("a")
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(mailbox.take, who) for who in ("a", None, None)]
        mailbox.close()
        assert [w.result(timeout=30) for w in waiting] == [None] * 3


def test_reopened_it_waits_again():
    mailbox = opened("a")
    mailbox.close()
    mailbox.reopen()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(mailbox.take)
        mailbox.deliver([final("a")])
        assert waiting.result(timeout=30) is not None


# ---- threads -----------------------------------------------------------------------------------------------------


def iterate(mailbox: Mailbox, request_id: str, claimed: threading.Barrier) -> list[int]:
    """What an iterator over one id sees: the token counts, up to and with its terminal output."""
    mailbox.claim(request_id)
    claimed.wait(timeout=30)
    counts = []
    while (output := mailbox.take(request_id, timeout=30)) is not None:
        assert output.request_id == request_id
        counts.append(len(output.generated_tokens))
        if output.is_finished():
            break
    return counts


def test_eight_threads_iterate_their_own_ids_beside_one_that_takes_anybodys():
    names = [f"r{i}" for i in range(8)]
    mailbox = opened(*names, "spare")
    claimed = threading.Barrier(len(names) + 1)
    with ThreadPoolExecutor(len(names) + 1) as pool:
        readers = [pool.submit(iterate, mailbox, name, claimed) for name in names]
        anybody = pool.submit(mailbox.take)
        claimed.wait(timeout=30)
        for count in range(1, 101):
            mailbox.deliver(partial(name, count) for name in names)
        mailbox.deliver([*(final(name) for name in names), final("spare")])
        assert [reader.result(timeout=30) for reader in readers] == [[*range(1, 101), 0]] * 8
        output = anybody.result(timeout=30)
    assert output is not None
    assert output.request_id == "spare"
    assert mailbox.open_ids() == []


def test_many_readers_of_anybody_get_every_output_once():
    names = [f"r{i}" for i in range(200)]
    mailbox = opened(*names)

    def read_all() -> list[str]:
        got = []
        while (output := mailbox.take()) is not None:
            got.append(output.request_id)
        return got

    with ThreadPoolExecutor(8) as pool:
        readers = [pool.submit(read_all) for _ in range(8)]
        for name in names:
            mailbox.deliver([final(name)])
        mailbox.close()
        got = [name for reader in readers for name in reader.result(timeout=30)]
    assert sorted(got) == sorted(names)
