"""Heads are read from every public layout, and refused by name where they do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import drafting
import pytest
import safetensors.torch
import tiny
import torch

from cb_engine.runner.drafters.eagle3_checkpoint import load_eagle3, save_eagle3
from cb_engine.runner.drafters.eagle3_head import Eagle3Head

HEADS, DIM, WIDTH = 4, 8, 32  # as `drafting.head_config` has them


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.make_model("llama")


def make_head(target: Any, **changes: Any) -> Eagle3Head:
    return drafting.make_head(target, draft_vocab_size=20, **changes)


def load(path: Path, target: Any, **more: Any) -> Eagle3Head:
    return load_eagle3(path, target_embeddings=target.get_input_embeddings(), target_config=target.config, **more)


def assert_same(loaded: Eagle3Head, head: Eagle3Head) -> None:
    assert loaded.config == head.config
    assert torch.equal(loaded.target_ids, head.target_ids)
    expected = head.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())


Tensors = dict[str, torch.Tensor]


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    file = folder / "model.safetensors"
    safetensors.torch.save_file(change(safetensors.torch.load_file(file)), file)


def reconfigure(folder: Path, **changes: Any) -> None:
    """Sets keys of config.json; `...` takes one away."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


@pytest.mark.parametrize("variant", drafting.HEAD_VARIANTS)
def test_what_is_saved_is_loaded(target: Any, tmp_path: Path, variant: str) -> None:
    head = make_head(target, **drafting.HEAD_VARIANTS[variant])
    save_eagle3(head, tmp_path)
    assert_same(load(tmp_path, target), head)


