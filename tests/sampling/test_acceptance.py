"""Which drafts were right, for rows worked out by hand and at random."""

from __future__ import annotations

import random

import torch

from cb_engine.sampling.acceptance import NOTHING, accept

N = NOTHING


def accepted(
    sampled: list[list[int]], drafts: list[list[int]], failed: frozenset[tuple[int, int]] = frozenset()
) -> list[list[int]]:
    """`sampled[b][i]` is what row i of request b gave; rows are laid out one request after the other."""
    rows: list[list[int]] = []
    flat: list[int] = []
    bad: list[bool] = []
    for b, of_one in enumerate(sampled):
        rows.append([len(flat) + i for i in range(len(of_one))])
        bad += [(b, i) in failed for i in range(len(of_one))]
        flat += of_one
    return accept(torch.tensor(flat), torch.tensor(bad), torch.tensor(rows), torch.tensor(drafts)).tolist()


def test_tokens_up_to_the_first_wrong_draft_and_the_one_in_its_place():
    sampled = [[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]]
    drafts = [[5, 6, 7], [5, 6, 9], [9, 6, 7], [5, N, N]]
    assert accepted(sampled, drafts) == [[5, 6, 7, 8], [5, 6, 7, N], [5, N, N, N], [5, 6, N, N]]


def test_a_draft_that_is_right_behind_a_wrong_one_counts_for_nothing():
    assert accepted([[1, 2, 3]], [[0, 2]]) == [[1, N, N]]


def test_a_row_that_failed_ends_what_is_before_it():
    sampled, drafts = [[5, 6, 7]] * 4, [[5, 6]] * 4
    failed = {(0, 0), (1, 1), (2, 2)}
    assert accepted(sampled, drafts, failed) == [[N, N, N], [5, N, N], [5, 6, N], [5, 6, 7]]
    # Behind a wrong draft nobody asks.
    assert accepted([[5, 6, 7]], [[9, 6]], frozenset({(0, 1)})) == [[5, N, N]]


def test_rows_of_padding_stand_in_for_those_that_are_not_there():
    # One request has a single row: its further ones repeat it.
    out = accept(
        torch.tensor([4, 5, 6]),
        torch.zeros(3, dtype=torch.bool),
        torch.tensor([[0, 0], [1, 2]]),
        torch.tensor([[N], [5]]),
    )
    assert out.tolist() == [[4, N], [5, 6]]


def test_at_random_it_is_the_loop_that_it_stands_for():
    rng = random.Random(0)
    for _ in range(300):
        k, batch = rng.randint(1, 5), rng.randint(1, 4)
        sampled = [[rng.randrange(3) for _ in range(k + 1)] for _ in range(batch)]
        drafts = [[rng.choice([0, 1, 2, N]) for _ in range(k)] for _ in range(batch)]
        wanted = []
        for row, draft in zip(sampled, drafts, strict=True):
            kept = [row[0]]
            for i, d in enumerate(draft):
                if d != row[i]:
                    break
                kept.append(row[i + 1])
            wanted.append(kept + [N] * (k + 1 - len(kept)))
        assert accepted(sampled, drafts) == wanted


def test_it_draws_from_p_whatever_is_drafted():
    """Rejection by matching: with rows sampled from p, the token that comes out is distributed as p.

    100,000 draws: a share is off by 5 standard deviations, 0.008, once in a million tests.
    """
    p = torch.tensor([0.5, 0.3, 0.2])
    count = 100_000
    generator = torch.Generator().manual_seed(0)
    sampled = torch.multinomial(p, 2 * count, replacement=True, generator=generator)
    rows = torch.arange(2 * count).view(count, 2)
    out = accept(sampled, torch.zeros(2 * count, dtype=torch.bool), rows, torch.full((count, 1), 1))
    shares = torch.bincount(out[:, 0], minlength=3) / count
    assert (shares - p).abs().max() < 0.008
    right = (out[:, 1] != N).float().mean()
    assert abs(right - 0.3) < 0.008
    behind = out[out[:, 1] != N][:, 1]
    assert (torch.bincount(behind, minlength=3) / len(behind) - p).abs().max() < 0.015
