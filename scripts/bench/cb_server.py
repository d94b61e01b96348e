"""This project's server for measurements and for tests of its faults, as a program.

    python cb_server.py --model demo --port 8000 [--events FILE]

With `--events` the engine can be made to fail: SIGUSR1 lets the next step raise, once for each signal. That is done to
the engine from outside; the product has no such door. FILE gets a line when an engine fails and when one starts, with
the time by `time.monotonic()`, so that a client can tell whether the server told the truth about it.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cb_engine import Engine, EngineConfig, GenerationOutput
from cb_engine.api.manager import ContinuousBatchingManager
from cb_engine.models import load_model
from cb_engine.serve.app import build_app
from cb_engine.serve.server import run_server
from cb_engine.serve.settings import ServeSettings


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="demo", help="`demo`, a local folder or a hub id (default: %(default)s)")
    add("--port", type=int, required=True, help="on loopback")
    add("--dtype", default="auto", help="of the weights (default: %(default)s)")
    add("--num-blocks", type=int, metavar="N", help="KV blocks of the pool (default: by free memory)")
    add("--shutdown-timeout", type=float, default=30.0, help="seconds for what runs at the end (default: %(default)s)")
    add("--events", type=Path, metavar="FILE", help="let SIGUSR1 fail the engine, and tell FILE of it")
    add("--slow-restart", type=float, default=0.0, metavar="S", help="seconds more that a failed engine stays away")
    return parser


class Faults:
    """Makes engines fail on demand, and keeps book of their lives."""

    def __init__(self, events: Path, slow_restart: float) -> None:
        self._events = events
        self._slow_restart = slow_restart
        self._num_wanted = 0
        self._has_failed = False

    def install(self) -> None:
        """Puts itself between the engines' threads and their steps."""
        step, warm_up, start = Engine.step, ContinuousBatchingManager.warmup, ContinuousBatchingManager.start

        def failing_step(engine: Engine) -> list[GenerationOutput]:
            if self._num_wanted:
                self._num_wanted -= 1
                self._has_failed = True
                self._tell("down")
                raise RuntimeError("a fault that was asked for")
            return step(engine)

        def slow_warmup(manager: ContinuousBatchingManager, progress_bar: bool = False) -> None:
            if self._has_failed:
                time.sleep(self._slow_restart)  # in a thread of its own, as all of the warm-up
            warm_up(manager, progress_bar)

        def telling_start(manager: ContinuousBatchingManager) -> None:
            start(manager)
            self._tell("up")

        for owner, name, replacement in (
            (Engine, "step", failing_step),
            (ContinuousBatchingManager, "warmup", slow_warmup),
            (ContinuousBatchingManager, "start", telling_start),
        ):
            setattr(owner, name, replacement)
        signal.signal(signal.SIGUSR1, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self._num_wanted += 1

    def _tell(self, event: str) -> None:
        with self._events.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, "at": time.monotonic()}) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until told to end."""
    args = build_parser().parse_args(argv)
    if args.events is not None:
        Faults(args.events, args.slow_restart).install()
    config = EngineConfig(num_blocks=args.num_blocks)
    settings = ServeSettings(model_name=args.model, shutdown_timeout=args.shutdown_timeout)
    app = build_app(lambda: load_model(args.model, dtype=args.dtype), settings, config=config)
    return run_server(app, host="127.0.0.1", port=args.port)


if __name__ == "__main__":
    sys.exit(main())
