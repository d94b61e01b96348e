"""The shadow tree: the engine's modules, the user's weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny
import torch
from accelerate import cpu_offload, dispatch_model
from transformers import GenerationConfig

import cb_engine
from cb_engine import Engine, SamplingParams
from cb_engine.attention.interface import ATTENTION_NAME
from cb_engine.errors import ModelChangedError
from cb_engine.runner.shadow import fingerprint, make_shadow

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
PROMPT = tiny.make_prompts((9,))[0]


def answer(engine: Engine, prompt: list[int] = PROMPT) -> list[int]:
    request_id = engine.add_request(prompt, GREEDY)[0]
    tokens: list[int] = []
    while engine.has_work:
        for output in engine.step():
            assert output.request_id == request_id
            tokens = output.generated_tokens
    return tokens


@pytest.fixture
def model() -> Any:
    return copy.deepcopy(tiny.family("llama")[0])


def test_every_tensor_is_shared_and_no_module_is(model: Any) -> None:
    shadow = make_shadow(model.train())
    pairs = list(zip(model.named_parameters(), shadow.named_parameters(), strict=True))
    assert all(theirs is ours for (_, theirs), (_, ours) in pairs)
    assert all(a is b for a, b in zip(model.buffers(), shadow.buffers(), strict=True))
    assert not {id(m) for m in model.modules()} & {id(m) for m in shadow.modules()}
    assert model.training
    assert not shadow.training
    assert (model.config._attn_implementation, shadow.config._attn_implementation) == ("eager", ATTENTION_NAME)


def test_tied_weights_stay_tied(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight
    shadow = make_shadow(model)
    assert shadow.lm_head.weight is shadow.model.embed_tokens.weight is model.lm_head.weight
    assert answer(Engine(model, eos_token_id=-1)) == tiny.generate(model, PROMPT, 6)


def test_accelerate_dispatch_and_offload_hooks_go_along(model: Any) -> None:
    reference = tiny.generate(model, PROMPT, 6)
    dispatched = dispatch_model(copy.deepcopy(model), {"": "cpu"}, force_hooks=True)
    assert answer(Engine(dispatched, eos_token_id=-1)) == reference
    offloaded = cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
    assert next(offloaded.parameters()).device.type == "meta"
    assert answer(Engine(offloaded, eos_token_id=-1)) == reference
    assert next(offloaded.parameters()).device.type == "meta", "the user's model is as it was"


def test_a_forward_hook_of_the_user_counts_and_a_backward_hook_does_not(model: Any) -> None:
    seen: list[str] = []
    model.lm_head.register_forward_hook(lambda module, args, out: -out)
    model.lm_head.register_full_backward_hook(lambda *a: seen.append("backward"))
    assert answer(Engine(model, eos_token_id=-1)) == tiny.generate(model, PROMPT, 6)
    assert not seen


def test_a_copy_of_an_attached_model_is_its_own(model: Any) -> None:
    cb_engine.attach(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.mul_(-1)
    config = GenerationConfig(eos_token_id=-1, max_new_tokens=6, pad_token_id=0)
    for each in (model, twin):
        output = next(iter(each.generate_batch([PROMPT], config).values()))
        assert output.generated_tokens == tiny.generate(each, PROMPT, 6)


def test_peft_adapters_are_followed(model: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config)
    wrapped.add_adapter("other", config)
    cb_engine.attach(wrapped)
    generation = GenerationConfig(eos_token_id=-1, max_new_tokens=6, pad_token_id=0)
    answers = []
    for adapter in ("default", "other", "default"):
        wrapped.set_adapter(adapter)
        settings = {"block_size": 4}
        output = next(iter(wrapped.generate_batch([PROMPT], generation, settings, persistent_manager=True).values()))
        assert output.num_cached_tokens == 0, "no block of another adapter is hit"
        with torch.no_grad():
            assert output.generated_tokens == tiny.generate(wrapped, PROMPT, 6)
        answers.append(output.generated_tokens)
    assert answers[0] == answers[2] != answers[1]
    cb_engine.detach(wrapped)


def test_replaced_parameters_are_taken_over(model: Any) -> None:
    engine = Engine(model, eos_token_id=-1)
    answer(engine)
    assert not engine.sync_weights()
    model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight.detach())
    assert engine.sync_weights()
    assert answer(engine) == tiny.generate(model, PROMPT, 6)
    state = {k: v * 1.1 for k, v in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert engine.sync_weights()
    assert answer(engine) == tiny.generate(model, PROMPT, 6)
    assert engine.weight_version == 2


def test_another_architecture_under_a_living_engine_is_refused(model: Any) -> None:
    engine = Engine(model, eos_token_id=-1)
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    with pytest.raises(ModelChangedError, match="make a new engine"):
        engine.sync_weights()


def test_a_fingerprint_sees_values_identity_and_settings(model: Any) -> None:
    before = fingerprint(model)
    assert fingerprint(model) == before
    assert fingerprint(model.train()) == before, "the train flag changes nothing here"
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    assert fingerprint(model).tensors != before.tensors
    model.lm_head.scale = 2.0
    assert fingerprint(model).structure != before.structure


def test_a_persistent_manager_is_replaced_when_the_model_becomes_another(model: Any) -> None:
    cb_engine.attach(model)
    config = GenerationConfig(eos_token_id=-1, max_new_tokens=4, pad_token_id=0)

    def check() -> None:
        output = next(iter(model.generate_batch([PROMPT], config, persistent_manager=True).values()))
        assert output.generated_tokens == tiny.generate(model, PROMPT, 4)

    check()
    first = model._cb_engine.persistent
    model.double()
    check()
    assert model._cb_engine.persistent is not first
    model.float()
    model.resize_token_embeddings(140)
    check()
    tokens = next(iter(model.generate_batch([[139]], config).values())).generated_tokens
    assert tokens == tiny.generate(model, [139], 4)
    cb_engine.detach(model)


def test_a_forward_compiled_in_place_is_left_to_the_user(model: Any) -> None:
    reference = tiny.generate(model, PROMPT, 6)
    model.forward = torch.compile(model.forward, backend="eager")
    assert answer(Engine(model, eos_token_id=-1)) == reference
