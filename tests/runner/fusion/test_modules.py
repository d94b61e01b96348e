"""A layer in one operator gives the bits of its parts called one after the other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny
import torch

from cb_engine import Engine, SamplingParams
from cb_engine.attention.interface import kernel_inputs
from cb_engine.native import build
from cb_engine.runner.fusion.linear import has_native_kernels

pytestmark = pytest.mark.skipif(
    not (build.load() and has_native_kernels()), reason="the native kernels cannot be built here, or are not chosen"
)

KERNEL_INPUTS = "cb_engine.runner.fusion.modules.kernel_inputs"
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
        layers.append(layer_idx)
        return kernel_inputs(layer_idx)

    monkeypatch.setattr(KERNEL_INPUTS, counted)
    whole = results(model)
    assert set(layers) == set(range(LAYERS)), "no layer was whole"
    monkeypatch.setattr(KERNEL_INPUTS, lambda layer_idx: None)
    assert results(model) == whole


def test_layers_with_parts_of_their_own_are_computed_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts instead of an MLP: the operator for the whole layer is not asked for."""
    model = tiny.family("qwen3_moe")[0]
    monkeypatch.setattr(KERNEL_INPUTS, lambda layer_idx: pytest.fail("not a whole layer"))
    assert all(tokens for tokens, _, _ in results(model))


def test_a_batch_of_rows_is_refused() -> None:
    layer = torch.ops.cb_engine.decoder_layer.default
    x = torch.zeros(2, 3, 4)
    nothing = (x, 0.0, 0.0, False)
    with pytest.raises(ValueError, match=r"hidden must be \[1, T, dim\]"):
        layer(
            *(x, None, None, x, x, x, x, x, x, *nothing, x, None, 1, 1, 4, *nothing, *nothing, 1.0, 0, 0.0, None),
            *(x, None, *nothing, x, 4, None, 2, x, None),
        )
