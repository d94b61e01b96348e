"""This engine beside transformers' own `generate_batch`, padded `generate`, and vLLM on the same machine.

Every engine gets a process of its own, one at a time, with the same model folder and the same prompts as token ids.
A round runs each engine once; figures are medians over the rounds. The time of a case is that of one call on a loaded
and warmed-up engine: `generate_batch` with a persistent manager, `generate`, `LLM.generate`. tok/s counts new tokens,
in the prefill row prompt tokens. EOS is off. The last row is the time from the start of the process to its first
token. mem(GB) is the peak resident memory of the process, weights included.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging

from bench.machine import describe_machine
from bench.peers import ENGINES, NUM_QUESTIONS, Case, agreement, build_cases, pythons_of, run_rounds, to_rows
from bench.report import Skipped, format_peers, write_json
from bench.scaling import show_scaling
from bench.step_profile import profile_cases
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
    add("--labels", metavar="A,B", help="rows to run (default: all)")
    add("--rounds", type=int, default=None, metavar="N", help="times that each engine runs (default: 3, quick: 1)")
    add("--quick", action="store_true", help="few prompts and tokens: does it work, not how fast is it")
    add("--seed", type=int, default=0, help="of random prompts (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the rows to FILE")
    instead = parser.add_mutually_exclusive_group().add_argument
    instead("--profile", action="store_true", help="instead: where cb_engine's time goes, against measured ceilings")
    instead("--scaling", action="store_true", help="instead: its rates by concurrency, context and time")
    return parser


def choose_cases(args: argparse.Namespace, source: str, prompts: list[list[int]]) -> list[Case]:
    """The rows asked for.

    Raises:
        ValueError: an unknown label, or too few questions.
    """
    if len(prompts) < NUM_QUESTIONS:
        raise ValueError(f"{args.dataset} has {len(prompts)} questions, {NUM_QUESTIONS} are needed")
    vocab_size = AutoConfig.from_pretrained(source).get_text_config().vocab_size
    cases = build_cases(prompts, vocab_size, quick=args.quick, seed=args.seed)
    if args.labels is None:
        return cases
    wanted = args.labels.split(",")
    unknown = set(wanted) - {case.label for case in cases}
    if unknown:
        raise ValueError(f"unknown label {min(unknown)!r}; known ones: {', '.join(c.label for c in cases)}")
    return [case for case in cases if case.label in wanted]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison; 1 if cb_engine failed in a row."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if (args.profile or args.scaling) and (args.engines or args.rounds or args.json or args.vllm_python):
        parser.error("--profile and --scaling run cb_engine once: leave --engines, --rounds, --json, --vllm-python out")
    if args.scaling and args.labels:
        parser.error("--scaling has rows of its own: leave --labels out")
    logging.disable_progress_bar()
    default = [e for e in ENGINES if e != "vllm" or args.vllm_python]
    engines = args.engines.split(",") if args.engines else default
    rounds = args.rounds or (1 if args.quick else 3)
    try:
        pythons = pythons_of(engines, args.vllm_python)
        source = str(resolve_model(args.model))
        prompts = encode_questions(AutoTokenizer.from_pretrained(source), load_questions(args.dataset))
        cases = choose_cases(args, source, prompts)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.profile or args.scaling:
        print(profile_cases(args.model, cases) if args.profile else show_scaling(args.model, prompts, quick=args.quick))
        return 0
    results = run_rounds(source, cases, pythons, rounds, lambda line: print(line, file=sys.stderr, flush=True))
    rows = to_rows(results, cases, engines)
    if args.json:
        write_json(args.json, rows, {**describe_machine(), "model": args.model, "seed": args.seed, "rounds": rounds})
    print(format_peers(rows, engines))
    print("\n".join(["", *agreement(results, cases, engines)]))
    return int(any(isinstance(row, Skipped) and row.failed and row.engine == "cb_engine" for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
