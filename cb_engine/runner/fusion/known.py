"""Which stand-in suits which module: the programs of transformers that the fused modules reproduce.

Every function here takes a module and returns its stand-in, or None if the module is something else or has parts that
are not plain (adapters, hooks, other devices). Where the children matter they are already replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import activations
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.phi3 import modeling_phi3
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.smollm3 import modeling_smollm3
from transformers.models.starcoder2 import modeling_starcoder2

from cb_engine.attention.backend import AttentionParams
from cb_engine.runner.fusion.linear import Epilogue, NativeWeight, is_native
from cb_engine.runner.fusion.modules import FusedAttention, FusedDecoderLayer, FusedMLP, FusedNorm
from cb_engine.runner.fusion.programs import calls_program_of, is_untouched, runs_program_of

_SEPARATE = (  # queries, keys and values from layers of their own
    modeling_llama.LlamaAttention,
    modeling_mistral.MistralAttention,
    modeling_qwen2.Qwen2Attention,
    modeling_starcoder2.Starcoder2Attention,
    modeling_gemma2.Gemma2Attention,
    modeling_smollm3.SmolLM3Attention,
)
_NORMED = (modeling_qwen3.Qwen3Attention, modeling_gemma3.Gemma3Attention)  # and norms over each head
_ROTATIONS = (modeling_llama.apply_rotary_pos_emb, modeling_phi3.apply_rotary_pos_emb)


def fused_norm(module: Any) -> FusedNorm | None:
    """For RMS norms."""
    if runs_program_of(module, (modeling_llama.LlamaRMSNorm,)):
        return FusedNorm(module.weight, module.variance_epsilon, offset=0.0, round_first=True)
    if runs_program_of(module, (modeling_olmo2.Olmo2RMSNorm,)):
        return FusedNorm(module.weight, module.variance_epsilon, offset=0.0, round_first=False)
    if runs_program_of(module, (modeling_gemma2.Gemma2RMSNorm, modeling_gemma3.Gemma3RMSNorm)):
        return FusedNorm(module.weight, module.eps, offset=1.0, round_first=False)
    return None


def fused_mlp(module: Any) -> FusedMLP | None:
    """For MLPs with a gate."""
    if runs_program_of(module, (modeling_llama.LlamaMLP,)):
        activation = _activation_of(module.act_fn)
        if activation is None or not _all_native(module.gate_proj, module.up_proj, module.down_proj):
            return None
        gate_up = NativeWeight(*_parameters(module.gate_proj, module.up_proj), gated=True)
    elif runs_program_of(module, (modeling_phi3.Phi3MLP,)):
        activation = _activation_of(module.activation_fn)
        if activation is None or not _all_native(module.gate_up_proj, module.down_proj):
            return None
        (weight,), (bias,) = _parameters(module.gate_up_proj)
        gate_up = NativeWeight(weight.chunk(2), (None, None) if bias is None else bias.chunk(2), gated=True)
    else:
        return None
    return FusedMLP(gate_up, activation, NativeWeight(*_parameters(module.down_proj)))


def fused_attention(module: Any, params: Mapping[int, AttentionParams]) -> FusedAttention | None:
    """For attention with rotated halves.

    Args:
        params: what each layer hands to the attention function, by its index.
    """
    if runs_program_of(module, (*_SEPARATE, *_NORMED)):
        projections = [module.q_proj, module.k_proj, module.v_proj]
    elif runs_program_of(module, (modeling_phi3.Phi3Attention,)):
        projections = [module.qkv_proj]
    else:
        return None
    known_rotation = any(calls_program_of(module, "apply_rotary_pos_emb", known) for known in _ROTATIONS)
    if not known_rotation or not _all_native(*projections, module.o_proj) or module.layer_idx not in params:
        return None
    queries = module.o_proj.in_features // module.head_dim
    rest = sum(projection.out_features for projection in projections) // module.head_dim - queries
    normed = runs_program_of(module, _NORMED)
    return FusedAttention(
        NativeWeight(*_parameters(*projections)),
        NativeWeight(*_parameters(module.o_proj)),
        params[module.layer_idx],
        layer_idx=module.layer_idx,
        head_dim=module.head_dim,
        num_heads=queries,
        num_kv_heads=rest // 2,
        q_norm=module.q_norm if normed else None,
        k_norm=module.k_norm if normed else None,
        rotates=getattr(module, "use_rope", True),
    )


def fused_layer(module: Any) -> FusedDecoderLayer | None:
    """For layers that add what attention and MLP make of the normed states to the states themselves."""
    if not runs_program_of(module, (modeling_llama.LlamaDecoderLayer,)):
        return None
    if not isinstance(module.self_attn, FusedAttention):
        return None
    return FusedDecoderLayer(module.input_layernorm, module.self_attn, module.post_attention_layernorm, module.mlp)


def _activation_of(module: nn.Module) -> Epilogue | None:
    if not is_untouched(module):
        return None
    if type(module) in (activations.SiLUActivation, nn.SiLU):
        return Epilogue.SILU_MUL
    if type(module) is activations.GELUTanh:
        return Epilogue.GELU_TANH_MUL
    return None


def _all_native(*modules: object) -> bool:
    return all(map(is_native, modules))


def _parameters(*linears: nn.Linear) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor | None]]:
    return [linear.weight for linear in linears], [linear.bias for linear in linears]
