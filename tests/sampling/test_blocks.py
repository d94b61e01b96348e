"""Block by block gives what the plain operation gives."""

from __future__ import annotations

import pytest
import torch

from cb_engine.sampling import blocks

INF = float("inf")


def prepared(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    padded = blocks.pad_to_blocks(logits)
    return padded, blocks.block_maxima(padded)


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 1000, 4096])
def test_argmax(vocab):
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab))
    assert blocks.argmax(*prepared(logits)).equal(logits.argmax(-1))


def test_argmax_takes_the_first_of_equals():
    logits = torch.zeros(2, 300)
    logits[0, [70, 71, 200]] = 1.0
    assert blocks.argmax(*prepared(logits)).tolist() == [70, 0]


@pytest.mark.parametrize(("vocab", "k"), [(64, 64), (100, 3), (5000, 20), (5000, 70), (8192, 64)])
@pytest.mark.parametrize("levels", [0, 7])  # 7: many ties
def test_topk(vocab, k, levels):
    generator = torch.Generator().manual_seed(k)
    logits = torch.randn(4, vocab, generator=generator)
    if levels:
        logits = torch.randint(levels, (4, vocab), generator=generator).float()
    values, ids = blocks.topk(*prepared(logits), k=k)
    assert values.equal(logits.topk(k).values)
    assert logits.gather(1, ids).equal(values)
    assert all(len(set(row)) == k for row in ids.tolist())


def test_draw_inverts_the_cumulated_weights():
    weights = torch.rand(3, 640, generator=torch.Generator().manual_seed(0))
    weights[:, 100:300] = 0.0
    cumulated = weights.double().cumsum(-1)
    for u in torch.linspace(0, 0.999, 57, dtype=torch.float64).tolist():
        index, total = blocks.draw(weights, torch.full((3,), u, dtype=torch.float64))
        expected = torch.searchsorted(cumulated, (u * cumulated[:, -1:]), right=True).squeeze(1)
        assert index.equal(expected)
        torch.testing.assert_close(total, cumulated[:, -1], rtol=1e-6, atol=0)
        assert blocks.draw_small(weights.double(), torch.full((3,), u).double())[0].equal(expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("u", [0.0, 0.5, 1.0 - 2**-53, 1.0])
def test_draw_never_takes_a_token_without_weight(u, dtype):
    # 1.0 is what a number just below it becomes on a device without float64.
    generator = torch.Generator().manual_seed(1)
    for at in (0, 1, 63, 64, 200, 319):
        weights = torch.zeros(1, 320)
        weights[0, at] = 1e-30
        uniform = torch.tensor([u], dtype=dtype)
        assert blocks.draw(weights, uniform)[0].item() == at
        assert blocks.draw_small(weights.to(dtype), uniform)[0].item() == at
    weights = torch.rand(50, 320, generator=generator)
    weights[torch.rand(50, 320, generator=generator) < 0.7] = 0.0
    index, _ = blocks.draw(weights, torch.full((50,), u, dtype=dtype))
    assert (weights.gather(1, index.unsqueeze(1)) > 0).all()


@pytest.mark.parametrize("fill", [0.0, float("nan"), INF])
def test_draw_stays_inside_a_row_without_sense(fill):
    index, _ = blocks.draw(torch.full((1, 128), fill), torch.tensor([0.5], dtype=torch.float64))
    assert 0 <= index.item() < 128


@pytest.mark.parametrize("rows", [0, 1, 8, 17])
def test_row_chunks_cover_every_row_once(rows):
    for device in ("cpu", "meta"):
        parts = blocks.row_chunks(rows, torch.device(device))
        assert [row for part in parts for row in range(rows)[part]] == list(range(rows))
