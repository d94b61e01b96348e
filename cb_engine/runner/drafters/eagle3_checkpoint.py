"""EAGLE-3 checkpoints: how heads are stored, in three public dialects.

Owns the formats, and the checks that a stored head fits a target. Does not know what a head computes.

    midlayer.*       flat config.json              the papers' own, and what `save_eagle3` writes
    layers.0.*       flat config.json              SpecForge, vLLM
    layers.0.*       transformer_layer_config      speculators
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from cb_engine.runner.drafters.eagle3_head import Eagle3Config, Eagle3Head, default_aux_layer_ids, weight_of

_WEIGHTS, _OLD_WEIGHTS, _CONFIG = "model.safetensors", "pytorch_model.bin", "config.json"
_MARKS = {"transformer_layer_config", "eagle_config", "eagle_aux_hidden_state_layer_ids", "draft_vocab_size"}
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "use_aux_hidden_state")


def load_eagle3(
    path: str | Path, *, target_embeddings: nn.Module, target_config: Any, target_lm_head: nn.Module | None = None
) -> Eagle3Head:
    """Loads a head in any of the public layouts, in the type and on the device of the target's embeddings.

    Args:
        path: a folder with config.json and model.safetensors (or pytorch_model.bin).
        target_embeddings: used by a head that has none.
        target_config: of the target.
        target_lm_head: used by a head that has none; not needed if the target's embeddings are tied to it.

    Raises:
        ValueError: it is no such folder, or does not fit the target.
    """
    folder = Path(path).expanduser()
    tensors = _read_tensors(folder)
    try:
        settings = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: {_CONFIG} cannot be read: {error}") from error
    d2t = tensors.pop("d2t", None)
    try:
        config = _parse_config(settings, target_config.get_text_config(), tensors, d2t)
        head = Eagle3Head(
            config,
            target_ids=None if d2t is None else torch.arange(d2t.numel()) + d2t.to("cpu", torch.int64).flatten(),
            target_embeddings=None if "embed_tokens.weight" in tensors else target_embeddings,
            target_lm_head=_shared_lm_head(tensors, target_embeddings, target_config, target_lm_head),
        )
        _check_tensors(head, tensors)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    like = weight_of(target_embeddings)
    head = head.to(device=like.device, dtype=like.dtype)
    head.load_state_dict(tensors)
    return head.eval().requires_grad_(False)


def kind_of(path: str | Path) -> str | None:
    """What a folder says that it holds: "eagle3", in any of the layouts, "causal_lm", or None for anything else."""
    try:
        settings = json.loads((Path(path).expanduser() / _CONFIG).read_text(encoding="utf-8"))
        names = " ".join(settings.get("architectures") or ())
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    if not _MARKS.isdisjoint(settings) or "eagle3" in names.lower():
        return "eagle3"
    return "causal_lm" if "ForCausalLM" in names else None


def save_eagle3(head: Eagle3Head, path: str | Path) -> None:
    """Writes a folder that `load_eagle3` reads, and other engines as `LlamaForCausalLMEagle3`."""
    folder = Path(path).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    config, target_ids = head.config, head.target_ids.cpu()
    known = torch.zeros(config.vocab_size, dtype=torch.bool)
    known[target_ids] = True
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    tensors |= {"d2t": target_ids - torch.arange(len(target_ids)), "t2d": known}
    safetensors.torch.save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    text = json.dumps(_config_json(config, head.norm.weight.dtype), indent=2) + "\n"
    (folder / _CONFIG).write_text(text, encoding="utf-8")
    (folder / _WEIGHTS).chmod((folder / _CONFIG).stat().st_mode)  # safetensors makes files that others cannot read


def _config_json(config: Eagle3Config, dtype: torch.dtype) -> dict[str, Any]:
    names = (
        *("hidden_size", "target_hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("intermediate_size", "draft_vocab_size", "vocab_size", "rms_norm_eps", "hidden_act", "attention_bias"),
        *("max_position_embeddings", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
    )
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "dtype": str(dtype).removeprefix("torch."),
        "tie_word_embeddings": False,
        **{name: getattr(config, name) for name in names},
        "rope_parameters": dict(config.rope_parameters),
        "rope_theta": config.rope_parameters["rope_theta"],
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(config.aux_layer_ids),
            "use_aux_hidden_state": config.use_aux_hidden_state,
        },
    }


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint in the `midlayer.*` naming, without what only training needs."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give one that holds an EAGLE-3 checkpoint")
    tensors: dict[str, torch.Tensor] = {}
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        tensors |= safetensors.torch.load_file(file)
    if not files:
        old = folder / _OLD_WEIGHTS
        if not old.is_file():
            raise ValueError(f"{folder} holds neither {_WEIGHTS} nor {_OLD_WEIGHTS}; give the folder of a checkpoint")
        tensors = torch.load(old, map_location="cpu", weights_only=True)
    named = {name.removeprefix("model.").replace("layers.0.", "midlayer."): t for name, t in tensors.items()}
    return {name: t for name, t in named.items() if name != "t2d" and not name.endswith("rotary_emb.inv_freq")}


def _parse_config(
    settings: dict[str, Any], target: Any, tensors: Mapping[str, torch.Tensor], d2t: torch.Tensor | None
) -> Eagle3Config:
    """config.json, flat or in the layout of `speculators`; what it omits is read off the tensors and the target."""
    is_speculators = "transformer_layer_config" in settings
    layer = settings.get("transformer_layer_config") or settings
    own = {**settings, **(settings.get("eagle_config") or {})}
    _check_layer(layer)
    hidden_size, heads = layer["hidden_size"], layer["num_attention_heads"]
    width = own.get("target_hidden_size") or (target.hidden_size if is_speculators else hidden_size)
    _check_target("hidden size", width, target.hidden_size)
    vocab_size = layer.get("vocab_size") or target.vocab_size
    _check_target("vocabulary", vocab_size, target.vocab_size)
    lm_head = tensors.get("lm_head.weight")
    rows = len(lm_head) if lm_head is not None else vocab_size if d2t is None else d2t.numel()
    flags = {"norm_before_residual": is_speculators} | {name: own[name] for name in _FLAGS if own.get(name) is not None}
    ids: Sequence[int] | None = own.get("eagle_aux_hidden_state_layer_ids")
    has_fc = flags.get("use_aux_hidden_state", True)
    fallback = default_aux_layer_ids(target.num_hidden_layers) if has_fc else (target.num_hidden_layers,)
    return Eagle3Config(
        hidden_size=hidden_size,
        target_hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=layer.get("num_key_value_heads") or heads,
        head_dim=layer.get("head_dim") or hidden_size // heads,
        intermediate_size=layer["intermediate_size"],
        draft_vocab_size=own.get("draft_vocab_size") or rows,
        vocab_size=vocab_size,
        aux_layer_ids=_check_ids(tuple(ids or fallback), target.num_hidden_layers),
        rms_norm_eps=layer.get("rms_norm_eps", 1e-6),
        hidden_act=layer.get("hidden_act", "silu"),
        attention_bias=bool(layer.get("attention_bias", False)),
        max_position_embeddings=layer.get("max_position_embeddings", 2048),
        rope_parameters=_rope_parameters(layer),
        **flags,
    )


def _check_layer(layer: Mapping[str, Any]) -> None:
    missing = [n for n in ("hidden_size", "num_attention_heads", "intermediate_size") if n not in layer]
    if missing:
        raise ValueError(f"{_CONFIG} does not give {', '.join(missing)}")
    if layer.get("num_hidden_layers", 1) != 1:
        raise ValueError(f"the head has {layer['num_hidden_layers']} layers; only heads of one layer are supported")
    if "sliding_attention" in (layer.get("layer_types") or ()):
        raise ValueError("the head has sliding-window attention, which is not supported")


def _check_target(what: str, own: int, targets: int) -> None:
    if own != targets:
        raise ValueError(f"the head was made for a target of {what} {own}, this one has {targets}; take another head")


def _check_ids(ids: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    if any(not 0 <= i <= num_layers for i in ids):
        raise ValueError(
            f"the head takes the inputs of layers {list(ids)} (eagle_aux_hidden_state_layer_ids), the target has "
            f"{num_layers} layers: the head was made for another model"
        )
    return ids


def _rope_parameters(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Both spellings: `rope_parameters`, and `rope_theta` with `rope_scaling`."""
    given = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
    rope_type = given.pop("type", None) or "default"
    theta = layer.get("rope_theta") or 10000.0
    return {"rope_theta": theta, "rope_type": rope_type} | given


