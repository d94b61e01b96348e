"""What drafts on the device, before there is a cache: its layers, its shapes, and how it becomes a drafter.

Owns the drafter's module tree and the fingerprint of what it was made from, and the checks that it fits the target.
Trees are made at once, before the cache is sized, since packed weights take memory; after that only when the drafter's
own weights have changed. Does not run anything: the ModelRunner gives a source its share of the cache and gets the
drafter.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from cb_engine.attention.interface import attend
from cb_engine.config import ResolvedConfig
from cb_engine.device import release_host_memory
from cb_engine.errors import ModelChangedError, UnsupportedModelError
from cb_engine.runner.buckets import DraftShapes
from cb_engine.runner.drafters.chain import ChainDrafter, Passes
from cb_engine.runner.drafters.draft_model import (
    DraftModelDrafter,
    FirstLayersDrafter,
    decoder_layers,
    drafting_forward,
    first_layers,
)
from cb_engine.runner.drafters.eagle3 import AuxStates, Eagle3Drafter, head_forward
from cb_engine.runner.drafters.eagle3_head import Eagle3Head
from cb_engine.runner.drafters.loading import load_draft_model, load_head
from cb_engine.runner.forward import Forward
from cb_engine.runner.fusion import fused_shadow, packed_shadow
from cb_engine.runner.kv_layout import LayerGroup, only
from cb_engine.runner.probe import AttentionLayer, ModelProfile, profile_model, run_probe
from cb_engine.runner.shadow import Fingerprint, fingerprint, make_shadow

logger = logging.getLogger(__name__)

# Ids by which two models of one tokenizer may differ, which only pad the matrices: so many, and such a share.
_MOST_PADDING, _PADDING_SHARE = 1024, 1 / 8

TreeT = TypeVar("TreeT", bound=nn.Module)


class DraftSource(ABC):
    """See the module docstring.

    Attributes:
        layers: its attention layers, which need a share of the cache; none if it uses the target's.
    """

    layers: tuple[AttentionLayer, ...] = ()

    @abstractmethod
    def shapes(self, num_tokens: int) -> DraftShapes:
        """The shapes of its passes for k = `num_tokens`."""

    @abstractmethod
    def forward(self, shadow: nn.Module) -> Forward:
        """What runs in its passes, beside the target's tree."""

    @abstractmethod
    def drafter(self, passes: Passes) -> ChainDrafter:
        """The drafter itself."""

    def groups(self, groups: Sequence[LayerGroup]) -> tuple[LayerGroup, ...]:
        """The layers that its forward attends with."""
        return only(groups, drafters=True)

    def tap(self, shadow: nn.Module, forward: Forward) -> Forward:
        """The target's forward, with whatever it has to leave behind."""
        return forward

    def has_changed(self) -> bool:
        """Whether the drafter's own weights are not those that its tree was made from.

        Raises:
            ModelChangedError: it is another model altogether.
        """
        return False

    def rebuild(self) -> None:  # noqa: B027 (not all have a tree)
        """Makes the tree anew. The old one goes before, if nobody else holds it."""

    def drop_shadow(self) -> None:  # noqa: B027 (not all hold it)
        """Lets go of the target's tree; the next `forward` brings another."""

    def devices(self, profile: ModelProfile) -> tuple[torch.device, torch.device]:
        """Where ids go, and where rows are chosen."""
        return profile.input_device, profile.output_device


class OwnTree(DraftSource, Generic[TreeT]):
    """A source with a module tree of its own, made of a module that somebody else may write to.

    Subclasses call `_build` when they know what `_make_tree` needs.
    """

    _tree: TreeT
    _fingerprint: Fingerprint

    def __init__(self, module: TreeT) -> None:
        self._module = module

    def has_changed(self) -> bool:
        if fingerprint(self._module) == self._fingerprint:
            return False
        self._check_that_it_fits()
        return True

    def rebuild(self) -> None:
        del self._tree
        release_host_memory()
        self._build()

    def _build(self) -> None:
        self._fingerprint = fingerprint(self._module)
        self._tree = self._make_tree()

    @abstractmethod
    def _make_tree(self) -> TreeT:
        """The tree for the weights as they are."""

    @abstractmethod
    def _check_that_it_fits(self) -> None:
        """Raises ModelChangedError if the module has become another one since the cache was made."""


