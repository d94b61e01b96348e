"""Packed linear layers: the same product, the user's modules untouched, changed weights packed anew."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny
import torch
from torch import nn

from cb_engine import Engine, SamplingParams
from cb_engine.runner.packing import PackedLinear, pack_linears
from cb_engine.runner.shadow import make_shadow

pytestmark = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU multiplies no bf16 through oneDNN"
)


@pytest.fixture
def model() -> Any:
    return copy.deepcopy(tiny.family("llama")[0]).to(torch.bfloat16)


@pytest.mark.parametrize("rows", [0, 1, 3, 64, 200])
@pytest.mark.parametrize("bias", [True, False])
def test_the_product_is_that_of_a_linear_layer(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(48, 80, bias=bias).to(torch.bfloat16)
    inputs = torch.randn(2, rows, 48, dtype=torch.bfloat16)
    with torch.no_grad():
        torch.testing.assert_close(PackedLinear(linear)(inputs), linear(inputs), atol=2e-2, rtol=2e-2)


def test_every_plain_layer_is_packed_once_and_the_model_is_not(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight
    shadow = make_shadow(model)
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *a: None)
    hooked = make_shadow(model)
    size = pack_linears(shadow, True)
    linears = [m for m in model.modules() if type(m) is nn.Linear]
    assert size == sum(x.weight.numel() * 2 for x in linears)
    assert sum(isinstance(m, PackedLinear) for m in shadow.modules()) == len(linears)
    assert not any(isinstance(m, PackedLinear) for m in model.modules())
    pack_linears(hooked, True)
    assert type(hooked.get_submodule("model.layers.0.mlp.up_proj")) is nn.Linear, (
        "what a hook may look into stays as it is"
    )
    assert pack_linears(make_shadow(model), False) == 0


def logits_of(engine: Engine, prompt: list[int]) -> list[float]:
    """Log-probabilities of a prompt's own tokens."""
    request_id = engine.add_request(prompt, SamplingParams(max_tokens=0, prompt_logprobs=0))[0]
    while engine.has_work:
        for output in engine.step():
            assert output.request_id == request_id
            entries = output.prompt_logprobs or []
    return [entry[0].logprob for entry in entries if entry is not None]


def test_packed_and_plain_engines_agree_and_follow_the_weights(model: Any) -> None:
    prompt = tiny.make_prompts((30,))[0]
    packed = Engine(model, config={"pack_weights": True})
    plain = Engine(model, config={"pack_weights": False})
    assert packed.packed_bytes > 0 == plain.packed_bytes
    before = logits_of(packed, prompt)
    assert before == pytest.approx(logits_of(plain, prompt), abs=0.1)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(-1.0)
    for engine in (packed, plain):
        assert engine.sync_weights()
    after = logits_of(packed, prompt)
    assert after == pytest.approx(logits_of(plain, prompt), abs=0.1)
    assert after != pytest.approx(before, abs=0.1)
    model.model.layers[1].mlp.down_proj.weight.data.mul_(-1.0)  # unseen by torch's counters
    packed.weights_changed()
    assert logits_of(packed, prompt) == before
