"""Drafting with an EAGLE-3 head (Li et al. 2025): one layer over the target's hidden states.

Owns the buffer that the target's states are left in, and how far the head has followed each request. Does not know the
head's inside (`eagle3_head.py`).

The row at position p takes the token at p + 1 and the target's states at p, and predicts the token at p + 2. States are
there only for what the target has just computed. Whatever lies before that, and the head has not followed then, is a
hole: steps in which nobody drafted, a prefix whose blocks were computed in such steps. From then on the head sees only
what lies behind it.

    the head's keys    | known | hole | behind it ...... |
                                      ^ visible from here

The last key of a prefix was made with the token that followed there. A request that goes on otherwise sees that one key
made wrongly, which costs less than to see none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import nn

from cb_engine.request import Request
from cb_engine.runner.buckets import Bucket, StepKind
from cb_engine.runner.drafters.chain import OwnCacheDrafter, Passes, Span
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
            # Taken out: between two steps nobody holds on to states.
            states = torch.cat([seen.pop(place)[0].to(self.rows.device) for place in range(len(self._layer_ids))], -1)
            # Written through the buffer itself: a graph does not see writes to a view of it.
            self.rows.index_copy_(0, torch.arange(states.shape[0], device=self.rows.device), states)
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


class Eagle3Drafter(OwnCacheDrafter):
    """See the module docstring. `observe` has to be told of every step of the target, and `propose` has to be called
    after each whose rows are to be followed, be it with no asks."""

    shift = 1

    def __init__(self, passes: Passes, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__(passes)
        self._hidden_size, self._dtype = hidden_size, dtype
        self._computed: dict[Request, _Computed] = {}  # by the latest step
        self._followed: WeakKeyDictionary[Request, _Followed] = WeakKeyDictionary()

    def observe(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """The target has computed these rows, in this order; their states are in the buffer."""
        self._computed = {}
        row = 0
        for item in scheduled:
            self._computed[item.request] = _Computed(row, item.start)
            row += item.num_tokens

    def forget(self, request: Request) -> None:
        """See `Proposer.forget`."""
        super().forget(request)
        self._computed.pop(request, None)
        self._followed.pop(request, None)

    def weights_changed(self, *, own: bool) -> None:
        """See `ChainDrafter.weights_changed`. Keys are made of the target's states; who runs on may go on with its old
        ones, as in the target, but not with those of another head."""
        self._rows.clear()
        if own:
            self._followed.clear()

    def _first_spans(self, requests: Sequence[Request]) -> list[Span | None]:
        """All that the step has computed is followed, also of requests that are not asked for."""
        right = {request: at for request, at in self._computed.items() if request.num_computed_tokens > at.start}
        followed = [request for request in right if not request.is_finished]
        self._take_tables(followed)
        spans = {request: self._span(request, right[request].start) for request in followed}
        for span in spans.values():
            self._note(span)
        firsts: dict[Request, Span] = {}
        for request in requests:
            if request in spans:
                spans[request], firsts[request] = self._parts(spans[request])
        self._prefill(list(spans.values()))
        return [firsts.get(request) for request in requests]

    def _span(self, request: Request, start: int) -> Span:
        """The rows that the target has just computed, from `start` on, and that were right."""
        followed = self._followed.get(request)
        if followed is None or followed.num_preemptions != request.num_preemptions:
            visible, end = 0, self._rows.count(request, self._tables[request], start)
        else:
            visible, end = followed.visible, followed.end
        return Span(request, start, request.num_computed_tokens, visible if end == start else start)

    def _note(self, span: Span) -> None:
        request, table = span.request, self._tables[span.request]
        self._followed[request] = _Followed(span.end, span.visible, request.num_preemptions)
        if span.visible:
            self._overwritten(span, span.start, span.end)
        else:
            self._rows.add(request, table, span.start, request.token_ids[span.start : span.end])

    def _overwritten(self, span: Span, start: int, end: int) -> None:
        """These rows of the request hold what nobody else can use: keys that have closed up, or the head's guesses."""
        size = self._passes.block_size
        self._rows.remove(self._tables[span.request], span.slot(start, size), span.slot(end, size))

    def _drafted(self, spans: Sequence[Span], token_ids: Sequence[Sequence[int]]) -> None:
        for span, ids in zip(spans, token_ids, strict=True):
            self._overwritten(span, span.end, span.end + len(ids) - 1)
        self._tables = {}

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
