"""What drafts is taken as it is given, or refused with the fix."""

from __future__ import annotations

import copy

import drafting
import pytest
import tiny
import torch

from cb_engine import Engine, SamplingParams
from cb_engine.runner.drafters.eagle3_head import Eagle3Head


def run(model: torch.nn.Module, head: Eagle3Head) -> Engine:
    speculative = {"method": "eagle3", "model": head, "adaptive": False}
    engine = Engine(model, config={"block_size": 4, "max_model_len": 32, "speculative": speculative}, eos_token_id=-1)
    engine.add_request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=12))
    while engine.has_work:
        engine.step()
    return engine


def test_a_head_that_is_given_stays_as_it_is() -> None:
    """It may be in training: the engine has a copy of its modules, which share its weights, and attends by itself."""
    model = tiny.make_model("llama")
    head = drafting.make_head(model)

    def never(*args: object) -> torch.Tensor:
        raise AssertionError("this is for training")

    head.attend_with(never)
    head.train()
    before, modules = copy.deepcopy(head.state_dict()), list(head.modules())
    assert run(model, head).stats().num_drafts > 0
    assert head.training
    assert list(head.modules()) == modules
    assert head.midlayer.self_attn.attend is never
    assert all(torch.equal(before[name], tensor) for name, tensor in head.state_dict().items())


def test_a_head_of_another_type_is_refused_and_not_cast() -> None:
    model = tiny.make_model("llama")
    head = drafting.make_head(model).to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"head's .* is torch.bfloat16 on cpu, .* call head.to\(cpu, torch.float32\)"):
        run(model, head)
    assert next(head.parameters()).dtype is torch.bfloat16


def test_a_head_for_layers_that_are_not_there_is_refused() -> None:
    model = tiny.make_model("llama")
    head = drafting.make_head(model)
    object.__setattr__(head.config, "aux_layer_ids", (0, 1, 9))
    with pytest.raises(ValueError, match="takes the input of layer 9, the model has layers 0 to 1"):
        run(model, head)


@pytest.mark.parametrize(("value", "name"), [(3, "3"), (torch.nn.Linear(2, 2), "Linear")])
def test_a_model_that_is_none_is_refused(value: object, name: str) -> None:
    model = tiny.make_model("llama")
    for method in ("eagle3", "draft_model"):
        with pytest.raises((TypeError, ValueError), match=name):
            Engine(model, config={"speculative": {"method": method, "model": value}})
