"""Trains an EAGLE-3 head for a model from the model's own answers.

    generate   the model answers the questions of a dataset, on its engine
    collect    what it computes and predicts along its answers
    train      a head learns to foresee them, several tokens ahead
    measure    the engine answers questions that the head was not trained on, with its drafts

Each stage keeps its work in DIR/training: a run that is cut off continues there if the same command is given again.
DIR itself becomes a checkpoint (config.json, model.safetensors) for
`EngineConfig(speculative={"method": "eagle3", "model": DIR})`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

import cb_engine
from bench.workloads import DEFAULT_DATASET, encode_questions, load_questions
from cb_engine import Engine, EngineStats, SamplingParams
from cb_engine.models import load_model
from cb_engine.runner.drafters.eagle3_checkpoint import save_eagle3
from cb_engine.runner.drafters.eagle3_head import Eagle3Head
from eagle3.examples import Example, choose_vocabulary, collect_examples, coverage, load_examples, save_examples
from eagle3.generations import Generation, fingerprint, generate_missing
from eagle3.initialising import make_head
from eagle3.training import Recipe, Trainer

_DEFAULTS = Recipe()


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def number(name: str, default: int, text: str) -> None:
        parser.add_argument(name, type=int, default=default, metavar="N", help=f"{text} (default: %(default)s)")

    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="where the head goes")
    parser.add_argument("--model", default="demo", help="`demo`, a local folder or a hub id (default: %(default)s)")
    parser.add_argument("--dataset", default=DEFAULT_DATASET, help="a jsonl file or hub id (default: %(default)s)")
    parser.add_argument("--device-map", default="auto", help="where the weights go (default: %(default)s)")
    number("--held-out", 200, "the first so many questions are not trained on")
    number("--eval-questions", 64, "how many of those the head is measured on")
    number("--train-questions", 800, "at most so many of the others are trained on")
    number("--max-new", 256, "most tokens of an answer")
    number("--draft-vocab-size", 4096, "most tokens that the head can draft")
    number("--num-spec-tokens", _DEFAULTS.num_passes, "k, tokens drafted at once")
    number("--epochs", _DEFAULTS.epochs, "times that all answers are trained on")
    number("--batch-size", _DEFAULTS.batch_size, "answers per step")
    number("--seed", _DEFAULTS.seed, "of the first weights and the order of the answers")
    parser.add_argument(
        "--learning-rate", type=float, default=_DEFAULTS.learning_rate, help="the highest (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    _check(parser, args)
    return args


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    for name, value in vars(args).items():
        if isinstance(value, int) and name != "seed" and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value} must be at least 1")
    if not args.learning_rate > 0:
        parser.error(f"--learning-rate {args.learning_rate} must be above 0")
    if args.eval_questions > args.held_out:
        parser.error(
            f"--eval-questions {args.eval_questions} exceeds --held-out {args.held_out}: a head is not measured on "
            "what it was trained on"
        )


def split_prompts(
    prompts: Sequence[list[int]], args: argparse.Namespace
) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """The prompts to train on and those to measure on, by their places in the dataset.

    Raises:
        ValueError: nothing is left to train on.
    """
    if len(prompts) <= args.held_out:
        raise ValueError(
            f"--held-out {args.held_out} leaves none of the {len(prompts)} questions of {args.dataset} to train on; "
            "hold out fewer"
        )
    numbered = list(enumerate(prompts))
    end = args.held_out + args.train_questions
    return dict(numbered[args.held_out : end]), dict(numbered[: args.eval_questions])


@contextmanager
def _stage(name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)


def collect(
    model: Any, generations: Sequence[Generation], head: Eagle3Head, settings: Mapping[str, Any], path: Path
) -> list[Example]:
    """The examples of these generations: those that are kept, or new ones, which are kept."""
    if not path.is_file():
        examples = collect_examples(model, generations, head.target_ids.cpu(), head.config.aux_layer_ids)
        save_examples(examples, settings, path)
    return load_examples(settings, path)


def measure(model: Any, head: Path, prompts: Sequence[list[int]], max_new: int, num_spec_tokens: int) -> EngineStats:
    """What the engine counts while it answers these prompts with the head's drafts."""
    speculative = {
        "method": "eagle3",
        "model": head,
        "num_speculative_tokens": num_spec_tokens,
        "adaptive": False,  # it is to be known how good the head is, not where it pays
    }
    hints = {
        "num_requests": len(prompts),
        "max_prompt_length": max(map(len, prompts)),
        "max_generated_length": max_new,
    }
    engine = Engine(model, config={"speculative": speculative}, hints=hints)
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=max_new))
    with tqdm(total=len(prompts), desc="measure", unit="prompt") as bar:
        while engine.has_work:
            bar.update(len(engine.step()))
    stats = engine.stats()
    engine.close()
    return stats


def print_acceptance(stats: EngineStats, num_questions: int) -> None:
    """Prints what `measure` has found."""
    rates = ", ".join(f"{count / max(1, stats.num_drafts):.3f}" for count in stats.accepted_per_position)
    print(
        f"{num_questions} unseen questions, k={len(stats.accepted_per_position)}: mean acceptance length "
        f"{stats.mean_acceptance_length:.3f}; accepted per position {rates}; {stats.num_drafts} drafts, "
        f"{stats.num_draft_tokens} tokens drafted, {stats.num_accepted_tokens} accepted"
    )


def train(args: argparse.Namespace) -> None:
    """All stages."""
    questions = load_questions(args.dataset)
    model, tokenizer = load_model(args.model, device_map=args.device_map)
    cb_engine.attach(model, tokenizer=tokenizer)
    to_train, to_measure = split_prompts(encode_questions(tokenizer, questions), args)
    work = args.output / "training"
    work.mkdir(parents=True, exist_ok=True)

    settings = {"model": args.model, "max_new": args.max_new}
    with _stage("generate"):
        generations = generate_missing(model, to_train, settings, work / "generations.jsonl")
    vocabulary = choose_vocabulary(generations, args.draft_vocab_size, model.config.get_text_config().vocab_size)
    print(f"the head can draft {len(vocabulary)} tokens: {coverage(generations, vocabulary):.1%} of the answers")
    settings |= {"train_questions": len(generations), "draft_vocab_size": len(vocabulary)}
    settings["answers"] = fingerprint(generations)
    head = make_head(model, vocabulary, args.seed)
    with _stage("collect"):
        examples = collect(model, generations, head, settings, work / "examples.pt")
    recipe = Recipe(args.epochs, args.batch_size, args.learning_rate, args.num_spec_tokens, args.seed)
    with _stage("train"):
        Trainer(head, examples, recipe, settings, work / "state.pt").run()
    save_eagle3(head.to(model.dtype), args.output)
    print(f"the head is in {args.output}", flush=True)
    with _stage("measure"):
        stats = measure(model, args.output, list(to_measure.values()), args.max_new, args.num_spec_tokens)
    print_acceptance(stats, len(to_measure))


def main(argv: list[str] | None = None) -> int:
    """Trains a head; 2 if something that was given is wrong, 130 if it was cut off."""
    args = parse_args(argv)
    try:
        train(args)
    except (ValueError, TypeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ncut off; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
