"""Log-probabilities mean what their mode says, and are reported for who asked."""

from __future__ import annotations

import pytest
import torch

from cb_engine.sampling import prompt_logprobs
from tests.sampling.common import kept, peaky, sample, state

INF = float("inf")


def test_raw_is_the_log_softmax_of_the_logits():
    logits = peaky(1, 300).bfloat16()
    output = sample(
        logits,
        state(
            temperature=0.5,
            top_k=3,
            logit_bias={9: 50.0},
            repetition_penalty=2.0,
            output=(9,),
            logprobs=300,
            logprobs_mode="raw",
        ),
    )
    expected = logits.float().log_softmax(-1)[0]
    found = kept(output)
    assert [found[i] for i in range(300)] == pytest.approx(expected.tolist(), abs=1e-5)
    token_id = output.token_ids.item()
    assert output.logprobs.item() == pytest.approx(expected[token_id].item(), abs=1e-5)


def test_processed_is_what_was_drawn_from():
    logits = peaky(1, 300)
    output = sample(logits, state(temperature=0.5, top_k=3, logprobs=5))
    expected = (logits / 0.5).topk(3).values.log_softmax(-1)[0]
    assert list(kept(output).values()) == pytest.approx(expected.tolist(), abs=1e-5)
    assert len(kept(output)) == 3


def test_processed_of_a_greedy_row_ignores_temperature_but_not_the_edits():
    logits = peaky(1, 100)
    output = sample(logits, state(temperature=0, logit_bias={4: 30.0}, allowed_token_ids=(4, 5), logprobs=9))
    edited = torch.tensor([logits[0, 4] + 30.0, logits[0, 5]]).log_softmax(0).tolist()
    assert kept(output) == pytest.approx({4: edited[0], 5: edited[1]}, abs=1e-5)
    assert output.token_ids.item() == 4
    assert output.logprobs.item() == pytest.approx(edited[0], abs=1e-6)


def test_nobody_asked():
    output = sample(peaky(2, 100), state(), state(temperature=0))
    assert output.logprobs is None
    assert output.top is None


def test_each_row_gets_what_it_asked_for():
    logits = peaky(5, 100)
    output = sample(
        logits,
        state(),
        state(logprobs=0),
        state(temperature=0, logprobs=2),
        state(logprobs=4, logprobs_mode="raw"),
        state(temperature=0, logprobs=0, logprobs_mode="raw"),
    )
    assert output.logprobs.isfinite().tolist() == [False, True, True, True, True]
    rows = [output.top.rows()[row] for row in range(5)]
    assert [row and len(row) for row in rows] == [None, None, 2, 4, None]
    for row in (2, 3):
        values = [value for _, value in rows[row]]
        assert values == sorted(values, reverse=True)
        assert [i for i, _ in rows[row]] == logits[row].topk(len(values)).indices.tolist()
    assert rows[2][0] == (output.token_ids[2].item(), output.logprobs[2].item())


def test_an_emitted_token_never_reports_minus_infinity():
    logits = torch.randn(400, 64, generator=torch.Generator().manual_seed(0)) * 30
    logits[:, ::3] = -INF
    for fields in (
        {},
        {"top_p": 0.3},
        {"top_k": 2},
        {"min_p": 0.5},
        {"temperature": 0},
        {"temperature": 9.0},
    ):
        for mode in ("raw", "processed"):
            states = [state(seed=s, logprobs=0, logprobs_mode=mode, **fields) for s in range(400)]
            assert sample(logits, *states).logprobs.isfinite().all()


def test_more_than_there_are():
    assert len(kept(sample(torch.zeros(1, 10), state(logprobs=50)))) == 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [0, 1, 150])
def test_prompt_logprobs(dtype, length):
    generator = torch.Generator().manual_seed(length)
    logits = torch.randn(length, 40, generator=generator).to(dtype)
    targets = torch.randint(40, (length,), generator=generator)
    found = prompt_logprobs(logits, targets, 3)
    expected = logits.float().log_softmax(-1)
    assert found.logprobs.equal(expected.gather(1, targets.unsqueeze(1)).squeeze(1))
    assert found.top_logprobs.equal(expected.topk(3).values)
    assert expected.gather(1, found.top_token_ids).equal(found.top_logprobs)
    assert prompt_logprobs(logits, targets, 0).top_token_ids.shape == (length, 0)
    assert prompt_logprobs(logits, targets, 99).top_token_ids.shape == (length, 40)


def test_prompt_logprobs_checks_shapes():
    with pytest.raises(ValueError, match="one target per row"):
        prompt_logprobs(torch.zeros(3, 8), torch.zeros(2, dtype=torch.long), 1)


def test_a_copy_on_a_device_says_the_same():
    output = sample(peaky(2, 64), state(logprobs=2), state(logprobs=0))
    moved = output.to("cpu", non_blocking=True)
    assert moved.token_ids.equal(output.token_ids)
    assert moved.failed.equal(output.failed)
    assert moved.logprobs.equal(output.logprobs)
    assert moved.top.rows()[0] == output.top.rows()[0]
    bare = sample(peaky(1, 64), state()).to("cpu")
    assert bare.logprobs is None
    assert bare.top is None
