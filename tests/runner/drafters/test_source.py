"""What drafts is taken as it is given, or refused with the fix; its tree is made when it has to be, and let go of."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import drafting
import pytest
import tiny
import torch

from cb_engine import Engine, SamplingParams
from cb_engine.errors import ModelChangedError
from cb_engine.runner.drafters import source
from cb_engine.runner.drafters.eagle3_checkpoint import save_eagle3
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


LM, HEAD = "a loaded causal LM or where", "the folder of an EAGLE-3 checkpoint or a loaded Eagle3Head"


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("draft_model", 3, f"speculative model must be {LM} .* not of type int"),
        ("eagle3", 3, f"speculative model must be {HEAD}, not of type int"),
        ("draft_model", torch.nn.Linear(2, 2), "speculative model: Linear is no transformers causal language model"),
        ("eagle3", torch.nn.Linear(2, 2), f"speculative model must be {HEAD}, not of type Linear; .*'draft_model'"),
    ],
    ids=["draft_model-3", "eagle3-3", "draft_model-Linear", "eagle3-Linear"],
)
def test_a_model_that_is_none_is_refused(method: str, value: object, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^{message}") as error:
        Engine(tiny.make_model("llama"), config={"speculative": {"method": method, "model": value}})
    assert len(str(error.value)) < 250, "no text of a module"


def test_what_is_for_the_other_method_is_refused_with_its_name(tmp_path: Path) -> None:
    model = tiny.make_model("llama")
    head = drafting.make_head(model)
    save_eagle3(head, tmp_path / "head")
    model.save_pretrained(tmp_path / "lm")
    for method, value, other in (
        ("draft_model", head, "eagle3"),
        ("draft_model", str(tmp_path / "head"), "eagle3"),
        ("eagle3", model, "draft_model"),
        ("eagle3", str(tmp_path / "lm"), "draft_model"),
    ):
        with pytest.raises((TypeError, ValueError), match=rf"^speculative model.*method='{other}'") as error:
            make_engine(method, model, value)
        assert len(str(error.value)) < 400, "no text of a module"


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_a_folder_of_something_else_is_refused(method: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^speculative model='{tmp_path}': .*; give the folder"):
        make_engine(method, tiny.make_model("llama"), str(tmp_path))


# ---- trees ---------------------------------------------------------------------------------------------------------


def make_engine(method: str, model: Any, drafts: Any, **config: Any) -> Engine:
    speculative = {"method": method, "model": drafts, "num_speculative_tokens": 3, "adaptive": False}
    whole = {"block_size": 4, "max_model_len": 64, **config, "speculative": speculative}
    return Engine(model, config=whole, eos_token_id=-1)


def drafts_for(method: str, model: Any, seed: int = 77) -> Any:
    return tiny.make_model("llama", seed=seed) if method == "draft_model" else drafting.make_head(model, seed=seed)


def all_drafts(engine: Engine) -> list[tuple[int, ...]]:
    engine.add_request(tiny.make_prompts((9,))[0], SamplingParams(temperature=0.0, max_tokens=16))
    found = []
    while engine.has_work:
        engine.step()
        found += [request.draft_token_ids for request in engine._scheduler.unfinished()]
    return [drafts for drafts in found if drafts]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes what is done, in order."""
    done: list[str] = []

    def note(owner: Any, name: str, attribute: str) -> None:
        original = getattr(owner, attribute)

        def noting(*args: Any, **kwargs: Any) -> Any:
            done.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, attribute, noting)

    note(source, "draft_model", "fused_shadow")
    note(source, "eagle3", "packed_shadow")
    note(source, "states", "AuxStates")
    note(__import__("cb_engine.engine", fromlist=["engine"]), "size", "size_groups")
    return done


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_what_takes_memory_is_there_before_the_cache_is_sized(made: list[str], method: str) -> None:
    model = tiny.make_model("llama")
    make_engine(method, model, drafts_for(method, model))
    assert made == [*(["states"] if method == "eagle3" else []), method, "size"]


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_a_tree_is_made_anew_when_its_own_weights_have_changed_and_only_then(
    made: list[str], method: str, pack: bool
) -> None:
    model = tiny.make_model("llama")
    drafts = drafts_for(method, model)
    config = {"pack_weights": pack, "enable_prefix_caching": False}  # a head has a hole where a prefix is hit
    engine = make_engine(method, model, drafts, **config)
    assert made.count(method) == 1
    before = all_drafts(engine)
    assert not engine.sync_weights()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1.0)
    assert engine.sync_weights()
    assert all_drafts(engine) == before
    assert (made.count(method), engine.weight_version) == (1, 1)
    other = drafts_for(method, model, seed=5)
    drafts.load_state_dict(other.state_dict())
    assert engine.sync_weights()
    assert (made.count(method), engine.weight_version) == (2, 1)
    assert all_drafts(engine) == all_drafts(make_engine(method, model, other, **config)) != before
    assert not engine.sync_weights()


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_a_tree_is_made_anew_when_weights_are_said_to_have_changed(method: str) -> None:
    """One value in the middle of many, written where no counter sees it."""
    model = tiny.make_model("llama")
    drafts = drafts_for(method, model)
    engine = make_engine(method, model, drafts)
    before = all_drafts(engine)
    layer = drafts.model.layers[0] if method == "draft_model" else drafts.midlayer
    layer.mlp.down_proj.weight.data[3, 1] += 30.0
    assert not engine.sync_weights()
    engine.weights_changed()
    assert all_drafts(engine) == all_drafts(make_engine(method, model, drafts)) != before


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_requests_that_run_go_on_with_the_new_drafter_and_nothing_of_the_old_one(method: str) -> None:
    model = tiny.make_model("llama")
    drafts, other = drafts_for(method, model), drafts_for(method, model, seed=5)
    prompt = tiny.make_prompts((9,))[0]
    engine = make_engine(method, model, drafts)
    (request_id,) = engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=16))
    for _ in range(4):
        engine.step()
    (request,) = engine._scheduler.unfinished()
    drafts.load_state_dict(other.state_dict())
    assert engine.sync_weights()
    engine.step()
    if method == "draft_model":
        assert list(request.draft_token_ids) == tiny.generate(other, request.token_ids, 3)
    else:
        drafter: Any = engine._runner.drafter
        (followed,) = drafter._followed.values()
        assert followed.visible == request.num_computed_tokens - request.num_step_tokens, "keys of its own alone"
    outputs = [output for _ in range(20) for output in engine.step()]
    assert [output.generated_tokens for output in outputs] == [tiny.generate(model, prompt)]
    assert outputs[0].request_id == request_id


