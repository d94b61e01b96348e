"""A layer in one operator gives the bits of its parts called one after the other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny
import torch

from cb_engine import Engine, SamplingParams
from cb_engine.attention.interface import native_inputs
from cb_engine.native import build
from cb_engine.runner.fusion import modules
from cb_engine.runner.fusion.linear import has_native_kernels

pytestmark = pytest.mark.skipif(
    not (build.load() and has_native_kernels()), reason="the native kernels cannot be built here, or are not chosen"
)

NATIVE_INPUTS = "cb_engine.runner.fusion.modules.native_inputs"
LAYERS = 2
PROMPTS = tiny.make_prompts((1, 7, 30, 12))


def results(model: Any) -> list[tuple[list[int], list[float], Any]]:
    """Tokens with their log-probabilities and those of the prompts."""
    engine = Engine(model, config={"block_size": 16, "max_prefill_chunk": 9}, eos_token_id=-1)
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=0, prompt_logprobs=0)
    ids = [engine.add_request(prompt, params)[0] for prompt in PROMPTS]
    outputs: dict[str, Any] = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
    return [(outputs[i].generated_tokens, outputs[i].logprobs, outputs[i].prompt_logprobs) for i in ids]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "smollm3"])
def test_one_operator_a_layer(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows, biases, norms over heads, layers without positions."""
    model = copy.deepcopy(tiny.family(family)[0]).to(dtype)
    layers: list[int] = []

    def counted(layer_idx: int) -> Any:
        inputs = native_inputs(layer_idx)
        if inputs is not None:
            layers.append(layer_idx)
        return inputs

    monkeypatch.setattr(NATIVE_INPUTS, counted)
    whole = results(model)
    assert set(layers) == set(range(LAYERS)), "no layer was whole"
    monkeypatch.setattr(NATIVE_INPUTS, lambda layer_idx: None)
    assert results(model) == whole


def test_layers_with_parts_of_their_own_are_computed_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts instead of an MLP: the layer is fused, but not into one operator."""
    model = tiny.family("qwen3_moe")[0]
    monkeypatch.setattr(NATIVE_INPUTS, lambda layer_idx: pytest.fail("not a whole layer"))
    assert Engine(model, eos_token_id=-1).fusion.fused["FusedDecoderLayer"] == LAYERS
    assert all(tokens for tokens, _, _ in results(model))


def test_a_layer_is_proved_with_the_operator_that_steps_use(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator that is called wrongly is found out, and the model's own layers run."""
    monkeypatch.setattr(modules.FusedDecoderLayer, "_whole", lambda self, hidden_states, *rest: hidden_states)
    model = tiny.family("llama")[0]
    assert "FusedDecoderLayer" not in Engine(model, eos_token_id=-1).fusion.fused
    assert "LlamaDecoderLayer is not replaced" in caplog.text


OPERATOR = torch.ops.cb_engine.decoder_layer.default
X = torch.zeros(1, 3, 4)
NAMES = [argument.name for argument in OPERATOR._schema.arguments]
DEFAULTS = {"int": 1, "float": 1.0, "bool": False, "Tensor": X, "Optional[Tensor]": None}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hidden": torch.zeros(2, 3, 4)}, r"hidden must be \[1, T, dim\]"),
        ({"cos": X}, "cos and sin come together"),
        ({"k_norm": X}, "q_norm and k_norm come together"),
    ],
)
def test_arguments_that_make_no_layer_are_refused(given: dict[str, torch.Tensor], message: str) -> None:
    settings = {argument.name: DEFAULTS[str(argument.type)] for argument in OPERATOR._schema.arguments}
    with pytest.raises(ValueError, match=message):
        OPERATOR(*(settings | given).values())


def test_settings_are_put_in_the_order_of_the_schema() -> None:
    names = NAMES[-3:]
    assert modules.in_order(OPERATOR, dict.fromkeys(reversed(names), 0) | {names[0]: 1}) == (1, 0, 0)
    assert modules.in_order(OPERATOR, {}) == ()
    with pytest.raises(KeyError):
        modules.in_order(OPERATOR, {"no such": 1})
