"""Drafting with an EAGLE-3 head (Li et al. 2025): one layer over the target's hidden states.

Owns the buffer that the target's states are left in, and how far the head has followed each request. Does not know the
head's inside (`eagle3_head.py`).

The row at position p takes the token at p + 1 and the target's states at p, and predicts the token at p + 2. States are
there only for what the target has just computed: a request that was passed over has a hole, and from then on the head
sees only what lies behind it.

    the head's keys    | known | hole | block | behind it ...... |
                                      ^ visible from here
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import nn

from cb_engine.request import Request
from cb_engine.runner.buckets import Bucket, StepKind
from cb_engine.runner.drafters.chain import ChainDrafter, Passes, Span
from cb_engine.runner.drafters.draft_model import decoder_layers
from cb_engine.runner.drafters.eagle3_head import Eagle3Head
from cb_engine.runner.forward import Forward
from cb_engine.scheduler.output import ScheduledRequest


class AuxStates:
    """The inputs of some of the target's layers, as the latest step had them.

    Args:
        layer_ids: whose inputs are taken.
        max_rows: of any step.
        width: of the target's states.
    """

    def __init__(
        self, layer_ids: Sequence[int], max_rows: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._layer_ids = tuple(layer_ids)
        self.rows = torch.zeros(max_rows, len(self._layer_ids) * width, dtype=dtype, device=device)

    def tap(self, shadow: nn.Module, forward: Forward) -> Forward:
        """The target's forward, which leaves its states here, [T, layers * width], from row 0 on."""
        _, layers = decoder_layers(shadow)
        seen: dict[int, torch.Tensor] = {}
        for place, layer_id in enumerate(self._layer_ids):
            layers[layer_id].register_forward_pre_hook(_note(seen, place), with_kwargs=True)

        def tapped(ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = forward(ids, positions, wanted)
            states = torch.cat([seen[place][0].to(self.rows.device) for place in range(len(self._layer_ids))], -1)
            self.rows.narrow(0, 0, states.shape[0]).copy_(states)
            return logits

        return tapped


Hook = Callable[[nn.Module, tuple[torch.Tensor, ...], dict[str, torch.Tensor]], None]


def _note(seen: dict[int, torch.Tensor], place: int) -> Hook:
    def note(module: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> None:
        seen[place] = args[0] if args else kwargs["hidden_states"]

    return note


@dataclass(frozen=True, slots=True)
class _Computed:
    """Where the states of a request's rows lie: position `start` at row `row`."""

    row: int
    start: int


@dataclass(slots=True)
class _Followed:
    """Up to which position the head has keys without a hole from `visible` on."""

    end: int
    visible: int
    num_preemptions: int


class Eagle3Drafter(ChainDrafter):
    """See the module docstring. `observe` has to be told of every step of the target."""

    shift = 1

    def __init__(self, passes: Passes, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__(passes)
        self._hidden_size, self._dtype = hidden_size, dtype
        self._computed: dict[Request, _Computed] = {}
        self._followed: WeakKeyDictionary[Request, _Followed] = WeakKeyDictionary()
        self._misses_nothing = True  # so what the prefix cache holds is known to the head as well

    def observe(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """The target has computed these rows, in this order; their states are in the buffer."""
        self._misses_nothing &= not self._computed  # else the last step's were never followed
        self._computed = {}
        row = 0
        for item in scheduled:
            self._computed[item.request] = _Computed(row, item.start)
            row += item.num_tokens

    def _spans(self, requests: Sequence[Request]) -> list[Span | None]:
        return [self._span(request) for request in requests]

    def _span(self, request: Request) -> Span | None:
        """The rows that the target has just computed and that were right."""
        computed = self._computed.get(request)
        if computed is None or request.num_computed_tokens <= computed.start:
            return None  # it was not in the step, or has been preempted since
        followed = self._followed.get(request)
        if followed is None:
            is_whole = self._misses_nothing
        else:
            is_whole = followed.end == computed.start and followed.num_preemptions == request.num_preemptions
        size = self._passes.block_size
        visible = (followed.visible if followed else 0) if is_whole else computed.start // size * size
        return Span(request, computed.start, request.num_computed_tokens, visible)

    def _others(self, asked: Sequence[Span]) -> list[Span]:
        known = {span.request for span in asked}
        rest = [r for r in self._computed if r not in known and not r.is_finished]
        spans = [span for span in map(self._span, rest) if span is not None]
        for span in (*spans, *asked):
            self._followed[span.request] = _Followed(span.end, span.visible, span.request.num_preemptions)
        return spans

    def _catch_up(self, spans: Sequence[Span]) -> list[Span]:
        left = super()._catch_up(spans)
        if not left:
            self._computed = {}
        return left

    def _drafted(self, spans: Sequence[Span], token_ids: Sequence[Sequence[int]]) -> None:
        self._computed = {}

    def _first_inputs(self, spans: Sequence[Span], bucket: Bucket) -> tuple[torch.Tensor, ...]:
        rows = torch.zeros(bucket.num_tokens, dtype=torch.int64)
        at = 0
        for span in spans:
            computed = self._computed[span.request]
            first = computed.row + span.start - computed.start
            rows[at : at + span.num_rows] = torch.arange(first, first + span.num_rows)
            at += span.num_rows
        return (rows.to(self._passes.model.input_device),)

    def _next_inputs(self, bucket: Bucket) -> tuple[torch.Tensor, ...]:
        if bucket.kind is not StepKind.DRAFT_NEXT:
            return ()
        device = self._passes.model.input_device
        return (torch.zeros(bucket.num_seqs, self._hidden_size, dtype=self._dtype, device=device),)


def head_forward(head: Eagle3Head, aux: AuxStates) -> Forward:
    """`(ids, positions, wanted [R], feed) -> (best next ids [R], states [R, H])` of a head.

    `feed` is what the rows start from: int64 [T], where their states lie in `aux`, in a first pass; [T, H], the head's
    own states, in a next one.
    """

    def draft(
        ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, feed: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first = not feed.is_floating_point()
        hidden = head.fuse(aux.rows.index_select(0, feed).unsqueeze(0)) if first else feed.unsqueeze(0)
        states = head(head.embed(ids), hidden, positions)[0].index_select(0, wanted)
        best = head.logits(states).argmax(-1)
        return head.target_ids.index_select(0, best), states

    return draft