def _shared_lm_head(
    tensors: Mapping[str, torch.Tensor], embeddings: nn.Module, target_config: Any, target_lm_head: nn.Module | None
) -> nn.Module | None:
    """The target's output matrix, for a head without one."""
    if "lm_head.weight" in tensors:
        return None
    if target_lm_head is not None:
        return target_lm_head
    if not target_config.get_text_config().tie_word_embeddings:
        raise ValueError("the checkpoint has no lm_head.weight; give target_lm_head, the target's own")
    weight = weight_of(embeddings)
    tied = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    tied.weight = nn.Parameter(weight, requires_grad=False) if not isinstance(weight, nn.Parameter) else weight
    return tied


def _check_tensors(head: Eagle3Head, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises for a tensor that is missing, unknown or of another shape than the config says."""
    expected = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    missing = sorted(expected.keys() - tensors.keys())
    if missing:
        raise ValueError(f"tensors are missing: {', '.join(missing)}; the checkpoint is no EAGLE-3 head, or incomplete")
    unknown = sorted(tensors.keys() - expected.keys())
    if unknown:
        raise ValueError(f"unknown tensors: {', '.join(unknown)}; this kind of head is not supported")
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise ValueError(
                f"{name} is {list(tensors[name].shape)}, {_CONFIG} and the target ask for {list(shape)}; the head was "
                "made for another model"
            )
