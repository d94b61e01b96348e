"""This server beside `transformers serve --continuous-batching` and vLLM's, at several request rates.

Every server gets a process of its own, one at a time, the same chats, one client, and a warm-up. Answers are greedy,
streamed and of equal length: EOS is off. Arrivals are a Poisson process; `inf` sends all at once. Definitions are those
of `vllm bench serve`; times are in milliseconds, figures are medians over the rounds. The client's own share of a
core is given, since it takes away from the server.

--overhead compares the server with `generate_batch` in a plain process instead.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from transformers.utils import logging

from bench.machine import describe_machine
from bench.peers import pythons_of
from bench.serve_figures import as_dict, format_rate
from bench.serve_overhead import WAYS, measure_overhead
from bench.serve_peers import NUM_WARM, Outcomes, Plan, run_rounds
from bench.server_process import ENGINES, ServerFailedError
from bench.workloads import DEFAULT_DATASET, encode_questions, load_questions
from cb_engine.models import resolve_model


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="demo", help="`demo`, a local folder or a hub id (default: %(default)s)")
    add("--dataset", default=DEFAULT_DATASET, metavar="ID_OR_FILE", help="hub id or jsonl file of GSM8K's questions")
    add("--engines", metavar="A,B", help=f"of {', '.join(ENGINES)} (default: all; vllm if --vllm-python is given)")
    add("--vllm-python", metavar="PATH", help="interpreter of an environment with vLLM; see the README")
    add("--vllm-bench", action="store_true", help="let `vllm bench serve` ask cb_engine's and vLLM's server too")
    add("--rates", type=parse_rates, default=(1.0, 2.0, 4.0, math.inf), metavar="A,B", help="default: 1,2,4,inf")
    add("--num-prompts", type=int, default=64, metavar="N", help="for each rate (default: %(default)s)")
    add("--max-tokens", type=int, default=128, metavar="N", help="of each answer (default: %(default)s)")
    add("--rounds", type=int, default=3, metavar="N", help="times that each server runs (default: %(default)s)")
    add("--timeout", type=float, default=600.0, metavar="S", help="for each request (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the arrivals (default: %(default)s)")
    add("--overhead", action="store_true", help="instead: the server against `generate_batch`, all prompts at once")
    add("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser


def parse_rates(text: str) -> tuple[float, ...]:
    """Requests a second, `inf` for all at once.

    Raises:
        ArgumentTypeError: one is no positive number.
    """
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(rate > 0 for rate in rates):
        raise argparse.ArgumentTypeError(f"{text!r} must be positive numbers or inf, with commas between them")
    return tuple(dict.fromkeys(rates))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads and checks the command line."""
    parser = build_parser()
    args = parser.parse_args(argv)
    for name in ("num_prompts", "max_tokens", "rounds", "timeout"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive")
    if args.overhead and (args.engines or args.vllm_python or args.vllm_bench):
        parser.error("--overhead runs cb_engine alone: leave --engines, --vllm-python and --vllm-bench out")
    if args.vllm_bench and args.vllm_python is None:
        parser.error("--vllm-bench needs --vllm-python PATH")
    default = [engine for engine in ENGINES if engine != "vllm" or args.vllm_python]
    args.engines = args.engines.split(",") if args.engines else default
    unknown = set(args.engines) - set(ENGINES)
    if unknown:
        parser.error(f"unknown engine {min(unknown)!r}; known ones: {', '.join(ENGINES)}")
    return args


def make_plan(args: argparse.Namespace, source: str, tokenizer: Any, questions: list[str]) -> Plan:
    """What every server gets.

    Raises:
        ValueError: there are too few questions.
    """
    plan = Plan(
        model=source,
        rates=args.rates,
        prompts=questions,
        num_prompts=args.num_prompts,
        max_tokens=args.max_tokens,
        max_model_len=max(map(len, encode_questions(tokenizer, questions))) + args.max_tokens,
        seed=args.seed,
        timeout=args.timeout,
        count_tokens=lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
        vllm_bench=args.vllm_python if args.vllm_bench else None,
    )
    if len(questions) < plan.num_needed:
        raise ValueError(f"{args.dataset} has {len(questions)} questions, {plan.num_needed} are needed")
    return plan


def format_outcomes(outcomes: Outcomes, args: argparse.Namespace) -> str:
    """A table for each rate, then what vLLM's own client said."""
    parts = []
    for rate in args.rates:
        title = "all at once" if math.isinf(rate) else f"{rate:g} requests a second"
        title = f"\n{title}, {args.num_prompts} requests of {args.max_tokens} new tokens"
        parts.append(format_rate(title, {engine: outcomes[rate, engine].result() for engine in args.engines}))
        for engine in args.engines:
            said = outcomes[rate, engine].by_vllm
            if said:
                medians = {name: statistics.median(one[name] for one in said) for name in said[0]}
                parts.append(f"vllm bench, {engine}: " + ", ".join(f"{n} {v:.1f}" for n, v in medians.items()))
            outcome = outcomes[rate, engine]
            parts += [f"{engine}: {reason}" for reason in dict.fromkeys([*outcome.failures, *outcome.vllm_failures])]
    return "\n".join(parts)


def write_outcomes(path: Path, outcomes: Outcomes, args: argparse.Namespace) -> None:
    """Figures of every round, their medians, and the machine."""
    rows = []
    for (rate, engine), outcome in outcomes.items():
        result = outcome.result()
        rows.append(
            {
                "rate": str(rate),
                "engine": engine,
                "median": None if isinstance(result, str) else as_dict(result),
                "rounds": [as_dict(figures) for figures in outcome.rounds],
                "vllm_bench": [dict(said) for said in outcome.by_vllm],
                "failures": outcome.failures + outcome.vllm_failures,
            }
        )
    settings = {name: getattr(args, name) for name in ("model", "num_prompts", "max_tokens", "rounds", "seed")}
    report = {"rows": rows, "settings": settings, "machine": describe_machine()}
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def run_overhead(args: argparse.Namespace, source: str, tokenizer: Any, questions: list[str]) -> int:
    """The server against `generate_batch`.

    Raises:
        ValueError: there are too few questions. ServerFailedError: a way did not do its work.
    """
    needed = args.num_prompts + NUM_WARM
    if len(questions) < needed:
        raise ValueError(f"{args.dataset} has {len(questions)} questions, {needed} are needed")
    asked, warm = questions[: args.num_prompts], questions[args.num_prompts : needed]
    prompts = encode_questions(tokenizer, asked)
    overhead = measure_overhead(source, asked, prompts, warm, args.max_tokens, args.rounds, args.timeout, _say)
    print(f"\n{args.num_prompts} requests of {args.max_tokens} new tokens, all at once")
    print("\n".join(overhead.lines()))
    if args.json is not None:
        extra = {way: overhead.extra(way) for way in WAYS[1:]}
        report = {"seconds": overhead.seconds, "extra": extra, "machine": describe_machine()}
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison; 1 if a request to cb_engine failed, 2 if it could not begin."""
    args = parse_args(argv)
    logging.disable_progress_bar()
    try:
        source = str(resolve_model(args.model))
        tokenizer = AutoTokenizer.from_pretrained(source)
        questions = load_questions(args.dataset)
        if args.overhead:
            return run_overhead(args, source, tokenizer, questions)
        pythons = pythons_of(args.engines, args.vllm_python)
        plan = make_plan(args, source, tokenizer, questions)
    except (OSError, ValueError, ServerFailedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    outcomes = run_rounds(plan, pythons, args.rounds, _say)
    print(format_outcomes(outcomes, args))
    if args.json is not None:
        write_outcomes(args.json, outcomes, args)
    return int(any(outcome.failures for (_, engine), outcome in outcomes.items() if engine == "cb_engine"))


if __name__ == "__main__":
    raise SystemExit(main())
