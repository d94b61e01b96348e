"""A draft model has seen exactly what it is said to have seen, whoever holds the blocks, and catches up in measure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import drafting
import pytest
import tiny
import torch

from cb_engine import Engine, SamplingParams
from cb_engine.runner.buckets import StepKind

Counts = list[dict[str, int]]


def make_engine(model: Any, draft_model: Any, **config: Any) -> Engine:
    """What nobody has written is NaN, where it can be."""
    speculative = {"method": "draft_model", "model": draft_model, "num_speculative_tokens": 3, "adaptive": False}
    whole = {"block_size": 4, "attention_backend": "torch", **config, "speculative": speculative}
    engine = Engine(model, config=whole, eos_token_id=-1)
    if engine._runner.executor.is_static:
        return engine
    with torch.inference_mode():
        for cache in engine._runner._caches[True].values():
            cache.k.fill_(float("nan"))
            cache.v.fill_(float("nan"))
    return engine


def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Counts:
    """The rows that each `propose` has computed, by kind of pass."""
    drafter = engine._runner.drafter
    counts: Counts = []
    run, propose = drafter._run, drafter.propose

    def counting_run(kind: StepKind, spans: Any) -> Any:
        counts[-1][str(kind)] = counts[-1].get(str(kind), 0) + sum(span.num_rows for span in spans)
        return run(kind, spans)

    def counting_propose(asks: Any) -> Any:
        counts.append({})
        return propose(asks)

    monkeypatch.setattr(drafter, "_run", counting_run)
    monkeypatch.setattr(engine._speculator._proposer, "propose", counting_propose)
    return counts


def run(engine: Engine, check: Any = None, between: Callable[[], None] = lambda: None) -> int:
    """Runs an engine to the end; `check` is the draft model whose drafts these have to be."""
    num_checked = 0
    while engine.has_work:
        between()
        engine.step()
        engine.check()
        for request in engine._scheduler.unfinished() if check else ():
            drafts = list(request.draft_token_ids)
            assert not drafts or drafts == tiny.generate(check, request.token_ids, len(drafts))
            num_checked += len(drafts)
    return num_checked


def all_accepted(engine: Engine) -> bool:
    stats = engine.stats()
    return stats.num_draft_tokens == stats.num_accepted_tokens > 0


def test_a_model_agrees_with_itself_while_others_wait() -> None:
    model = tiny.family("llama")[0]
    engine = make_engine(model, model, max_num_seqs=4, enable_prefix_caching=False)
    for i in range(20):
        engine.add_request([i + 1] * 6, SamplingParams(temperature=0.0, max_tokens=30 + i))
    run(engine)
    assert all_accepted(engine)


def test_blocks_of_drafts_that_are_taken_back_are_computed_anew() -> None:
    """Every step the requests come by the blocks of each other's drafts."""
    model = tiny.family("llama")[0]
    engine = make_engine(model, model, max_num_seqs=4)
    for i in range(4):
        engine.add_request([i + 1] * (5 + i), SamplingParams(temperature=0.0, max_tokens=30))

    def trim() -> None:
        for request in engine._scheduler._running:
            engine._blocks.trim(request, request.num_computed_tokens)

    run(engine, between=trim)
    assert all_accepted(engine)


@pytest.mark.parametrize("backend", ["torch", "auto", "static"])
def test_samples_of_a_prompt_catch_up_with_it_once_and_within_a_budget(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    model, draft_model = tiny.family("llama")[0], tiny.make_model("llama", seed=77)
    more = {"fake_static_device": True, "max_model_len": 128, "attention_backend": "auto"}
    more = more if backend == "static" else {"attention_backend": backend}
    engine = make_engine(model, draft_model, max_num_seqs=8, max_num_batched_tokens=32, **more)
    counts = watch(engine, monkeypatch)
    prompt = tiny.make_prompts((101,))[0]
    engine.add_request(prompt, SamplingParams(n=8, temperature=0.8, max_tokens=14, seed=0))
    with drafting.any_shape(engine):
        assert run(engine, draft_model) > 100
    late = [count.get("draft_prefill", 0) for count in counts]
    assert max(late) <= 32
    assert 100 <= sum(late) < 101 + 8 * 6, "the prompt once, and for each what is its own"


def test_many_newcomers_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft_model = tiny.family("llama")[0], tiny.make_model("llama", seed=77)
    engine = make_engine(model, draft_model, max_num_seqs=8, max_num_batched_tokens=64)
    counts = watch(engine, monkeypatch)
    for prompt in tiny.make_prompts((60,) * 8):
        engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=16))
    assert run(engine, draft_model) > 50
    late = [count.get("draft_prefill", 0) for count in counts]
    assert max(late) <= 64
    assert sum(late) >= 8 * 55


