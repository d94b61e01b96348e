"""Fused shadows: what is replaced in which family, the same results, the user's modules untouched."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

from cb_engine import Engine, SamplingParams
from cb_engine.native import build
from cb_engine.runner.fusion import Fusion, fuse, fused_shadow, known, linear
from cb_engine.runner.fusion.linear import NativeLinear, OneDnnLinear
from cb_engine.runner.fusion.modules import FusedNorm
from cb_engine.runner.probe import profile_model, run_probe
from cb_engine.runner.shadow import make_shadow

needs_kernels = pytest.mark.skipif(not build.load(), reason="the native kernels cannot be built here")

LAYERS = 2
WHOLE = {"FusedDecoderLayer": LAYERS, "FusedAttention": LAYERS, "FusedMLP": LAYERS, "FusedNorm": 2 * LAYERS + 1}
PARTS: dict[str, dict[str, int]] = {
    "llama": WHOLE,
    "mistral": WHOLE,
    "qwen2": WHOLE,
    "qwen3": {**WHOLE, "FusedNorm": 4 * LAYERS + 1},
    "gemma2": {"FusedAttention": LAYERS, "FusedMLP": LAYERS, "FusedNorm": 4 * LAYERS + 1},
    "gemma3": {"FusedAttention": LAYERS, "FusedMLP": LAYERS, "FusedNorm": 6 * LAYERS + 1},
    "phi3": {"FusedAttention": LAYERS, "FusedMLP": LAYERS, "FusedNorm": 2 * LAYERS + 1},
    "olmo2": {"FusedMLP": LAYERS, "FusedNorm": 4 * LAYERS + 1},
    "granite": {"FusedAttention": LAYERS, "FusedMLP": LAYERS, "FusedNorm": 2 * LAYERS + 1},
    "cohere2": {"FusedMLP": LAYERS},
    "starcoder2": {"FusedDecoderLayer": LAYERS, "FusedAttention": LAYERS},
    "gpt2": {},
    "gpt_neox": {},
    "opt": {},
    "mixtral": {"FusedAttention": LAYERS, "FusedNorm": 2 * LAYERS + 1},
    "qwen3_moe": {"FusedDecoderLayer": LAYERS, "FusedAttention": LAYERS, "FusedNorm": 4 * LAYERS + 1},
    "gpt_oss": {"FusedNorm": 2 * LAYERS + 1},
    "smollm3": WHOLE,
}


def fused(model: Any, **options: Any) -> tuple[nn.Module, Fusion]:
    """A fused shadow of a model."""
    profile = profile_model(model, make_shadow(model))
    settings = {"fuse": True, "pack": True, **options}
    return fused_shadow(lambda: make_shadow(model), lambda tree: run_probe(tree, profile), **settings)


@pytest.fixture(autouse=True)
def _without_matrix_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs that have them use other kernels; these tests are about this project's own."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)


@pytest.fixture
def model() -> Any:
    return copy.deepcopy(tiny.family("llama")[0])


# ---- what is replaced --------------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_known_modules_of_every_family_are_fused(family: str, dtype: torch.dtype) -> None:
    before = copy.deepcopy(tiny.family(family)[0]).to(dtype)
    kinds = [type(module) for module in before.modules()]
    _, fusion = fused(before)
    assert fusion.fused == PARTS[family]
    assert [type(module) for module in before.modules()] == kinds, "the user's model stays as it is"


@needs_kernels
def test_without_packed_weights_only_norms_are_fused(model: Any) -> None:
    _, fusion = fused(model, pack=False)
    assert fusion == Fusion(packed_bytes=0, fused=fusion.fused)
    assert fusion.fused == {"FusedNorm": 2 * LAYERS + 1}


@needs_kernels
def test_without_fusion_linear_layers_are_packed_one_by_one(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight
    shadow, fusion = fused(model, fuse=False)
    layers = [m for m in model.modules() if type(m) is nn.Linear]
    assert fusion == Fusion(packed_bytes=sum(x.weight.nbytes for x in layers))
    assert sum(isinstance(m, NativeLinear) for m in shadow.modules()) == len(layers)
    assert shadow.lm_head.weight is model.lm_head.weight


@needs_kernels
def test_memory_decides_where_nobody_does(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    size = fused(model)[1].packed_bytes
    for room, packed in ((3 * size, size), (3 * size - 1, 0)):
        monkeypatch.setattr(fuse, "free_memory", lambda device, room=room: room)
        assert fused(model, pack=None)[1].packed_bytes == packed


@needs_kernels
def test_what_a_hook_looks_into_stays_whole(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *a: None)
    model.model.layers[1].self_attn.register_forward_hook(lambda *a: None)
    shadow, fusion = fused(model)
    assert fusion.fused == {"FusedDecoderLayer": 1, "FusedAttention": 1, "FusedMLP": 1, "FusedNorm": 2 * LAYERS + 1}
    assert type(shadow.get_submodule("model.layers.0.mlp.up_proj")) is nn.Linear
    assert type(shadow.get_submodule("model.layers.0.mlp.gate_proj")) is NativeLinear


@needs_kernels
def test_a_stand_in_that_gives_something_else_is_not_taken(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(module: Any) -> FusedNorm | None:
        found = known.fused_norm(module)
        return found and FusedNorm(found.weight, 1e-5, offset=0.5, round_first=True)

    def broken(module: Any) -> Any:
        return None if known.fused_mlp(module) is None else nn.Bilinear(1, 1, 1)

    monkeypatch.setattr(fuse, "fused_norm", wrong)
    monkeypatch.setattr(fuse, "fused_mlp", broken)
    with caplog.at_level(logging.WARNING):
        _, fusion = fused(model)
    assert fusion.fused == {"FusedAttention": LAYERS, "FusedDecoderLayer": LAYERS}
    assert "LlamaRMSNorm is not replaced by its fused form: its output differs by" in caplog.text
    assert "LlamaMLP is not replaced by its fused form: TypeError" in caplog.text


class Rowwise(nn.Module):
    """Feeds a linear layer with rows that do not lie one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.linear.scale = 0.5  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, dim = x.shape
        layer: object = self.linear
        if not isinstance(layer, nn.Linear):
            return x
        out = layer(x.view(batch, tokens, 4, 8).transpose(1, 2)) * self.linear.scale
        return out.transpose(1, 2).reshape(batch, tokens, dim)


