"""Engines side by side: the cases, the processes they run in, and what comes of several rounds.

Each engine runs in a process of its own (`peer_worker.py`), one at a time, so that no engine's idle threads disturb
another. A round runs every engine once over all cases; figures are medians over the rounds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.report import Row, Skipped
from bench.workloads import random_prompts
from cb_engine.kv_cache.block import common_prefix_length

ENGINES = ("cb_engine", "transformers", "static", "vllm")
FIRST_TOKEN = "first_token"
NUM_QUESTIONS = 161

_WORKER = Path(__file__).with_name("peer_worker.py")
_MARK = "@@"
_WATCH_INTERVAL_S = 0.1
# In one process vLLM is half as fast again on few cores as with its engine in a process of its own.
_VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@dataclass(frozen=True)
class Case:
    """One row of work, EOS off: each sample gets exactly `max_new` tokens.

    Attributes:
        temperature: 0 is greedy.
        n: samples of each prompt.
        counts_prompt: the figure is prompt tokens a second, of a case that is all prompt.
        skip: engines that would take many minutes over it.
    """

    label: str
    prompts: list[list[int]]
    max_new: int
    temperature: float = 0.0
    n: int = 1
    counts_prompt: bool = False
    skip: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """What the figure counts, over all samples."""
        if self.counts_prompt:
            return sum(map(len, self.prompts))
        return len(self.prompts) * self.n * self.max_new

    @property
    def avg_in(self) -> float:
        """Mean prompt length in tokens."""
        return sum(map(len, self.prompts)) / len(self.prompts)


def build_cases(questions: list[list[int]], vocab_size: int, *, quick: bool, seed: int) -> list[Case]:
    """The rows of the comparison.

    Args:
        questions: token ids of at least NUM_QUESTIONS GSM8K prompts, none of which is used twice: engines keep what
            they have computed.
        vocab_size: bounds the ids of random prompts.
        quick: an eighth of the prompts, sixteen new tokens at most.
    """

    def questions_from(first: int, count: int) -> list[list[int]]:
        return questions[first : first + (count // 8 if quick else count)]

    def random(count: int, length: int, salt: int) -> list[list[int]]:
        return random_prompts(max(1, count // 8) if quick else count, vocab_size, seed + salt, length)

    def new(count: int) -> int:
        return min(count, 16) if quick else count

    slow = () if quick else ("transformers",)
    long = () if quick else ("transformers", "static")
    return [
        Case("gsm8k_32x64", questions_from(0, 32), new(64)),
        Case("gsm8k_64x128", questions_from(32, 64), new(128)),
        Case("gsm8k_64x128_t0.8", questions_from(96, 64), new(128), temperature=0.8, skip=slow),
        Case("random_32x512", random(32, 256, 1), new(512), skip=long),
        Case("random_32x1024", random(32, 256, 2), new(1024), skip=long),
        Case("random_8x128_n8", random(8, 256, 3), new(128), temperature=1.0, n=8, skip=slow),
        Case("single_128", questions[160:161], new(128)),
        Case("prefill_16x1024", random(16, 1024, 4), 1, counts_prompt=True, skip=slow),
    ]


@dataclass
class Measured:
    """What the rounds have shown of one engine and case."""

    seconds: list[float] = field(default_factory=list)
    memory_gb: float = 0.0
    outputs: list[list[int]] = field(default_factory=list)
    repeatable: bool = True  # every round gave the same tokens
    failures: list[str] = field(default_factory=list)  # one round that failed is enough for the row to have failed


Results = dict[tuple[str, str], Measured]  # by (label, engine)


def run_rounds(
    model: str,
    cases: Sequence[Case],
    pythons: Mapping[str, str],
    rounds: int,
    progress: Callable[[str], None],
) -> Results:
    """Runs all engines in turn, so many times.

    Args:
        model: a folder that every engine can load.
        pythons: the interpreter of each engine.
        progress: gets a line before each process and after each case.
    """
    results: Results = {}
    for number in range(1, rounds + 1):
        for engine, python in pythons.items():
            progress(f"round {number} of {rounds}: {engine}")
            run_engine(engine, python, model, cases, results, progress)
    return results


def run_engine(
    engine: str,
    python: str,
    model: str,
    cases: Sequence[Case],
    results: Results,
    progress: Callable[[str], None],
) -> None:
    """Starts an engine's process and adds what it measures to `results`."""
    mine = [case for case in cases if engine not in case.skip]
    if not mine:
        return
    longest = max(max(map(len, case.prompts)) + case.max_new for case in mine)
    known_ids = 1 + max(max(prompt) for case in mine for prompt in case.prompts)
    spec = {
        "model": model,
        "limits": {"max_model_len": max(longest, 128)},
        "warm_prompts": random_prompts(8, known_ids, 99, 64),
        "cases": [asdict(case) for case in mine],
    }
    with tempfile.TemporaryDirectory() as folder:
        spec_path, errors = Path(folder, "spec.json"), Path(folder, "stderr")
        spec_path.write_text(json.dumps(spec), encoding="utf-8")
        with errors.open("w") as sink:
            start = time.perf_counter()
            process = subprocess.Popen(
                [python, str(_WORKER), engine, str(spec_path)],
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                env=os.environ | (_VLLM_ENVIRONMENT if engine == "vllm" else {}),
            )
            with _PeakOf(process.pid) as peak:
                reported = _read(process, engine, start, peak, results, progress)
        if process.wait() != 0:
            last = errors.read_text(errors="replace").strip().splitlines()[-1:] or ["no message"]
            for label in (FIRST_TOKEN, *(case.label for case in mine)):
                if label not in reported:
                    failures = results.setdefault((label, engine), Measured()).failures
                    failures.append(f"the process ended with {process.returncode}: {last[0]}")


