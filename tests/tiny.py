"""Tiny random models of many families, and plain `generate` to compare with.

Weights are drawn so that along the reference output the best token leads by a wide gap: two correct computations in
fp32 then agree token for token, and a wrong one hardly ever does.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

VOCAB = 128
MIN_GAP = 1e-3
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
_NO_IDS = {"bos_token_id": None, "eos_token_id": None}
_WINDOW = {"sliding_window": 7}
_HYBRID = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _SIZES),
    "mistral": ("MistralConfig", {**_SIZES, **_WINDOW}),
    "qwen2": ("Qwen2Config", _SIZES),
    "qwen3": ("Qwen3Config", {**_SIZES, "head_dim": 8}),
    "gemma2": ("Gemma2Config", {**_SIZES, **_HYBRID, "head_dim": 8, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3TextConfig", {**_SIZES, **_HYBRID, "head_dim": 8}),
    "phi3": ("Phi3Config", _SIZES),
    "olmo2": ("Olmo2Config", _SIZES),
    "granite": ("GraniteConfig", {**_SIZES, "attention_multiplier": 0.5, "logits_scaling": 0.5}),
    "cohere2": ("Cohere2Config", {**_SIZES, **_HYBRID}),
    "starcoder2": ("Starcoder2Config", {**_SIZES, **_WINDOW}),
    "gpt2": ("GPT2Config", {**_GPT2, **_NO_IDS}),
    "gpt_neox": ("GPTNeoXConfig", {k: v for k, v in _SIZES.items() if k != "num_key_value_heads"}),
    "opt": (
        "OPTConfig",
        {
            **{k: v for k, v in _SIZES.items() if k not in ("num_key_value_heads", "intermediate_size")},
            "ffn_dim": 64,
            "word_embed_proj_dim": 32,
        },
    ),
    "mixtral": ("MixtralConfig", {**_SIZES, "num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_SIZES, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2},
    ),
    "gpt_oss": ("GptOssConfig", {**_SIZES, **_HYBRID, "head_dim": 8, "num_local_experts": 4, "rope_parameters": None}),
    "smollm3": ("SmolLM3Config", _SIZES),
}
PROMPT_LENGTHS = (1, 4, 8, 13, 30)
NEW_TOKENS = 16


def make_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A random fp32 model; norms and biases are random too, so that no term of the computation is idle."""
    config_name, settings = FAMILIES[family]
    settings = {**settings, **changes}
    if settings.get("rope_parameters", 0) is None:
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    config = getattr(transformers, config_name)(**settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.2 if parameter.dim() > 1 or "sinks" in name else parameter + noise * 0.2)
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    return model


def make_prompts(lengths: Sequence[int] = PROMPT_LENGTHS, seed: int = 1) -> list[list[int]]:
    """Random prompts of the given lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def generate(model: Any, prompt: Sequence[int], new_tokens: int = NEW_TOKENS) -> list[int]:
    """Greedy tokens of plain `generate`, one request alone."""
    return generate_with_gap(model, prompt, new_tokens)[0]


def generate_with_gap(model: Any, prompt: Sequence[int], new_tokens: int = NEW_TOKENS) -> tuple[list[int], float]:
    """The same with the smallest lead of a chosen token over the next best."""
    out = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=new_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack([logits[0].float().topk(2).values for logits in out.logits])
    return out.sequences[0, len(prompt) :].tolist(), float((best[:, 0] - best[:, 1]).min())


@cache
def family(name: str) -> tuple[Any, list[list[int]], list[list[int]]]:
    """(model, prompts, greedy references) with wide gaps, made once per process."""
    prompts = make_prompts()
    for seed in range(20):
        model = make_model(name, seed)
        references, gaps = zip(*(generate_with_gap(model, p) for p in prompts), strict=True)
        if min(gaps) > MIN_GAP:
            return model, prompts, list(references)
    raise RuntimeError(f"no seed gives {name} wide gaps")


def greedy_config(model: Any, **changes: Any) -> GenerationConfig:
    """The model's generation config without EOS."""
    config = copy.deepcopy(model.generation_config)
    config.update(eos_token_id=-1, **changes)
    return config
