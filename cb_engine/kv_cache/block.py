"""A block and its hash. Owns the identity of cached content; knows no pool and no request.

A full block is named by a 128-bit hash chained over its prefix:

    h[-1] = H(weight_version, cache_salt)        h[i] = H(h[i-1], tokens of block i)

so equal names mean equal prefixes under equal weights. A look-up still compares tokens and parent.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

NULL_BLOCK_ID = 0  # what padding writes to and masked table entries point to; never held, never cached


@dataclass(eq=False, slots=True)
class Block:
    """One fixed run of KV slots. Changed by its BlockPool only."""

    block_id: int
    ref_count: int = 0
    block_hash: bytes | None = None  # set while its content can be found in the prefix cache
    parent_hash: bytes | None = None
    token_ids: tuple[int, ...] = ()


def common_prefix_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences have in common from their start; fast if both are lists, or both tuples."""
    length, limit, step = 0, min(len(a), len(b)), 256
    while length < limit and a[length : length + step] == b[length : length + step]:
        length += step
    while length < limit and a[length] == b[length]:
        length += 1
    return min(length, limit)


def root_hash(weight_version: int, cache_salt: str | None) -> bytes:
    """The parent of a sequence's first block: everything but tokens that its KV depends on."""
    return blake2b(repr((weight_version, cache_salt)).encode(), digest_size=16).digest()


def hash_block(parent_hash: bytes, token_ids: Sequence[int]) -> bytes:
    """128-bit name of the block that continues the prefix `parent_hash` with `token_ids`."""
    return blake2b(parent_hash + array("q", token_ids).tobytes(), digest_size=16).digest()