def _read(
    process: subprocess.Popen[str],
    engine: str,
    start: float,
    peak: _PeakOf,
    results: Results,
    progress: Callable[[str], None],
) -> set[str]:
    """Takes in what a process says, and returns the labels it has said something of."""
    reported: set[str] = set()
    for line in process.stdout or ():
        if not line.startswith(_MARK):
            continue
        message: dict[str, Any] = json.loads(line.removeprefix(_MARK))
        if message["event"] == "ready":
            peak.take()
            continue
        label = message.get("label", FIRST_TOKEN)
        measured = results.setdefault((label, engine), Measured())
        reported.add(label)
        if message["event"] == "failed":
            measured.failures.append(message["reason"])
            continue
        seconds = message.get("seconds", time.perf_counter() - start)
        outputs = message.get("outputs", [])
        measured.repeatable &= not measured.seconds or outputs == measured.outputs
        measured.seconds.append(seconds)
        measured.memory_gb = max(measured.memory_gb, peak.take())
        measured.outputs = outputs
        progress(f"  {label}: {seconds:.2f} s")
    return reported


class _PeakOf:
    """Peak resident memory of a process and its children, all told: weights, caches, compiled code."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-of", daemon=True)

    def __enter__(self) -> _PeakOf:
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._stop.set()
        self._thread.join()

    def take(self) -> float:
        """The peak since the last call, in GB."""
        peak, self._peak = max(self._peak, self._now()), 0
        return peak / 1e9

    def _now(self) -> int:
        try:
            family = [self._process, *self._process.children(recursive=True)]
            return sum(process.memory_info().rss for process in family)
        except psutil.Error:  # it is ending
            return 0

    def _watch(self) -> None:
        while not self._stop.wait(_WATCH_INTERVAL_S):
            self._peak = max(self._peak, self._now())


def to_rows(results: Results, cases: Sequence[Case], engines: Sequence[str]) -> list[Row | Skipped]:
    """Medians as rows, in the order of the cases. The time to the first token is a row with one token."""
    rows: list[Row | Skipped] = []
    for case in [*cases, None]:
        label = case.label if case else FIRST_TOKEN
        shape = (len(case.prompts) * case.n, round(case.avg_in, 1), case.max_new) if case else (1, 64.0, 1)
        for engine in engines:
            measured = results.get((label, engine))
            if measured is None:
                rows.append(Skipped(label, engine, *shape, "takes many minutes", failed=False))
                continue
            if measured.failures:
                rounds = len(measured.failures) + len(measured.seconds)
                reason = f"failed in {len(measured.failures)} of {rounds} rounds: {measured.failures[-1]}"
                rows.append(Skipped(label, engine, *shape, reason, failed=True))
                continue
            seconds = statistics.median(measured.seconds)
            tokens = case.tokens if case else 1
            rows.append(Row(label, engine, *shape, seconds, tokens, tokens / seconds, measured.memory_gb))
    return rows


def agreement(results: Results, cases: Sequence[Case], engines: Sequence[str]) -> list[str]:
    """How the greedy outputs compare, a line per case and engine: with padded `generate`'s where it ran, else with
    those of the first engine that did."""
    lines = []
    order = sorted(engines, key=lambda engine: engine != "static")
    for case in cases:
        measurements = {e: m for e in order if (m := results.get((case.label, e))) is not None and m.outputs}
        if case.temperature > 0 or not measurements:
            continue
        reference, *others = measurements
        theirs = measurements[reference].outputs
        for engine in others:
            measured = measurements[engine]
            common = [common_prefix_length(a, b) for a, b in zip(measured.outputs, theirs, strict=True)]
            equal = sum(a == b for a, b in zip(measured.outputs, theirs, strict=True))
            steady = "" if measured.repeatable else "; not the same in every round"
            lines.append(
                f"{case.label:18} {engine:12} {equal:3} of {len(theirs)} equal to {reference}'s, "
                f"first {statistics.mean(common):.0f} of {case.max_new} tokens on average{steady}"
            )
    return lines


def pythons_of(engines: Sequence[str], vllm_python: str | None) -> dict[str, str]:
    """The interpreter of each engine.

    Raises:
        ValueError: an unknown engine, or vLLM without an interpreter that has it.
    """
    for engine in engines:
        if engine not in ENGINES:
            raise ValueError(f"unknown engine {engine!r}; known ones: {', '.join(ENGINES)}")
    if "vllm" in engines:
        if vllm_python is None:
            raise ValueError("vllm needs --vllm-python PATH, the interpreter of an environment that has it")
        found = subprocess.run([vllm_python, "-c", "import vllm"], capture_output=True, text=True, check=False)
        if found.returncode != 0:
            last = found.stderr.strip().splitlines()[-1:] or ["no message"]
            raise ValueError(f"{vllm_python} cannot import vllm: {last[0]}")
    return {engine: (vllm_python or "") if engine == "vllm" else sys.executable for engine in engines}
