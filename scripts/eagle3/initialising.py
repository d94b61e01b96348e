"""A head to start from: as much of it as possible is the target's own.

Owns the head's sizes and first weights. A late layer of the target already turns such states into the next ones, and
the output matrix already knows the tokens; what has to be learned is to listen to the token in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from cb_engine.runner.drafters.draft_model import decoder_layers
from cb_engine.runner.drafters.eagle3_head import Eagle3Config, Eagle3Head, default_aux_layer_ids

_SPREAD = 0.02  # standard deviation of weights that the target has no example for


def make_head(model: Any, vocabulary: torch.Tensor, seed: int) -> Eagle3Head:
    """An fp32 head for a target, which shares its embeddings."""
    config = head_config(model.config.get_text_config(), len(vocabulary))
    torch.manual_seed(seed)
    head = Eagle3Head(config, target_ids=vocabulary, target_embeddings=model.get_input_embeddings())
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=_SPREAD)
        _take_states(head)
        _take_layer(head, model)
        _take_output(head, model, vocabulary)
    return head.to(model.get_input_embeddings().weight.device)


def head_config(target: Any, draft_vocab_size: int) -> Eagle3Config:
    """A head of the target's own sizes; `getattr`, because configs describe models in many dialects."""
    heads = target.num_attention_heads
    rope: Mapping[str, Any] = getattr(target, "rope_parameters", None) or {}
    return Eagle3Config(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(target, "num_key_value_heads", None) or heads,
        head_dim=getattr(target, "head_dim", None) or target.hidden_size // heads,
        intermediate_size=getattr(target, "intermediate_size", None) or 4 * target.hidden_size,
        draft_vocab_size=draft_vocab_size,
        vocab_size=target.vocab_size,
        aux_layer_ids=default_aux_layer_ids(target.num_hidden_layers),
        rms_norm_eps=getattr(target, "rms_norm_eps", 1e-6),
        max_position_embeddings=getattr(target, "max_position_embeddings", 2048),
        rope_parameters={"rope_type": "default", "rope_theta": float(rope.get("rope_theta", 10000.0))},
    )


def _take_states(head: Eagle3Head) -> None:
    """The head starts with the highest state alone."""
    head.fc.weight.mul_(0.1)
    head.fc.weight[:, -head.config.target_hidden_size :] += torch.eye(head.config.hidden_size)


def _take_layer(head: Eagle3Head, model: Any) -> None:
    """The weights of the target's last layer that fit. Its attention reads the hidden half of the head's input."""
    _, layers = decoder_layers(model)
    source = dict(layers[-1].named_parameters())
    size = head.config.hidden_size
    for name, parameter in head.midlayer.named_parameters():
        given = source.get(name.replace("hidden_norm", "input_layernorm"))
        if given is None or name == "input_layernorm.weight" or (parameter.dim() == 1 and not _is_plain(layers[-1])):
            continue
        part = parameter[:, size:] if parameter.dim() > 1 and parameter.shape[1] == 2 * size else parameter
        if part.shape == given.shape:
            part.copy_(given)


def _is_plain(layer: nn.Module) -> bool:
    """Whether the layer's norm multiplies by its weight, as the head's do; some add 1 to it."""
    norm = getattr(layer, "input_layernorm", None)
    if norm is None:
        return False
    weight = norm.weight
    x = torch.linspace(-1, 1, len(weight), device=weight.device, dtype=weight.dtype)
    return torch.allclose(norm(x).float(), nn.functional.rms_norm(x, x.shape, weight).float(), rtol=0.05, atol=0.05)


def _take_output(head: Eagle3Head, model: Any, vocabulary: torch.Tensor) -> None:
    lm_head = model.get_output_embeddings().weight
    if lm_head.shape[1] == head.lm_head.weight.shape[1]:
        head.lm_head.weight.copy_(lm_head[vocabulary.to(lm_head.device)])
    norm = getattr(model.base_model, "norm", None)
    _, layers = decoder_layers(model)
    if norm is not None and _is_plain(layers[-1]) and norm.weight.shape == head.norm.weight.shape:
        head.norm.weight.copy_(norm.weight)
