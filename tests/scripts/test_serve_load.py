"""The load script: its checks on made-up exchanges, and a small real run against a server that is made to fail."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import serve_load
from bench.http_client import Address, Exchange
from bench.load_checks import (
    Outage,
    check_answers,
    check_drained,
    check_health_truth,
    check_log,
    check_memory,
    check_outage,
    check_promptness,
    check_refusals,
    read_outages,
)
from bench.load_requests import Answer, BadRequest, Choice, Plan, make_bad_requests, make_plans, read_answer
from bench.load_round import Client, Poll, Round, make_clients, read_gauges

ADDRESS = Address("127.0.0.1", 1)
CHAT = Plan("chat", "/v1/chat/completions", {"messages": []})
RIGHT = Answer([Choice("right", "stop")], 3)
ERROR = {"error": {"message": "the engine failed", "type": "server_error", "param": None, "code": None}}


def exchange(status: int, body: bytes, *, sent: float = 10.0, ended: float = 11.0, stream: bool = False) -> Exchange:
    kind = "text/event-stream" if stream else "application/json"
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    return Exchange(sent, ended, [(ended, head + body)])


def whole(text: str = "right", tokens: int = 3) -> bytes:
    choice = {"index": 0, "message": {"content": text}, "finish_reason": "stop"}
    return json.dumps({"choices": [choice], "usage": {"completion_tokens": tokens}}).encode()


def events(*values: object) -> bytes:
    return b"".join(b"data: " + (v if isinstance(v, bytes) else json.dumps(v).encode()) + b"\n\n" for v in values)


def chunk(text: str, finish: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}


USAGE = {"choices": [], "usage": {"completion_tokens": 3}}
DONE = b"[DONE]"


@pytest.mark.parametrize(
    ("answer", "outages", "fault"),
    [
        (exchange(200, whole()), [], None),
        (exchange(200, events(chunk("ri"), chunk("ght", "stop"), USAGE, DONE), stream=True), [], None),
        (exchange(200, whole("wrong")), [], "alone it was"),
        (exchange(200, whole(tokens=4)), [], "4 completion tokens, alone it had 3"),
        (exchange(200, whole()[:-5] + b"xxxxx"), [], "JSONDecodeError"),
        (exchange(200, events(chunk("right", "stop"), USAGE), stream=True), [], "no [DONE]"),
        (exchange(200, events(chunk("right", "stop"), chunk("!"), DONE), stream=True), [], "goes on after its end"),
        (exchange(200, events(chunk("ri"), ERROR, DONE), stream=True), [], "though the engine lived"),
        (exchange(200, events(chunk("ri"), ERROR, DONE), stream=True), [Outage(10.5, 12.0)], None),
        (
            exchange(200, events(chunk("wr"), ERROR, DONE), stream=True),
            [Outage(10.5, 12.0)],
            "before the error is wrong",
        ),
        (exchange(503, json.dumps(ERROR).encode()), [Outage(10.5, 12.0)], None),
        (exchange(503, json.dumps(ERROR).encode()), [Outage(11.5, 12.0)], "status 503"),
        (exchange(503, b"{}"), [Outage(10.5, 12.0)], "without an error object"),
        (exchange(500, json.dumps(ERROR).encode()), [Outage(10.5, 12.0)], "status 500"),
        (replace(exchange(200, whole()), failure="ConnectionResetError"), [], "ConnectionResetError"),
        (Exchange(1.0, 2.0), [], "not complete"),
    ],
)
def test_answers_are_judged(answer: Exchange, outages: list[Outage], fault: str | None) -> None:
    check = check_answers([Round(1, clients=[(Client(CHAT, False, None), answer)])], {CHAT: RIGHT}, outages)
    assert (check.verdict == "passed") == (fault is None), check.faults
    assert fault is None or fault in check.faults[0]


def test_who_has_left_is_not_asked() -> None:
    gone = Exchange(1.0, 2.0, left=True)
    check = check_answers([Round(1, clients=[(Client(CHAT, False, None), gone)])], {CHAT: RIGHT}, [])
    assert (check.verdict, check.note) == ("passed", "1 left early")


def test_refusals_are_judged() -> None:
    def verdict(answer: Exchange, *, is_http: bool = False, outages: tuple[Outage, ...] = ()) -> str:
        return check_refusals([Round(1, bad=[(BadRequest("bad", b"", 400, is_http), answer)])], outages).verdict

    assert verdict(exchange(400, json.dumps(ERROR).encode())) == "passed"
    assert verdict(exchange(400, b"no")) == "failed"
    assert verdict(exchange(400, b"no"), is_http=True) == "passed"
    assert verdict(exchange(200, whole())) == "failed"
    assert verdict(exchange(503, json.dumps(ERROR).encode())) == "failed"
    assert verdict(exchange(503, json.dumps(ERROR).encode()), outages=(Outage(10.5, 12.0),)) == "passed"


def test_health_is_judged() -> None:
    def verdict(*looks: tuple[float, int]) -> str:
        polls = [Poll("/health", exchange(status, b"{}", sent=at, ended=at + 0.01)) for at, status in looks]
        return check_health_truth(polls, [Outage(10.0, 12.0)], failed_on_purpose=True).verdict

    assert verdict((9.0, 200), (11.0, 503), (13.0, 200)) == "passed"
    assert verdict((10.05, 200), (11.0, 503), (12.05, 503)) == "passed", "within the lag"
    assert verdict((9.0, 503), (11.0, 503)) == "failed"
    assert verdict((11.0, 200), (11.5, 503)) == "failed"
    assert verdict((9.0, 200), (13.0, 200)) == "failed", "nobody saw it"


def test_the_other_checks() -> None:
    assert check_memory([Round(1, rss=10**9), Round(2, rss=10**9 + 10**7)], 64).verdict == "passed"
    assert check_memory([Round(1, rss=10**9), Round(2, rss=10**9 + 10**8)], 64).verdict == "failed"
    assert check_memory([Round(1, rss=10**9)], 64).verdict == "skipped"
    assert check_drained([Round(1, drained=0.1)], 10).verdict == "passed"
    assert check_drained([Round(1, gauges={"x": 1.0})], 10).verdict == "failed"
    slow = Poll("/health", Exchange(1.0, 4.0))
    assert check_promptness([slow], "/health", 2.0).verdict == "failed"
    assert check_promptness([slow], "/health", 4.0).verdict == "passed"
    assert check_promptness([slow], "/metrics", 4.0).verdict == "failed"
    assert check_outage([Outage(1, 2)], failed_on_purpose=True).verdict == "passed"
    assert check_outage([], failed_on_purpose=True).verdict == "failed"
    assert check_outage([Outage(1, float("inf"))], failed_on_purpose=True).verdict == "failed"
    assert check_log("all is well").verdict == "passed"
    assert check_log("Task exception was never retrieved").verdict == "failed"


def test_outages_are_read_from_the_servers_book(tmp_path: Path) -> None:
    book = tmp_path / "events"
    assert read_outages(book) == []
    lines = [("up", 1.0), ("down", 2.0), ("up", 3.0), ("down", 4.0)]
    book.write_text("".join(json.dumps({"event": event, "at": at}) + "\n" for event, at in lines))
    assert read_outages(book) == [Outage(2.0, 3.0), Outage(4.0, float("inf"))]


def test_requests_and_clients_are_the_same_every_time() -> None:
    plans = make_plans(16, 0, "m", 32)
    assert [p.body for p in plans] == [p.body for p in make_plans(16, 0, "m", 32)]
    assert len({p.name for p in plans}) == 8
    assert all(1 <= plan.body["max_tokens"] <= 32 for plan in plans)
    clients = make_clients(plans, 64, 0)
    assert sum(client.leave is not None for client in clients) == 16
    assert 16 < sum(client.stream for client in clients) < 48
    names = [bad.name for bad in make_bad_requests(ADDRESS, "m", 100)]
    assert len(names) == len(set(names)) == 26


def test_several_choices_are_read() -> None:
    plan = Plan("two", "/v1/completions", {"prompt": ["a", "b"], "n": 2})
    assert plan.num_choices == 4
    texts = [{"index": i, "text": f"t{i}", "finish_reason": "length", "logprobs": None} for i in (1, 0, 3, 2)]
    body = json.dumps({"choices": texts, "usage": {"completion_tokens": 4}}).encode()
    assert [choice.text for choice in read_answer(exchange(200, body), plan).choices] == ["t0", "t1", "t2", "t3"]


def test_gauges_are_read() -> None:
    page = 'vllm:num_requests_running{model_name="m"} 2.0\ncb_engine:kv_blocks_live{engine="0"} 7.0\n'
    assert read_gauges(page) == {"vllm:num_requests_running": 2.0, "cb_engine:kv_blocks_live": 7.0}


@pytest.mark.parametrize("flags", [["--rounds", "0"], ["--base-url", "ftp://x"], ["--base-url", "nonsense"]])
def test_wrong_flags_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        serve_load.main(flags)


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve_load.main(["--base-url", "http://127.0.0.1:9", "--rounds", "1"]) == 2
    assert "/v1/models" in capsys.readouterr().err


def run(model: Path, file: Path, *flags: str) -> dict[str, str]:
    assert serve_load.main(["--model", str(model), "--json", str(file), *flags]) == 0
    return {check["name"]: check["verdict"] for check in json.loads(file.read_text())["checks"]}


def test_a_small_run(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--rounds", "2", "--concurrency", "12", "--plans", "8", "--longest", "24")
    verdicts = run(tiny_model, tmp_path / "report.json", *flags, "--health-limit", "30")
    assert set(verdicts.values()) == {"passed"}, capsys.readouterr().out
    assert len(verdicts) == 11


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = run(Path("demo"), tmp_path / "report.json", "--health-limit", "30")
    assert set(verdicts.values()) == {"passed"}, capsys.readouterr().out
