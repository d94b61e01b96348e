"""Whether this engine scales: with the number of requests, with the length of their context, and with time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import cb_engine
from bench.step_profile import StepSpy
from bench.workloads import random_prompts
from cb_engine.models import load_model

_CONCURRENCY = (1, 8, 64, 256)
_CONTEXTS = (128, 512, 2048, 4000)
_HOST_REQUESTS = 16
_HOST_STEPS = 20
_WINDOW_S = 60.0


def show_scaling(model_name: str, questions: list[list[int]], *, quick: bool) -> str:
    """Three tables, as text.

    Args:
        questions: token ids of prompts; all of them run for the third table.
        quick: fewer of everything.
    """
    model, _ = load_model(model_name)
    parts = [
        _by_concurrency(model, questions, new=16 if quick else 128),
        _by_context(model, _CONTEXTS[:2] if quick else _CONTEXTS),
        _over_time(model, questions[:32] if quick else questions, new=32 if quick else 256),
    ]
    return "\n\n".join(parts)


def _by_concurrency(model: Any, questions: list[list[int]], new: int) -> str:
    lines = [f"{'requests at once':>16} {'tok/s':>8}   ({new} new tokens each)"]
    for count in _CONCURRENCY:
        prompts = [questions[i % len(questions)] for i in range(count)]
        engine = _engine(model, prompts, new)
        start = time.perf_counter()
        tokens = sum(len(output.generated_tokens) for output in _finish(engine))
        lines.append(f"{count:16} {tokens / (time.perf_counter() - start):8.1f}")
        engine.close()
    return "\n".join(lines)


def _by_context(model: Any, contexts: Sequence[int]) -> str:
    """Host time of a decode step: all but its execution."""
    config = model.config.get_text_config()
    lines = [f"{'context':>16} {'host us a step':>16} {'step ms':>8}   ({_HOST_REQUESTS} requests)"]
    for context in contexts:
        if context + _HOST_STEPS + 1 > config.max_position_embeddings:
            continue
        prompts = random_prompts(_HOST_REQUESTS, config.vocab_size, context, context)
        # Long enough that the first request is still there when the last one's prompt is computed.
        engine = _engine(model, prompts, config.max_position_embeddings - context)
        host: list[float] = []
        steps: list[float] = []
        while len(steps) < _HOST_STEPS and engine.has_work:
            with StepSpy(engine) as spy:
                engine.step()
            if spy.is_decode and len(spy.scheduled) == _HOST_REQUESTS:
                steps.append(spy.seconds)
                host.append(spy.scheduling_seconds)
        lines.append(f"{context:16} {statistics.median(host) * 1e6:16.0f} {statistics.median(steps) * 1e3:8.2f}")
        engine.close()
    return "\n".join(lines)


def _over_time(model: Any, questions: list[list[int]], new: int) -> str:
    engine = _engine(model, questions, new)
    start, seen = time.perf_counter(), [(0.0, 0)]
    while engine.has_work:
        engine.step()
        seen.append((time.perf_counter() - start, engine.stats().generated_tokens))
    engine.close()
    total, tokens = seen[-1]
    window = min(_WINDOW_S, total / 3)
    lines = [f"{len(questions)} prompts x {new} in {total:.0f} s, {tokens / total:.1f} tok/s; by {window:.0f} s:"]
    edges = [window * i for i in range(int(total / window) + 1)]
    counts = [max(count for at, count in seen if at <= edge) for edge in edges]
    rates = [(after - before) / window for before, after in pairwise(counts)]
    return "\n".join([*lines, " ".join(f"{rate:.0f}" for rate in rates)])


def _engine(model: Any, prompts: list[list[int]], new: int) -> cb_engine.Engine:
    hints = {"max_prompt_length": max(map(len, prompts)), "max_generated_length": new, "num_requests": len(prompts)}
    engine = cb_engine.Engine(model, hints=hints)
    for prompt in prompts:
        engine.add_request(prompt, cb_engine.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True))
    return engine


def _finish(engine: cb_engine.Engine) -> list[cb_engine.GenerationOutput]:
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs
