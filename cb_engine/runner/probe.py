"""What a model's layers really are, learned by running them once.

Owns the checks that decide whether a model is served or refused. Configs describe models in many dialects; a short
forward through the shadow tree shows what every attention layer hands over: heads, sizes, scale, window, soft-cap,
sinks. Whatever does not fit paged attention is refused here, with the layer named, and never run wrongly.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from cb_engine.attention.backend import AttentionParams, NativeInputs
from cb_engine.attention.interface import bind
from cb_engine.errors import UnsupportedModelError

_PROBE_TOKENS = 4
_FAR_POSITION = 4096  # for models that name no last one


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer, as its forward showed it. `window` says which of its keys may be forgotten; what is masked
    is up to the params of each forward."""

    layer_idx: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    dtype: torch.dtype
    device: torch.device
    is_drafters: bool = False  # a drafter's, which has indices of its own


@dataclass(frozen=True)
class ModelProfile:
    """What the engine needs to know of a model."""

    layers: tuple[AttentionLayer, ...]
    vocab_size: int
    max_model_len: int | None  # None: the model names no limit
    takes_logits_to_keep: bool
    input_device: torch.device
    output_device: torch.device


class PlainAttention:
    """Causal attention over the tokens of one forward, for probes: their tokens are fewer than any window. Notes what
    each layer asks for."""

    def __init__(self) -> None:
        self.params: dict[int, AttentionParams] = {}  # by layer_idx
        self.keys: dict[int, torch.Tensor] = {}

    def attend(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """See `StepContext.attend`; soft-caps and sinks are left out."""
        self.params[layer_idx], self.keys[layer_idx] = params, key
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=params.scale, enable_gqa=True)
        return out[0].transpose(0, 1).contiguous()

    def native_inputs(self, layer_idx: int) -> NativeInputs | None:
        """See `StepContext.native_inputs`; there is no cache."""
        return None


