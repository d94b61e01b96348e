"""Speculative decoding measured against plain decoding, in one run, on real prompts.

Every round runs the same prompts twice, without and with speculation, each time on a fresh engine, so that neither
finds the other's prefixes or texts; who goes first changes from round to round. Rates are medians over the rounds.
Greedy outputs are compared token by token: they are equal in float32, while in bfloat16 the products of a wider step
may be rounded differently, which decides between two tokens that are as likely.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from bench.machine import describe_machine, release_memory
from bench.spec_workloads import WORKLOADS, make_prompts
from bench.workloads import DEFAULT_DATASET
from cb_engine import Engine, EngineStats, GenerationOutput, SamplingParams
from cb_engine.models import load_model
from cb_engine.runner.forward import Coverage

DTYPES = ("auto", "float32", "bfloat16", "float16")
TASKS = ("ngram", "suffix", "draft_model", "eagle3")


@dataclass
class Run:
    """What one engine did with the prompts."""

    seconds: float
    outputs: list[GenerationOutput]
    stats: EngineStats
    coverage: Coverage

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return sum(len(output.generated_tokens) for output in self.outputs)

    @property
    def tok_per_s(self) -> float:
        """Tokens generated a second, prompts included in the time."""
        return self.num_tokens / self.seconds


@dataclass
class Report:
    """The figures of all rounds, as they go into the file."""

    task: str
    workload: str
    dtype: str
    batch_size: int
    num_prompts: int
    osl: int
    num_spec_tokens: int
    tok_per_s: float
    tok_per_s_baseline: float
    speedup: float
    mean_acceptance_length: float
    acceptance_per_position: list[float]
    num_steps: int
    num_steps_baseline: int
    shapes_captured: int
    shapes_used: int
    shapes_missed: int
    output_equal: bool
    num_outputs_equal: int
    machine: dict[str, object] = field(default_factory=describe_machine)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, required=True, help="who guesses the tokens")
    parser.add_argument("--workload", choices=WORKLOADS, default="gsm8k", help="the prompts (default: %(default)s)")
    parser.add_argument("--dataset", default=DEFAULT_DATASET, help="a jsonl file or hub id (default: %(default)s)")
    parser.add_argument("--model", default="demo", help="`demo`, a local folder or a hub id (default: %(default)s)")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="of the weights; auto: the checkpoint's own (default: %(default)s)",
    )
    parser.add_argument("--batch_size", type=int, default=8, help="requests at once (default: %(default)s)")
    parser.add_argument("--num_prompts", type=int, help="requests in all (default: the batch size)")
    parser.add_argument("--skip", type=int, default=0, help="prompts to pass over (default: %(default)s)")
    parser.add_argument("--osl", type=int, default=2048, help="most tokens of an answer (default: %(default)s)")
    parser.add_argument("--ignore_eos", action="store_true", help="let every answer have that many tokens")
    parser.add_argument("--num_spec_tokens", type=int, default=2, help="k, most guesses at once (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--draft_model", metavar="MODEL", help="draft_model: a smaller model with the same vocabulary")
    parser.add_argument("--num_draft_layers", type=int, help="draft_model: draft with the model's own first layers")
    parser.add_argument("--head", metavar="DIR", help="eagle3: a checkpoint, of train_eagle3.py for one")
    parser.add_argument("--always", action="store_true", help="speculate also where it does not pay")
    parser.add_argument("--pad", action="store_true", help="pad steps to buckets and warm all of them up first")
    parser.add_argument("--coverage", action="store_true", help="print which shapes were captured, used and missed")
    parser.add_argument("--rounds", type=int, default=3, help="of both runs, in turn (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args(argv)
    if args.task == "eagle3" and args.head is None:
        parser.error("--task eagle3 needs --head DIR; scripts/train_eagle3.py makes one")
    if args.task != "eagle3" and args.head is not None:
        parser.error("--head is for --task eagle3")
    if args.task != "draft_model" and (args.draft_model or args.num_draft_layers):
        parser.error("--draft_model and --num_draft_layers are for --task draft_model")
    if args.task == "draft_model" and (args.draft_model is None) == (args.num_draft_layers is None):
        parser.error("--task draft_model needs either --draft_model MODEL or --num_draft_layers N")
    for name in ("batch_size", "num_prompts", "osl", "num_spec_tokens", "rounds"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name} must be at least 1")
    if args.skip < 0:
        parser.error("--skip must be 0 or more")
    return args


def speculative_settings(args: argparse.Namespace) -> dict[str, Any]:
    """`EngineConfig.speculative` for these arguments."""
    settings: dict[str, Any] = {
        "method": args.task,
        "num_speculative_tokens": args.num_spec_tokens,
        "adaptive": not args.always,
    }
    if args.task == "eagle3":
        settings["model"] = args.head
    elif args.task == "draft_model":
        settings |= {"num_draft_layers": args.num_draft_layers, "model": args.draft_model}
    return settings


def run_once(
    model: Any, prompts: list[list[int]], args: argparse.Namespace, speculative: dict[str, Any] | None, name: str
) -> Run:
    """Runs all prompts through a fresh engine; loading and warm-up are not timed."""
    release_memory()
    config = {"max_num_seqs": args.batch_size, "pad_decode_batches": args.pad, "speculative": speculative}
    hints = {
        "num_requests": len(prompts),
        "max_prompt_length": max(map(len, prompts)),
        "max_generated_length": args.osl,
    }
    engine = Engine(model, config=config, hints=hints)
    warm_up(engine, name)
    params = SamplingParams(
        temperature=args.temperature,
        max_tokens=args.osl,
        ignore_eos=args.ignore_eos,
        seed=0 if args.temperature else None,
    )
    ids = [engine.add_request(prompt, params)[0] for prompt in prompts]
    ended: dict[str, GenerationOutput] = {}
    started = time.perf_counter()
    with tqdm(total=len(ids), desc=name, unit="request", leave=False) as bar:
        while engine.has_work:
            outputs = engine.step()
            ended |= {output.request_id: output for output in outputs}
            bar.update(len(outputs))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    failed = [output for output in ended.values() if output.finish_reason == "error"]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0].error}")
    run = Run(seconds, [ended[i] for i in ids], engine.stats(), engine.coverage)
    engine.close()
    return run


def warm_up(engine: Engine, name: str) -> None:
    """Runs every shape; the bar shows how many there are and how long it will take."""
    if not engine.num_shapes:
        return
    with tqdm(total=engine.num_shapes, desc=f"{name}: warming up", unit="shape", leave=False) as bar:
        engine.warmup(lambda done, total: bar.update())


def summarize(args: argparse.Namespace, dtype: torch.dtype, plain: list[Run], drafted: list[Run]) -> Report:
    """Medians over the rounds; counts are those of the last one."""
    last, stats = drafted[-1], drafted[-1].stats
    pairs = list(zip(plain[-1].outputs, last.outputs, strict=True))
    num_equal = sum(a.generated_tokens == b.generated_tokens for a, b in pairs)
    rate, rate_plain = (statistics.median(run.tok_per_s for run in runs) for runs in (drafted, plain))
    return Report(
        task=args.task,
        workload=args.workload,
        dtype=str(dtype).removeprefix("torch."),
        batch_size=args.batch_size,
        num_prompts=len(pairs),
        osl=args.osl,
        num_spec_tokens=args.num_spec_tokens,
        tok_per_s=round(rate, 2),
        tok_per_s_baseline=round(rate_plain, 2),
        speedup=round(statistics.median(b.tok_per_s / a.tok_per_s for a, b in zip(plain, drafted, strict=True)), 3),
        mean_acceptance_length=round(stats.mean_acceptance_length, 3),
        acceptance_per_position=[round(n / stats.num_drafts, 3) for n in stats.accepted_per_position],
        num_steps=stats.num_steps,
        num_steps_baseline=plain[-1].stats.num_steps,
        shapes_captured=len(last.coverage.warmed),
        shapes_used=len(last.coverage.used),
        shapes_missed=len(last.coverage.missed),
        output_equal=num_equal == len(pairs),
        num_outputs_equal=num_equal,
    )


def print_report(report: Report) -> None:
    """The figures for people."""
    print(
        f"\n{report.task}, {report.workload}, {report.dtype}: {report.num_prompts} prompts, "
        f"{report.batch_size} at once, k={report.num_spec_tokens}\n"
        f"  without speculation  {report.tok_per_s_baseline:8.1f} tok/s  {report.num_steps_baseline} steps\n"
        f"  with speculation     {report.tok_per_s:8.1f} tok/s  {report.num_steps} steps\n"
        f"  speedup              {report.speedup:8.2f}\n"
        f"  mean acceptance length {report.mean_acceptance_length:.2f}; right, by position: "
        f"{' '.join(f'{share:.2f}' for share in report.acceptance_per_position) or '-'}\n"
        f"  shapes: {report.shapes_captured} captured, {report.shapes_used} used, {report.shapes_missed} missed\n"
        f"  outputs equal to those without: {report.num_outputs_equal} of {report.num_prompts}"
    )


def run_rounds(model: Any, prompts: list[list[int]], args: argparse.Namespace) -> tuple[list[Run], list[Run]]:
    """All runs without speculation, and all with."""
    plain: list[Run] = []
    drafted: list[Run] = []
    for number in range(args.rounds):
        sides = [(plain, None, "without"), (drafted, speculative_settings(args), args.task)]
        for runs, speculative, name in sides if number % 2 == 0 else reversed(sides):
            label = f"round {number + 1} of {args.rounds}, {name}"
            runs.append(run_once(model, prompts, args, speculative, label))
    return plain, drafted


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; 1 if greedy outputs differ in fp32, where they must not."""
    args = parse_args(argv)
    try:
        model, tokenizer = load_model(args.model, dtype=args.dtype)
        count = args.num_prompts or args.batch_size
        prompts = make_prompts(args.workload, tokenizer, args.dataset, count, skip=args.skip)
        plain, drafted = run_rounds(model, prompts, args)
    except (OSError, ValueError, TypeError) as error:  # something named is not there, or does not fit
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = summarize(args, model.dtype, plain, drafted)
    print_report(report)
    if args.coverage:
        print(drafted[-1].coverage.report())
    if args.json is not None:
        args.json.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    must_equal = args.temperature == 0 and model.dtype == torch.float32
    return int(must_equal and not report.output_equal)


if __name__ == "__main__":
    raise SystemExit(main())
