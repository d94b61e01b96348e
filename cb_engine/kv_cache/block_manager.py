"""Who holds which blocks: block tables per request and layer group, prefix hits, copy-on-write.

Owns the tables and all calls to the BlockPools. Does not decide whom to run, admit or preempt: the Scheduler does.
Layers fall into groups (full attention, sliding window of one size); each has its own pool and its own tables,
and a request's table in a group is a list of block ids in token order, with the null block where a sliding window
has passed:

    tokens        0 ......... first_needed ........ start ............ start + num_new
    full group    [ b3 | b7 | b1 | b9 | b2 ]                         one id per block of tokens
    window group  [  0 |  0 | b4 | b5 | b8 ]                         blocks behind the window are given back

A prefix that others have computed may end within a block: the whole block is shared then, and copied before the first
token is written into it.

    cached        [ A A A A | B B B B ]           both blocks stay what they are
    request       [ A A A A | B B c c ]           6 tokens are shared, the second block is a copy
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cb_engine.kv_cache.block import NULL_BLOCK_ID, common_prefix_length, hash_block, root_hash
from cb_engine.kv_cache.block_pool import BlockPool
from cb_engine.request import Request

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class KVGroup:
    """Layers that share a block table. `window` is None for full attention."""

    window: int | None
    num_blocks: int


@dataclass(frozen=True)
class SharedPrefix:
    """Blocks that already hold a request's first `num_tokens` tokens; one table per group."""

    num_tokens: int
    tables: tuple[tuple[int, ...], ...]

    def ends_inside_block(self, block_size: int) -> bool:
        """Whether the last block is to be copied: behind the shared tokens it holds another's, or will."""
        return self.num_tokens % block_size != 0


@dataclass(frozen=True)
class BlockCopy:
    """A copy-on-write order for the runner: within `group`, copy block `src` to `dst` before the step."""

    group: int
    src: int
    dst: int


@dataclass(slots=True)
class _Holding:
    """What one running request holds."""

    row: int  # its row of the dense tables
    tables: list[list[int]]
    num_hashed_blocks: int = 0  # blocks already offered to the prefix cache
    cacheable: bool = True
    sources: list[tuple[int, int, bytes]] = field(default_factory=list)  # copied ones: (group, block, its hash)
    # Tokens up to which nothing has to be allocated, copied or given back. Nobody else comes to hold the block that is
    # written meanwhile: a fork that shares it copies it in the same call of `allocate`.
    roomy_until: int = 0


@dataclass
class _Group:
    """One layer group's pool and its dense table, a row per running request, ready to be sliced for a step."""

    window: int | None
    pool: BlockPool
    dense: Int32Array = field(repr=False)

    def first_needed_block(self, position: int, block_size: int) -> int:
        """The first block that the query at `position` can still see."""
        return 0 if self.window is None else max(0, position - self.window + 1) // block_size

    def unchanged_until(self, position: int, block_size: int) -> int:
        """The first position after this one that sees a block less."""
        if self.window is None:
            return 1 << 62
        return (self.first_needed_block(position, block_size) + 1) * block_size + self.window - 1


