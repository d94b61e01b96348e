"""How much of a target's greedy text a head foresees, as greedy speculative decoding would meet it.

Owns the walk over a text. A draft that is right is the text's own token, so the passes over the text that training
unrolls are those that decoding would run, and one unrolling gives the drafts of every position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cb_engine.runner.drafters.eagle3_head import Eagle3Head
from eagle3.examples import Example
from eagle3.unrolling import PaddedBatch, arithmetic, shifted, unroll

_SEQUENCES_PER_BATCH = 8


@dataclass(frozen=True)
class Acceptance:
    """What became of the drafts of many texts.

    Attributes:
        rounds: how often k tokens were drafted.
        accepted: [k] rounds in which the first, second, ... draft was accepted.
    """

    rounds: int
    accepted: tuple[int, ...]

    @property
    def mean_length(self) -> float:
        """Tokens per round: the accepted drafts and the target's own."""
        return 1 + sum(self.accepted) / max(1, self.rounds)

    @property
    def rates(self) -> tuple[float, ...]:
        """For each draft, the share of rounds that accepted it."""
        return tuple(count / max(1, self.rounds) for count in self.accepted)


@torch.no_grad()
def measure_acceptance(head: Eagle3Head, examples: Sequence[Example], num_drafts: int) -> Acceptance:
    """Drafts `num_drafts` tokens at a time along the answers."""
    rounds, accepted = 0, [0] * num_drafts
    order = sorted(examples, key=lambda example: len(example.token_ids))
    for start in range(0, len(order), _SEQUENCES_PER_BATCH):
        part = order[start : start + _SEQUENCES_PER_BATCH]
        for example, is_right in zip(part, _right_drafts(head, part, num_drafts), strict=True):
            for length in walk(is_right.tolist(), example.prompt_length, len(example.token_ids)):
                rounds += 1
                for i in range(length):
                    accepted[i] += 1
    return Acceptance(rounds, tuple(accepted))


def _right_drafts(head: Eagle3Head, examples: Sequence[Example], num_drafts: int) -> torch.Tensor:
    """[B, L, k] whether the draft s of the chain of position p is the token p + s + 1."""
    batch = PaddedBatch.of(examples)
    rows = []
    with arithmetic(head, batch):
        for number, hidden in enumerate(unroll(head, batch, num_drafts), start=1):
            drafts = head.target_ids[head.logits(hidden).argmax(-1)].cpu()
            rows.append(drafts == shifted(batch.token_ids, number + 1))
    return torch.stack(rows, -1)


def walk(is_right: Sequence[Sequence[bool]], prompt_length: int, length: int) -> list[int]:
    """How many drafts each round accepts. A round at p knows the token p + 1 and drafts from p + 2 on."""
    rounds, p = [], prompt_length - 1
    while p + 2 < length:
        right = is_right[p][: length - p - 2]
        count = next((i for i, ok in enumerate(right) if not ok), len(right))
        rounds.append(count)
        p += 1 + count
    return rounds
