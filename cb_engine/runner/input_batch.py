"""One step's tensors, padded to a Bucket.

Owns the arithmetic from a plan to packed tensors. Does not know models or kernels. A step is one packed row:

    plan           r0: tokens 7..8 | r1: tokens 0..3      | padding
    input_ids      [ t7            | t0  t1  t2           | 0 0 ]          [1, T]
    position_ids   [ 7             | 0   1   2            | 0 0 ]          [1, T]
    slot_mapping   [ table[r0][7 // bs] * bs + 7 % bs ... | null block ]   [T] per layer group

Padding rows write to the null block, have no tokens (`seq_lens` 0) and are never read back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cb_engine.kv_cache.block import NULL_BLOCK_ID
from cb_engine.kv_cache.block_manager import Int32Array
from cb_engine.runner.buckets import Bucket, StepKind
from cb_engine.scheduler.output import ScheduledRequest

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class GroupInputs:
    """What one layer group needs, on the host: slots [T] int64 and tables [B, W] int32."""

    slot_mapping: torch.Tensor
    block_table: torch.Tensor


@dataclass(frozen=True)
class InputBatch:
    """See the module docstring. All tensors live on the host; the runner moves them."""

    bucket: Bucket
    input_ids: torch.Tensor  # [1, T] int64
    position_ids: torch.Tensor  # [1, T] int64
    query_start_loc: torch.Tensor  # [B + 1] int32
    seq_lens: torch.Tensor  # [B] int32
    logits_indices: torch.Tensor  # [R] int64: packed rows whose logits are wanted
    groups: tuple[GroupInputs, ...]
    max_query_len: int
    max_seq_len: int


def make_input_batch(
    scheduled: Sequence[ScheduledRequest],
    block_tables: Sequence[Int32Array],
    bucket: Bucket,
    block_size: int,
    *,
    static_logits: bool = False,
) -> InputBatch:
    """Packs a plan into tensors of the bucket's shape.

    Args:
        scheduled: the plan's requests; may be empty, for a warm-up step of padding alone.
        block_tables: per layer group [len(scheduled), width], width at most `bucket.num_blocks`.
        static_logits: pad the wanted logits rows to `num_seqs`, so that the head's product has a static shape.
    """
    starts: IntArray = np.fromiter((s.start for s in scheduled), np.int64, len(scheduled))
    lengths: IntArray = np.fromiter((s.num_tokens for s in scheduled), np.int64, len(scheduled))
    total = int(lengths.sum())
    loc: IntArray = np.zeros(len(scheduled) + 1, np.int64)
    np.cumsum(lengths, out=loc[1:])
    rows = np.repeat(np.arange(len(scheduled)), lengths)
    positions = np.arange(total) + np.repeat(starts - loc[:-1], lengths)

    input_ids = np.zeros(bucket.num_tokens, np.int64)
    if total == len(scheduled):
        input_ids[:total] = [s.request.token_ids[s.start] for s in scheduled]
    else:
        input_ids[:total] = [t for s in scheduled for t in s.request.token_ids[s.start : s.end]]
    position_ids = np.zeros(bucket.num_tokens, np.int64)
    position_ids[:total] = positions
    seq_lens = np.zeros(bucket.num_seqs, np.int32)
    seq_lens[: len(scheduled)] = starts + lengths

    if bucket.kind is StepKind.DECODE:
        query_start_loc = np.arange(bucket.num_seqs + 1, dtype=np.int32)
    else:
        query_start_loc = np.full(bucket.num_seqs + 1, total, np.int32)
        query_start_loc[: len(scheduled) + 1] = loc
    decode = bucket.kind is StepKind.DECODE
    return InputBatch(
        bucket=bucket,
        input_ids=torch.from_numpy(input_ids).unsqueeze(0),
        position_ids=torch.from_numpy(position_ids).unsqueeze(0),
        query_start_loc=torch.from_numpy(query_start_loc),
        seq_lens=torch.from_numpy(seq_lens),
        logits_indices=torch.from_numpy(_logits_indices(scheduled, loc, bucket.num_seqs if static_logits else 0)),
        groups=tuple(_group_inputs(t, rows, positions, bucket, block_size) for t in block_tables),
        # The general path is taken for anything but a decode bucket, even if all rows hold one token.
        max_query_len=1 if decode else max(2, int(lengths.max(initial=0))),
        max_seq_len=int(seq_lens.max(initial=0)),
    )


def _group_inputs(
    table: Int32Array, rows: IntArray, positions: IntArray, bucket: Bucket, block_size: int
) -> GroupInputs:
    padded = np.full((bucket.num_seqs, bucket.num_blocks), NULL_BLOCK_ID, np.int32)
    padded[: table.shape[0], : table.shape[1]] = table
    slots = np.zeros(bucket.num_tokens, np.int64)
    slots[: len(rows)] = padded[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
    return GroupInputs(torch.from_numpy(slots), torch.from_numpy(padded))


def _logits_indices(scheduled: Sequence[ScheduledRequest], loc: IntArray, at_least: int) -> IntArray:
    """Rows whose logits are wanted: the last of each request that samples, before it every row of a prompt whose
    log-probabilities were asked for."""
    wanted: list[int] = []
    for i, item in enumerate(scheduled):
        wanted.extend(loc[i] + row for row in prompt_logprob_rows(item))
        if item.samples:
            wanted.append(int(loc[i + 1]) - 1)
    indices = np.zeros(max(len(wanted), at_least), np.int64)
    indices[: len(wanted)] = wanted
    return indices


def prompt_logprob_rows(item: ScheduledRequest) -> range:
    """Rows of a request's chunk that predict a prompt token whose log-probability was asked for.

    The row at position p predicts the token at p + 1, so the prompt's last row predicts none of it.
    """
    request = item.request
    if request.sampling_params.prompt_logprobs is None or item.start >= request.num_prompt_tokens:
        return range(0)
    return range(min(item.num_tokens, request.num_prompt_tokens - 1 - item.start))