@pytest.mark.parametrize("whose", ["target", "drafter"])
def test_a_strict_engine_that_was_warm_is_warm_again_at_once(whose: str) -> None:
    """The code that was compiled for the old modules is gone, and no step may compile."""
    model = tiny.make_model("llama")
    drafts = drafts_for("draft_model", model)
    options = {"compile": True, "compile_options": {"backend": "eager"}, "strict_shapes": True, "max_num_seqs": 1}
    engine = make_engine("draft_model", model, drafts, **options, max_model_len=32)
    engine.warmup()
    before = all_drafts(engine)
    if whose == "drafter":
        drafts.load_state_dict(drafts_for("draft_model", model, seed=5).state_dict())
    else:
        model.load_state_dict(tiny.make_model("llama", seed=3).state_dict())
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    assert engine.sync_weights()
    assert engine.is_warm
    assert all_drafts(engine) != before
    assert not engine.coverage.missed


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_what_has_become_another_model_is_refused(method: str) -> None:
    model = tiny.make_model("llama")
    drafts = drafts_for(method, model)
    engine = make_engine(method, model, drafts)
    drafts.to(torch.bfloat16)
    for look in (engine.sync_weights, engine.weights_changed):
        with pytest.raises(ModelChangedError, match="make a new engine"):
            look()
    assert engine.weight_version == 0


@pytest.mark.parametrize("pack", [True, False])
def test_a_head_follows_the_targets_weights(pack: bool) -> None:
    """Its own keys were made of the old states, and so is what it has borrowed."""
    model = tiny.make_model("llama")
    other = tiny.make_model("llama", seed=3)
    head = drafts_for("eagle3", model)
    engine = make_engine("eagle3", model, head, pack_weights=pack)
    before = all_drafts(engine)
    model.load_state_dict(other.state_dict())
    assert engine.sync_weights()
    after = all_drafts(engine)
    assert after != before
    assert after == all_drafts(make_engine("eagle3", model, head, pack_weights=pack))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_a_closed_engine_holds_no_part_of_what_drafted(method: str, compiled: bool) -> None:
    model = tiny.make_model("llama")
    drafts = drafts_for(method, model)
    options = {"compile": True, "compile_options": {"backend": "eager"}, "max_num_seqs": 2} if compiled else {}
    engine = make_engine(method, model, drafts, **options)
    all_drafts(engine)
    origin: Any = engine._runner._drafts
    held = [weakref.ref(part) for part in (origin, origin._tree, *engine._runner._caches[True].values())]
    if method == "eagle3":
        held.append(weakref.ref(origin._aux.rows))
    held.append(weakref.ref(engine._runner._shadow))
    del origin
    engine.close()
    gc.collect()
    assert [part() for part in held] == [None] * len(held)


def test_the_targets_modules_that_a_head_uses_are_those_of_the_engines_tree() -> None:
    """The user's own may be anything by then: in training, hooked, on another device."""
    model = tiny.make_model("llama")
    config = drafting.head_config()
    shared = {"target_embeddings": model.get_input_embeddings(), "target_lm_head": model.get_output_embeddings()}
    torch.manual_seed(0)
    head = Eagle3Head(config, **shared)
    engine = make_engine("eagle3", model, head)
    calls: list[str] = []
    for name, module in shared.items():
        module.register_forward_hook(lambda *args, name=name: calls.append(name))
    assert all_drafts(engine)
    assert calls == []
    assert head.borrowed == tuple(shared.values())
