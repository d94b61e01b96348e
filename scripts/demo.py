"""The main job in one command: a real model answers many prompts at once through the engine."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import cb_engine
from cb_engine.models import load_model
from cb_engine.speculative_config import parse_speculative

QUESTIONS = (
    "What is the capital of Japan?",
    "What is the capital of Egypt?",
    "What is the chemical symbol for gold?",
    "How many days are there in a week?",
    "What is 2 + 2?",
    "What is the boiling point of water in Celsius?",
    "What is the chemical symbol for oxygen?",
    "What is the chemical formula of water?",
    "Write a Python line that prints hello.",
    "Write a short sentence about the sea.",
    "What is photosynthesis? Answer in one sentence.",
    "What is gravity? Answer in one sentence.",
    "What is the sun? Answer in one sentence.",
    "What is the heart for? Answer in one sentence.",
    "What is the internet? Answer in one sentence.",
    "What is a computer program? Answer in one sentence.",
    "What is machine learning? Answer in one sentence.",
    "What is a democracy? Answer in one sentence.",
    "What does a doctor do? Answer in one sentence.",
    "What does a teacher do? Answer in one sentence.",
)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo", help="`demo`, a local folder or a hub id (default: %(default)s)")
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help="a prompt of your own; may be given many times"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, help="longest answer (default: %(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 takes the likeliest token (default: %(default)s)"
    )
    parser.add_argument("--device-map", default="auto", help="where the weights go (default: %(default)s)")
    parser.add_argument("--stream", action="store_true", help="print each answer while it is being written")
    parser.add_argument(
        "--speculative",
        metavar="METHOD_OR_JSON",
        help='speculate: ngram, suffix, or e.g. \'{"method": "draft_model", "num_draft_layers": 8}\'',
    )
    args = parser.parse_args(argv)
    try:
        args.speculative = parse_speculative(args.speculative) if args.speculative else None
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    return args


def encode(tokenizer: Any, prompts: list[str]) -> list[list[int]]:
    """Token ids of the prompts, as chat turns if the model has a chat template."""
    if tokenizer.chat_template is None:
        return [tokenizer.encode(prompt) for prompt in prompts]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        for prompt in prompts
    ]


def answer_all(model: Any, inputs: list[list[int]], params: Any, config: Any) -> tuple[list[Any], Any]:
    """Answers every prompt in one call. Returns the outputs in input order, and the engine's statistics."""
    outputs = model.generate_batch(
        inputs,
        sampling_params=params,
        continuous_batching_config=config,
        progress_bar=True,
        persistent_manager=True,
    )
    stats = model.init_continuous_batching().stats()  # the manager that call has left
    model.destroy_cached_continuous_batching_manager()
    return list(outputs.values()), stats


def stream_all(
    model: Any, inputs: list[list[int]], params: Any, config: Any, prompts: list[str]
) -> tuple[list[Any], Any]:
    """Submits all prompts at once and prints the answers in order, each as far as it has come."""
    outputs = []
    hints = {
        "num_requests": len(inputs),
        "max_prompt_length": max(map(len, inputs)),
        "max_generated_length": params.max_tokens,
    }
    with model.continuous_batching_context_manager(continuous_batching_config=config, workload_hints=hints) as manager:
        ids = [manager.add_request(one, streaming=True, sampling_params=params) for one in inputs]
        for number, (request_id, prompt) in enumerate(zip(ids, prompts, strict=True), start=1):
            print(f"\n[{number}] {prompt}\n    ", end="", flush=True)
            shown = 0
            for last in manager.request_id_iter(request_id):
                print(last.text[shown:].replace("\n", "\n    "), end="", flush=True)
                shown = len(last.text)
            outputs.append(last)
            print()
        stats = manager.stats()
    return outputs, stats


def print_answers(prompts: list[str], outputs: list[Any]) -> None:
    """Prints the pairs of prompt and answer."""
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), start=1):
        answer = output.text.strip().replace("\n", "\n    ")
        cut = " [...]" if output.finish_reason == "length" else ""
        print(f"\n[{number}] {prompt}\n    {answer}{cut}")


def print_summary(outputs: list[Any], stats: Any) -> None:
    """Prints the throughput and what the engine counted."""
    prompt_tokens = sum(len(o.prompt_ids) for o in outputs)
    new_tokens = sum(len(o.generated_tokens) for o in outputs)
    seconds = max(o.lifespan[1] for o in outputs) - min(o.created_time for o in outputs)
    print(
        f"\n{len(outputs)} requests, {prompt_tokens} prompt tokens, {new_tokens} new tokens "
        f"in {seconds:.2f} s: {new_tokens / seconds:.1f} tok/s"
    )
    print(
        f"engine: {sum(o.num_cached_tokens for o in outputs)} prompt tokens came from the prefix cache, "
        f"{stats.num_preemptions} preemptions, {stats.step_time_ms:.1f} ms per step"
    )
    if stats.num_drafts:
        print(
            f"speculation: {stats.num_accepted_tokens} of {stats.num_draft_tokens} drafted tokens were right, "
            f"{stats.mean_acceptance_length:.2f} tokens per verified draft"
        )


def main(argv: list[str] | None = None) -> int:
    """Runs the demo; 1 if a request failed."""
    args = parse_args(argv)
    prompts = args.prompt or list(QUESTIONS)
    model, tokenizer = load_model(args.model, device_map=args.device_map)
    cb_engine.attach(model, tokenizer=tokenizer)
    print(f"{args.model}: {model.num_parameters() / 1e6:.0f} M parameters, {model.dtype}, on {model.device}")
    inputs = encode(tokenizer, prompts)
    params = cb_engine.SamplingParams(temperature=args.temperature, max_tokens=args.max_new_tokens)
    config = cb_engine.EngineConfig(speculative=args.speculative)
    if args.stream:
        outputs, stats = stream_all(model, inputs, params, config, prompts)
    else:
        outputs, stats = answer_all(model, inputs, params, config)
        print_answers(prompts, outputs)
    print_summary(outputs, stats)
    failed = [o.request_id for o in outputs if o.finish_reason == "error"]
    for request_id in failed:
        print(f"request {request_id} failed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
