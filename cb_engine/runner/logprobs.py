"""From the sampler's tensors to the entries a caller reads. Owns nothing."""

from __future__ import annotations

import torch

from cb_engine.outputs import TokenLogprob
from cb_engine.runner.input_batch import prompt_logprob_rows
from cb_engine.sampling import prompt_logprobs
from cb_engine.scheduler.output import ScheduledRequest


def candidate_entries(
    pairs: list[tuple[int, float]] | None, token_id: int, logprob: float
) -> list[TokenLogprob] | None:
    """The N likeliest tokens of a row that asked for N > 0 of them, the sampled one added if it is not among them."""
    return None if pairs is None else _entries(pairs, token_id, logprob)


def prompt_entries(item: ScheduledRequest, logits: torch.Tensor) -> list[list[TokenLogprob]]:
    """An entry list per prompt token that this chunk predicts.

    Args:
        item: the chunk.
        logits: [P, vocab], the rows of `prompt_logprob_rows(item)`.
    """
    rows = prompt_logprob_rows(item)
    first = item.start + 1
    targets = list(item.request.prompt_token_ids[first : first + len(rows)])
    top_n = item.request.sampling_params.prompt_logprobs or 0
    scored = prompt_logprobs(logits, torch.tensor(targets, dtype=torch.int64, device=logits.device), top_n)
    chosen = scored.logprobs.tolist()
    top_ids, top_values = scored.top_token_ids.tolist(), scored.top_logprobs.tolist()
    return [
        _entries(list(zip(top_ids[i], top_values[i], strict=True)), target, chosen[i])
        for i, target in enumerate(targets)
    ]


def _entries(pairs: list[tuple[int, float]], token_id: int, logprob: float) -> list[TokenLogprob]:
    entries = [TokenLogprob(i, value, rank) for rank, (i, value) in enumerate(pairs, start=1)]
    if all(entry.token_id != token_id for entry in entries):
        entries.append(TokenLogprob(token_id, logprob, None))
    return entries
