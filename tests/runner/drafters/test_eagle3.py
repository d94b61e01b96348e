"""The EAGLE-3 drafter inside the engine: its drafts are those of the head run over the whole text at once."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import drafting
import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cb_engine import Engine, SamplingParams
from cb_engine.attention.interface import bind
from cb_engine.request import Request
from cb_engine.runner.drafters.eagle3 import AuxStates
from cb_engine.runner.drafters.eagle3_head import Eagle3Head
from cb_engine.runner.probe import PlainAttention
from cb_engine.runner.shadow import make_shadow

K = 3


@torch.no_grad()
def drafts_of(head: Eagle3Head, model: Any, token_ids: list[int], count: int, first: int = 0) -> list[int]:
    """The head over all rows of a text from the `first` on, then over the tokens that it has guessed itself."""
    states = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    hidden = head.fuse(torch.cat([states[i][:, first:-1] for i in head.config.aux_layer_ids], -1))
    ids = token_ids[first + 1 :]
    drafts: list[int] = []
    for _ in range(count):
        positions = torch.arange(first, first + len(ids)).unsqueeze(0)
        with bind(PlainAttention()):
            out = head(head.embed(torch.tensor([ids])), hidden, positions)
        drafts.append(int(head.target_ids[head.logits(out[0, -1:]).argmax(-1)]))
        hidden = torch.cat([hidden, out[:, -1:]], 1)
        ids = [*ids, drafts[-1]]
    return drafts


def make_engine(head: Eagle3Head, model: Any, **config: Any) -> Engine:
    """What nobody has written is NaN."""
    speculative = {"method": "eagle3", "model": head, "num_speculative_tokens": K, "adaptive": False}
    whole = {"block_size": 4, "attention_backend": "torch", **config, "speculative": speculative}
    engine = Engine(model, config=whole, eos_token_id=-1)
    (cache,) = engine._runner._caches[True].values()
    with torch.inference_mode():
        cache.k.fill_(float("nan"))
        cache.v.fill_(float("nan"))
    return engine


Drafted = list[tuple[list[int], tuple[int, ...], Request]]


def drafted(engine: Engine, plain: Callable[[int], bool] = lambda step: False) -> Drafted:
    """Runs an engine to the end; everything that was drafted on the way, with the text it was drafted for. In `plain`
    steps nobody drafts."""
    found: Drafted = []
    step = 0
    while engine.has_work:
        engine._speculator._works = not plain(step)
        step += 1
        engine.step()
        engine.check()
        found += [(list(r.token_ids), r.draft_token_ids, r) for r in engine._scheduler.unfinished()]
    return [(text, drafts, request) for text, drafts, request in found if drafts]


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_prefill_chunk": 5}, {"num_blocks": 14, "max_prefill_chunk": 5}, {"pad_decode_batches": True}],
    ids=str,
)
def test_drafts_are_those_of_the_head_alone(settings: dict[str, Any], backend: str) -> None:
    model, prompts, _ = tiny.family("llama")
    head = drafting.make_head(model, draft_vocab_size=64)
    engine = make_engine(head, model, enable_prefix_caching=False, attention_backend=backend, **settings)
    engine.warmup()
    for prompt in prompts:
        if len(prompt) > 1:
            engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=tiny.NEW_TOKENS))
    seen = drafted(engine)
    assert len(seen) > 20
    for text, drafts, _ in seen:
        assert list(drafts) == drafts_of(head, model, text, len(drafts))
    if "num_blocks" in settings:
        assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_windows_of_the_target_are_none_of_the_heads(family: str) -> None:
    model, prompts, _ = tiny.family(family)
    head = drafting.make_head(model, draft_vocab_size=64)
    engine = make_engine(head, model, num_blocks=24, max_prefill_chunk=5)
    for prompt in prompts[1:]:
        engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=tiny.NEW_TOKENS))
    seen = drafted(engine)
    assert len(seen) > 20
    for text, drafts, _ in seen:
        assert list(drafts) == drafts_of(head, model, text, len(drafts))


@pytest.fixture(scope="module")
def case() -> tuple[Any, Eagle3Head, list[int]]:
    model, prompts, _ = tiny.family("llama")
    return model, drafting.make_head(model, draft_vocab_size=64), prompts[-1]


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)


def test_a_prefix_from_the_cache_is_known_to_the_head(case: Any) -> None:
    model, head, prompt = case
    engine = make_engine(head, model)
    engine.add_request(prompt, greedy(6))
    drafted(engine)
    engine.add_request([*prompt[:25], 7, 8], greedy(6))
    seen = drafted(engine)
    assert seen[0][2].num_cached_tokens >= 24
    for text, drafts, _ in seen:
        assert list(drafts) == drafts_of(head, model, text, len(drafts))


@pytest.mark.parametrize("others_known", [False, True])
def test_a_prefix_that_the_head_has_not_followed_is_a_hole(case: Any, others_known: bool) -> None:
    """Whoever computed it had ended before anybody drafted. Others that were followed change nothing."""
    model, head, prompt = case
    engine = make_engine(head, model)
    if others_known:
        engine.add_request(prompt[10:], greedy(12))
        drafted(engine)
    engine.add_request(prompt, greedy(1))
    drafted(engine)
    engine.add_request([*prompt[:25], 7, 8], greedy(12))
    seen = drafted(engine)
    hit = seen[0][2].num_cached_tokens
    assert hit >= 24
    assert len(seen) > 5
    for text, drafts, _ in seen:
        assert list(drafts) == drafts_of(head, model, text, len(drafts), first=hit)


def test_one_step_without_drafts_spoils_nothing_for_others(case: Any) -> None:
    model, head, prompt = case
    engine = make_engine(head, model)
    engine.add_request([5, 6, 7], greedy(12))
    drafted(engine, plain=lambda step: step == 3)
    engine.add_request(prompt, greedy(6))
    drafted(engine)
    engine.add_request([*prompt[:25], 7, 8], greedy(12))
    seen = drafted(engine)
    assert seen[0][2].num_cached_tokens >= 24
    for text, drafts, _ in seen:
        assert list(drafts) == drafts_of(head, model, text, len(drafts))


def test_samples_of_one_prompt_know_it(case: Any) -> None:
    model, head, prompt = case
    engine = make_engine(head, model, max_prefill_chunk=8)
    engine.add_request(prompt[:23], SamplingParams(n=4, temperature=0.9, seed=1, max_tokens=10))
    seen = drafted(engine)
    assert len(seen) > 20
    for text, drafts, _ in seen:
        assert list(drafts) == drafts_of(head, model, text, len(drafts))


def test_a_preempted_request_goes_on_with_what_is_known(case: Any) -> None:
    model, head, prompt = case
    engine = make_engine(head, model)
    request_id = engine.add_request(prompt, greedy(16))[0]

    def preempt(step: int) -> bool:
        if step == 3:
            engine._scheduler._preempt(engine._scheduler._requests[request_id])
        return False

    seen = drafted(engine, plain=preempt)
    assert seen[0][2].num_preemptions == 1
    assert seen[0][2].num_hit_tokens > 20
    for text, drafts, _ in seen:
        assert list(drafts) == drafts_of(head, model, text, len(drafts))


@pytest.mark.parametrize("length", [7, 8, 9, 10])
def test_behind_a_hole_the_head_sees_only_what_follows(case: Any, length: int) -> None:
    """Steps without drafting leave rows out."""
    model, head, prompt = case
    engine = make_engine(head, model, enable_prefix_caching=False)
    engine.add_request(prompt[:length], greedy(24))
    seen = drafted(engine, plain=lambda step: step < 8)
    assert len(seen) > 2
    for text, drafts, _ in seen:
        # The prompt, and seven steps more of a token each.
        assert list(drafts) == drafts_of(head, model, text, len(drafts), first=length + 7)


def test_keys_that_have_closed_up_behind_a_hole_are_nobody_elses(case: Any) -> None:
    model, head, prompt = case
    engine = make_engine(head, model)
    engine.add_request(prompt[:9], greedy(24))
    whole = drafted(engine, plain=lambda step: step < 3)[-1][0]
    engine.add_request([*whole[:25], 7, 8], greedy(12))
    seen = drafted(engine)
    hit = seen[0][2].num_cached_tokens
    assert hit >= 24
    for text, drafts, _ in seen:
        assert list(drafts) == drafts_of(head, model, text, len(drafts), first=hit)


@pytest.mark.parametrize("seed", range(3))
def test_the_head_sees_what_it_is_said_to_see_whatever_happens(case: Any, seed: int) -> None:
    """Texts that come again, samples, ends at once, preemptions, and steps in which nobody drafts."""
    model, head, text = case
    rng = random.Random(seed)
    texts = [text[:9], text[9:23], text[10:30]]
    engine = make_engine(head, model, num_blocks=24, max_num_seqs=4, max_prefill_chunk=(None, 5, 6)[seed])
    unsent, counts = 16, [0, 0]
    while unsent or engine.has_work:
        if unsent and rng.random() < 0.4:
            unsent -= 1
            engine.add_request(rng.choice(texts), greedy(rng.choice((1, 8, 24)), n=rng.choice((1, 1, 2))))
        if engine._scheduler._running and rng.random() < 0.06:
            engine._scheduler._preempt(engine._scheduler._running[-1])
        engine._speculator._works = rng.random() < 0.9
        engine.step()
        engine.check()
        for request in engine._scheduler._running:
            drafts = list(request.draft_token_ids)
            if drafts:
                first = engine._runner.drafter._followed[request].visible
                assert drafts == drafts_of(head, model, request.token_ids, len(drafts), first=first)
                counts[first > 0] += 1
    assert min(counts) > 3


def test_no_step_leaves_states_behind(case: Any) -> None:
    """Apart from the buffer, which is written as a whole: a captured graph does not see writes to a view."""
    model = case[0]
    aux = AuxStates((0, 1, 1), 8, 32, torch.float32, torch.device("cpu"))
    shadow = make_shadow(model)
    states: list[weakref.ref[torch.Tensor]] = []
    for layer in shadow.model.layers:
        layer.register_forward_pre_hook(lambda module, args: states.append(weakref.ref(args[0])))

    def forward(ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        with bind(PlainAttention()):
            return shadow(input_ids=ids, position_ids=positions, use_cache=False).logits[0]

    tapped = aux.tap(shadow, forward)
    before = aux.rows.clone()
    with torch.no_grad(), _Writes() as writes:
        tapped(torch.tensor([[3, 4, 5]]), torch.arange(3).unsqueeze(0), torch.tensor([2]))
    assert len(states) == 2
    assert all(state() is None for state in states)
    assert not torch.equal(aux.rows[:3], before[:3])
    assert torch.equal(aux.rows[3:], before[3:])
    assert [tensor is aux.rows for tensor in writes.to if tensor.data_ptr() == aux.rows.data_ptr()] == [True]


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the tensors that are written in place."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.to: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.to.append(value)
        return func(*args, **(kwargs or {}))


def test_a_head_for_layers_that_are_not_there_is_refused() -> None:
    model = tiny.family("llama")[0]
    head = drafting.make_head(model, draft_vocab_size=64)
    object.__setattr__(head.config, "aux_layer_ids", (0, 1, 2))
    with pytest.raises(ValueError, match="layer 2"):
        make_engine(head, model)
