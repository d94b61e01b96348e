"""The kernel that draws a token from a row, on every instruction set this CPU has."""

from __future__ import annotations

import pytest
import torch

from cb_engine.native import build

pytestmark = pytest.mark.skipif(not build.load(), reason="the native kernels cannot be built here")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF = float("inf")


def draw(
    logits: torch.Tensor, temperature: float, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    odds = torch.full((len(logits),), temperature)
    token_ids, failed, sums = torch.ops.cb_engine.draw(logits, odds, uniform)
    return token_ids, failed, sums


def logits_of(rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    return (3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab))).to(dtype)


@pytest.mark.parametrize("vocab", [1, 5, 16, 100, 1024, 1025, 5000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_inverts_the_cumulated_odds(isa: int, temperature: float, dtype: torch.dtype, vocab: int) -> None:
    logits = logits_of(50, vocab, dtype)
    uniform = torch.rand(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    token_ids, failed, sums = draw(logits, temperature, uniform)
    assert not failed.any()
    scores = logits.double() / temperature
    odds = (scores - scores.amax(-1, keepdim=True)).exp()
    torch.testing.assert_close(sums.double(), odds.sum(-1), rtol=1e-5, atol=0)
    after = (odds / odds.sum(-1, keepdim=True)).cumsum(-1)
    upper = after.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    lower = upper - (odds / odds.sum(-1, keepdim=True)).gather(1, token_ids.unsqueeze(1)).squeeze(1)
    assert (lower - 1e-6 <= uniform).all()
    assert (uniform <= upper + 1e-6).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_greedy_is_the_first_of_the_best(isa: int, dtype: torch.dtype) -> None:
    logits = logits_of(20, 3000, dtype)
    logits[3, [700, 2000]] = 50.0
    logits[4, 2999] = 50.0
    token_ids, failed, sums = draw(logits, 0.0, torch.zeros(20, dtype=torch.float64))
    assert torch.equal(token_ids, logits.argmax(-1))
    assert token_ids[3:5].tolist() == [700, 2999]
    assert not failed.any()
    assert (sums == 1).all()


def test_ends_of_the_range_and_tokens_without_weight(isa: int) -> None:
    """A token that cannot be is never drawn, even where rounding reaches the last of the sum."""
    logits = torch.full((2, 4000), -INF)
    logits[:, [1500, 2500]] = 0.0
    token_ids, failed, _ = draw(logits, 1.0, torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64))
    assert token_ids.tolist() == [1500, 2500]
    assert not failed.any()


def test_extreme_temperatures(isa: int) -> None:
    logits = logits_of(2, 300, torch.float32)
    uniform = torch.tensor([0.0, 0.999], dtype=torch.float64)
    for cold in (1e-45, 1e-30, 1e-3):
        assert torch.equal(draw(logits, cold, uniform)[0], logits.argmax(-1))
    assert draw(logits, 1e30, uniform)[0].tolist() == [0, 299]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_without_sense_fail_alone(isa: int, dtype: torch.dtype, temperature: float) -> None:
    logits = logits_of(6, 100, dtype)
    uniform = torch.full((6,), 0.5, dtype=torch.float64)
    good = draw(logits, temperature, uniform)[0]
    logits[1, 3] = torch.nan
    logits[2, 99] = INF
    logits[4] = -INF
    token_ids, failed, _ = draw(logits, temperature, uniform)
    assert failed.tolist() == [False, True, True, False, True, False]
    assert torch.equal(token_ids[~failed], good[~failed])
    assert ((token_ids >= 0) & (token_ids < 100)).all()


def test_a_row_is_the_same_alone_on_any_number_of_threads_and_in_any_dtype(isa: int) -> None:
    logits = logits_of(30, 5000, torch.bfloat16)
    uniform = torch.rand(30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    together = draw(logits, 0.8, uniform)
    parts = [draw(logits[i : i + 1], 0.8, uniform[i : i + 1]) for i in range(30)]
    padded = torch.nn.functional.pad(logits.float(), (0, 56), value=-INF)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for other in ([torch.cat(x) for x in zip(*parts, strict=True)], draw(padded, 0.8, uniform)):
            assert all(map(torch.equal, other, together))
    finally:
        torch.set_num_threads(threads)


def test_no_rows(isa: int) -> None:
    token_ids, failed, sums = draw(torch.zeros(0, 10), 1.0, torch.zeros(0, dtype=torch.float64))
    assert token_ids.shape == failed.shape == sums.shape == (0,)


def test_wrong_arguments_are_refused() -> None:
    op, half = torch.ops.cb_engine.draw, torch.full((2,), 0.5, dtype=torch.float64)
    with pytest.raises(ValueError, match="temperature must be"):
        op(torch.zeros(2, 4), torch.ones(3), half)
    with pytest.raises(ValueError, match="uniform must be"):
        op(torch.zeros(2, 4), torch.ones(2), half.float())
    with pytest.raises(ValueError, match="contiguous along V"):
        op(torch.zeros(4, 2).T, torch.ones(2), half)
    with pytest.raises(TypeError, match="Double"):
        op(torch.zeros(2, 4).double(), torch.ones(2), half)
