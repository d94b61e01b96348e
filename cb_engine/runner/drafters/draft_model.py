"""A draft model: any smaller causal LM with the same vocabulary, or the first layers of the target itself.

Does not know acceptance: what has become of drafts shows in the requests' tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from cb_engine.request import Request
from cb_engine.runner.drafters.chain import ChainDrafter, OwnCacheDrafter, Passes, Span
from cb_engine.runner.forward import Forward, logits_forward
from cb_engine.speculative.proposer import NO_DRAFT, Draft, DraftAsk


class FirstLayersDrafter(ChainDrafter):
    """Its layers are the target's own first ones, whose keys and values the target has written."""

    shift = 0

    def _first_spans(self, requests: Sequence[Request]) -> list[Span | None]:
        return [Span(request, request.num_computed_tokens, request.num_tokens) for request in requests]


class DraftModelDrafter(OwnCacheDrafter):
    """A model with layers of its own.

    A `propose` catches up with no more tokens than a step may have, the most urgent requests first. Who is not there
    yet gets no draft and goes on from where it is the next time. What requests share is computed once.

    Args:
        max_model_len: where its positions end; None: nowhere. Who has grown beyond that gets no drafts.
    """

    shift = 0

    def __init__(self, passes: Passes, max_model_len: int | None) -> None:
        super().__init__(passes)
        self._max_model_len = max_model_len

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """See `Proposer.propose`."""
        if self._max_model_len is None:
            return super().propose(asks)
        # The last draft is no input: its own position may be the first that there is not.
        rooms = [self._max_model_len + 1 - ask.request.num_tokens for ask in asks]
        within = [
            replace(a, max_tokens=min(a.max_tokens, room)) for a, room in zip(asks, rooms, strict=True) if room > 0
        ]
        drafts = iter(super().propose(within))
        return [next(drafts) if room > 0 else NO_DRAFT for room in rooms]

    def _first_spans(self, requests: Sequence[Request]) -> list[Span | None]:
        self._take_tables(requests)
        room = self._passes.buckets.max_num_batched_tokens
        found: list[Span | None] = []
        waiting: list[Span] = []  # rows to be computed in one go, which must not see each other
        touched: set[int] = set()  # the blocks that they lie in
        for request in requests:
            late, first = self._parts(self._unknown(request))
            if touched and not touched.isdisjoint(self._tables[request].tolist()):
                self._prefill(waiting)
                waiting, touched = [], set()
            late = replace(late, end=min(late.end, late.start + room))
            if late.num_rows:
                room -= late.num_rows
                waiting.append(late)
                touched.update(self._computed(late, request.token_ids[late.start : late.end]))
            found.append(first if late.end == first.start else None)
        self._prefill(waiting)
        return found

    def _unknown(self, request: Request) -> Span:
        """At least the last token, whose logits are wanted."""
        known = self._rows.count(request, self._tables[request], request.num_tokens - 1)
        return Span(request, known, request.num_tokens)

    def _computed(self, span: Span, token_ids: Sequence[int]) -> list[int]:
        """Notes rows from the span's first on; returns the blocks that they lie in."""
        table, size = self._tables[span.request], self._passes.block_size
        self._rows.add(span.request, table, span.start, token_ids)
        ids: list[int] = table[span.start // size : -(-(span.start + len(token_ids)) // size)].tolist()
        return ids

    def _drafted(self, spans: Sequence[Span], token_ids: Sequence[Sequence[int]]) -> None:
        for span, ids in zip(spans, token_ids, strict=True):
            self._computed(span, [*span.request.token_ids[span.start : span.end], *ids[:-1]])  # the last is no input
        self._tables = {}

    def weights_changed(self, *, own: bool) -> None:
        """See `ChainDrafter.weights_changed`."""
        if own:
            self._rows.clear()


def drafting_forward(model: nn.Module, *, takes_logits_to_keep: bool, vocab_size: int, own_vocab_size: int) -> Forward:
    """`(ids, positions, wanted [R]) -> (best next ids [R],)` of a causal LM.

    Args:
        vocab_size: of the target. Where the draft model's own differs, by ids that pad one of them, such ids are never
            drafted, and read as the last one.
    """
    logits = logits_forward(model, takes_logits_to_keep=takes_logits_to_keep)

    def draft(ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor]:
        if own_vocab_size < vocab_size:
            ids = ids.clamp(max=own_vocab_size - 1)
        return (logits(ids, positions, wanted)[:, :vocab_size].argmax(-1).to(ids.device),)

    return draft


def first_layers(shadow: nn.Module, num_layers: int) -> nn.Module:
    """The same tree with only the first decoder layers; modules and weights are shared.

    Raises:
        ValueError: it has no more layers, or its layers are not in one list.
    """
    name, layers = decoder_layers(shadow)
    if num_layers >= len(layers):
        raise ValueError(
            f"speculative num_draft_layers={num_layers} must be below the model's own {len(layers)} layers; give "
            "fewer, or a draft model of its own"
        )
    return _with_fewer(shadow, name.split("."), num_layers)


def decoder_layers(shadow: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of decoder layers and its dotted name.

    Raises:
        ValueError: there is none.
    """
    depth = getattr(getattr(shadow, "config", None), "num_hidden_layers", None)
    for name, module in shadow.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return name, module
    raise ValueError(
        f"{type(shadow).__name__} has no list of its {depth} decoder layers, which this kind of speculation needs; use "
        "method='ngram' or 'suffix', or a draft model of its own"
    )


def _with_fewer(module: nn.Module, path: Sequence[str], num_layers: int) -> nn.Module:
    """A copy of the modules on the way to a list, and of the list."""
    if not path:
        return nn.ModuleList(list(module.children())[:num_layers]).train(False)
    twin = copy.copy(module)
    twin.__dict__["_modules"] = dict(module._modules)
    child = module._modules[path[0]]
    if child is not None:
        twin._modules[path[0]] = _with_fewer(child, path[1:], num_layers)
    return twin
