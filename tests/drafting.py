"""Proposers that know the future, or know it to be otherwise, for engines whose every output is known beforehand."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from cb_engine import Engine
from cb_engine.request import Request
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
