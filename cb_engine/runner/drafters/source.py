"""What drafts on the device, before there is a cache: its layers, its shapes, and how it becomes a drafter.

Owns the loading of draft models and heads and the checks that they fit the target. Does not run anything after that:
the ModelRunner gives a source its share of the cache and gets the drafter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cb_engine.attention.interface import attend
from cb_engine.config import ResolvedConfig
from cb_engine.errors import UnsupportedModelError
from cb_engine.models import load_model
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
from cb_engine.runner.drafters.eagle3_checkpoint import load_eagle3
from cb_engine.runner.drafters.eagle3_head import Eagle3Head
from cb_engine.runner.forward import Forward
from cb_engine.runner.fusion import fused_shadow, packed_shadow
from cb_engine.runner.kv_layout import LayerGroup, only
from cb_engine.runner.probe import AttentionLayer, ModelProfile, profile_model, run_probe
from cb_engine.runner.shadow import make_shadow

_MOST_PADDING = 1024  # ids by which two models of one tokenizer may differ: they only pad the matrices


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
        """What runs in its passes, given the target's tree."""

    @abstractmethod
    def drafter(self, passes: Passes) -> ChainDrafter:
        """The drafter itself."""

    def groups(self, groups: Sequence[LayerGroup]) -> tuple[LayerGroup, ...]:
        """The layers that its forward attends with."""
        return only(groups, drafters=True)

    def tap(self, shadow: nn.Module, forward: Forward, max_rows: int) -> Forward:
        """The target's forward for steps of at most `max_rows` rows, with whatever it has to leave behind."""
        return forward

    def devices(self, profile: ModelProfile) -> tuple[torch.device, torch.device]:
        """Where ids go, and where rows are chosen."""
        return profile.input_device, profile.output_device


class OwnModel(DraftSource):
    """A smaller causal LM, with layers of its own in the same pool."""

    def __init__(self, model: nn.Module, profile: ModelProfile, config: ResolvedConfig) -> None:
        self._model, self._target, self._config = model, profile, config
        try:
            self._profile = profile_model(model, make_shadow(model))
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"the draft model: {error}") from error
        if abs(self._profile.vocab_size - profile.vocab_size) > _MOST_PADDING:
            raise ValueError(
                f"the draft model has {self._profile.vocab_size} tokens and the model {profile.vocab_size}: it "
                "has to be one with the same tokenizer"
            )
        limit = self._profile.max_model_len
        if limit is not None and limit < config.max_model_len:
            raise ValueError(
                f"the draft model's positions end at {limit}, max_model_len is {config.max_model_len}; set "
                "max_model_len lower, or take another draft model"
            )
        # All blocks are kept, also those behind a window, which attention masks by itself: the drafter may begin with
        # a text after the target has passed it.
        self.layers = tuple(replace(layer, window=None, is_drafters=True) for layer in self._profile.layers)

    def shapes(self, num_tokens: int) -> DraftShapes:
        return DraftShapes(num_tokens, first_width=1 + num_tokens, prefills=True)

    def forward(self, shadow: nn.Module) -> Forward:
        own, _ = fused_shadow(
            lambda: make_shadow(self._model),
            lambda tree: run_probe(tree, self._profile),
            fuse=self._config.fuse_modules,
            pack=self._config.pack_weights,
        )
        return drafting_forward(
            own,
            takes_logits_to_keep=self._profile.takes_logits_to_keep,
            vocab_size=self._target.vocab_size,
            own_vocab_size=self._profile.vocab_size,
        )

    def drafter(self, passes: Passes) -> ChainDrafter:
        return DraftModelDrafter(passes)

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


class Head(DraftSource):
    """An EAGLE-3 head: one layer of its own, and a look at the target's states."""

    def __init__(self, head: Eagle3Head, shadow: nn.Module, profile: ModelProfile, *, pack: bool | None) -> None:
        _, layers = decoder_layers(shadow)
        for layer_id in head.config.aux_layer_ids:
            if not 0 <= layer_id < len(layers):
                raise ValueError(
                    f"the EAGLE-3 head takes the input of layer {layer_id}, the model has layers 0 to {len(layers) - 1}"
                    "; heads that take the last layer's output are not supported"
                )
        self._head, self._target, self._pack = head, profile, pack
        config, device = head.config, profile.layers[-1].device
        self._dtype = profile.layers[-1].dtype
        _check_head(head, device, self._dtype)
        self.layers = (
            AttentionLayer(
                0,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                None,
                self._dtype,
                device,
                is_drafters=True,
            ),
        )

    def shapes(self, num_tokens: int) -> DraftShapes:
        return DraftShapes(num_tokens, first_width=1 + num_tokens, prefills=True)

    def forward(self, shadow: nn.Module) -> Forward:
        head = make_shadow(self._head)
        head.attend_with(attend)
        return head_forward(packed_shadow(head, pack=self._pack), self._aux)

    def drafter(self, passes: Passes) -> ChainDrafter:
        return Eagle3Drafter(passes, self._head.config.hidden_size, self._dtype)

    def tap(self, shadow: nn.Module, forward: Forward, max_rows: int) -> Forward:
        config = self._head.config
        self._aux = AuxStates(
            config.aux_layer_ids, max_rows, config.target_hidden_size, self._dtype, self.layers[0].device
        )
        return self._aux.tap(shadow, forward)

    def devices(self, profile: ModelProfile) -> tuple[torch.device, torch.device]:
        return self.layers[0].device, self.layers[0].device


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
            given, _ = load_model(str(given), dtype=profile.layers[0].dtype)
        if not isinstance(given, nn.Module):
            raise TypeError(f"speculative model must be a loaded causal LM or where to load it from, not {given!r}")
        return OwnModel(given, profile, config)
    if isinstance(given, str | Path):
        embeddings = getattr(model, "get_input_embeddings")()  # noqa: B009 (a Module's attributes are typed as modules)
        given = load_eagle3(given, target_embeddings=embeddings, target_config=model.config)
        given.to(profile.layers[-1].device, profile.layers[-1].dtype)
    if not isinstance(given, Eagle3Head):
        raise TypeError(f"speculative model must be the folder of an EAGLE-3 checkpoint or a head, not {given!r}")
    return Head(given, shadow, profile, pack=config.pack_weights)


def _check_head(head: Eagle3Head, device: torch.device, dtype: torch.dtype) -> None:
    for name, weight in head.named_parameters():
        if (weight.device, weight.dtype) != (device, dtype):
            raise ValueError(
                f"the EAGLE-3 head's {name} is {weight.dtype} on {weight.device}, the model's last layer {dtype} on "
                f"{device}; call head.to({device}, {dtype}), or give its folder"
            )
