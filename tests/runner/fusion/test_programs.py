"""Modules are known by what their forward is compiled from, not by their names."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralMLP
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from cb_engine.runner.fusion.programs import calls_program_of, runs_program_of, same_program

_CONFIG = LlamaConfig(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1)


class Same(nn.Module):
    """LlamaRMSNorm's text in another place, with another docstring."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.variance_epsilon = 1e-6

    def forward(self, hidden_states):  # type: ignore[no-untyped-def]
        """Other words."""
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class Other(Same):
    """One number differs."""

    def forward(self, hidden_states):  # type: ignore[no-untyped-def]
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(3).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


def test_a_helper_that_a_function_calls_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = modeling_llama.LlamaAttention(_CONFIG, 0)
    rotation = modeling_llama.apply_rotary_pos_emb
    assert calls_program_of(llama, "apply_rotary_pos_emb", rotation)
    monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: x)
    assert not calls_program_of(llama, "apply_rotary_pos_emb", rotation)


def test_a_known_class_that_was_patched_is_not_known() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaMLP, "forward", lambda self, x: x)
        assert not runs_program_of(LlamaMLP(_CONFIG), [LlamaMLP])


def test_names_and_places_do_not_matter_and_text_does() -> None:
    assert runs_program_of(Same(), [LlamaRMSNorm])
    assert not runs_program_of(Other(), [LlamaRMSNorm])
    assert not runs_program_of(Gemma2RMSNorm(4), [LlamaRMSNorm])
    assert not runs_program_of(Olmo2RMSNorm(4), [LlamaRMSNorm])
    assert same_program(MistralMLP.forward, LlamaMLP.forward)


def test_a_helper_method_counts() -> None:
    class Twice(Gemma2RMSNorm):
        def _norm(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super()._norm(x)

    assert runs_program_of(Gemma2RMSNorm(4), [Gemma2RMSNorm])
    assert not runs_program_of(Twice(4), [Gemma2RMSNorm])


def test_a_wrapper_counts() -> None:
    class Wrapped(LlamaRMSNorm):
        @functools.wraps(LlamaRMSNorm.forward)
        def forward(self, *args: Any) -> Any:
            return 2 * LlamaRMSNorm.forward(self, *args)

    assert not runs_program_of(Wrapped(4), [LlamaRMSNorm])


def test_hooks_and_replaced_forwards_count() -> None:
    hooked, replaced = Same(), Same()
    hooked.register_forward_hook(lambda *args: None)
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    assert not runs_program_of(hooked, [LlamaRMSNorm])
    assert not runs_program_of(replaced, [LlamaRMSNorm])


def test_what_a_forward_calls_is_known_by_its_text_too() -> None:
    from transformers import CohereConfig
    from transformers.models.cohere.modeling_cohere import CohereAttention

    llama = modeling_llama.LlamaAttention(_CONFIG, 0)
    cohere = CohereAttention(CohereConfig(hidden_size=8, num_attention_heads=2, num_key_value_heads=1), 0)
    rotation = modeling_llama.apply_rotary_pos_emb
    assert calls_program_of(llama, "apply_rotary_pos_emb", rotation)
    assert not calls_program_of(cohere, "apply_rotary_pos_emb", rotation), "it rotates neighbours, not halves"
    assert not calls_program_of(llama, "no_such_name", rotation)
