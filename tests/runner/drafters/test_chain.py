"""Drafting passes meet known shapes only, and draft the same, however steps are padded and wherever requests end."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import drafting
import pytest
import tiny

from cb_engine import Engine, SamplingParams
from cb_engine.device import device_defaults

MAX_LEN = 24


def make_engine(drafter: str, model: Any, k: int, **config: Any) -> Engine:
    own: dict[str, dict[str, Any]] = {
        "first_layers": {"method": "draft_model", "num_draft_layers": 1},
        "draft_model": {"method": "draft_model", "model": tiny.make_model("llama", seed=77)},
        "eagle3": {"method": "eagle3", "model": drafting.make_head(model)},
    }
    speculative = {"num_speculative_tokens": k, "adaptive": False, **own[drafter]}
    limits = {"block_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 8, "max_model_len": MAX_LEN}
    return Engine(model, config={**limits, **config, "speculative": speculative}, eos_token_id=-1)


def run(engine: Engine, prompts: list[list[int]]) -> tuple[list[list[int]], list[tuple[int, ...]]]:
    """Outputs, and all drafts on the way; one request joins when others are under way."""
    outputs: dict[str, list[int]] = {}
    ids = [engine.add_request(prompt, SamplingParams(temperature=0.0))[0] for prompt in prompts[:-1]]
    drafts = []
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id] = output.generated_tokens
        drafts += [request.draft_token_ids for request in engine._scheduler.unfinished()]
        if len(drafts) == 4 * len(ids):
            ids += engine.add_request(prompts[-1], SamplingParams(temperature=0.0))
        engine.check()
    return [outputs[i] for i in ids], [draft for draft in drafts if draft]


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("cb_engine")]


@pytest.fixture(scope="module")
def case() -> tuple[Any, list[list[int]], list[list[int]]]:
    model = tiny.family("llama")[0]
    prompts = tiny.make_prompts((3, 9, 6))
    return model, prompts, [tiny.generate(model, p, MAX_LEN - len(p)) for p in prompts]


PADDINGS: dict[str, dict[str, Any]] = {
    "everything": {},
    "prompts": {"pad_decode_batches": False},
    "packed rows": {"decode_fast_path": False},
}


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("drafter", ["first_layers", "draft_model", "eagle3"])
def test_padding_changes_no_draft(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, case: Any, drafter: str, padding: str
) -> None:
    """Where decodes are not padded and prompts are, first passes are packed into shapes that prompts have."""
    model, prompts, references = case
    plain = run(make_engine(drafter, model, 3, max_num_seqs=4), prompts)
    assert plain[0] == references
    assert len(plain[1]) > 10
    monkeypatch.setattr("cb_engine.engine.device_defaults", lambda device: replace(device_defaults(device), pads=True))
    engine = make_engine(drafter, model, 3, max_num_seqs=4, strict_shapes=True, **PADDINGS[padding])
    engine.warmup()
    assert run(engine, prompts) == plain
    assert not complaints(caplog)
    kinds = {str(bucket.kind) for bucket in engine.coverage.used}
    assert kinds >= ({"draft_first", "draft_next"} if padding == "everything" else {"draft_prefill"})


@pytest.mark.parametrize("config", [{"fake_static_device": True}, {"pad_decode_batches": True, "strict_shapes": True}])
@pytest.mark.parametrize("drafter", ["first_layers", "draft_model", "eagle3"])
def test_a_request_close_to_its_end_does_not_widen_the_passes_of_others(
    case: Any, drafter: str, config: dict[str, Any]
) -> None:
    """It has been given all its drafts; the passes that follow are beyond the maximum length for it."""
    model, prompts, references = case
    k = 6
    engine = make_engine(drafter, model, k, max_num_batched_tokens=24, **config)
    engine.warmup(compile_only=True)
    outputs, drafts = run(engine, prompts)
    assert outputs == references
    assert {len(draft) for draft in drafts} == set(range(1, k + 1))
    assert max(bucket.num_blocks for bucket in engine.coverage.used) == MAX_LEN // 4


def test_a_head_that_has_missed_a_text_is_not_widened_by_it_either(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, case: Any
) -> None:
    """It sees the end of the text alone, which lies beyond the whole of what others have."""
    model, _, _ = case
    prompts = [tiny.make_prompts((17,))[0], *tiny.make_prompts((3, 3), seed=5)]
    rng = random.Random(0)
    monkeypatch.setattr(
        "cb_engine.speculative.control.DraftController.to_draft",
        lambda self, num_requests: (num_requests, 6) if rng.random() < 0.5 else (0, 0),
    )
    engine = make_engine("eagle3", model, 6, max_num_batched_tokens=24)
    outputs, drafts = run(engine, prompts)
    assert outputs == [tiny.generate(model, p, MAX_LEN - len(p)) for p in prompts]
    assert len(drafts) > 10
    assert not complaints(caplog)