class OwnModel(OwnTree[nn.Module]):
    """A smaller causal LM, with layers of its own in the same pool."""

    def __init__(self, model: nn.Module, profile: ModelProfile, config: ResolvedConfig) -> None:
        super().__init__(model)
        self._target, self._config = profile, config
        try:
            self._profile = profile_model(model, make_shadow(model))
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"speculative model: {error}") from error
        sizes = self._profile.vocab_size, profile.vocab_size
        if max(sizes) - min(sizes) > min(_MOST_PADDING, _PADDING_SHARE * max(sizes)):
            raise ValueError(
                f"the draft model has {self._profile.vocab_size} tokens and the model {profile.vocab_size}: it "
                "has to be one with the same tokenizer"
            )
        limit = self._profile.max_model_len
        if limit is not None and limit < config.max_model_len:
            logger.warning("the draft model's positions end at %d: longer requests go on without drafts", limit)
        # All blocks are kept, also those behind a window, which attention masks by itself: the drafter may begin with
        # a text after the target has passed it.
        self.layers = tuple(replace(layer, window=None, is_drafters=True) for layer in self._profile.layers)
        self._build()

    def shapes(self, num_tokens: int) -> DraftShapes:
        return DraftShapes(num_tokens, first_width=1 + num_tokens, prefills=True)

    def _check_that_it_fits(self) -> None:
        if profile_model(self._module, make_shadow(self._module)) != self._profile:
            raise ModelChangedError("the draft model's layers, dtype, device or vocabulary changed; make a new engine")

    def _make_tree(self) -> nn.Module:
        tree, _ = fused_shadow(
            lambda: make_shadow(self._module),
            lambda tree: run_probe(tree, self._profile),
            fuse=self._config.fuse_modules,
            pack=self._config.pack_weights,
        )
        return tree

    def forward(self, shadow: nn.Module) -> Forward:
        return drafting_forward(
            self._tree,
            takes_logits_to_keep=self._profile.takes_logits_to_keep,
            vocab_size=self._target.vocab_size,
            own_vocab_size=self._profile.vocab_size,
        )

    def drafter(self, passes: Passes) -> ChainDrafter:
        return DraftModelDrafter(passes, self._profile.max_model_len)

    def devices(self, profile: ModelProfile) -> tuple[torch.device, torch.device]:
        return self._profile.input_device, self._profile.output_device


class FirstLayers(DraftSource):
    """The target's own first layers: what they have computed in the target is theirs as well."""

    def __init__(self, num_layers: int, shadow: nn.Module, profile: ModelProfile) -> None:
        first_layers(shadow, num_layers)  # raises what is wrong
        self._num_layers, self._target = num_layers, profile

    def shapes(self, num_tokens: int) -> DraftShapes:
        return DraftShapes(num_tokens, first_width=1)

    def forward(self, shadow: nn.Module) -> Forward:
        size = self._target.vocab_size
        return drafting_forward(
            first_layers(shadow, self._num_layers),
            takes_logits_to_keep=self._target.takes_logits_to_keep,
            vocab_size=size,
            own_vocab_size=size,
        )

    def drafter(self, passes: Passes) -> ChainDrafter:
        return FirstLayersDrafter(passes)

    def groups(self, groups: Sequence[LayerGroup]) -> tuple[LayerGroup, ...]:
        own = only(groups, drafters=False)
        return tuple(LayerGroup(g.window, tuple(x for x in g.layers if x.layer_idx < self._num_layers)) for g in own)


