"""The EAGLE-3 drafter inside the engine: its drafts are those of the head run over the whole text at once."""

from __future__ import annotations

from typing import Any

import drafting
import pytest
import tiny
import torch

from cb_engine import Engine, SamplingParams
from cb_engine.attention.interface import bind
from cb_engine.request import Request
from cb_engine.runner.drafters.eagle3_head import Eagle3Head
from cb_engine.runner.probe import PlainAttention

K = 3


@torch.no_grad()
def drafts_of(head: Eagle3Head, model: Any, token_ids: list[int], count: int) -> list[int]:
    """The head over all rows of a text, then over the tokens that it has guessed itself."""
    states = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    hidden = head.fuse(torch.cat([states[i][:, :-1] for i in head.config.aux_layer_ids], -1))
    ids = token_ids[1:]
    drafts: list[int] = []
    for _ in range(count):
        positions = torch.arange(len(ids)).unsqueeze(0)
        with bind(PlainAttention()):
            out = head(head.embed(torch.tensor([ids])), hidden, positions)
        drafts.append(int(head.target_ids[head.logits(out[0, -1:]).argmax(-1)]))
        hidden = torch.cat([hidden, out[:, -1:]], 1)
        ids = [*ids, drafts[-1]]
    return drafts


def make_engine(head: Eagle3Head, model: Any, **config: Any) -> Engine:
    speculative = {"method": "eagle3", "model": head, "num_speculative_tokens": K, "adaptive": False}
    return Engine(model, config={"block_size": 4, "speculative": speculative, **config}, eos_token_id=-1)


def drafted(engine: Engine) -> list[tuple[list[int], tuple[int, ...], Request]]:
    """Runs an engine to the end; everything that was drafted on the way, with the text it was drafted for."""
    found = []
    while engine.has_work:
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


def test_a_prefix_from_the_cache_is_known_to_the_head() -> None:
    model, prompts, _ = tiny.family("llama")
    head = drafting.make_head(model, draft_vocab_size=64)
    engine = make_engine(head, model)
    params = SamplingParams(temperature=0.0, max_tokens=6)
    engine.add_request(prompts[-1], params)
    drafted(engine)
    engine.add_request([*prompts[-1][:25], 7, 8], params)
    seen = drafted(engine)
    assert seen[0][2].num_cached_tokens >= 24
    for text, drafts, _ in seen:
        assert list(drafts) == drafts_of(head, model, text, len(drafts))


def test_behind_a_hole_the_head_sees_only_what_follows() -> None:
    """Steps without drafting leave rows out. What comes after is drafted as if the text began with a block's edge near
    the hole: not from keys that were never written."""
    model, prompts, _ = tiny.family("llama")
    head = drafting.make_head(model, draft_vocab_size=64)
    engine = make_engine(head, model, enable_prefix_caching=False, attention_backend="torch")
    (cache,) = engine._runner._caches[True].values()
    with torch.inference_mode():
        cache.k.fill_(float("nan"))
        cache.v.fill_(float("nan"))
    request_id = engine.add_request(prompts[2], SamplingParams(temperature=0.0, max_tokens=24))[0]
    engine._speculator._works = False
    for _ in range(8):
        engine.step()
    engine._speculator._works = True
    seen = drafted(engine)
    assert seen[0][2].request_id == request_id
    followed = engine._runner.drafter._followed[seen[0][2]]
    assert followed.visible == 12, "the block of position 15, the first that is followed again"
    assert len(seen) > 2
    assert all(0 <= token < tiny.VOCAB for _, drafts, _ in seen for token in drafts)


def test_a_head_for_layers_that_are_not_there_is_refused() -> None:
    model = tiny.family("llama")[0]
    head = drafting.make_head(model, draft_vocab_size=64)
    object.__setattr__(head.config, "aux_layer_ids", (0, 1, 2))
    with pytest.raises(ValueError, match="layer 2"):
        make_engine(head, model)
