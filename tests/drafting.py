"""Proposers that know the future, or know it to be otherwise, for engines whose every output is known beforehand."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch

from cb_engine import Engine
from cb_engine.request import Request
from cb_engine.runner.drafters.eagle3_head import Eagle3Config, Eagle3Head
from cb_engine.speculative.proposer import Draft, DraftAsk

Guess = Callable[[Sequence[int], random.Random], list[int]]


def always_right(future: Sequence[int], rng: random.Random) -> list[int]:
    return list(future)


def always_wrong(future: Sequence[int], rng: random.Random) -> list[int]:
    return [(token + 1) % 97 for token in future]


def at_random(future: Sequence[int], rng: random.Random) -> list[int]:
    """Of random length, also none, and right up to a random place."""
    length, right = rng.randrange(len(future) + 1), rng.randrange(len(future) + 1)
    return [t if i < right else rng.randrange(97) for i, t in enumerate(future[:length])]


GUESSES: dict[str, Guess] = {"right": always_right, "wrong": always_wrong, "random": at_random}


HEAD_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "no_fc": {"use_aux_hidden_state": False, "aux_layer_ids": (1,)},
}


def head_config(**changes: Any) -> Eagle3Config:
    """Of a head for a tiny Llama."""
    config = Eagle3Config(
        hidden_size=32,
        target_hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        draft_vocab_size=tiny.VOCAB,
        vocab_size=tiny.VOCAB,
        aux_layer_ids=(0, 1, 1),
    )
    return replace(config, **changes)


def make_head(model: Any, *, seed: int = 0, **changes: Any) -> Eagle3Head:
    """A random EAGLE-3 head for a tiny Llama, with its embeddings; a small vocabulary is a choice of the target's."""
    torch.manual_seed(seed)
    config = head_config(**changes)
    chosen = torch.randperm(tiny.VOCAB)[: config.draft_vocab_size].sort().values
    head = Eagle3Head(config, target_ids=chosen, target_embeddings=model.get_input_embeddings()).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape) * 0.2
            parameter.copy_(noise if parameter.dim() > 1 else 1 + noise)
    return head


@contextmanager
def any_shape(engine: Engine) -> Iterator[None]:
    """Within, an engine takes shapes as they come, as if all were warmed up, which takes long."""
    runner = engine._runner
    with runner._guard.warming(), runner.executor.warming():
        yield


class Oracle:
    """Guesses from what each prompt is known to become.

    Args:
        futures: prompt -> output.
        guess: what to make of the tokens that will follow.
    """

    def __init__(self, futures: dict[tuple[int, ...], list[int]], guess: Guess, seed: int = 0) -> None:
        self._futures = futures
        self._guess = guess
        self._rng = random.Random(seed)
        self.ended: list[Request] = []

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        drafts = []
        for ask in asks:
            request = ask.request
            done = len(request.output_token_ids)
            future = self._futures[tuple(request.prompt_token_ids)][done : done + ask.max_tokens]
            drafts.append(Draft(tuple(self._guess(future, self._rng))))
        return drafts

    def forget(self, request: Request) -> None:
        self.ended.append(request)


def oracle_engine(monkeypatch: pytest.MonkeyPatch, oracle: Any, model: Any, k: int = 3, **options: Any) -> Engine:
    """An engine whose lookup is the oracle; always on unless a test says otherwise."""
    monkeypatch.setattr("cb_engine.engine.make_lookup", lambda settings: oracle)
    config = dict(options.pop("config", {}))
    speculative = {"method": "ngram", "num_speculative_tokens": k, "adaptive": False, **options.pop("speculative", {})}
    return Engine(model, config={"speculative": speculative, **config}, **options)