def test_the_file_is_as_other_engines_expect_it(target: Any, tmp_path: Path) -> None:
    head = make_head(target)
    save_eagle3(head, tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert torch.equal(torch.arange(20) + tensors["d2t"], head.target_ids)
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["t2d"].nonzero().flatten().tolist() == head.target_ids.tolist()
    assert tensors["fc.weight"].shape == (WIDTH, 3 * WIDTH)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (HEADS * DIM, 2 * WIDTH)
    assert tensors["lm_head.weight"].shape == (20, WIDTH)
    assert "embed_tokens.weight" not in tensors
    assert len({(tmp_path / name).stat().st_mode for name in ("model.safetensors", "config.json")}) == 1
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["draft_vocab_size"], config["vocab_size"], config["num_hidden_layers"]) == (20, tiny.VOCAB, 1)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 1]


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_namings_and_files(target: Any, tmp_path: Path, prefix: str, layer: str, kind: str) -> None:
    head = make_head(target)
    save_eagle3(head, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {prefix + n.replace("midlayer.", layer): t for n, t in safetensors.torch.load_file(file).items()}
    tensors |= {"d2t": tensors.pop(prefix + "d2t"), "midlayer.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    if kind == "bin":
        file.unlink()
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    else:
        safetensors.torch.save_file(tensors, file)
    assert_same(load(tmp_path, target), head)


def test_the_layout_of_speculators(target: Any, tmp_path: Path) -> None:
    """Sizes are in `transformer_layer_config`, and the residual is normalised unless it says otherwise."""
    head = make_head(target, norm_before_residual=True)
    save_eagle3(head, tmp_path)
    file = tmp_path / "config.json"
    flat = json.loads(file.read_text())
    moved = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    layer = {name: flat[name] for name in (*moved, "vocab_size", "rms_norm_eps")}
    own = {"draft_vocab_size": 20, "eagle_aux_hidden_state_layer_ids": [0, 1, 1], "speculators_config": {}}
    file.write_text(json.dumps({"transformer_layer_config": {**layer, "max_position_embeddings": 2048}, **own}))
    assert_same(load(tmp_path, target), head)


def test_what_an_old_config_leaves_out(target: Any, tmp_path: Path) -> None:
    head = make_head(target)
    save_eagle3(head, tmp_path)
    reconfigure(
        tmp_path, head_dim=..., draft_vocab_size=..., target_hidden_size=..., rope_parameters=..., eagle_config=...
    )
    loaded = load(tmp_path, target)
    assert loaded.config == replace(head.config, aux_layer_ids=(1, 1, 0)), "2, n // 2 and n - 3 of two layers"


def test_own_embeddings_and_the_targets_output_matrix(target: Any, tmp_path: Path) -> None:
    """A head without lm_head drafts all of the target's tokens; one with embeddings uses those."""
    config = drafting.head_config()
    torch.manual_seed(0)
    lm_head = target.get_output_embeddings()
    save_eagle3(Eagle3Head(config, target_lm_head=lm_head), tmp_path)
    rewrite(tmp_path, lambda tensors: {n: t for n, t in tensors.items() if n not in ("d2t", "t2d")})
    with pytest.raises(ValueError, match="give target_lm_head"):
        load(tmp_path, target)
    head = load(tmp_path, target, target_lm_head=lm_head)
    assert head.target_ids.tolist() == list(range(tiny.VOCAB))
    hidden = torch.randn(3, WIDTH)
    assert torch.equal(head.logits(hidden), lm_head(head.norm(hidden)))
    assert torch.equal(head.embed(torch.tensor([3])), head.embed_tokens.weight[3:4])
    tied = tiny.make_model("llama", tie_word_embeddings=True)
    head = load(tmp_path, tied)
    assert torch.equal(head.logits(hidden), head.norm(hidden) @ tied.get_input_embeddings().weight.T)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 64}, r"target of vocabulary 64, this one has 128; take another head"),
        ({"target_hidden_size": 48}, r"target of hidden size 48, this one has 32; take another head"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}}, r"inputs of layers \[0, 1, 9\]"),
        ({"num_hidden_layers": 2}, r"2 layers; only heads of one layer"),
        ({"intermediate_size": ...}, r"config.json does not give intermediate_size"),
        ({"intermediate_size": 64}, r"mlp.gate_proj.weight is \[48, 32\], .* ask for \[64, 32\]"),
        ({"draft_vocab_size": 21}, r"d2t\) has shape \(20,\), draft_vocab_size=21"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, r"rope_type 'dynamic' is not supported; known"),
        ({"layer_types": ["sliding_attention"]}, r"sliding-window attention"),
        ({"num_key_value_heads": 3}, r"num_attention_heads=4 is no multiple of num_key_value_heads=3"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_a_config_that_does_not_fit(target: Any, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_eagle3(make_head(target), tmp_path)
    reconfigure(tmp_path, **changes)
    with pytest.raises(ValueError, match=message) as error:
        load(tmp_path, target)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {n: x for n, x in t.items() if n != "fc.weight"}, r"tensors are missing: fc.weight"),
        (lambda t: {**t, "extra.weight": torch.zeros(1)}, r"unknown tensors: extra.weight"),
        (lambda t: {**t, "fc.weight": torch.zeros(32, 64)}, r"fc.weight is \[32, 64\], .* ask for \[32, 96\]"),
        (lambda t: {**t, "d2t": t["d2t"] + 100}, r"maps to tokens \d+ to \d+, the target has 128"),
    ],
    ids=["missing", "unknown", "shape", "d2t"],
)
def test_tensors_that_do_not_fit(
    target: Any, tmp_path: Path, change: Callable[[Tensors], Tensors], message: str
) -> None:
    save_eagle3(make_head(target), tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        load(tmp_path, target)


def test_folders_that_hold_no_head(target: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no folder; give one that holds an EAGLE-3 checkpoint"):
        load(tmp_path / "none", target)
    with pytest.raises(ValueError, match=r"holds neither model.safetensors nor pytorch_model.bin"):
        load(tmp_path, target)
    save_eagle3(make_head(target), tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json cannot be read"):
        load(tmp_path, target)