class BlockManager:
    """Invariant: a block's ref_count is the number of table entries that name it (`check` verifies this)."""

    def __init__(
        self,
        groups: Sequence[KVGroup],
        *,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.block_size = block_size
        self.max_blocks_per_seq = -(-max_model_len // block_size)
        self._enable_prefix_caching = enable_prefix_caching
        shape = (max_num_seqs, self.max_blocks_per_seq)
        self._groups = [_Group(g.window, BlockPool(g.num_blocks), np.zeros(shape, np.int32)) for g in groups]
        self._holdings: dict[str, _Holding] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._copies: list[BlockCopy] = []
        self._weight_version = 0

    # ---- questions -------------------------------------------------------------------------------------------

    @property
    def num_live_blocks(self) -> int:
        """Blocks held by requests, over all groups."""
        return sum(g.pool.num_live for g in self._groups)

    @property
    def num_cached_blocks(self) -> int:
        """Unheld blocks that a prefix may hit, over all groups."""
        return sum(g.pool.num_cached for g in self._groups)

    @property
    def num_free_blocks(self) -> int:
        """Unheld blocks without content, over all groups."""
        return sum(g.pool.num_available - g.pool.num_cached for g in self._groups)

    @property
    def num_total_blocks(self) -> int:
        """Live, cached and free blocks together: the null blocks are not counted."""
        return sum(g.pool.num_usable for g in self._groups)

    @property
    def weight_version(self) -> int:
        """The version of the weights that new blocks are computed with."""
        return self._weight_version

    def capacity_shortage(self, num_tokens: int, chunk: int) -> tuple[int, int] | None:
        """Whether a request of `num_tokens`, computed `chunk` tokens a step, exceeds a pool even when alone.

        Returns:
            (blocks needed, blocks there are) of the first group that is too small, or None if it fits.
        """
        for group in self._groups:
            needed = -(-num_tokens // self.block_size)
            if group.window is not None:
                needed = min(needed, self._window_blocks(group.window, min(num_tokens, chunk)))
            if needed > group.pool.num_usable:
                return needed, group.pool.num_usable
        return None

    def capacity(self, limit: int, chunk: int) -> int:
        """Tokens, up to `limit`, of the longest request that the pools hold when it is alone."""
        lengths = range(1, limit + 1)
        return bisect_left(lengths, True, key=lambda n: self.capacity_shortage(n, chunk) is not None)

    def has_room_for(self, num_tokens: int, chunk: int, reserve: int, shared: SharedPrefix | None = None) -> bool:
        """Whether `num_tokens` more tokens, computed `chunk` a step, fit beyond `shared` and leave `reserve` blocks
        in every group."""
        for index, group in enumerate(self._groups):
            table = shared.tables[index] if shared else ()
            total = -(-((shared.num_tokens if shared else 0) + num_tokens) // self.block_size)
            revived = sum(group.pool.is_evictable(b) for b in table)
            needed = total - len(table) + revived
            if group.window is not None:
                needed = min(needed, self._window_blocks(group.window, min(num_tokens, chunk)))
            if shared is not None and shared.ends_inside_block(self.block_size):
                needed += 1  # the copy
            room = group.pool.num_available - needed
            # A pool smaller than the reserve must still admit somebody when it is idle.
            if room < 0 or (room < reserve and group.pool.num_live > 0):
                return False
        return True

    # ---- prefixes --------------------------------------------------------------------------------------------

    def match_prefix(self, request: Request) -> SharedPrefix | None:
        """The longest cached prefix of the request that leaves at least one token to compute.

        Whole blocks, then part of one more: a block that begins like the rest of the request and goes on otherwise.
        A window group needs only the blocks that the window at the end of the prefix still sees.
        """
        if not self._may_hit(request):
            return None
        self._extend_hashes(request, (request.num_tokens - 1) // self.block_size)
        length = (request.num_tokens - 1) // self.block_size
        found: list[list[int | None]] = []
        for group in self._groups:
            ids = self._find_blocks(group, request, length)
            found.append(ids)
            if group.window is None:
                length = next((i for i in range(length) if ids[i] is None), length)
        while length and not all(self._covers(g, f, length) for g, f in zip(self._groups, found, strict=True)):
            length -= 1
        part, num_equal = self._find_part(request, length)  # ((), 0) if there is none
        if not length and not part:
            return None
        tables = tuple(
            self._prefix_table(g, f, length) + part[i : i + 1]
            for i, (g, f) in enumerate(zip(self._groups, found, strict=True))
        )
        return SharedPrefix(length * self.block_size + num_equal, tables)

    def without_copy(self, shared: SharedPrefix) -> SharedPrefix | None:
        """As much of a prefix as whole blocks hold, or None if that is nothing or a window would miss a block of it."""
        length = shared.num_tokens // self.block_size
        tables = tuple(table[:length] for table in shared.tables)
        for group, table in zip(self._groups, tables, strict=True):
            if NULL_BLOCK_ID in table[group.first_needed_block(length * self.block_size, self.block_size) :]:
                return None
        return SharedPrefix(length * self.block_size, tables) if length else None

    @property
    def min_shared_tokens(self) -> int:
        """Prefixes with fewer tokens in common are not hit."""
        return -(-self.block_size // 2)

    def num_shareable_tokens(self, request: Request, leader: Request) -> int:
        """How many of the request's first tokens can be had from a running one, once that has computed what it has."""
        if not self._may_hit(request) or not self._holdings[leader.request_id].cacheable:
            return 0
        if leader.sampling_params.cache_salt != request.sampling_params.cache_salt:
            return 0
        num_full = leader.num_tokens // self.block_size * self.block_size  # only full blocks are cached
        num_equal = min(common_prefix_length(leader.token_ids, request.token_ids), num_full, request.num_tokens - 1)
        num_shareable = self._worth_sharing(num_equal)
        # What the leader has computed was there to be hit before, and will not come again.
        is_coming = leader.num_computed_tokens < -(-num_shareable // self.block_size) * self.block_size
        return num_shareable if is_coming else 0

    def fork(self, source: Request, num_tokens: int) -> SharedPrefix | None:
        """The source's blocks that hold its first `num_tokens` tokens, for a sibling with the same ones.

        Returns:
            None if a window group of the source has already given back a block that the sibling would see, or if the
            source's blocks were computed under older weights.
        """
        holding = self._holdings[source.request_id]
        if not holding.cacheable:
            return None
        end = -(-num_tokens // self.block_size)
        tables: list[tuple[int, ...]] = []
        for group, table in zip(self._groups, holding.tables, strict=True):
            first = group.first_needed_block(num_tokens, self.block_size)
            if NULL_BLOCK_ID in table[first:end]:
                return None
            tables.append((NULL_BLOCK_ID,) * min(first, end) + tuple(table[first:end]))
        return SharedPrefix(num_tokens, tuple(tables))

    # ---- changes ---------------------------------------------------------------------------------------------

    def allocate(self, request: Request, num_new_tokens: int, shared: SharedPrefix | None = None) -> bool:
        """Gives the request the blocks for its next `num_new_tokens` tokens, in all groups or in none.

        Args:
            request: a running request, or a new one, whose first tokens `shared` may already hold.
            num_new_tokens: tokens computed next, counted from `num_computed_tokens` (or from the shared ones).

        Returns:
            False, with nothing changed but what a window had passed, when a pool is too short.
        """
        holding = self._holdings.get(request.request_id)
        if holding is not None and request.num_computed_tokens + num_new_tokens <= holding.roomy_until:
            return True  # most steps of most requests
        start = request.num_computed_tokens if holding else (shared.num_tokens if shared else 0)
        end_block = -(-(start + num_new_tokens) // self.block_size)
        if holding is not None:
            self._release_passed(holding, start)
        needs: list[int] = []
        for index, group in enumerate(self._groups):
            table: Sequence[int] = holding.tables[index] if holding else (shared.tables[index] if shared else ())
            revived = 0 if holding else sum(group.pool.is_evictable(b) for b in table)
            needs.append(end_block - len(table) + self._must_copy(group, table, start, bool(shared)))
            if needs[-1] + revived > group.pool.num_available:
                return False
        if holding is None:
            holding = self._open(request, shared)
        for index, need in enumerate(needs):
            self._extend(holding, index, start, need)
        unchanged = min(group.unchanged_until(start, self.block_size) for group in self._groups)
        holding.roomy_until = min(end_block * self.block_size, unchanged)
        return True

    def allocate_spare(self, request: Request, num_new_tokens: int, *, reserve: int) -> bool:
        """`allocate` for a running request whose next token has its block already, or could have: tokens that may never
        be needed get blocks only as long as `reserve` of each pool remain."""
        tables = self._holdings[request.request_id].tables
        end_block = -(-(request.num_computed_tokens + num_new_tokens) // self.block_size)
        for group, table in zip(self._groups, tables, strict=True):
            if end_block > len(table) and group.pool.num_available - (end_block - len(table)) < reserve:
                return False
        return self.allocate(request, num_new_tokens)

    def trim(self, request: Request, num_tokens: int) -> int:
        """Takes the blocks back that a running request holds beyond its first `num_tokens` tokens; returns how many."""
        holding = self._holdings[request.request_id]
        keep = -(-num_tokens // self.block_size)
        freed = 0
        for group, table in zip(self._groups, holding.tables, strict=True):
            if len(table) > keep:
                group.pool.release(table[keep:])
                group.dense[holding.row, keep : len(table)] = NULL_BLOCK_ID
                freed += len(table) - keep
                del table[keep:]
        holding.roomy_until = min(holding.roomy_until, keep * self.block_size)
        return freed

    def cache_computed_blocks(self, request: Request) -> None:
        """Makes the request's full, computed blocks findable; called once a step is known to be good."""
        holding = self._holdings[request.request_id]
        num_full = request.num_computed_tokens // self.block_size
        if not self._enable_prefix_caching or not holding.cacheable or num_full <= holding.num_hashed_blocks:
            return
        self._extend_hashes(request, num_full)
        for i in range(holding.num_hashed_blocks, num_full):
            tokens = request.token_ids[i * self.block_size : (i + 1) * self.block_size]
            parent = request.block_hashes[i - 1] if i else self._root(request)
            for group, table in zip(self._groups, holding.tables, strict=True):
                if table[i] != NULL_BLOCK_ID:
                    group.pool.insert(table[i], request.block_hashes[i], parent, tokens)
        holding.num_hashed_blocks = num_full

    def free(self, request: Request, *, forget: bool = False) -> None:
        """Takes back everything the request holds. Full blocks that it has cached or hit stay findable, unless `forget`
        says that their content is not to be trusted."""
        holding = self._holdings.pop(request.request_id, None)
        if holding is None:
            return
        for group, table in zip(self._groups, holding.tables, strict=True):
            if forget:
                group.pool.forget(table)
            group.pool.release(table)
            group.dense[holding.row, : len(table)] = NULL_BLOCK_ID
        self._free_rows.append(holding.row)
        for index, source, block_hash in holding.sources if forget else ():
            self._groups[index].pool.forget_content(source, block_hash)

    def set_weight_version(self, version: int) -> None:
        """From now on blocks belong to other weights: nothing computed before can be hit, and no running request
        that keeps its old blocks is cached any more."""
        if version == self._weight_version:
            return
        self._weight_version = version
        for group in self._groups:
            group.pool.drop_cache()
        for holding in self._holdings.values():
            holding.cacheable = False

    def reset_prefix_cache(self) -> None:
        """Forgets all cached content at once."""
        for group in self._groups:
            group.pool.drop_cache()
        for holding in self._holdings.values():
            holding.num_hashed_blocks = 0

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """The copies ordered since the last call, for the next step."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def block_tables(self, requests: Sequence[Request], width: int) -> tuple[Int32Array, ...]:
        """Per group a copy of the tables, [len(requests), width]; entries beyond a table are the null block."""
        rows = [self._holdings[r.request_id].row for r in requests]
        return tuple(group.dense[rows, :width] for group in self._groups)

    def check(self) -> None:
        """Verifies conservation of blocks and rows; see `BlockPool.check`."""
        for index, group in enumerate(self._groups):
            holders: dict[int, int] = {}
            for holding in self._holdings.values():
                table = holding.tables[index]
                if list(group.dense[holding.row, : len(table)]) != table:
                    raise RuntimeError(f"group {index}: the dense row {holding.row} differs from its table")
                for block_id in table:
                    if block_id != NULL_BLOCK_ID:
                        holders[block_id] = holders.get(block_id, 0) + 1
            group.pool.check(holders)
        rows = [h.row for h in self._holdings.values()] + self._free_rows
        if len(set(rows)) != len(rows):
            raise RuntimeError("a row of the dense tables is held twice")

    # ---- inside ----------------------------------------------------------------------------------------------

    def _open(self, request: Request, shared: SharedPrefix | None) -> _Holding:
        row = self._free_rows.pop()
        tables = [list(t) for t in shared.tables] if shared else [[] for _ in self._groups]
        for group, table in zip(self._groups, tables, strict=True):
            group.pool.share(table)
            group.dense[row, : len(table)] = table
        holding = self._holdings[request.request_id] = _Holding(row, tables)
        holding.num_hashed_blocks = shared.num_tokens // self.block_size if shared else 0
        return holding

    def _extend(self, holding: _Holding, index: int, start: int, count: int) -> None:
        """Takes `count` blocks; the first replaces a shared block that the next token would be written into."""
        group, table = self._groups[index], holding.tables[index]
        new = group.pool.allocate(count)
        if self._must_copy(group, table, start, shared=False):
            last = start // self.block_size
            source, table[last] = table[last], new.pop(0)
            self._copies.append(BlockCopy(index, source, table[last]))
            block_hash = group.pool.hash_of(source)
            if block_hash is not None:
                holding.sources.append((index, source, block_hash))
            group.pool.release([source])
            group.dense[holding.row, last] = table[last]
        group.dense[holding.row, len(table) : len(table) + len(new)] = new
        table.extend(new)

    def _must_copy(self, group: _Group, table: Sequence[int], start: int, shared: bool) -> bool:
        """Whether the token at `start` would be written into a block that somebody else holds too, or may yet hit.

        `shared` tells that the table's own reference is still to come.
        """
        block = start // self.block_size
        if start % self.block_size == 0 or block >= len(table):
            return False
        return group.pool.ref_count(table[block]) + shared > 1 or group.pool.is_findable(table[block])

    def _release_passed(self, holding: _Holding, start: int) -> None:
        """Gives back the blocks that no query from `start` on can see."""
        for group, table in zip(self._groups, holding.tables, strict=True):
            last = min(group.first_needed_block(start, self.block_size), len(table))
            while last > 0 and table[last - 1] != NULL_BLOCK_ID:
                last -= 1
                group.pool.release([table[last]])
                table[last] = NULL_BLOCK_ID
                group.dense[holding.row, last] = NULL_BLOCK_ID

    def _window_blocks(self, window: int, chunk: int) -> int:
        """Blocks for the window behind a chunk, the chunk, and a partial block at each end."""
        return (window - 1 + chunk) // self.block_size + 2

    def _root(self, request: Request) -> bytes:
        return root_hash(self._weight_version, request.sampling_params.cache_salt)

    def _extend_hashes(self, request: Request, num_blocks: int) -> None:
        hashes = request.block_hashes
        while len(hashes) < num_blocks:
            i = len(hashes)
            parent = hashes[-1] if hashes else self._root(request)
            hashes.append(hash_block(parent, request.token_ids[i * self.block_size : (i + 1) * self.block_size]))

    def _find_blocks(self, group: _Group, request: Request, length: int) -> list[int | None]:
        """The cached block of each of the first `length` blocks; a full group stops at the first gap."""
        found: list[int | None] = []
        parent = self._root(request)
        for i in range(length):
            tokens = request.token_ids[i * self.block_size : (i + 1) * self.block_size]
            found.append(group.pool.find(request.block_hashes[i], parent, tokens))
            if found[-1] is None and group.window is None:
                break
            parent = request.block_hashes[i]
        return found + [None] * (length - len(found))

    def _find_part(self, request: Request, length: int) -> tuple[tuple[int, ...], int]:
        """A block in every group that begins like the request after its first `length` blocks.

        Returns:
            (block ids, number of equal tokens), or ((), 0) where there is none worth a copy.
        """
        parent = request.block_hashes[length - 1] if length else self._root(request)
        start = length * self.block_size
        tokens = tuple(request.token_ids[start : min(start + self.block_size, request.num_tokens - 1)])
        block, num_equal = self._groups[0].pool.find_longest(parent, tokens)
        if block is None or block.block_hash is None or self._worth_sharing(num_equal) == 0:
            return (), 0
        ids = tuple(g.pool.find(block.block_hash, parent, block.token_ids) for g in self._groups)
        return ((), 0) if None in ids else (tuple(i for i in ids if i is not None), num_equal)

    def _worth_sharing(self, num_equal_tokens: int) -> int:
        """How many of a prefix's equal tokens to share: of its last block at least half, or a copy is not worth it."""
        part = num_equal_tokens % self.block_size
        return num_equal_tokens if part >= self.min_shared_tokens else num_equal_tokens - part

    def _may_hit(self, request: Request) -> bool:
        """Prompt logprobs need the logits, hence the computation, of every prompt token."""
        return self._enable_prefix_caching and request.may_hit and request.sampling_params.prompt_logprobs is None

    def _covers(self, group: _Group, found: Sequence[int | None], length: int) -> bool:
        first = group.first_needed_block(length * self.block_size, self.block_size)
        return None not in found[first:length]

    def _prefix_table(self, group: _Group, found: Sequence[int | None], length: int) -> tuple[int, ...]:
        first = group.first_needed_block(length * self.block_size, self.block_size)
        return tuple(NULL_BLOCK_ID if i < first else (found[i] or NULL_BLOCK_ID) for i in range(length))
