"""A server under load and faults: does everybody get the right answer, or a clear error?

Rounds of clients ask all at once, for chats and completions, streamed and whole. A quarter of them leave early, bad
requests come in between, in the second round the engine is made to fail, and /health is asked all the while. In the
end the server gets a SIGTERM while a stream is open, and another server two of them.

Answers are compared with those that the same server gave to the same requests one at a time before. They are equal in
float32, which is the default; in bfloat16 two tokens that are as likely may change places.

With --base-url another server is asked; what takes a process of our own is left out then: faults, memory and signals.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import urllib.parse
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from bench.http_client import Address, fetch, request_bytes
from bench.load_checks import (
    Check,
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
from bench.load_requests import Answer, Plan, make_bad_requests, make_plans, read_answer
from bench.load_round import Poll, Round, make_clients, run_round, wait_drained, wait_healthy, watching
from bench.load_shutdown import check_drain, check_second_sigterm
from bench.machine import describe_machine
from bench.server_process import ServerFailedError, ServerProcess, cb_engine_command

_READY_S = 300.0
_DRAIN_S = 10.0
_RECOVERY_S = 120.0  # for a failed engine to be made anew
_ENDING_TOKENS = 256
_SLOW_RESTART_S = 1.0  # long enough to be seen by who asks every 50 ms


@dataclass
class Session:
    """What is asked of whom, and what has come of it."""

    address: Address
    args: argparse.Namespace
    server: ServerProcess | None
    events: Path
    model: str = ""
    max_model_len: int = 0
    plans: list[Plan] = field(default_factory=list)
    ending: Plan | None = None  # a stream that is still open when the server is told to end
    right: dict[Plan, Answer] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    polls: list[Poll] = field(default_factory=list)

    @property
    def failing_round(self) -> int | None:
        """The round in which the engine is made to fail."""
        return min(2, self.args.rounds) if self.server is not None else None


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="demo", help="`demo`, a local folder or a hub id (default: %(default)s)")
    add("--dtype", default="float32", help="of the weights (default: %(default)s)")
    add("--base-url", metavar="URL", help="a server that runs already, e.g. http://127.0.0.1:8000")
    add("--rounds", type=int, default=3, metavar="N", help="default: %(default)s")
    add("--concurrency", type=int, default=64, metavar="N", help="clients at once (default: %(default)s)")
    add("--plans", type=int, default=24, metavar="N", help="different good requests (default: %(default)s)")
    add("--longest", type=int, default=64, metavar="N", help="most tokens of an answer (default: %(default)s)")
    add("--num-blocks", type=int, default=256, metavar="N", help="KV blocks of the server (default: %(default)s)")
    add("--timeout", type=float, default=120.0, metavar="S", help="for each request (default: %(default)s)")
    add("--health-limit", type=float, default=2.0, metavar="S", help="for each look at /health (default: %(default)s)")
    add("--rss-tolerance", type=float, default=64.0, metavar="MB", help="growth after round 1 (default: %(default)s)")
    add("--seed", type=int, default=0, help="of all choices (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write checks and figures to FILE")
    return parser


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads and checks the command line."""
    parser = build_parser()
    args = parser.parse_args(argv)
    for name in ("rounds", "concurrency", "plans", "longest", "num_blocks", "timeout", "health_limit"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive")
    if args.base_url is not None:
        parts = urllib.parse.urlsplit(args.base_url)
        if parts.scheme != "http" or not parts.hostname:
            parser.error("--base-url must look like http://127.0.0.1:8000")
        args.address = Address(parts.hostname, parts.port or 80)
    return args


def new_server(args: argparse.Namespace, events: Path) -> ServerProcess:
    """A server that can be made to fail, not started yet."""
    options = ["--dtype", args.dtype, "--num-blocks", str(args.num_blocks), "--events", str(events)]
    options += ["--slow-restart", str(_SLOW_RESTART_S)]
    return ServerProcess(cb_engine_command(args.model, options=options))


async def get_ready(session: Session) -> None:
    """Asks what is served, and gets every answer once while nothing else goes on.

    Raises:
        ServerFailedError: an answer is not what it should be even so.
    """
    cards = await fetch(session.address, request_bytes("GET", "/v1/models", address=session.address), timeout=30)
    if cards.status != 200:
        raise ServerFailedError(f"/v1/models: {cards.failure or cards.status}")
    card = cards.json()["data"][0]
    session.model, session.max_model_len = card["id"], card["max_model_len"]
    args = session.args
    session.plans = make_plans(args.plans, args.seed, session.model, args.longest)
    greedy_chat = session.plans[0]
    session.ending = greedy_chat.lasting(min(_ENDING_TOKENS, session.max_model_len // 2))
    for plan in tqdm([*session.plans, session.ending], desc="answers alone", unit="request", leave=False):
        session.right[plan] = await ask_alone(session, plan)


async def ask_alone(session: Session, plan: Plan) -> Answer:
    """The answer to a request that has the server to itself."""
    exchange = await fetch(session.address, plan.request(session.address, stream=False), timeout=session.args.timeout)
    if exchange.status != 200 or not exchange.is_complete:
        raise ServerFailedError(f"{plan.name}: {exchange.failure or exchange.status}, {exchange.body[:300]!r}")
    return read_answer(exchange, plan)


async def run_rounds(session: Session) -> None:
    """All rounds, watched."""
    args = session.args
    bad = make_bad_requests(session.address, session.model, session.max_model_len)
    async with watching(session.address) as session.polls:
        for number in range(1, args.rounds + 1):
            clients = make_clients(session.plans, args.concurrency, args.seed + number)
            with tqdm(total=len(clients), desc=f"round {number} of {args.rounds}", unit="answer", leave=False) as bar:

                def on_end(count: int, bar: Any = bar, number: int = number) -> None:
                    bar.update()
                    if number == session.failing_round and count == max(1, args.concurrency // 3) and session.server:
                        session.server.signal(signal.SIGUSR1)

                result = await run_round(
                    session.address, number, clients, bad, seed=args.seed, timeout=args.timeout, on_end=on_end
                )
            await wait_healthy(session.address, _RECOVERY_S)
            await wait_drained(session.address, result, _DRAIN_S)
            result.rss = None if session.server is None else session.server.rss()
            session.rounds.append(result)


def judge(session: Session) -> list[Check]:
    """The checks that need no signals."""
    args = session.args
    outages = read_outages(session.events)
    checks = [
        check_answers(session.rounds, session.right, outages),
        check_refusals(session.rounds, outages),
        check_drained(session.rounds, _DRAIN_S),
        check_memory(session.rounds, args.rss_tolerance),
        check_outage(outages, failed_on_purpose=session.server is not None),
        check_health_truth(session.polls, outages, failed_on_purpose=session.server is not None),
        check_promptness(session.polls, "/health", args.health_limit),
        check_promptness(session.polls, "/metrics", args.health_limit),
    ]
    return checks


async def run_session(session: Session) -> list[Check]:
    """Everything that one server is asked, its end included."""
    await get_ready(session)
    await run_rounds(session)
    checks = judge(session)
    if session.server is not None and session.ending is not None:
        right = session.right[session.ending]
        checks.append(await check_drain(session.server, session.ending, right, session.args.timeout))
        checks.append(check_log(session.server.log))
    return checks


def run_all(args: argparse.Namespace) -> tuple[list[Check], Session]:
    """The whole script.

    Raises:
        ServerFailedError: a server did not come up, or could not even answer alone.
    """
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder, "events")
        with nullcontext() if args.base_url else new_server(args, events) as server:
            if server is not None:
                server.wait_ready(_READY_S)
            session = Session(args.address if server is None else server.address, args, server, events)
            checks = asyncio.run(run_session(session))
        if server is not None and session.ending is not None:
            with new_server(args, events) as second:
                second.wait_ready(_READY_S)
                checks.append(asyncio.run(check_second_sigterm(second, session.ending, args.timeout)))
    return checks, session


def main(argv: Sequence[str] | None = None) -> int:
    """Runs it; 1 if a check failed, 2 if the server did not come up."""
    args = parse_args(argv)
    try:
        checks, session = run_all(args)
    except ServerFailedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.rounds} rounds of {args.concurrency} clients: {to_seconds(session.rounds)}")
    print("\n".join(line for check in checks for line in check.lines()))
    if args.json is not None:
        report = {
            "checks": [{**asdict(check), "verdict": check.verdict} for check in checks],
            "rounds": [{"seconds": r.seconds, "drained": r.drained, "rss": r.rss} for r in session.rounds],
            "machine": describe_machine(),
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return int(any(check.verdict == "failed" for check in checks))


def to_seconds(rounds: Sequence[Round]) -> str:
    """How long they took."""
    return ", ".join(f"{round_.seconds:.1f} s" for round_ in rounds)


if __name__ == "__main__":
    raise SystemExit(main())
