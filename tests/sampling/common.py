"""Requests and logits for the sampler's tests."""

from __future__ import annotations

from typing import Any

import torch

from cb_engine.sampling import Sampler, SamplingState
from cb_engine.sampling_params import SamplingParams

_native = False  # set by the fixture in conftest.py


def make_sampler() -> Any:
    """A sampler that remembers nothing, of the kind that is under test."""
    return Sampler(native=_native)


def state(
    *,
    seed: int = 0,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    eos: tuple[int, ...] = (),
    **fields: Any,
) -> Any:
    """Return a SamplingState as the engine would make it. Any: tests append to its list of output tokens."""
    params = SamplingParams(**fields)
    stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos))
    words = tuple(tuple(word) for word in params.bad_words if not isinstance(word, str))
    return SamplingState(params, seed, list(prompt), list(output), stops, words)


def sample(logits: torch.Tensor, *states: SamplingState) -> Any:
    """Sample with a sampler that remembers nothing. Any: a test knows which parts its states asked for."""
    return make_sampler()(logits, states)


def kept(output: Any, row: int = 0) -> dict[int, float]:
    """Return one row's whole distribution, from a request with `logprobs=V`."""
    entries = output.top.rows()[row]
    assert entries is not None
    return dict(entries)


def peaky(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    """Return logits `[rows, vocab]` shaped like a language model's: a few tokens share most of the mass."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator)
    best = torch.stack([torch.randperm(vocab, generator=generator)[:20] for _ in range(rows)])
    return logits.scatter_add(1, best, torch.linspace(12, 4, 20).repeat(rows, 1))
