"""Masks as bits become logits: of exactly the tokens and rows meant, to the bit, on both samplers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cb_engine.grammar.masks import TokenMasks
from cb_engine.sampling.static_sampler import StaticSampler
from cb_engine.sampling.token_masks import forbid, num_bytes, penalty_of
from tests.sampling.common import kept, make_sampler, peaky, state

INF = float("inf")


def masks_of(allowed: dict[int, list[int]], width: int) -> TokenMasks:
    """A mask of `width` tokens, rounded up as llguidance does, for some rows."""
    flags = np.zeros((len(allowed), -(-width // 32) * 32), np.uint8)
    for place, token_ids in enumerate(allowed.values()):
        flags[place, token_ids] = 1
    return TokenMasks(tuple(allowed), np.packbits(flags, axis=1, bitorder="little"))


@pytest.mark.parametrize("vocab", [1, 7, 8, 9, 64, 264, 1000])
def test_every_bit_is_its_token(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    flags = rng.random((5, vocab)) < 0.5
    masks = masks_of({row: np.flatnonzero(flags[row]).tolist() for row in range(5)}, vocab + 40)
    bits = torch.from_numpy(masks.bits[:, : num_bytes(vocab)])
    wanted = torch.from_numpy(np.where(flags, 0.0, -INF)).float()
    assert torch.equal(penalty_of(bits, vocab), wanted)


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [2], [1, 3]])
def test_only_the_masked_rows_change(rows: list[int]) -> None:
    scores = peaky(4, 100)
    before = scores.clone()
    forbid(scores, masks_of({row: [3, 64, 99] for row in rows}, 128))
    for row in range(4):
        for token_id in range(100):
            out = row in rows and token_id not in (3, 64, 99)
            assert scores[row, token_id] == (-INF if out else before[row, token_id])


@pytest.mark.parametrize("static", [False, True])
def test_rows_without_a_grammar_are_as_if_alone(static: bool) -> None:
    """To the bit, and whether they are greedy, drawn freely or cut."""
    logits = peaky(6, 200)
    options: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 1.0, "logprobs": 0},
        {"temperature": 0.9, "top_k": 7, "logprobs": 5},
        {"temperature": 1.2, "presence_penalty": 1.0, "logprobs": 1},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.8, "logit_bias": {5: 2.0}},
    ]

    def sampler() -> Any:
        return StaticSampler(lambda _, f, *args: f(*args), max_logprobs=20) if static else make_sampler()

    states = [state(seed=i, **o) for i, o in enumerate(options)]
    for masked in (0, 1, 3, 4):
        masks = masks_of({masked: [11, 12, 150]}, 224)
        together = sampler()(logits, states, masks)
        plain = sampler()(logits, states)
        for row in range(6):
            if row == masked:
                assert int(together.token_ids[row]) in (11, 12, 150)
                alone = sampler()(logits[row : row + 1], [states[row]], TokenMasks((0,), masks.bits))
            else:
                assert together.token_ids[row] == plain.token_ids[row]
                alone = sampler()(logits[row : row + 1], [states[row]])
            assert together.token_ids[row] == alone.token_ids[0]
            if "logprobs" in options[row]:
                assert together.logprobs[row] == alone.logprobs[0]


def both(logits: torch.Tensor, masks: TokenMasks, **fields: Any) -> list[Any]:
    """What either sampler makes of a row."""
    samplers: list[Any] = [make_sampler(), StaticSampler(lambda _, f, *args: f(*args), max_logprobs=20)]
    return [sampler(logits, [state(**fields)], masks) for sampler in samplers]


def test_log_probabilities_are_those_of_the_masked_distribution() -> None:
    logits = peaky(1, 100)
    allowed = [1, 17, 42, 99]
    masks = masks_of({0: allowed}, 100)
    wanted = logits[0, allowed].log_softmax(-1)
    for output in both(logits, masks, temperature=0.0, logprobs=10):
        found = kept(output)
        assert found.keys() == set(allowed)
        assert [found[i] for i in allowed] == pytest.approx(wanted.tolist(), abs=1e-5)
        assert int(output.token_ids[0]) == allowed[int(wanted.argmax())]
    for output in both(logits, masks, temperature=0.5, logprobs=10, seed=3):
        assert [kept(output)[i] for i in allowed] == pytest.approx(
            (logits[0, allowed] / 0.5).log_softmax(-1).tolist(), abs=1e-5
        )
    for output in both(logits, masks, temperature=0.5, logprobs=2, logprobs_mode="raw"):
        raw = logits[0].log_softmax(-1)
        best = raw.topk(2)
        assert kept(output) == pytest.approx(
            dict(zip(best.indices.tolist(), best.values.tolist(), strict=True)), abs=1e-5
        )
        assert output.logprobs[0].item() == pytest.approx(raw[int(output.token_ids[0])].item(), abs=1e-5)


def test_masks_win_over_all_that_adds_and_meet_other_masks() -> None:
    logits = peaky(1, 50)
    masks = masks_of({0: [4, 5]}, 50)
    for output in both(logits, masks, temperature=0.0, logit_bias={9: 1e4, 4: 1.0}):
        assert int(output.token_ids[0]) in (4, 5)
    for output in both(logits, masks, temperature=0.0, allowed_token_ids=[5, 6], logit_bias={6: 100.0}):
        assert int(output.token_ids[0]) == 5
    for fields in ({"allowed_token_ids": [6]}, {"logit_bias": {4: -INF, 5: -INF}}, {"bad_words": [[4], [5]]}):
        for output in both(logits, masks, temperature=1.0, **fields):
            assert output.failed.tolist() == [True]
    for output in both(logits, masks_of({0: []}, 50), temperature=1.0):
        assert output.failed.tolist() == [True]


@pytest.mark.parametrize("bad", [float("nan"), INF])
def test_a_mask_hides_no_failure(bad: float) -> None:
    logits = peaky(1, 50)
    logits[0, 7] = bad
    for output in both(logits, masks_of({0: [4, 5]}, 50), temperature=1.0):
        assert output.failed.tolist() == [True]


def test_logits_are_not_changed() -> None:
    logits = peaky(2, 64)
    before = logits.clone()
    for sampler in (make_sampler(), StaticSampler(lambda _, f, *args: f(*args), max_logprobs=20)):
        sampler(logits, [state(temperature=0.0), state(temperature=1.0)], masks_of({0: [1], 1: [2]}, 64))
        assert torch.equal(logits, before)
