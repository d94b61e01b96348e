"""What models are learned to be, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import transformers
from fake_model import FakeModel
from transformers import AutoModelForCausalLM

import cb_engine
from cb_engine import Engine, UnsupportedModelError
from cb_engine.runner.probe import profile_model
from cb_engine.runner.shadow import make_shadow

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
EXPERTS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def profile(model: Any) -> Any:
    return profile_model(model, make_shadow(model))


def test_layers_are_what_they_are() -> None:
    layers = profile(tiny.family("gemma2")[0]).layers
    assert [(x.layer_idx, x.num_heads, x.num_kv_heads, x.head_dim, x.window) for x in layers] == [
        (0, 4, 2, 8, 7),
        (1, 4, 2, 8, None),
    ]


@pytest.mark.parametrize(
    ("config_name", "settings", "reason"),
    [
        (
            "MambaConfig",
            {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
            "linear_attention",
        ),
        ("DeepseekV3Config", {**SIZES, "num_key_value_heads": 4, **LATENT, **EXPERTS}, "MLA"),
        ("BloomConfig", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "BloomAttention"),
        ("FalconConfig", {k: v for k, v in SIZES.items() if k != "intermediate_size"}, "Falcon"),
        ("MptConfig", {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4}, "Mpt"),
    ],
)
def test_what_would_be_wrong_is_refused_with_its_name(config_name: str, settings: dict[str, Any], reason: str) -> None:
    model = AutoModelForCausalLM.from_config(getattr(transformers, config_name)(**settings))
    with pytest.raises(UnsupportedModelError, match=reason):
        cb_engine.attach(model)
    assert not hasattr(model, "_cb_engine")


def test_encoder_decoders_are_refused() -> None:
    config = transformers.T5Config(vocab_size=64, d_model=32, num_layers=1, d_kv=8, d_ff=32, num_heads=4)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        cb_engine.attach(transformers.T5ForConditionalGeneration(config))


def test_what_is_no_language_model_is_refused() -> None:
    import torch

    with pytest.raises(UnsupportedModelError, match="no config"):
        cb_engine.attach(torch.nn.Linear(2, 2))


def test_bidirectional_models_and_models_without_a_head_are_refused() -> None:
    bert = transformers.BertConfig(**SIZES, is_decoder=False)
    with pytest.raises(UnsupportedModelError, match="is_causal"):
        cb_engine.attach(transformers.BertLMHeadModel(bert))
    llama = transformers.LlamaConfig(**SIZES)
    for kind in (transformers.LlamaModel, transformers.LlamaForSequenceClassification):
        with pytest.raises(UnsupportedModelError, match="AutoModelForCausalLM"):
            cb_engine.attach(kind(llama))
    with pytest.raises(TypeError, match="from_pretrained"):
        cb_engine.attach("some/model")  # type: ignore[arg-type]


def test_prompt_learning_is_refused_and_the_meta_device_too() -> None:
    import torch

    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(UnsupportedModelError, match="prompt learning"):
        cb_engine.attach(peft.get_peft_model(tiny.make_model("llama"), config))
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES))
    with pytest.raises(UnsupportedModelError, match="meta device"):
        cb_engine.attach(empty)


def test_rope_that_depends_on_the_longest_neighbour_limits_the_length() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    model = tiny.make_model("llama", rope_parameters=rope, max_position_embeddings=256)
    assert Engine(model).config.max_model_len == 64
    assert Engine(FakeModel()).config.max_model_len == 512