class Scaled(torch.Tensor):
    """A weight that is multiplied by three wherever it is used: quantised weights are made this way."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return 3 * out if func is torch.nn.functional.linear else out


class Halved(modeling_llama.LlamaMLP):
    def __call__(self, x: torch.Tensor) -> Any:
        return 0.5 * super().__call__(x)


class Peeking(LlamaForCausalLM):
    """A model that looks into its layers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * (1 + self.model.layers[0].mlp.gate_proj.weight.std())
        return output


def unusual_rows(model: Any) -> None:
    torch.manual_seed(0)
    model.model.layers[0].mlp = Rowwise()


def subclassed_weight(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().as_subclass(Scaled), requires_grad=False)


def subclassed_call(model: Any) -> None:
    model.model.layers[0].mlp.__class__ = Halved


def peeking_model(model: Any) -> None:
    model.__class__ = Peeking


def function_for_an_activation(model: Any) -> None:
    for layer in model.model.layers:
        del layer.mlp.act_fn
        layer.mlp.act_fn = torch.nn.functional.silu


@pytest.mark.parametrize(
    "change", [unusual_rows, subclassed_weight, subclassed_call, peeking_model, function_for_an_activation]
)
def test_unusual_models_are_computed_as_they_are(model: Any, change: Callable[[Any], None]) -> None:
    change(model)
    prompt = tiny.make_prompts((30,))[0]
    found, plain = (
        logits_of(Engine(model, config={"pack_weights": on, "fuse_modules": on}), prompt) for on in (True, False)
    )
    assert found == pytest.approx(plain, abs=1e-4)


@pytest.mark.parametrize("kind", ["hook", "linear", "known class"])
def test_what_is_patched_for_all_modules_is_left_alone(model: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = None
    if kind == "hook":
        handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    elif kind == "linear":
        before = nn.Linear.forward
        monkeypatch.setattr(nn.Linear, "forward", lambda self, x: before(self, x))
    else:
        known_forward = modeling_llama.LlamaMLP.forward
        monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: known_forward(self, x))
    try:
        _, fusion = fused(model)
    finally:
        if handle is not None:
            handle.remove()
    if kind == "known class":
        assert "FusedMLP" not in fusion.fused
    else:
        assert fusion == Fusion()


