"""The serving benchmark: arithmetic, arrivals, reading of streams, and a small run on a tiny model."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from pathlib import Path

import pytest

import serve_bench
from bench.http_client import Address, Exchange, parse_events, request_bytes, unchunk
from bench.serve_client import Load, chat_body, figures_of_load
from bench.serve_figures import (
    Figures,
    Served,
    arrival_times,
    figures_of,
    format_rate,
    median_figures,
    percentile,
    read_served,
)
from bench.serve_overhead import Overhead
from bench.serve_peers import NUM_WARM, Outcome, Plan
from bench.server_process import ServerFailedError, ServerProcess, cb_engine_command, peer_command

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked(*values: object) -> list[bytes]:
    """Each value as an event in a chunk of its own, and the end."""
    datas = [b"data: " + (v if isinstance(v, bytes) else json.dumps(v).encode()) + b"\n\n" for v in values]
    return [*(f"{len(data):x}\r\n".encode() + data + b"\r\n" for data in datas), b"0\r\n\r\n"]


def delta(text: str | None, finish: str | None = None, **more: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}], **more}


USAGE = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4}}


def test_chunks_and_events_keep_the_time_of_their_last_byte() -> None:
    wire = b"".join(chunked({"a": 1}, b"[DONE]"))
    for step in (1, 3, 7, len(wire)):
        pieces = [(float(i), wire[i : i + step]) for i in range(0, len(wire), step)]
        events = list(parse_events(list(unchunk(pieces))))
        assert [data for _, data in events] == ['{"a": 1}', "[DONE]"]
        ends = [wire.index(b"\n\n\r\n") + 3, wire.index(b"[DONE]\n\n\r\n") + 9]
        assert [when for when, _ in events] == [end // step * step for end in ends]


def test_comments_and_other_fields_of_events_are_passed_over() -> None:
    data = b": ping\n\nevent: x\ndata: 1\n\ndata: 2\r\n\r\ndata: unfinished"
    assert list(parse_events([(1.0, data)])) == [(1.0, "1"), (1.0, "2")]


def test_an_answer_is_complete_or_not() -> None:
    def answer(*data: bytes, failure: str | None = None) -> Exchange:
        return Exchange(0.0, 1.0, [(0.5, piece) for piece in data], failure=failure)

    plain = b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\n"
    assert answer(plain, b"body").is_complete
    assert (answer(plain, b"body").status, answer(plain, b"bo", b"dy").body) == (404, b"body")
    assert not answer(plain, b"bod").is_complete
    assert answer(HEAD, *chunked(1)).is_complete
    assert not answer(HEAD, *chunked(1)[:-1]).is_complete
    assert not answer(HEAD, *chunked(1), failure="reset").is_complete
    assert not answer().is_complete
    assert answer(HEAD[:10], HEAD[10:], *chunked(1)).body == b"data: 1\n\n"


def test_a_request_on_the_wire() -> None:
    wire = request_bytes("POST", "/x", {"a": 1}, address=Address("h", 9), headers={"x-y": "z"})
    head, _, body = wire.partition(b"\r\n\r\n")
    assert json.loads(body) == {"a": 1}
    assert head.split(b"\r\n")[0] == b"POST /x HTTP/1.1"
    assert {b"host: h:9", b"content-length: 8", b"connection: close", b"x-y: z"} <= set(head.split(b"\r\n"))


def stream(*values: object, sent: float = 10.0) -> Exchange:
    """Pieces come at 11, 12, 13 ..."""
    pieces = [(sent + 1 + i, piece) for i, piece in enumerate(chunked(*values))]
    return Exchange(sent, pieces[-1][0], [(sent + 0.5, HEAD), *pieces])


def test_a_stream_is_read_into_times_and_tokens() -> None:
    served = read_served(stream(delta(""), delta("a"), delta("bc"), delta("", "length"), USAGE, b"[DONE]"), len)
    assert (served.times, served.tokens, served.prompt_tokens) == ((12.0, 13.0), 4, 5)
    assert (served.ttft, served.e2el, served.itl) == (2.0, 3.0, [1.0])
    assert served.tpot == pytest.approx(1 / 3)


def test_tokens_are_counted_where_the_server_does_not_say() -> None:
    assert read_served(stream(delta("ab"), delta("c", "stop")), len).tokens == 3
    with_usage = read_served(stream(delta("ab"), delta("c", "stop", **{"usage": USAGE["usage"]})), len)
    assert with_usage.tokens == 4


@pytest.mark.parametrize(
    ("exchange", "reason"),
    [
        (stream(delta("a"), b"[DONE]"), "broke off"),
        (stream(delta("", "stop")), "no text"),
        (stream(delta("a"), {"error": {"message": "no"}}, b"[DONE]"), "ended with"),
        (Exchange(0.0, 1.0, [(1.0, b"HTTP/1.1 503 X\r\ncontent-length: 2\r\n\r\nno")]), "status 503"),
        (Exchange(0.0, 1.0, failure="ConnectionRefusedError"), "Refused"),
    ],
)
def test_failures_have_reasons(exchange: Exchange, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_served(exchange, len)


def test_figures_are_those_of_vllm_bench() -> None:
    served = [Served(0.0, (1.0, 1.5, 2.0), 3), Served(1.0, (3.0, 5.0), 2), Served(2.0, (3.0,), 1)]
    figures = figures_of(served, failed=1, client_cpu=0.5)
    assert (figures.completed, figures.failed, figures.output_tokens, figures.seconds) == (3, 1, 6, 5.0)
    assert (figures.requests_per_s, figures.tokens_per_s, figures.client_cpu) == (0.6, 1.2, 0.1)
    assert figures.ttft_median == 1000  # of 1, 2, 1
    assert figures.ttft_p99 == pytest.approx(1980)
    assert figures.tpot_median == 1250  # of 0.5 and 2: an answer of one token has none
    assert figures.itl_median == 500  # of 0.5, 0.5, 2
    assert figures.e2el_median == 2000  # of 2, 4, 1
    nothing = figures_of([], failed=2, client_cpu=0.1)
    assert (nothing.completed, nothing.failed, nothing.tokens_per_s, nothing.ttft_median) == (0, 2, 0.0, 0.0)


def test_percentiles_are_linear() -> None:
    assert [percentile([4, 1, 3, 2], p) for p in (0, 50, 99, 100)] == [1, 2.5, pytest.approx(3.97), 4]
    assert (percentile([], 50), percentile([7], 99)) == (0.0, 7)


def test_arrivals_are_a_poisson_process_with_a_seed() -> None:
    assert arrival_times(3, math.inf, 0) == [0.0, 0.0, 0.0]
    times = arrival_times(20000, 4.0, 1)
    assert times == arrival_times(20000, 4.0, 1) != arrival_times(20000, 4.0, 2)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times[0] == 0.0
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.03)  # an exponential's deviation is its mean
    assert [t / 2 for t in arrival_times(50, 1.0, 3)] == pytest.approx(arrival_times(50, 2.0, 3))


def some_figures(tokens_per_s: float, ttft: float, failed: int = 0) -> Figures:
    rest = dict.fromkeys(("ttft_p99", "tpot_median", "tpot_p99", "itl_median", "itl_p99", "e2el_median"), 10.0)
    return Figures(8, failed, 1.0, 80, 8.0, tokens_per_s, ttft, client_cpu=0.05, **rest)


def test_medians_and_ratios() -> None:
    rounds = [some_figures(10, 30), some_figures(30, 10, failed=1), some_figures(20, 20)]
    median = median_figures(rounds)
    assert (median.tokens_per_s, median.ttft_median, median.failed, median.completed) == (20, 20, 1, 8)
    assert Outcome(rounds).result() == median
    assert Outcome(failures=["no room"]).result() == "no room"
    table = format_rate("title", {"mine": median, "theirs": some_figures(10, 10), "third": "no room"}).splitlines()
    assert table[0] == "title"
    assert table[1].split()[:3] == ["req/s", "tok/s", "TTFT"]
    assert table[-2].split() == ["x", "theirs", "1.00", "2.00", "0.50", *["1.00"] * 5]
    assert table[-1] == "third: no room"


def test_failed_requests_are_counted_and_named() -> None:
    figures, failures = figures_of_load(Load([stream(delta("a", "stop")), Exchange(0.0, 1.0)], 0.0), len)
    assert (figures.completed, figures.failed, len(failures)) == (1, 1, 1)


def test_every_server_is_asked_for_the_same_in_its_own_words() -> None:
    ours, theirs, vllms = (chat_body(e, "m", "q", 7) for e in ("cb_engine", "transformers", "vllm"))
    assert ours == vllms
    assert ours["ignore_eos"] is True
    assert ours["messages"] == theirs["messages"]
    config = json.loads(theirs["generation_config"])
    assert (config["eos_token_id"], config["max_new_tokens"], config["do_sample"]) == (-1, 7, False)
    assert "stream_options" not in chat_body("cb_engine", "m", "q", 7, stream=False)


def test_no_prompt_is_sent_to_a_server_twice() -> None:
    prompts = [f"p{i}" for i in range(100)]
    plan = Plan("m", (1.0, math.inf), prompts, 5, 8, 64, 0, 1.0, len, vllm_bench="python")
    slices = [plan.prompts_of(i, client) for client in (0, 1) for i in (0, 1)]
    used = [*itertools.chain(*slices), *plan.warm_prompts]
    assert len(used) == len(set(used)) == plan.num_needed == 4 * 5 + NUM_WARM


def test_overhead_is_the_median_of_the_rounds_ratios() -> None:
    overhead = Overhead(100)
    overhead.seconds["generate_batch"] = [1.0, 2.0, 4.0]
    overhead.seconds["server, streamed"] = [1.1, 2.4, 4.0]
    overhead.seconds["server, whole"] = [1.0, 1.9, 4.4]
    overhead.client_cpu = [0.02, 0.03]
    assert overhead.extra("server, streamed") == pytest.approx(0.1)
    assert overhead.extra("server, whole") == pytest.approx(0.0)
    lines = overhead.lines()
    assert lines[1].split() == ["server,", "streamed", "2.40", "s", "41.7", "tok/s", "+10.0%"]
    assert lines[-1] == "the client took 2.5% of a core"


def test_commands_of_the_peers() -> None:
    vllm = peer_command("vllm", "/model", "/venv/python", 300)
    assert vllm.command[0] == "/venv/python"
    assert vllm.environment["VLLM_CPU_KVCACHE_SPACE"]
    assert "--continuous-batching" in peer_command("transformers", "/model", "python", 300).command


def test_a_server_that_does_not_come_up(tmp_path: Path) -> None:
    with (
        ServerProcess(cb_engine_command(str(tmp_path / "nowhere"))) as server,
        pytest.raises(ServerFailedError, match="ended with 1"),
    ):
        server.wait_ready(60)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rates", "1,x"], "positive numbers or inf"),
        (["--rates", "0"], "positive numbers or inf"),
        (["--num-prompts", "0"], "--num-prompts must be positive"),
        (["--engines", "tgi"], "unknown engine 'tgi'"),
        (["--vllm-bench"], "--vllm-bench needs --vllm-python"),
        (["--overhead", "--engines", "vllm"], "--overhead runs cb_engine alone"),
    ],
)
def test_wrong_flags_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve_bench.main(flags)
    assert message in capsys.readouterr().err


def test_what_cannot_begin_says_why(tiny_model: Path, questions_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--model", str(tiny_model), "--dataset", str(questions_file), "--num-prompts", "2", "--engines"]
    assert serve_bench.main([*base, "cb_engine"]) == 2
    assert "has 5 questions, 16 are needed" in capsys.readouterr().err
    assert serve_bench.main([*base, "vllm"]) == 2
    assert "needs --vllm-python" in capsys.readouterr().err


@pytest.fixture
def many_questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"question": f"w{i} w2 w3"}) + "\n" for i in range(20)))
    return path


def test_a_small_run(
    tiny_model: Path, many_questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    args = ["--model", str(tiny_model), "--dataset", str(many_questions), "--engines", "cb_engine", "--rates", "50,inf"]
    assert (
        serve_bench.main([*args, "--num-prompts", "3", "--max-tokens", "6", "--rounds", "1", "--json", str(file)]) == 0
    )
    printed = capsys.readouterr().out
    assert "50 requests a second, 3 requests of 6 new tokens" in printed
    assert "all at once" in printed
    rows = json.loads(file.read_text())["rows"]
    assert [(row["rate"], row["engine"]) for row in rows] == [("50.0", "cb_engine"), ("inf", "cb_engine")]
    assert all((r["median"]["completed"], r["median"]["output_tokens"], r["failures"]) == (3, 18, []) for r in rows)


def test_a_small_run_of_the_overhead(
    tiny_model: Path, many_questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "overhead.json"
    args = ["--overhead", "--model", str(tiny_model), "--dataset", str(many_questions), "--num-prompts", "4"]
    assert serve_bench.main([*args, "--max-tokens", "8", "--rounds", "1", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert all(way in printed for way in ("generate_batch", "server, streamed", "server, whole", "of a core"))
    assert set(json.loads(file.read_text())["extra"]) == {"server, streamed", "server, whole"}
