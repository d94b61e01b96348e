"""The C++ CPU kernel against dense attention written out in float64, on every instruction set this CPU has."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
import torch

from cb_engine.attention.backend import AttentionMetadata, AttentionParams, KVCache, KVSpec
from cb_engine.attention.native_backend import NativeBackend
from cb_engine.native import build

pytestmark = pytest.mark.skipif(not build.load(), reason="no C++ compiler here")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Largest error allowed, absolute, on values of order one. bfloat16 keeps 8 bits, weights and result are rounded to it.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclass
class Options:
    """What `run` takes beside the tensors."""

    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def kwargs(self) -> dict[str, Any]:
        return {"window": self.window, "softcap": self.softcap, "sinks": self.sinks}


def dense(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, options: Options
) -> torch.Tensor:
    """Attention of the last rows of a sequence to all of it: [q, H, D], [n, Hkv, D], [n, Hkv, D] -> [q, H, D]."""
    q, k, v = query.double(), keys.double(), values.double()
    num_queries, num_heads, _ = q.shape
    n = k.shape[0]
    k, v = (x.repeat_interleave(num_heads // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    position = torch.arange(n - num_queries, n)[:, None]
    key_position = torch.arange(n)[None]
    hidden = key_position > position
    if options.window is not None:
        hidden |= key_position <= position - options.window
    scores = scores.masked_fill(hidden, -torch.inf)
    if options.sinks is not None:
        sink = options.sinks.double()[:, None, None].expand(-1, num_queries, 1)
        scores = torch.cat([scores, sink], dim=-1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :-1], v)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


class World:
    """Sequences whose tokens go through the backend step by step, in a pool full of NaN and of shuffled blocks."""

    def __init__(
        self,
        lengths: list[int],
        *,
        heads: int = 2,
        kv_heads: int = 1,
        head_dim: int = 16,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.block_size, self.dtype = block_size, dtype
        self.backend = NativeBackend()
        spec = KVSpec(num_kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, block_size=block_size)
        needed = [-(-length // block_size) for length in lengths]
        num_blocks = 1 + sum(needed) + 2
        self.cache = self.backend.allocate(spec, num_blocks, torch.device("cpu"))
        self.cache.k.fill_(torch.nan)
        self.cache.v.fill_(torch.nan)
        ids = (1 + torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed))).tolist()
        self.tables = [[ids.pop() for _ in range(count)] for count in needed]
        self.q = [self._random(length, heads, head_dim) for length in lengths]
        self.k = [self._random(length, kv_heads, head_dim) for length in lengths]
        self.v = [self._random(length, kv_heads, head_dim) for length in lengths]
        self.done = [0] * len(lengths)
        self.scale = head_dim**-0.5

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def metadata(self, spans: list[tuple[int, int, int]], pad_requests: int, pad_tokens: int) -> AttentionMetadata:
        """`spans`: (sequence, first token, end). Padding: requests of one token and length 0, then loose tokens."""
        counts = [end - begin for _, begin, end in spans] + [1] * pad_requests
        slots = [
            self.tables[i][p // self.block_size] * self.block_size + p % self.block_size
            for i, begin, end in spans
            for p in range(begin, end)
        ]
        width = max(len(self.tables[i]) for i, _, _ in spans) + 1
        table = torch.zeros(len(counts), width, dtype=torch.int32)
        for row, (i, _, end) in enumerate(spans):
            used = -(-end // self.block_size)
            table[row, :used] = torch.tensor(self.tables[i][:used], dtype=torch.int32)
        lens = [end for _, _, end in spans] + [0] * pad_requests
        return self.backend.plan(
            AttentionMetadata(
                slot_mapping=torch.tensor(slots + [0] * (pad_requests + pad_tokens), dtype=torch.int64),
                block_table=table,
                query_start_loc=torch.tensor([0, *counts]).cumsum(0).int(),
                seq_lens=torch.tensor(lens, dtype=torch.int32),
                max_query_len=max(counts),
                max_seq_len=max(lens),
            )
        )

    def poison(self, positions: range) -> None:
        """Overwrites tokens of sequence 0, and slot 0, with NaN: as padding tokens, which nobody attends to."""
        slots = [self.tables[0][p // self.block_size] * self.block_size + p % self.block_size for p in positions]
        metadata = self.metadata([(0, 0, 0)], 0, 1 + len(slots))
        metadata.slot_mapping[1:] = torch.tensor(slots)
        q, k, v = (x[0].new_full((1 + len(slots), *x[0].shape[1:]), torch.nan) for x in (self.q, self.k, self.v))
        assert not self.backend.run(q, k, v, self.cache, metadata, AttentionParams(1.0)).any()

    def step(
        self,
        counts: dict[int, int],
        options: Options | None = None,
        *,
        pad_requests: int = 0,
        pad_tokens: int = 0,
        strided: bool = False,
    ) -> list[torch.Tensor]:
        """Runs the next `counts[i]` tokens of the sequences `i`; returns their outputs."""
        options = options or Options()
        spans = [(i, self.done[i], self.done[i] + count) for i, count in counts.items()]
        padding = pad_requests + pad_tokens

        def packed(x: list[torch.Tensor]) -> torch.Tensor:
            rows = torch.cat([x[i][begin:end] for i, begin, end in spans])
            return torch.cat([rows, rows.new_full((padding, *rows.shape[1:]), torch.nan)])

        q, k, v = packed(self.q), packed(self.k), packed(self.v)
        if strided:  # as slices of a fused projection, heads first
            fused = torch.cat([q, k, v], dim=1).transpose(0, 1).contiguous().transpose(0, 1)
            q, k, v = torch.split(fused, [q.shape[1], k.shape[1], v.shape[1]], dim=1)
            assert not q.is_contiguous()
        metadata = self.metadata(spans, pad_requests, pad_tokens)
        out = self.backend.run(q, k, v, self.cache, metadata, AttentionParams(self.scale, **options.kwargs()))
        assert out.is_contiguous()
        assert out.dtype == self.dtype
        assert out.shape == q.shape
        assert (out[len(out) - padding :] == 0).all()
        for i, _, end in spans:
            self.done[i] = end
        return list(torch.split(out[: len(out) - padding], [end - begin for _, begin, end in spans]))

    def expected(self, i: int, begin: int, end: int, options: Options | None = None) -> torch.Tensor:
        return dense(self.q[i][begin:end], self.k[i][:end], self.v[i][:end], self.scale, options or Options())

    def check(self, out: torch.Tensor, i: int, begin: int, options: Options | None = None) -> None:
        expected = self.expected(i, begin, begin + len(out), options)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[self.dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "group"), [(8, 3), (20, 1), (64, 3), (96, 4), (128, 1), (5, 2)])
@pytest.mark.parametrize("block_size", [4, 16, 64])
def test_prefill_then_decode(isa: int, dtype: torch.dtype, head_dim: int, group: int, block_size: int) -> None:
    lengths = [1, 17, 70, 133]
    world = World(
        lengths, heads=2 * group, kv_heads=2, head_dim=head_dim, block_size=block_size, dtype=dtype, seed=head_dim
    )
    prompts = {i: max(1, length - 2) for i, length in enumerate(lengths)}
    for i, out in enumerate(world.step(prompts)):
        world.check(out, i, 0)
    for _ in range(2):
        running = dict.fromkeys(range(1, 4), 1)
        begins = list(world.done)
        for i, out in zip(running, world.step(running, pad_requests=2, pad_tokens=3), strict=True):
            world.check(out, i, begins[i])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [3, 4, 12, 16, 48])
@pytest.mark.parametrize(
    "options",
    [
        Options(window=1),
        Options(window=24),
        Options(window=65),
        Options(softcap=2.0),
        Options(softcap=50.0, window=33),
        Options(sinks=torch.tensor([0.5, -1.0, 3.0])),
        Options(sinks=torch.tensor([0.5, -torch.inf, 30.0]), window=7),
    ],
    ids=["window1", "window24", "window65", "softcap", "softcap+window", "sinks", "sinks+window"],
)
def test_options(isa: int, dtype: torch.dtype, block_size: int, options: Options) -> None:
    world = World([90, 150], heads=3, kv_heads=1, head_dim=32, block_size=block_size, dtype=dtype)
    for counts in ({0: 85, 1: 30}, {0: 1, 1: 100}, {0: 4, 1: 20}):  # prefill, mixed, verify and a last chunk
        begins = list(world.done)
        for i, out in zip(counts, world.step(counts, options), strict=True):
            world.check(out, i, begins[i], options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [4, 16])
def test_every_block_residue(isa: int, dtype: torch.dtype, block_size: int) -> None:
    """All lengths and all chunk boundaries around a block; windows that begin everywhere in one."""
    count = 2 * block_size + 1
    world = World(
        [n + 3 for n in range(1, count + 1)], heads=3, kv_heads=1, head_dim=16, block_size=block_size, dtype=dtype
    )
    options = Options(window=block_size + 1)
    for counts in ({i: i + 1 for i in range(count)}, dict.fromkeys(range(count), 2), dict.fromkeys(range(count), 1)):
        begins = list(world.done)
        for i, out in zip(counts, world.step(counts, options), strict=True):
            world.check(out, i, begins[i], options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [40, 41])
def test_nothing_before_the_window_is_read(isa: int, dtype: torch.dtype, window: int) -> None:
    """Blocks outside the window may be freed: their entries are the null block. All of that is NaN here."""
    world = World([200], heads=4, kv_heads=2, head_dim=64, block_size=16, dtype=dtype)
    options = Options(window=window)
    world.step({0: 197}, options)
    visible_from = 198 - window
    world.poison(range(visible_from))
    world.tables[0][: visible_from // 16] = [0] * (visible_from // 16)
    (out,) = world.step({0: 1}, options)
    world.check(out, 0, 197, options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_of_fused_projections(isa: int, dtype: torch.dtype) -> None:
    world = World([40, 3], heads=6, kv_heads=2, head_dim=64, dtype=dtype)
    for i, out in enumerate(world.step({0: 40, 1: 3}, strided=True)):
        world.check(out, i, 0)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, Options()),
        (torch.float32, Options(window=300)),
        (torch.float16, Options(softcap=5.0, sinks=torch.tensor([0.0, 1.0, 2.0]))),
    ],
    ids=["bfloat16", "float32-window", "float16-softcap-sinks"],
)
def test_same_bits_however_the_work_is_cut(isa: int, dtype: torch.dtype, options: Options) -> None:
    """Alone or in a batch, whole or in chunks, one token at a time, on one thread or two, in blocks of any size."""
    length = 531  # more than two pieces of 256
    threads = torch.get_num_threads()
    results = []
    for block_size, num_threads, chunks, crowd in [
        (16, 1, [531], 0),
        (64, 2, [531], 0),
        (4, 2, [100, 300, 127, 3, 1], 0),
        (32, 1, [257, 270, 1, 1, 1, 1], 3),
        (16, 2, [520, 4, 1, 1, 5], 3),
    ]:
        torch.set_num_threads(num_threads)
        try:
            world = World([length], heads=3, kv_heads=1, head_dim=32, block_size=block_size, dtype=dtype)
            others = World([600] * crowd, heads=3, kv_heads=1, head_dim=32, block_size=block_size, dtype=dtype, seed=1)
            results.append(torch.cat([both(world, others, chunk, crowd, options) for chunk in chunks]))
        finally:
            torch.set_num_threads(threads)
    world.check(results[0], 0, 0, options)
    for other in results[1:]:
        assert torch.equal(results[0], other)


def both(world: World, others: World, chunk: int, crowd: int, options: Options) -> torch.Tensor:
    """The next `chunk` tokens of the only sequence of `world`, in one step with one token of each of the others."""
    if crowd == 0:
        return world.step({0: chunk}, options)[0]
    joint = World.__new__(World)
    joint.__dict__.update(world.__dict__)
    base = len(world.cache.k)
    joint.cache = KVCache(torch.cat([world.cache.k, others.cache.k]), torch.cat([world.cache.v, others.cache.v]))
    joint.q, joint.k, joint.v = world.q + others.q, world.k + others.k, world.v + others.v
    joint.tables = world.tables + [[base + block for block in table] for table in others.tables]
    joint.done = world.done + others.done
    out = joint.step({1: 1, 0: chunk, **dict.fromkeys(range(2, crowd + 1), 1)}, options)[1]
    world.cache.k.copy_(joint.cache.k[:base])
    world.cache.v.copy_(joint.cache.v[:base])
    others.cache.k.copy_(joint.cache.k[base:])
    others.cache.v.copy_(joint.cache.v[base:])
    world.done, others.done = joint.done[:1], joint.done[1:]
    return out


def test_long_context_is_split_over_threads(isa: int) -> None:
    """Batch 1, one kv head: the pieces of one request run apart and are merged."""
    world = World([1030], heads=3, kv_heads=1, head_dim=64, dtype=torch.float32)
    options = Options(sinks=torch.tensor([1.0, 5.0, -3.0]))
    world.step({0: 1029})
    (out,) = world.step({0: 1}, options)
    world.check(out, 0, 1029, options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_scores(isa: int, dtype: torch.dtype) -> None:
    """The softmax stays finite where exp() of the scores would not."""
    world = World([100], heads=1, kv_heads=1, head_dim=16, dtype=dtype)
    world.scale = 60.0
    (out,) = world.step({0: 100})
    torch.testing.assert_close(
        out.double(), world.expected(0, 0, 100), rtol=0, atol=3e-2 if dtype != torch.float32 else 1e-3
    )


def test_nan_stays_with_its_request(isa: int) -> None:
    world = World([20, 20], heads=2, kv_heads=1, dtype=torch.bfloat16)
    world.q[0][10] = torch.nan
    first, second = world.step({0: 20, 1: 20})
    assert first[10].isnan().all()
    assert not first[:10].isnan().any()
    assert not first[11:].isnan().any()
    world.check(second, 1, 0)


def test_empty_steps(isa: int) -> None:
    world = World([5], heads=2, kv_heads=1)
    nothing = world.q[0][:0]
    metadata = world.metadata([(0, 0, 0)], 0, 0)
    out = world.backend.run(nothing, world.k[0][:0], world.v[0][:0], world.cache, metadata, AttentionParams(1.0))
    assert out.shape == (0, 2, 16)
    world.check(world.step({0: 5})[0], 0, 0)


def test_copy_blocks(isa: int) -> None:
    """A copied block holds the same tokens, whatever the layout."""
    world = World([20], heads=2, kv_heads=2, dtype=torch.bfloat16)
    world.step({0: 19})
    spare = next(i for i in range(1, len(world.cache.k)) if i not in world.tables[0])
    world.backend.copy_blocks(world.cache, torch.tensor([world.tables[0][1]]), torch.tensor([spare]))
    world.tables[0][1] = spare
    world.check(world.step({0: 1})[0], 0, 19)


def test_wrong_arguments_are_refused() -> None:
    world = World([20], heads=2, kv_heads=1)
    q, k, v = world.q[0], world.k[0], world.v[0]

    def run(metadata: AttentionMetadata, query: torch.Tensor = q, cache: KVCache = world.cache) -> None:
        world.backend.run(query, k, v, cache, metadata, AttentionParams(1.0))

    good = world.metadata([(0, 0, 20)], 0, 0)
    run(good)
    with pytest.raises(IndexError, match="block_table"):
        run(world.backend.plan(AttentionMetadata(**{**vars(good), "block_table": good.block_table + 1000})))
    with pytest.raises(IndexError, match="slot_mapping"):
        run(world.backend.plan(AttentionMetadata(**{**vars(good), "slot_mapping": good.slot_mapping - 10_000})))
    with pytest.raises(ValueError, match="more than its"):
        run(world.backend.plan(AttentionMetadata(**{**vars(good), "seq_lens": good.seq_lens + 1000})))
    with pytest.raises(ValueError, match="seq_lens"):
        run(world.backend.plan(AttentionMetadata(**{**vars(good), "seq_lens": good.seq_lens.long()})))
    with pytest.raises(ValueError, match="allocate"):
        run(good, cache=KVCache(world.cache.k.flatten(2), world.cache.v))
    with pytest.raises(ValueError, match="contiguous along its last axis"):
        run(good, query=q.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(TypeError, match="Double"):
        run(good, query=q.double())
    with pytest.raises(ValueError, match="CPU"):
        world.backend.allocate(KVSpec(1, 16, torch.float32, 16), 4, torch.device("meta"))
    with pytest.raises(ValueError, match="not available"):
        torch.ops.cb_engine.set_isa(99)


def test_operator_is_well_defined_for_the_compiler() -> None:
    world = World([20], heads=2, kv_heads=1)
    m = world.metadata([(0, 0, 20)], 0, 0)
    arguments = (
        *(world.q[0], world.k[0], world.v[0], world.cache.k, world.cache.v),
        *(m.slot_mapping, m.block_table, m.query_start_loc, m.seq_lens),
        *(world.scale, 0, 0.0, None),
    )
    world.cache.k.zero_()  # opcheck compares mutated arguments, and NaN differs from itself
    world.cache.v.zero_()
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.cb_engine.paged_attention, arguments, test_utils=checks)


def test_runs_inside_torch_compile() -> None:
    world = World([20], heads=2, kv_heads=1)
    metadata = world.metadata([(0, 0, 20)], 0, 0)

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return world.backend.run(q * 2, k, v, world.cache, metadata, AttentionParams(world.scale / 2)) + 1

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        out = compiled(world.q[0], world.k[0], world.v[0])
    world.check(out - 1, 0, 0)
    assert not world.cache.k[world.tables[0][0]].isnan().any()


def test_pool_is_aligned_and_takes_memory_only_where_it_is_used() -> None:
    before = psutil.Process().memory_info().rss
    cache = NativeBackend().allocate(KVSpec(3, 64, torch.bfloat16, 32), 40_000, torch.device("cpu"))
    assert cache.k.nbytes + cache.v.nbytes > 900 << 20
    assert psutil.Process().memory_info().rss - before < 200 << 20
    assert cache.k.data_ptr() % 4096 == cache.v.data_ptr() % 4096 == 0
    assert cache.k.is_contiguous()
    assert len(cache.k) == len(cache.v) == 40_000


@pytest.mark.skipif(sys.platform != "linux", reason="no advice on huge pages here")
def test_layers_come_to_the_end_of_a_huge_page_with_different_blocks() -> None:
    """A page that is touched first costs up to milliseconds: one step must not pay for those of all layers."""
    backend, huge_page = NativeBackend(), 2 << 20
    spec = KVSpec(3, 64, torch.bfloat16, 32)
    tensors = [t for _ in range(30) for c in [backend.allocate(spec, 4000, torch.device("cpu"))] for t in (c.k, c.v)]
    block_bytes = tensors[0][0].nbytes
    crossing = [0] * 4000
    for tensor in tensors:
        for block in range(1, 4000):
            begin = tensor.data_ptr() + block * block_bytes
            crossing[block] += (begin - 1) // huge_page != (begin + block_bytes - 1) // huge_page
    assert sum(crossing) > 60 * 20
    assert max(crossing) <= 3
