"""Padded shapes: the keys of compiled and captured code. Free of torch.

Owns the one rule that turns a step's true sizes into a shape. Warm-up lists shapes with it and look-up finds them
with it, so the two cannot drift apart.

    decode         num_seqs sequences of one token, block tables num_blocks wide
    verify         the same with 1 + k tokens: num_seqs * (1 + k) rows, packed; who has fewer drafts leaves rows over
    prefill        width packed tokens of at most num_seqs sequences; the tables have one width, the largest
    draft_prefill  the drafter's pass over a prompt, like prefill
    draft_first    the drafter's pass over what the target has just verified: num_seqs sequences of at most width tokens
    draft_next     each further pass: num_seqs sequences of one token

The width is 1 or 1 + k and nothing between, however many drafts there are. Sizes climb power-of-two ladders whose top,
the configured maximum, is always a step of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MIN_PREFILL_TOKENS = 16  # smaller chunks are padded to this: fewer shapes, at next to no cost


class StepKind(StrEnum):
    """What a step computes."""

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"
    DRAFT_PREFILL = "draft_prefill"
    DRAFT_FIRST = "draft_first"
    DRAFT_NEXT = "draft_next"

    @property
    def is_prefill(self) -> bool:
        """Whether the width is that of the packed row, rather than of each sequence."""
        return self in (StepKind.PREFILL, StepKind.DRAFT_PREFILL)

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one token, so that row i is sequence i."""
        return self in (StepKind.DECODE, StepKind.DRAFT_NEXT)

    @property
    def is_draft(self) -> bool:
        """Whether it is a drafter's."""
        return self in (StepKind.DRAFT_PREFILL, StepKind.DRAFT_FIRST, StepKind.DRAFT_NEXT)


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
        return self.width if self.kind.is_prefill else self.num_seqs * self.width


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
class DraftShapes:
    """What speculation adds to the shapes of an engine.

    Attributes:
        num_tokens: k.
        first_width: tokens a sequence has at most in a drafter's first pass; 0: no drafter runs on the device.
        prefills: whether the drafter passes over prompts too.
    """

    num_tokens: int
    first_width: int = 0
    prefills: bool = False


@dataclass(frozen=True)
class BucketTable:
    """All shapes of an engine.

    Attributes:
        max_num_seqs, max_num_batched_tokens: the engine's limits, tops of their ladders.
        max_blocks_per_seq: top of the block ladder: the widest table that the workload hints announce.
        pads_decode, pads_prefill: whether steps of the kind are padded; if not, they keep their sizes and none is
            listed.
        drafts: what speculation adds; None: it is off.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_blocks_per_seq: int
    pads_decode: bool
    pads_prefill: bool
    drafts: DraftShapes | None = None

    def pads(self, kind: StepKind) -> bool:
        """Whether steps of this kind have the shape of a listed bucket."""
        return self.pads_prefill if kind.is_prefill else self.pads_decode

    def width(self, kind: StepKind) -> int:
        """Tokens that a sequence has at most in a step that is no prefill."""
        if self.drafts is None or kind.is_decode:
            return 1
        return self.drafts.first_width if kind is StepKind.DRAFT_FIRST else 1 + self.drafts.num_tokens

    def pad(self, kind: StepKind, num_seqs: int, num_tokens: int, num_blocks: int) -> Bucket:
        """The shape of a step.

        Args:
            num_seqs: sequences.
            num_tokens: tokens of all sequences together.
            num_blocks: the widest block table of a sequence.
        """
        if not self.pads(kind) and not kind.is_prefill and not kind.is_decode:
            # Ragged rows without a shape of their own take that of a packed row.
            packed = StepKind.DRAFT_PREFILL if kind.is_draft else StepKind.PREFILL
            return self.pad(packed, num_seqs, num_tokens, num_blocks)
        if not self.pads(kind):
            return Bucket(kind, num_seqs, 1 if kind.is_decode else num_tokens, num_blocks)
        if not kind.is_prefill:
            num_seqs = climb(num_seqs, self.max_num_seqs)
            return Bucket(kind, num_seqs, self.width(kind), climb(num_blocks, self.max_blocks_per_seq))
        return Bucket(
            kind,
            climb(num_seqs, self.max_num_seqs),
            climb(num_tokens, self._most_tokens(kind), MIN_PREFILL_TOKENS),
            max(num_blocks, self.max_blocks_per_seq),
        )

    def all(self) -> tuple[Bucket, ...]:
        """Every shape that `pad` gives within the limits, largest first."""
        listed = [bucket for kind in self._kinds() if self.pads(kind) for bucket in self._of_kind(kind)]
        return tuple(sorted(listed, key=lambda b: (b.num_tokens, b.num_seqs, b.num_blocks), reverse=True))

    def _kinds(self) -> tuple[StepKind, ...]:
        kinds = [StepKind.DECODE, StepKind.PREFILL]
        if self.drafts is not None:
            kinds.append(StepKind.VERIFY)
            kinds += [StepKind.DRAFT_FIRST] * (self.drafts.first_width > 0)
            kinds += [StepKind.DRAFT_NEXT] * (self.drafts.first_width > 0 and self.drafts.num_tokens > 1)
            kinds += [StepKind.DRAFT_PREFILL] * (self.drafts.prefills or self._packs_first_passes)
        return tuple(kinds)

    @property
    def _packs_first_passes(self) -> bool:
        """Whether a drafter's first passes have the shapes of its passes over prompts; see `pad`."""
        return self.drafts is not None and self.drafts.first_width > 0 and not self.pads(StepKind.DRAFT_FIRST)

    def _most_tokens(self, kind: StepKind) -> int:
        """Of a packed row."""
        most = self.max_num_batched_tokens
        if kind is StepKind.DRAFT_PREFILL and self._packs_first_passes:
            return max(most, self.max_num_seqs * self.width(StepKind.DRAFT_FIRST))
        return most

    def _of_kind(self, kind: StepKind) -> list[Bucket]:
        seqs = ladder(self.max_num_seqs)
        if not kind.is_prefill:
            blocks = ladder(self.max_blocks_per_seq)
            return [Bucket(kind, s, self.width(kind), b) for s in seqs for b in blocks]
        tokens = ladder(self._most_tokens(kind), MIN_PREFILL_TOKENS)
        return [Bucket(kind, s, t, self.max_blocks_per_seq) for s in seqs for t in tokens if s <= t]
