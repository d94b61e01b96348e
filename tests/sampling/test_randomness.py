"""The numbers that are drawn with are uniform, independent and the same each time."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from cb_engine.sampling.randomness import derive_seed, uniforms


def grid(seeds: Iterable[int], positions: Iterable[int]) -> npt.NDArray[np.float64]:
    seeds = list(seeds)
    return np.stack([uniforms(np.array(seeds, dtype=np.uint64), [p] * len(seeds)) for p in positions])


def test_a_number_depends_on_seed_and_position_only():
    alone = uniforms(np.array([7], dtype=np.uint64), [3])
    among = uniforms(np.array([1, 7, 2**64 - 1], dtype=np.uint64), [9, 3, 0])
    assert among[1] == alone[0]
    # Written down: a change of these would change every seeded output.
    assert alone[0] == 0.17506733521231221


def test_uniform_and_uncorrelated():
    # 65536 numbers of neighbouring seeds and positions. Each bound is 5 standard deviations: a false alarm in
    # 10^6.
    numbers = grid(range(256), range(256))
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    size = numbers.size
    counts = np.histogram(numbers, bins=64, range=(0, 1))[0]
    chi_square = ((counts - size / 64) ** 2 / (size / 64)).sum()
    assert abs(chi_square - 63) < 5 * np.sqrt(2 * 63)
    centred = numbers - numbers.mean()
    for other in (np.roll(centred, 1, axis=0), np.roll(centred, 1, axis=1), centred.T):
        assert abs((centred * other).mean() / centred.var()) < 5 * np.sqrt(2 / size)
    assert len(np.unique(numbers)) == size


def test_derived_seeds_differ():
    seeds = {derive_seed(seed, index) for seed in range(-50, 50) for index in range(50)}
    assert len(seeds) == 5000
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert derive_seed(-1, 0) == derive_seed(2**64 - 1, 0)
    assert derive_seed(5, 1) == derive_seed(5, 1)