class _ProbeContext(PlainAttention):
    """Refuses what paged attention cannot do, and notes the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: dict[int, AttentionLayer] = {}

    def attend(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        if key.shape != value.shape or key.shape[-1] != query.shape[-1]:
            raise UnsupportedModelError(
                f"layer {layer_idx} has keys of {tuple(key.shape[1:])} and values of {tuple(value.shape[1:])}: "
                "multi-head latent attention (MLA) is not supported"
            )
        if layer_idx in self.layers:
            raise UnsupportedModelError(f"attention layer {layer_idx} ran twice in one forward: shared layers")
        self.layers[layer_idx] = AttentionLayer(
            layer_idx, query.shape[1], key.shape[1], key.shape[2], params.window, key.dtype, key.device
        )
        return super().attend(layer_idx, query, key, value, params)


def profile_model(model: nn.Module, shadow: nn.Module) -> ModelProfile:
    """Runs the shadow once and returns what it is.

    Raises:
        UnsupportedModelError: naming the layer type or the setting that is not supported, and why.
    """
    config = getattr(model, "config", None)
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UnsupportedModelError("PEFT prompt learning (prompt, prefix or p-tuning) is not supported; LoRA is")
    if config is None or not callable(getattr(model, "forward", None)):
        raise UnsupportedModelError(
            f"{type(model).__name__} is no transformers causal language model: it has no config"
        )
    _refuse_by_config(config)
    if getattr(model, "_tp_size", None) not in (None, 1):
        raise UnsupportedModelError(
            f"{type(model).__name__} is split by a tp_plan: tensor parallelism is not supported"
        )
    device = _input_device(shadow)
    if device.type == "meta":
        raise UnsupportedModelError(
            f"{type(model).__name__} has no weights (it is on the meta device); load them first"
        )
    context = _ProbeContext()
    tokens = torch.ones(1, _PROBE_TOKENS, dtype=torch.int64, device=device)
    positions = torch.arange(_PROBE_TOKENS, device=device).unsqueeze(0)
    try:
        with torch.no_grad(), bind(context):
            output = shadow(input_ids=tokens, position_ids=positions, use_cache=False)
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not run with paged attention ({type(error).__name__}: {error})"
        ) from error
    _refuse_headless(shadow, getattr(output, "logits", None))
    _refuse_foreign_layers(shadow, config, context)
    layers = tuple(context.layers[i] for i in sorted(context.layers))
    # Over several devices accelerate moves the wanted rows' indices to one and the hidden states to another.
    one_device = len({layer.device for layer in layers} | {device}) == 1
    return ModelProfile(
        layers=layers,
        vocab_size=int(output.logits.shape[-1]),
        max_model_len=_max_model_len(config),
        takes_logits_to_keep=one_device and _takes_logits_to_keep(shadow),
        input_device=device,
        output_device=output.logits.device,
    )


def run_probe(shadow: nn.Module, profile: ModelProfile) -> torch.Tensor:
    """The logits of a shadow for other tokens, at positions from the first to the last that are defined."""
    last = (profile.max_model_len or _FAR_POSITION) - 1
    device = profile.input_device
    tokens = torch.arange(_PROBE_TOKENS, device=device).unsqueeze(0) % profile.vocab_size
    positions = torch.tensor([[0, min(1, last), last // 2, last]], device=device)
    with torch.no_grad():
        logits: torch.Tensor = shadow(input_ids=tokens, position_ids=positions, use_cache=False).logits
    return logits


def _refuse_by_config(config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{config.model_type}: encoder-decoder models are not supported")
    for name in ("vision_config", "audio_config"):
        if getattr(config, name, None) is not None:
            raise UnsupportedModelError(
                f"{config.model_type}: multimodal models ({name}) are not supported; attach its language model"
            )
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(f"{config.model_type}: layers of type {kind!r} are not supported")


def _refuse_headless(shadow: nn.Module, logits: torch.Tensor | None) -> None:
    """A language model gives logits over the vocabulary for every token; classifiers and base models do not."""
    head = getattr(_innermost(shadow), "get_output_embeddings", None)
    if logits is None or logits.dim() != 3 or logits.shape[1] != _PROBE_TOKENS or (head is not None and head() is None):
        raise UnsupportedModelError(
            f"{type(_innermost(shadow)).__name__} gives no logits over a vocabulary; load it as AutoModelForCausalLM"
        )


def _refuse_foreign_layers(shadow: nn.Module, config: Any, context: _ProbeContext) -> None:
    """Every decoder layer has to have come through paged attention; recurrent ones, for example, do not."""
    expected = getattr(config, "num_hidden_layers", None)
    seen = len(context.layers)
    if seen and (expected is None or seen == expected):
        return
    attending = set(context.layers)
    names = {
        type(child).__name__
        for module in shadow.modules()
        if isinstance(module, nn.ModuleList) and len(module) == expected
        for i, layer in enumerate(module)
        if i not in attending
        for child in layer.children()
    }
    raise UnsupportedModelError(
        f"{type(shadow).__name__}: {seen} of {expected} layers attend through the engine; the others are made of "
        f"{', '.join(sorted(names)) or 'unknown modules'}, which keep state that the engine does not page"
    )


def _takes_logits_to_keep(shadow: nn.Module) -> bool:
    return "logits_to_keep" in inspect.signature(_innermost(shadow).forward).parameters


def _max_model_len(config: Any) -> int | None:
    """The longest sequence that positions are defined for, and that a batch cannot bend.

    Dynamic and long RoPE choose their frequencies by the longest sequence of the batch: one request's length would
    change its neighbours' output, so such models are served up to the length where nothing changes.
    """
    limit = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    settings = [rope] if "rope_type" in rope else [v for v in rope.values() if isinstance(v, dict)]
    for setting in settings:
        if setting.get("rope_type") in ("dynamic", "longrope"):
            original = setting.get("original_max_position_embeddings") or limit
            limit = min(limit, original) if limit and original else limit
    return int(limit) if limit else None


def _innermost(model: nn.Module) -> nn.Module:
    """The causal LM inside a PEFT wrapper."""
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) else model


def _input_device(model: nn.Module) -> torch.device:
    """Where token ids go: where accelerate's hooks run the embedding, else where its weights are."""
    embeddings = getattr(_innermost(model), "get_input_embeddings", lambda: None)()
    for module in (model, embeddings):
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    tensor = next(iter((embeddings or model).parameters()), None)
    return torch.device("cpu") if tensor is None else tensor.device
