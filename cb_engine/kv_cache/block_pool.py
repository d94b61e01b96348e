"""Which blocks exist: the free list, reference counts and the prefix-cache index of one layer group.

Owns every `Block`. Does not know requests or tables: the BlockManager says which blocks a request holds.
A block is in exactly one state:

    free       ref_count 0, no hash      taken first, in stack order (warm in cache)
    cached     ref_count 0, a hash       a hit revives it; else evicted block by block, least recently used first
    held       ref_count > 0             with or without a hash
    null       block 0                   outside all counts
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from cb_engine.kv_cache.block import NULL_BLOCK_ID, Block, common_prefix_length

_MAX_COMPARED = 16  # continuations of one prefix that `find_longest` looks at: bounds what a look-up costs


class BlockPool:
    """Invariant: every block but the null block is free, cached or held, and never two of them."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks} leaves no block beside the null block; give at least 2")
        self.num_blocks = num_blocks
        self._blocks = [Block(i) for i in range(num_blocks)]
        self._free = list(range(num_blocks - 1, NULL_BLOCK_ID, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # evictable ids, least recently used first
        self._by_hash: dict[bytes, Block] = {}
        self._by_parent: dict[bytes, dict[int, Block]] = {}  # findable blocks by parent and id, the latest last

    @property
    def num_usable(self) -> int:
        """Blocks a request could hold if it were alone."""
        return self.num_blocks - 1

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free ones and evictable ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and that a prefix could still hit."""
        return len(self._cached)

    @property
    def num_live(self) -> int:
        """Blocks that some request holds."""
        return self.num_usable - self.num_available

    def ref_count(self, block_id: int) -> int:
        """How many requests hold the block."""
        return self._blocks[block_id].ref_count

    def is_evictable(self, block_id: int) -> bool:
        """Whether the block is cached and unheld, so that a hit on it takes one from `num_available`."""
        return block_id in self._cached

    def is_findable(self, block_id: int) -> bool:
        """Whether a prefix can hit the block, so that its content must stay as it is."""
        return self.hash_of(block_id) is not None

    def hash_of(self, block_id: int) -> bytes | None:
        """The block's hash while it is findable."""
        return self._blocks[block_id].block_hash

    def allocate(self, count: int) -> list[int]:
        """Hands out `count` blocks with one reference each, evicting cached ones when the free ones run out.

        Raises:
            ValueError: fewer than `count` are available; callers ask `num_available` first.
        """
        if count > self.num_available:
            raise ValueError(f"{count} blocks asked for, {self.num_available} available")
        ids: list[int] = []
        for _ in range(count):
            block_id = self._free.pop() if self._free else self._evict()
            self._blocks[block_id].ref_count = 1
            ids.append(block_id)
        return ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Adds a reference to each block, reviving cached ones. The null block is passed over."""
        for block_id in block_ids:
            if block_id == NULL_BLOCK_ID:
                continue
            block = self._blocks[block_id]
            if block.ref_count == 0:
                del self._cached[block_id]
            block.ref_count += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drops one reference from each. Give a sequence's blocks in order: they are released tail first,
        so that the head, which other prompts are likelier to share, is evicted last."""
        for block_id in reversed(block_ids):
            if block_id == NULL_BLOCK_ID:
                continue
            block = self._blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.block_hash is None:
                    self._free.append(block_id)
                else:
                    self._cached[block_id] = None

    def insert(self, block_id: int, block_hash: bytes, parent_hash: bytes, token_ids: Sequence[int]) -> None:
        """Makes a held, full block findable. The first block under a hash stays; a later twin is left uncached."""
        block = self._blocks[block_id]
        if block.block_hash is not None or block_hash in self._by_hash:
            return
        block.block_hash, block.parent_hash, block.token_ids = block_hash, parent_hash, tuple(token_ids)
        self._by_hash[block_hash] = block
        self._by_parent.setdefault(parent_hash, {})[block_id] = block

    def find(self, block_hash: bytes, parent_hash: bytes, token_ids: Sequence[int]) -> int | None:
        """The block holding exactly these tokens after exactly this prefix, or None. A hash alone proves nothing."""
        block = self._by_hash.get(block_hash)
        if block is None or block.parent_hash != parent_hash or block.token_ids != tuple(token_ids):
            return None
        return block.block_id

    def find_longest(self, parent_hash: bytes, token_ids: Sequence[int]) -> tuple[Block | None, int]:
        """Of the latest blocks after exactly this prefix the one that begins with most of `token_ids`.

        Returns:
            the block, and how many of its first tokens are equal; (None, 0) if there is none.
        """
        best, most = None, 0
        for block in islice(reversed(self._by_parent.get(parent_hash, {}).values()), _MAX_COMPARED):
            equal = common_prefix_length(block.token_ids, token_ids)
            if equal > most:
                best, most = block, equal
        return best, most

    def forget(self, block_ids: Iterable[int]) -> None:
        """Makes held blocks unfindable; whoever holds them goes on."""
        for block_id in block_ids:
            self._forget(self._blocks[block_id])

    def forget_content(self, block_id: int, block_hash: bytes) -> None:
        """Makes a block unfindable, held or not, if it still has this content."""
        if self.hash_of(block_id) != block_hash:
            return
        self._forget(self._blocks[block_id])
        if block_id in self._cached:
            del self._cached[block_id]
            self._free.append(block_id)

    def drop_cache(self) -> None:
        """Forgets all cached content; held blocks stay held."""
        for block in list(self._by_hash.values()):
            self._forget(block)
        self._free.extend(self._cached)
        self._cached.clear()

    def check(self, holders: dict[int, int]) -> None:
        """Verifies conservation against `holders`, the table entries per block. For tests and debugging.

        Raises:
            RuntimeError: naming the first block whose books do not agree.
        """
        free = set(self._free)
        if len(free) != len(self._free) or free & set(self._cached):
            raise RuntimeError("a block is on the free list twice, or both free and cached")
        for block in self._blocks[1:]:
            states = (block.block_id in free, block.block_id in self._cached, block.ref_count > 0)
            if sum(states) != 1:
                raise RuntimeError(f"block {block.block_id}: (free, cached, held) = {states}, exactly one expected")
            if block.ref_count != holders.get(block.block_id, 0):
                raise RuntimeError(
                    f"block {block.block_id}: ref_count {block.ref_count}, but {holders.get(block.block_id, 0)} "
                    "table entries"
                )
            if block.block_hash is not None and self._by_hash.get(block.block_hash) is not block:
                raise RuntimeError(f"block {block.block_id} has a hash that the index does not know")
        by_parent = {(parent, i, b) for parent, siblings in self._by_parent.items() for i, b in siblings.items()}
        if by_parent != {(b.parent_hash, b.block_id, b) for b in self._by_hash.values()}:
            raise RuntimeError("the index by parent and the index by hash differ")

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        self._forget(self._blocks[block_id])
        return block_id

    def _forget(self, block: Block) -> None:
        if block.block_hash is not None and block.parent_hash is not None:
            del self._by_hash[block.block_hash]
            siblings = self._by_parent[block.parent_hash]
            del siblings[block.block_id]
            if not siblings:
                del self._by_parent[block.parent_hash]
        block.block_hash, block.parent_hash, block.token_ids = None, None, ()
