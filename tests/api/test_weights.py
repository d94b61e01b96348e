"""Weights that change while a manager lives: every request is computed with the weights as they are when its turn
comes, however they were written."""

from __future__ import annotations

import copy
import ctypes
import gc
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import tiny
import torch

import cb_engine
from cb_engine.api.manager import ContinuousBatchingManager

PROMPT = tiny.make_prompts((21,))[0]


@pytest.fixture
def model() -> Any:
    return cb_engine.attach(copy.deepcopy(tiny.family("llama")[0]))


def config(model: Any) -> Any:
    return tiny.greedy_config(model, max_new_tokens=8)


def step_of(optimizer: type[torch.optim.Optimizer], **options: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        ids = torch.tensor([PROMPT])
        chosen = optimizer(model.parameters(), lr=0.1, **options)  # type: ignore[call-arg]
        model.requires_grad_(True)
        model(ids, labels=ids).loss.backward()
        chosen.step()
        model.zero_grad()
        model.requires_grad_(False)

    return change


def write_data(model: Any) -> None:
    model.model.layers[0].mlp.down_proj.weight.data.mul_(-1.5)


def write_in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.mul_(-1.5)
        model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight.roll(7, 0))


def change_a_setting(model: Any) -> None:
    model.model.layers[0].input_layernorm.variance_epsilon = 10.0


def hook(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: -output)


def swap_hooks(model: Any) -> None:
    model.model.layers[0].mlp._forward_hooks.clear()
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: 2 * output)


CHANGES = {
    "AdamW": step_of(torch.optim.AdamW),
    "fused AdamW": step_of(torch.optim.AdamW, fused=True),
    "fused SGD": step_of(torch.optim.SGD, fused=True),
    ".data": write_data,
    "in place": write_in_place,
    "setting": change_a_setting,
    "hook": hook,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_kept_manager_follows(model: Any, change: Callable[[Any], None]) -> None:
    def generated() -> list[int]:
        outputs = model.generate_batch([PROMPT], generation_config=config(model), persistent_manager=True)
        return next(iter(outputs.values())).generated_tokens

    before = generated()
    assert before == tiny.generate(model, PROMPT, 8)
    change(model)
    after = tiny.generate(model, PROMPT, 8)
    assert generated() == after
    assert after != before, "a change that changes nothing tests nothing"


def test_one_hook_in_the_place_of_another(model: Any) -> None:
    for change in (hook, swap_hooks):
        change(model)
        outputs = model.generate_batch([PROMPT], generation_config=config(model), persistent_manager=True)
        assert next(iter(outputs.values())).generated_tokens == tiny.generate(model, PROMPT, 8)


def in_a_pause(manager: ContinuousBatchingManager, change: Callable[[], None]) -> None:
    with manager.pause():
        change()


def while_idle(manager: ContinuousBatchingManager, change: Callable[[], None]) -> None:
    change()


def while_stopped(manager: ContinuousBatchingManager, change: Callable[[], None]) -> None:
    manager.stop(keep_for_next_session=True)
    change()
    manager.start()


@pytest.mark.parametrize("when", [in_a_pause, while_idle, while_stopped])
@pytest.mark.parametrize("change", [write_in_place, CHANGES["fused AdamW"]])
def test_a_session_follows(
    model: Any,
    when: Callable[[ContinuousBatchingManager, Callable[[], None]], None],
    change: Callable[[Any], None],
) -> None:
    with model.continuous_batching_context_manager(generation_config=config(model)) as manager:
        for version in range(3):
            output = manager.get_result(manager.add_request(PROMPT))
            assert output.generated_tokens == tiny.generate(model, PROMPT, 8)
            assert set(output.weight_version) == {version}
            assert output.num_cached_tokens == 0
            when(manager, lambda: change(model))


def test_weights_changed_reaches_a_manager_that_is_not_kept(model: Any) -> None:
    """One value among many, written where no counter sees it."""
    with model.continuous_batching_context_manager(generation_config=config(model)) as manager:
        manager.get_result(manager.add_request(PROMPT))
        weight = model.model.layers[0].mlp.up_proj.weight
        weight.data[3, 1] += 1e-3
        cb_engine.weights_changed(model)
        assert set(manager.get_result(manager.add_request(PROMPT)).weight_version) == {1}
    cb_engine.weights_changed(model)  # nobody is left to tell


def test_new_weights_of_a_draft_model_are_seen_between_two_calls(model: Any) -> None:
    """The same tokens as before, and now the drafts are right."""
    draft = copy.deepcopy(tiny.make_model("llama", seed=77))
    speculative = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3, "adaptive": False}

    def output() -> cb_engine.GenerationOutput:
        outputs = model.generate_batch(
            [PROMPT],
            generation_config=config(model),
            continuous_batching_config={"block_size": 4, "speculative": speculative},
            persistent_manager=True,
        )
        return next(iter(outputs.values()))  # type: ignore[no-any-return]

    first = output()
    assert first.num_draft_tokens > first.num_accepted_tokens
    draft.load_state_dict(model.state_dict())
    second = output()
    assert second.num_draft_tokens == second.num_accepted_tokens > 0
    assert second.generated_tokens == first.generated_tokens
    assert set(second.weight_version) == {0}
    assert second.num_cached_tokens > 0, "what the target has computed is as good as before"


def test_a_draft_model_is_not_the_one_to_tell() -> None:
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is not attached; if it drafts .* weights_changed on"):
        cb_engine.weights_changed(tiny.make_model("llama"))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc's allocator")
def test_memory_stays_where_it_is_over_many_changes() -> None:
    model = tiny.make_model("llama", hidden_size=512, intermediate_size=2048)
    cb_engine.attach(model)
    resident = psutil.Process().memory_info
    seen = []
    for _ in range(12):
        with torch.no_grad():
            model.lm_head.weight.mul_(1.0)
        model.generate_batch(
            [PROMPT],
            generation_config=config(model),
            persistent_manager=True,
            continuous_batching_config={"num_blocks": 9},
        )
        gc.collect()
        seen.append(resident().rss)
    packed = sum(p.nbytes for p in model.parameters())
    assert max(seen[4:]) - seen[3] < packed
