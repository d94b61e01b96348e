"""Throughput of continuous batching, one row per label, as in transformers' benchmark of the same name.

tok/s is all generated tokens over the time from the first submission to the last request's end. Loading,
attaching and warm-up are not in it; every row gets a freshly loaded model. mem(GB) is the peak beyond the
loaded weights: the resident set on the CPU, the allocator's own figure on CUDA. EOS is off, so each sample
gets exactly max_new tokens. `x NAME` is how many times as fast the row is as that engine, or as the
earlier run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging

from bench.engines import Engine, make_engines
from bench.machine import PeakMemory, describe_machine, release_memory
from bench.report import Reference, Row, Skipped, format_table, write_json
from bench.workloads import (
    ALL_LABELS,
    DEFAULT_DATASET,
    GSM8K_LABELS,
    Workload,
    build_workload,
    choose_labels,
    encode_questions,
    load_questions,
)
from cb_engine.models import load_model, resolve_model
from cb_engine.speculative_config import parse_speculative


def positive(text: str) -> int:
    """An argument type: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def build_parser() -> argparse.ArgumentParser:
    """The command line. Lists may be separated by commas or spaces."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=_LABEL_HELP
    )
    add = parser.add_argument
    add("--model", default="demo", help="`demo`, a local folder or a hub id (default: %(default)s)")
    add(
        "--dataset",
        default=DEFAULT_DATASET,
        metavar="ID_OR_FILE",
        help="hub id, or a local jsonl file with a field `question` (default: %(default)s)",
    )
    add("--samples", type=positive, metavar="N", help="at most so many prompts per label (default: all)")
    add("--labels", nargs="+", metavar="LABEL", help="labels to run (default: all)")
    add(
        "--rollouts-lengths",
        "-rl",
        nargs="+",
        metavar="N",
        help="new tokens of the rollouts; without --labels only these rows run",
    )
    add("--max-new", type=positive, metavar="N", help="new tokens per sample instead of each label's own")
    add("--device-map", default="auto", help="where the weights go (default: %(default)s)")
    add(
        "--engines",
        nargs="+",
        default=["cb_engine"],
        metavar="ENGINE",
        help="cb_engine, transformers (its own generate_batch), static (padded generate): measured in turn, "
        "in this order (default: cb_engine)",
    )
    add("--batch-size", type=positive, default=64, metavar="N", help="of `static` (default: %(default)s)")
    add(
        "--speculative",
        metavar="METHOD_OR_JSON",
        help="of `cb_engine`: ngram, suffix, or a JSON object of speculative settings (default: no speculation)",
    )
    add("--seed", type=int, default=0, help="of random prompts and of sampling (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the rows to FILE, anew after every row")
    add("--compare-to", type=Path, metavar="FILE", help="add a ratio to an earlier run's --json file")
    return parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line, with the lists turned into labels and engines."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        lengths = [positive(n) for n in _split(args.rollouts_lengths)]
        args.labels = choose_labels(_split(args.labels), lengths)
        speculative = parse_speculative(args.speculative) if args.speculative else None
        args.engines = make_engines(_split(args.engines), args.batch_size, speculative)
        args.reference = Reference(args.compare_to) if args.compare_to else None
    except (ValueError, TypeError, OSError, argparse.ArgumentTypeError) as error:
        parser.error(str(error))
    return args


_LABEL_HELP = f"""labels:
  gsm8k_*           the dataset's questions as chat turns, 256 new tokens: _default is greedy; _sampling has
                    temperature 0.6 and top_p 0.9; _compile runs under torch.compile; _no_fast_decode sends
                    decode steps through the general path
  rollouts_N        32 random prompts of 256 tokens, N new tokens, under torch.compile where that is the faster way
                    (static: without; cb_engine on a CPU: without)
  few_blocks        20 random prompts of 256 tokens, 256 new tokens, a KV pool of 16 x 256 tokens
  multi_return_seq  50 random prompts of 256 tokens, 256 new tokens, 8 samples each at temperature 1
default: {" ".join(ALL_LABELS)}
"""


def _split(values: Sequence[str] | None) -> list[str]:
    return [part for value in values or () for part in value.split(",") if part]


def measure(engine: Engine, workload: Workload, args: argparse.Namespace) -> Row | Skipped:
    """Runs one row. An engine that fails gives its reason; the other rows go on."""
    key = (workload.label, engine.name, len(workload.prompts), round(workload.avg_in, 1), workload.max_new)
    reason = engine.cannot(workload)
    if reason is not None:
        return Skipped(*key, reason)
    try:
        model, _ = load_model(args.model, device_map=args.device_map)
        reason = _too_long(model, workload)
        if reason is not None:
            return Skipped(*key, reason)
        with torch.inference_mode():  # pages in the weights, starts the threads
            model(torch.ones(1, 32, dtype=torch.long, device=model.device))
        with PeakMemory() as peak:
            outcome = engine.run(model, workload, args.seed)
    except Exception as error:  # whatever an engine dies of is this row's result
        lines = str(error).strip().splitlines() or [""]
        return Skipped(*key, f"{type(error).__name__}: {lines[0]}", failed=True)
    finally:
        model = None
        release_memory()
    if outcome.tokens != workload.expected_tokens:
        return Skipped(*key, f"generated {outcome.tokens} of {workload.expected_tokens} tokens", failed=True)
    rate = outcome.tokens / outcome.seconds
    return Row(*key, outcome.seconds, outcome.tokens, rate, peak.gigabytes)


def _too_long(model: Any, workload: Workload) -> str | None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = max(map(len, workload.prompts)) + workload.max_new
    if limit is None or longest <= limit:
        return None
    return f"{longest} tokens exceed the model's {limit} positions"


def build_all(args: argparse.Namespace) -> list[Workload]:
    """The work of every label, encoded with the model's tokenizer."""
    source = resolve_model(args.model)
    vocab_size = AutoConfig.from_pretrained(source).get_text_config().vocab_size
    questions: list[list[int]] = []
    if any(label in GSM8K_LABELS for label in args.labels):
        tokenizer = AutoTokenizer.from_pretrained(source)
        questions = encode_questions(tokenizer, load_questions(args.dataset)[: args.samples])
    options = {"samples": args.samples, "max_new": args.max_new, "seed": args.seed}
    return [build_workload(label, questions, vocab_size, **options) for label in args.labels]


def main(argv: list[str] | None = None) -> int:
    """Runs every label with every engine; 1 if cb_engine failed in one."""
    args = parse_args(argv)
    logging.disable_progress_bar()
    try:
        workloads = build_all(args)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    machine = {**describe_machine(), "model": args.model, "seed": args.seed}
    rows: list[Row | Skipped] = []
    total = len(workloads) * len(args.engines)
    for workload in workloads:
        for engine in args.engines:
            print(f"[{len(rows) + 1}/{total}] {workload.label}, {engine.name}", file=sys.stderr, flush=True)
            rows.append(measure(engine, workload, args))
            if args.json:
                write_json(args.json, rows, machine)
    print(format_table(rows, [engine.name for engine in args.engines], args.reference))
    return int(any(isinstance(row, Skipped) and row.failed and row.engine == "cb_engine" for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
