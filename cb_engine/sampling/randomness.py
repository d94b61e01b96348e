"""The numbers that chance gives: one per request and output position.

Owns: the hash from (seed, position) to a number in [0, 1).
Does not know: batches, devices, order of calls. It holds no state, so a request draws the same numbers alone,
in any batch, after a preemption and when it is replayed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment: 2^64 divided by the golden ratio, made odd
_SAMPLE_SALT = 0xD1B54A32D192ED03  # keeps derived seeds apart from the positions' stream


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    # splitmix64's finaliser: a bijection in which every input bit flips about half of the output bits.
    # Unsigned arrays wrap.
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def derive_seed(seed: int, sample_index: int) -> int:
    """Return the seed of one of a request's `n` samples.

    Args:
        seed: the request's seed, any integer; taken modulo 2^64.
        sample_index: which of the samples, from 0.

    Returns:
        A seed in [0, 2^64). Different samples of one request get different ones.
    """
    start = np.array([(seed + _GOLDEN) & _MASK], dtype=np.uint64)
    step = np.array([(_SAMPLE_SALT * (sample_index + 1)) & _MASK], dtype=np.uint64)
    return int(_mix(_mix(start) ^ step)[0])


def uniforms(seeds: npt.NDArray[np.uint64], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return one number per request.

    Args:
        seeds: the requests' seeds, `[R]`.
        positions: the output position that each request draws for, length `R`.

    Returns:
        `[R]` multiples of 2^-53 in [0, 1).
    """
    counters = (np.asarray(positions, dtype=np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    bits = _mix(_mix(seeds + np.uint64(_GOLDEN)) ^ counters)
    # Two rounds over the counter: a seed and a position must not be exchangeable for another pair with the
    # same xor.
    bits = _mix(bits + counters)
    uniform: npt.NDArray[np.float64] = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return uniform