class Head(OwnTree[Eagle3Head]):
    """An EAGLE-3 head: one layer of its own, and a look at the target's states.

    Owns the buffer of states too: it takes as many rows as a step may have.
    """

    def __init__(
        self, head: Eagle3Head, model: nn.Module, shadow: nn.Module, profile: ModelProfile, config: ResolvedConfig
    ) -> None:
        super().__init__(head)
        _, layers = decoder_layers(shadow)
        own = head.config
        for layer_id in own.aux_layer_ids:
            if not 0 <= layer_id < len(layers):
                raise ValueError(
                    f"the EAGLE-3 head takes the input of layer {layer_id}, the model has layers 0 to {len(layers) - 1}"
                    "; heads that take the last layer's output are not supported"
                )
        self._pack = config.pack_weights
        device, dtype = profile.layers[-1].device, profile.layers[-1].dtype
        _check_head(head, device, dtype)
        heads = (own.num_attention_heads, own.num_key_value_heads, own.head_dim)
        self.layers = (AttentionLayer(0, *heads, None, dtype, device, is_drafters=True),)
        # What it shares with the target is looked up by name in the target's tree, which comes and goes.
        names = {module: name for name, module in model.named_modules()}
        self._borrowed = tuple(None if module is None else names.get(module, "") for module in head.borrowed)
        self._aux = AuxStates(own.aux_layer_ids, _most_rows(config), own.target_hidden_size, dtype, device)
        self._build()

    def shapes(self, num_tokens: int) -> DraftShapes:
        return DraftShapes(num_tokens, first_width=1 + num_tokens, prefills=True)

    def _check_that_it_fits(self) -> None:
        try:
            _check_head(self._module, self.layers[0].device, self.layers[0].dtype)
        except ValueError as error:
            raise ModelChangedError(f"{error}; then make a new engine") from error

    def _make_tree(self) -> Eagle3Head:
        tree = make_shadow(self._module)
        tree.attend_with(attend)
        return packed_shadow(tree, pack=self._pack)

    def forward(self, shadow: nn.Module) -> Forward:
        twins = [
            shadow.get_submodule(name) if name else module
            for name, module in zip(self._borrowed, self._module.borrowed, strict=True)
        ]
        self._tree.borrow(*twins)
        return head_forward(self._tree, self._aux)

    def drop_shadow(self) -> None:
        self._tree.borrow(None, None)

    def drafter(self, passes: Passes) -> ChainDrafter:
        return Eagle3Drafter(passes, self._module.config.hidden_size, self.layers[0].dtype)

    def tap(self, shadow: nn.Module, forward: Forward) -> Forward:
        return self._aux.tap(shadow, forward)

    def devices(self, profile: ModelProfile) -> tuple[torch.device, torch.device]:
        return self.layers[0].device, self.layers[0].device


def _most_rows(config: ResolvedConfig) -> int:
    """Of any step of the target."""
    width = 1 + config.speculative.num_tokens if config.speculative and config.pads_decode else 1
    return max(config.max_num_batched_tokens, config.max_num_seqs * width)


def draft_source(
    model: nn.Module, shadow: nn.Module, profile: ModelProfile, config: ResolvedConfig
) -> DraftSource | None:
    """What drafts on the device under these settings; None: nothing does.

    Raises:
        ValueError, TypeError: it does not fit the model, or cannot be loaded.
    """
    settings = config.speculative
    if settings is None or settings.method in ("ngram", "suffix"):
        return None
    if settings.num_draft_layers is not None:
        return FirstLayers(settings.num_draft_layers, shadow, profile)
    given: Any = settings.model
    if settings.method == "draft_model":
        if isinstance(given, str | Path):
            given = load_draft_model(given, model, profile.layers[0].dtype)
        if not isinstance(given, nn.Module):
            raise TypeError(
                "speculative model must be a loaded causal LM or where to load it from, not of type "
                f"{type(given).__name__}"
            )
        if isinstance(given, Eagle3Head):
            raise ValueError("speculative model is an EAGLE-3 head; give method='eagle3'")
        return OwnModel(given, profile, config)
    if isinstance(given, str | Path):
        given = load_head(given, model, profile.layers[-1].device, profile.layers[-1].dtype)
    if not isinstance(given, Eagle3Head):
        raise TypeError(
            "speculative model must be the folder of an EAGLE-3 checkpoint or a loaded Eagle3Head, not of type "
            f"{type(given).__name__}; a causal LM drafts with method='draft_model'"
        )
    return Head(given, model, shadow, profile, config)


def _check_head(head: Eagle3Head, device: torch.device, dtype: torch.dtype) -> None:
    for name, weight in head.named_parameters():
        if (weight.device, weight.dtype) != (device, dtype):
            raise ValueError(
                f"the EAGLE-3 head's {name} is {weight.dtype} on {weight.device}, the model's last layer {dtype} on "
                f"{device}; call head.to({device}, {dtype}), or give its folder"
            )
