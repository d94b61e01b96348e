"""A draft model: any smaller causal LM with the same vocabulary, or the first layers of the target itself.

Owns how far each request has been seen by the draft model. Does not know acceptance: it looks at what became of its
own drafts when it is asked again.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import nn

from cb_engine.kv_cache.block import common_prefix_length
from cb_engine.request import Request
from cb_engine.runner.drafters.chain import ChainDrafter, Passes, Span
from cb_engine.runner.forward import Forward, logits_forward


@dataclass(slots=True)
class _Seen:
    """A request's tokens whose keys and values the draft model has.

    Those of drafts are right as far as the drafts were: `drafts` follow the first `num_tokens`, and all but the last
    have been computed.
    """

    num_tokens: int
    drafts: Sequence[int]
    num_preemptions: int


class DraftModelDrafter(ChainDrafter):
    """See the module docstring.

    Args:
        shares_cache: its layers are the target's own first ones, whose keys and values the target has written.
    """

    shift = 0

    def __init__(self, passes: Passes, *, shares_cache: bool) -> None:
        super().__init__(passes)
        self._shares_cache = shares_cache
        self._seen: WeakKeyDictionary[Request, _Seen] = WeakKeyDictionary()

    def _spans(self, requests: Sequence[Request]) -> list[Span | None]:
        return [Span(request, self._num_known(request), request.num_tokens) for request in requests]

    def _num_known(self, request: Request) -> int:
        """At most all but the last token, whose logits are wanted."""
        if self._shares_cache:
            return request.num_computed_tokens
        seen = self._seen.get(request)
        if seen is None or seen.num_preemptions != request.num_preemptions:
            return 0
        kept = common_prefix_length(seen.drafts[:-1], request.token_ids[seen.num_tokens :])
        return min(seen.num_tokens + kept, request.num_tokens - 1)

    def _drafted(self, spans: Sequence[Span], token_ids: Sequence[Sequence[int]]) -> None:
        if self._shares_cache:
            return
        for span, ids in zip(spans, token_ids, strict=False):
            request = span.request
            self._seen[request] = _Seen(request.num_tokens, ids, request.num_preemptions)


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
        raise ValueError(f"num_draft_layers={num_layers} must be below the model's own {len(layers)} layers")
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