def test_prefix_hits_and_resumed_requests_take_over_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft_model = tiny.family("llama")[0], tiny.make_model("llama", seed=77)
    engine = make_engine(model, draft_model)
    counts = watch(engine, monkeypatch)
    prompt = tiny.make_prompts((40,))[0]
    for tail in ([1], [2, 3], [4, 5, 6]):
        counts.clear()
        engine.add_request([*prompt, *tail], SamplingParams(temperature=0.0, max_tokens=8))
        assert run(engine, draft_model) > 6
        late = sum(count.get("draft_prefill", 0) for count in counts)
        assert late == (41 if tail == [1] else 0)
    counts.clear()
    (request_id,) = engine.add_request([*prompt, 1, 7], SamplingParams(temperature=0.0, max_tokens=12))
    for _ in range(4):
        engine.step()
    engine._scheduler._preempt(engine._scheduler._requests[request_id])
    assert run(engine, draft_model) > 6
    assert sum(count.get("draft_prefill", 0) for count in counts) <= 12


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_few_blocks(prefix_caching: bool) -> None:
    """Blocks change hands all the time."""
    model, draft_model = tiny.family("llama")[0], tiny.make_model("llama", seed=77)
    config = {"num_blocks": 22, "max_num_seqs": 4, "max_prefill_chunk": 6, "enable_prefix_caching": prefix_caching}
    engine = make_engine(model, draft_model, **config)
    common = tiny.make_prompts((14,))[0]
    for i in range(8):
        prompt = [*common[: 14 - i % 5], i + 1]
        engine.add_request(prompt, SamplingParams(temperature=0.0, n=1 + i % 2, max_tokens=10 + i))
    steps = iter(range(1000))

    def preempt() -> None:
        if next(steps) % 5 == 4 and engine._scheduler._running:
            engine._scheduler._preempt(engine._scheduler._running[-1])

    assert run(engine, draft_model, preempt) > 50
    assert engine.stats().num_preemptions > 5


def test_catching_up_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft_model = tiny.family("llama")[0], tiny.make_model("llama", seed=77)
    engine = make_engine(model, draft_model)
    counts = watch(engine, monkeypatch)
    seconds = []
    engine.add_request(tiny.make_prompts((30,))[0], SamplingParams(temperature=0.0, max_tokens=12))
    while engine.has_work:
        engine.step()
        seconds.append(engine._runner.drafter.catch_up_seconds)
    assert [s > 0 for s in seconds] == ["draft_prefill" in count for count in counts]
    assert [s > 0 for s in seconds].count(True) == 1


@pytest.mark.parametrize(
    "config", [{}, {"fake_static_device": True}, {"pad_decode_batches": True, "strict_shapes": True}]
)
def test_a_model_with_fewer_positions_drafts_as_far_as_they_go(
    config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Its positions are rows of a table: one beyond the last would be an error."""
    end = 20
    model, prompts, _ = tiny.family("gpt2")
    draft_model = tiny.make_model("gpt2", seed=77, n_positions=end)
    sizes = {"max_num_seqs": 4, "max_model_len": 40, "num_blocks": 24, "max_num_batched_tokens": 32}
    backend = "auto" if "fake_static_device" in config else "torch"
    engine = make_engine(model, draft_model, **sizes, **config, attention_backend=backend)
    assert [record.message for record in caplog.records] == [
        "the draft model's positions end at 20: longer requests go on without drafts"
    ]
    engine.warmup(compile_only=True)
    lengths: list[tuple[int, int]] = []
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=None))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
        for request in engine._scheduler.unfinished():
            drafts = list(request.draft_token_ids)
            lengths += [(request.num_tokens, len(drafts))] * bool(drafts)
            assert drafts == (tiny.generate(draft_model, request.token_ids, len(drafts)) if drafts else [])
    assert len(caplog.records) == 1, "it did not fail"
    wanted = sorted(tiny.generate(model, prompt, 40 - len(prompt)) for prompt in prompts)
    assert sorted(output.generated_tokens for output in outputs) == wanted
    assert max(length + count for length, count in lengths) == end + 1, "the last draft has no position"
    assert max(count for _, count in lengths) == 3
