"""Times one layer's attention on this CPU: the native kernel beside gathering the cache and calling SDPA.

    python scripts/bench_attention.py [--seconds 0.5]

Decode cases cycle through several layers' caches, so that keys and values come from memory as they do in a model.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from cb_engine.attention.backend import AttentionMetadata, AttentionParams, KVCache, KVSpec
from cb_engine.attention.native_backend import NativeBackend

HEADS, KV_HEADS, HEAD_DIM, DTYPE = 9, 3, 64, torch.bfloat16
SCALE = HEAD_DIM**-0.5
COLD_BYTES = 160 << 20  # of all layers together: several times the largest common cache


@dataclass(frozen=True)
class Case:
    """`batch` requests of `context` tokens, of which the last `queries` are this step's."""

    name: str
    batch: int
    context: int
    queries: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that one layer's step has to read at least."""
        return 2 * self.batch * self.context * KV_HEADS * HEAD_DIM * DTYPE.itemsize

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products, the causal mask taken into account."""
        past = self.context - self.queries
        pairs = self.queries * past + self.queries * (self.queries + 1) // 2
        return 4 * self.batch * HEADS * HEAD_DIM * pairs

    @property
    def layers(self) -> int:
        """Layers to cycle through so that a decode step finds its keys and values in memory, not in a cache."""
        return 1 if self.queries > 1 else max(1, min(30, COLD_BYTES // self.kv_bytes))


CASES = (
    Case("decode 32 x 1024", 32, 1024, 1),
    Case("decode 64 x 160", 64, 160, 1),
    Case("decode 1 x 1024", 1, 1024, 1),
    Case("prefill 64 x 94", 64, 94, 94),
    Case("prefill 4 x 1024", 4, 1024, 1024),
)


def _inputs(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    qkv = torch.randn(case.batch * case.queries, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=DTYPE)
    q, k, v = torch.split(qkv, [HEADS, KV_HEADS, KV_HEADS], dim=1)
    return q, k, v


def native_step(case: Case, block_size: int) -> Callable[[], None]:
    """One call is one layer; block ids are shuffled, as after hours of serving."""
    backend = NativeBackend()
    width = -(-case.context // block_size)
    spec = KVSpec(KV_HEADS, HEAD_DIM, DTYPE, block_size)
    caches: list[KVCache] = []
    for _ in range(case.layers):
        caches.append(backend.allocate(spec, 1 + case.batch * width, torch.device("cpu")))
        for tensor in (caches[-1].k, caches[-1].v):
            tensor.normal_()
    table = (1 + torch.randperm(case.batch * width).view(case.batch, width)).int()
    position = torch.arange(case.context - case.queries, case.context)
    slots = table.long()[:, position // block_size] * block_size + position % block_size
    metadata = AttentionMetadata(
        slot_mapping=slots.flatten(),
        block_table=table,
        query_start_loc=torch.arange(case.batch + 1, dtype=torch.int32) * case.queries,
        seq_lens=torch.full((case.batch,), case.context, dtype=torch.int32),
        max_query_len=case.queries,
        max_seq_len=case.context,
    )
    q, k, v = _inputs(case)
    turn = 0

    def step() -> None:
        nonlocal turn
        backend.run(q, k, v, caches[turn % len(caches)], metadata, AttentionParams(SCALE))
        turn += 1

    return step


def gather_step(case: Case, block_size: int = 16) -> Callable[[], None]:
    """The same with PyTorch's operators: scatter, gather of whole blocks, scaled_dot_product_attention."""
    width = -(-case.context // block_size)
    shape = (1 + case.batch * width, block_size, KV_HEADS, HEAD_DIM)
    caches = [(torch.randn(shape).to(DTYPE), torch.randn(shape).to(DTYPE)) for _ in range(case.layers)]
    table = 1 + torch.randperm(case.batch * width).view(case.batch, width)
    position = torch.arange(case.context - case.queries, case.context)
    slots = (table[:, position // block_size] * block_size + position % block_size).flatten()
    q, k, v = _inputs(case)
    turn = 0

    def step() -> None:
        nonlocal turn
        k_cache, v_cache = caches[turn % len(caches)]
        turn += 1
        k_cache.view(-1, KV_HEADS, HEAD_DIM).index_copy_(0, slots, k)
        v_cache.view(-1, KV_HEADS, HEAD_DIM).index_copy_(0, slots, v)
        keys = k_cache[table].flatten(1, 2)[:, : case.context].transpose(1, 2)
        values = v_cache[table].flatten(1, 2)[:, : case.context].transpose(1, 2)
        queries = q.view(case.batch, case.queries, HEADS, HEAD_DIM).transpose(1, 2)
        F.scaled_dot_product_attention(
            queries, keys, values, is_causal=case.queries > 1, scale=SCALE, enable_gqa=True
        ).transpose(1, 2).contiguous()

    return step


def milliseconds(step: Callable[[], None], seconds: float) -> tuple[float, float]:
    """Median and least time of a call, over about that many seconds."""
    for _ in range(3):
        step()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        begin = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times), min(times)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one line per case and implementation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=0.5, help="time to spend on each line")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 32, 64])
    options = parser.parse_args(arguments)
    print(f"heads {HEADS}, kv heads {KV_HEADS}, head size {HEAD_DIM}, {DTYPE}, {torch.get_num_threads()} threads")
    print(f"{'':36}{'median ms':>10}{'least ms':>10}{'GB/s':>8}{'GFLOP/s':>9}")
    with torch.inference_mode():
        for case in CASES:
            steps = {f"native, blocks of {size}": (native_step, size) for size in options.block_sizes}
            for name, (make, size) in {**steps, "gather + SDPA": (gather_step, 16)}.items():
                median, least = milliseconds(make(case, size), options.seconds)
                rates = f"{case.kv_bytes / median / 1e6:8.1f}{case.flops / median / 1e6:9.0f}"
                print(f"{case.name:17}{name:19}{median:10.3f}{least:10.3f}{rates}", flush=True)


if __name__ == "__main__":
    main()