def test_a_model_that_refuses_the_probe_is_served_unfused(model: Any) -> None:
    def check(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if (args[0] == 2).any():
            raise RuntimeError("no twos")

    model.model.embed_tokens.register_forward_pre_hook(check)
    _, fusion = fused(model)
    assert fusion == Fusion()


@needs_kernels
def test_having_asked_for_hidden_states_once_does_not_cost_fusion(model: Any) -> None:
    before = fused(model)[1]
    model(torch.tensor([[1, 2]]), output_hidden_states=True, output_attentions=True)
    assert model.model.layers[0]._forward_hooks, "transformers leaves its hooks there"
    assert fused(model)[1] == before


# ---- oneDNN, where the native kernels are not wanted ---------------------------------------------------------------


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU multiplies no bf16 through oneDNN")
    monkeypatch.setattr(fuse, "has_native_kernels", lambda: False)


@pytest.mark.parametrize("rows", [0, 1, 3, 64, 200])
@pytest.mark.parametrize("bias", [True, False])
def test_the_product_is_that_of_a_linear_layer(onednn: None, rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(48, 80, bias=bias).to(torch.bfloat16)
    inputs = torch.randn(2, rows, 48, dtype=torch.bfloat16)
    with torch.no_grad():
        torch.testing.assert_close(OneDnnLinear(layer)(inputs), layer(inputs), atol=2e-2, rtol=2e-2)


def test_onednn_packs_bfloat16_alone(onednn: None, model: Any) -> None:
    shadow, fusion = fused(model)
    assert fusion == Fusion()
    shadow, fusion = fused(model.to(torch.bfloat16))
    layers = [m for m in model.modules() if type(m) is nn.Linear]
    assert fusion == Fusion(packed_bytes=sum(x.weight.nbytes for x in layers))
    assert sum(isinstance(m, OneDnnLinear) for m in shadow.modules()) == len(layers)


@needs_kernels
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "gemma2", "gpt2"])
def test_many_rows_go_to_onednn_where_there_are_matrix_tiles(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of few rows and of many give the same, within what a rounding more or less does."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU multiplies no bf16 through oneDNN")
    model = copy.deepcopy(tiny.family(family)[0]).to(torch.bfloat16)
    prompt = tiny.make_prompts((200,))[0]
    without = Engine(model, config={"block_size": 16})
    plain = logits_of(without, prompt)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    calls: list[int] = []
    product = linear._TiledWeight.__call__

    def counted(self: Any, inputs: torch.Tensor, *rest: Any) -> torch.Tensor:
        calls.append(inputs.numel() // inputs.shape[-1])
        return product(self, inputs, *rest)

    monkeypatch.setattr(linear._TiledWeight, "__call__", counted)
    engine = Engine(model, config={"block_size": 16})
    assert engine.fusion.fused == without.fusion.fused
    assert engine.fusion.packed_bytes == 2 * without.fusion.packed_bytes
    assert logits_of(engine, prompt) == pytest.approx(plain, abs=0.15)
    assert min(calls) >= linear._TILE_ROWS
    calls.clear()
    assert logits_of(engine, prompt[:20]) == logits_of(without, prompt[:20])
    assert not calls, "few rows stay with the kernel"


# ---- results -----------------------------------------------------------------------------------------------------


def logits_of(engine: Engine, prompt: list[int]) -> list[float]:
    """Log-probabilities of a prompt's own tokens."""
    request_id = engine.add_request(prompt, SamplingParams(max_tokens=0, prompt_logprobs=0))[0]
    while engine.has_work:
        for output in engine.step():
            assert output.request_id == request_id
            entries = output.prompt_logprobs or []
    return [entry[0].logprob for entry in entries if entry is not None]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.15)], ids=str)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_fused_and_plain_engines_agree(family: str, dtype: torch.dtype, tolerance: float) -> None:
    model = copy.deepcopy(tiny.family(family)[0]).to(dtype)
    prompt = tiny.make_prompts((30,))[0]
    engines = [Engine(model, config={"pack_weights": on, "fuse_modules": on}) for on in (True, False)]
    assert engines[1].fusion == Fusion()
    assert logits_of(engines[0], prompt) == pytest.approx(logits_of(engines[1], prompt), abs=tolerance)


def change_in_place(model: Any) -> Callable[[Engine], object]:
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(-1.0)
    return Engine.sync_weights


def change_unseen(model: Any) -> Callable[[Engine], object]:
    model.model.layers[1].mlp.down_proj.weight.data.mul_(-1.0)
    return Engine.weights_changed


@pytest.mark.parametrize("change", [change_in_place, change_unseen])
def test_changed_weights_are_packed_anew(model: Any, change: Callable[[Any], Callable[[Engine], object]]) -> None:
    prompt = tiny.make_prompts((30,))[0]
    engine, plain = (Engine(model, config={"pack_weights": on, "fuse_modules": on}) for on in (True, False))
    before = logits_of(engine, prompt)
    sync = change(model)
    for each in (engine, plain):
        sync(each)
    after = logits_of(engine, prompt)
    assert after == pytest.approx(logits_of(plain, prompt), abs=1e-4)
    assert after != pytest.approx(before, abs=0.1)


def test_adapters_are_followed() -> None:
    """What an adapter wraps is no plain layer: the adapter's product must not be lost."""
    peft = pytest.importorskip("peft")
    model = copy.deepcopy(tiny.family("llama")[0])
    prompt = tiny.make_prompts((30,))[0]
    plain = logits_of(Engine(model), prompt)
    settings = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, settings)
    engine = Engine(adapted)
    assert "FusedAttention" not in engine.fusion.fused
    assert "FusedMLP" not in engine.fusion.fused
    assert logits_of(engine, prompt) != pytest.approx(plain, abs=1e-3)
    assert logits_of(engine, prompt) == pytest.approx(
        logits_of(Engine(adapted, config={"pack_weights": False, "fuse_modules": False}), prompt), abs=1e-4
    )
