"""Padded shapes: the keys of compiled and captured code. Free of torch.

Owns the one rule that turns a step's true sizes into a shape. Warm-up lists shapes with it and look-up finds them
with it, so the two cannot drift apart.

    decode    num_seqs sequences of one token, block tables num_blocks wide
    prefill   width packed tokens of at most num_seqs sequences; the tables have one width, the largest

Sizes climb power-of-two ladders whose top, the configured maximum, is always a step of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MIN_PREFILL_TOKENS = 16  # smaller chunks are padded to this: fewer shapes, at next to no cost


class StepKind(StrEnum):
    """What a step computes."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, order=True)
class Bucket:
    """A padded shape; see the module docstring for the meaning of the fields by kind."""

    kind: StepKind
    num_seqs: int
    width: int
    num_blocks: int

    @property
    def num_tokens(self) -> int:
        """Rows of the step's packed tensors."""
        return self.width if self.kind is StepKind.PREFILL else self.num_seqs * self.width


def ladder(top: int, bottom: int = 1) -> tuple[int, ...]:
    """Powers of two from `bottom` (rounded up to one) below `top`, then `top` itself."""
    steps: list[int] = []
    step = 1 << (bottom - 1).bit_length()
    while step < top:
        steps.append(step)
        step *= 2
    return (*steps, top)


def climb(value: int, top: int, bottom: int = 1) -> int:
    """The first step of `ladder(top, bottom)` that holds `value`; `value` itself beyond the top."""
    if value > top:
        return value
    return min(max(1 << (value - 1).bit_length(), 1 << (bottom - 1).bit_length()), top)


@dataclass(frozen=True)
class BucketTable:
    """All shapes of an engine.

    Attributes:
        max_num_seqs, max_num_batched_tokens: the engine's limits, tops of their ladders.
        max_blocks_per_seq: top of the block ladder: the widest table that the workload hints announce.
        pads_decode, pads_prefill: whether steps of the kind are padded; if not, they keep their sizes and none is
            listed.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_blocks_per_seq: int
    pads_decode: bool
    pads_prefill: bool

    def pad(self, kind: StepKind, num_seqs: int, num_tokens: int, num_blocks: int) -> Bucket:
        """The shape for a step of these true sizes (`num_tokens` in all, tables `num_blocks` wide)."""
        if kind is StepKind.DECODE:
            if not self.pads_decode:
                return Bucket(kind, num_seqs, 1, num_blocks)
            return Bucket(kind, climb(num_seqs, self.max_num_seqs), 1, climb(num_blocks, self.max_blocks_per_seq))
        if not self.pads_prefill:
            return Bucket(kind, num_seqs, num_tokens, num_blocks)
        return Bucket(
            kind,
            climb(num_seqs, self.max_num_seqs),
            climb(num_tokens, self.max_num_batched_tokens, MIN_PREFILL_TOKENS),
            max(num_blocks, self.max_blocks_per_seq),
        )

    def all(self) -> tuple[Bucket, ...]:
        """Every shape that `pad` gives within the limits, largest first."""
        seqs = ladder(self.max_num_seqs)
        decode = [Bucket(StepKind.DECODE, s, 1, b) for s in seqs for b in ladder(self.max_blocks_per_seq)]
        prefill = [
            Bucket(StepKind.PREFILL, s, t, self.max_blocks_per_seq)
            for s in seqs
            for t in ladder(self.max_num_batched_tokens, MIN_PREFILL_TOKENS)
            if s <= t
        ]
        listed = (decode if self.pads_decode else []) + (prefill if self.pads_prefill else [])
        return tuple(sorted(listed, key=lambda b: (b.num_tokens, b.num_seqs, b.num_blocks), reverse=True))
