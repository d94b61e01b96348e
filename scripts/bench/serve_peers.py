"""Servers side by side: each in its own process, one at a time, at several request rates.

A round starts every server once, warms it up and sends the same prompts to it as to the others. No prompt is sent to
one server twice: all of them keep what they have computed.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.serve_client import chat_body, figures_of_load, send, warm_up
from bench.serve_figures import Figures, arrival_times, median_figures
from bench.server_process import ServerFailedError, ServerProcess, peer_command

NUM_WARM = 8

_READY_S = 600.0
# `vllm bench serve` without the command line around it, which wants metadata that builds for the CPU lack.
_VLLM_BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
try:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
except ImportError:
    from vllm.utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
_BENCH_FIGURES = (
    *("completed", "output_throughput", "request_throughput", "median_ttft_ms", "p99_ttft_ms"),
    *("median_tpot_ms", "p99_tpot_ms", "median_itl_ms", "p99_itl_ms"),
)


@dataclass(frozen=True)
class Plan:
    """What every server gets.

    Attributes:
        rates: requests a second; infinity is all at once.
        prompts: `num_prompts` for each rate, and as many again for vLLM's own client if it runs; then those of the
            warm-up.
        count_tokens: of a text, for a server that does not say how many there were.
        vllm_bench: the interpreter of vLLM's own client; None leaves it out.
    """

    model: str
    rates: tuple[float, ...]
    prompts: list[str]
    num_prompts: int
    max_tokens: int
    max_model_len: int
    seed: int
    timeout: float
    count_tokens: Callable[[str], int]
    vllm_bench: str | None = None

    @property
    def num_needed(self) -> int:
        """Prompts that one server gets in a round."""
        clients = 1 if self.vllm_bench is None else 2
        return clients * len(self.rates) * self.num_prompts + NUM_WARM

    def prompts_of(self, index: int, client: int = 0) -> list[str]:
        """Those of the rate with this index."""
        start = (client * len(self.rates) + index) * self.num_prompts
        return self.prompts[start : start + self.num_prompts]

    @property
    def warm_prompts(self) -> list[str]:
        """Those of the warm-up."""
        return self.prompts[self.num_needed - NUM_WARM : self.num_needed]


@dataclass
class Outcome:
    """What the rounds have shown of one server at one rate.

    Attributes:
        failures: why a round, or a request, has failed.
        by_vllm: figures that vLLM's own client gave; `vllm_failures`: why it gave none.
    """

    rounds: list[Figures] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    by_vllm: list[Mapping[str, float]] = field(default_factory=list)
    vllm_failures: list[str] = field(default_factory=list)

    def result(self) -> Figures | str:
        """Medians, or why there are none."""
        if not self.rounds:
            return self.failures[-1] if self.failures else "did not run"
        return median_figures(self.rounds)


Outcomes = dict[tuple[float, str], Outcome]  # by (rate, engine)


def run_rounds(plan: Plan, pythons: Mapping[str, str], rounds: int, progress: Callable[[str], None]) -> Outcomes:
    """Runs all servers in turn, so many times. One that fails is left out of that round.

    Args:
        pythons: the interpreter of each engine.
    """
    outcomes: Outcomes = {(rate, engine): Outcome() for rate in plan.rates for engine in pythons}
    for number in range(1, rounds + 1):
        for engine, python in pythons.items():
            progress(f"round {number} of {rounds}: {engine}")
            try:
                _run_server(plan, engine, python, outcomes, progress)
            except (ServerFailedError, ValueError, OSError) as error:
                progress(f"  failed: {error}")
                for rate in plan.rates:
                    outcomes[rate, engine].failures.append(str(error))
    return outcomes


def _run_server(plan: Plan, engine: str, python: str, outcomes: Outcomes, progress: Callable[[str], None]) -> None:
    with ServerProcess(peer_command(engine, plan.model, python, plan.max_model_len)) as server:
        progress(f"  ready after {server.wait_ready(_READY_S):.1f} s")
        asyncio.run(warm_up(engine, server.address, plan.model, plan.warm_prompts, plan.timeout))
        for index, rate in enumerate(plan.rates):
            figures, failures = _measure(plan, engine, server, index)
            outcomes[rate, engine].failures += failures
            if figures.completed:
                outcomes[rate, engine].rounds.append(figures)
            progress(f"  {rate:g}/s: {figures.tokens_per_s:.1f} tok/s, {figures.failed} failed")
            if plan.vllm_bench is not None and engine != "transformers":
                progress(f"  {rate:g}/s by vllm bench: {_take_in(plan, server, index, outcomes[rate, engine])}")


def _take_in(plan: Plan, server: ServerProcess, index: int, outcome: Outcome) -> str:
    """Runs vLLM's client, whose failure is not the server's, and says in a word what came of it."""
    try:
        said = run_vllm_bench(plan, plan.vllm_bench or "", server, index)
    except ServerFailedError as error:
        outcome.vllm_failures.append(str(error))
        return str(error)
    outcome.by_vllm.append(said)
    return f"{said['output_throughput']:.1f} tok/s"


def _measure(plan: Plan, engine: str, server: ServerProcess, index: int) -> tuple[Figures, list[str]]:
    prompts, rate = plan.prompts_of(index), plan.rates[index]
    bodies = [chat_body(engine, plan.model, prompt, plan.max_tokens) for prompt in prompts]
    arrivals = arrival_times(len(prompts), rate, plan.seed)
    load = asyncio.run(send(server.address, bodies, arrivals, plan.timeout, f"{engine}, {rate:g}/s"))
    return figures_of_load(load, plan.count_tokens)


def run_vllm_bench(plan: Plan, python: str, server: ServerProcess, index: int) -> Mapping[str, float]:
    """Lets vLLM's own load generator ask the server, and returns its figures (times in milliseconds).

    Raises:
        ServerFailedError: it ended without any.
    """
    rate = plan.rates[index]
    with tempfile.TemporaryDirectory() as folder:
        prompts, result = Path(folder, "prompts.jsonl"), Path(folder, "result.json")
        prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in plan.prompts_of(index, client=1)))
        command = [
            *(python, "-c", _VLLM_BENCH, "--backend", "openai-chat"),
            *("--base-url", f"http://{server.address.host}:{server.address.port}"),
            *("--endpoint", "/v1/chat/completions", "--model", plan.model, "--ready-check-timeout-sec", "0"),
            *("--dataset-name", "custom", "--dataset-path", str(prompts), "--skip-chat-template"),
            *("--num-prompts", str(plan.num_prompts), "--custom-output-len", str(plan.max_tokens)),
            *("--request-rate", f"{rate:g}", "--seed", str(plan.seed), "--temperature", "0", "--ignore-eos"),
            *("--percentile-metrics", "ttft,tpot,itl", "--disable-tqdm", "--disable-shuffle"),
            *("--save-result", "--result-dir", folder, "--result-filename", result.name),
        ]
        timeout = plan.timeout + len(plan.prompts_of(index)) / min(rate, 1e6)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired as error:
            raise ServerFailedError(f"vllm bench serve did not end within {timeout:.0f} s") from error
        if not result.exists():
            last = done.stderr.strip().splitlines()[-1:] or ["no message"]
            raise ServerFailedError(f"vllm bench serve ended with {done.returncode}: {last[0]}")
        said = json.loads(result.read_text())
    return {name: float(said[name]) for name in _BENCH_FIGURES}
