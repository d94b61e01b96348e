"""One step's tensors, padded to a Bucket.

Owns the arithmetic from a plan to packed tensors. Does not know models or kernels. A step is one packed row:

    plan           r0: tokens 7..8 | r1: tokens 0..3      | padding
    input_ids      [ t7            | t0  t1  t2           | 0 0 ]          [1, T]
    position_ids   [ 7             | 0   1   2            | 0 0 ]          [1, T]
    slot_mapping   [ table[r0][7 // bs] * bs + 7 % bs ... | null block ]   [T] per layer group

Padding rows write to the null block, have no tokens (`seq_lens` 0) and are never read back. A decode bucket's row i is
request i; one that computes nothing in this pass is a padding row among the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from cb_engine.kv_cache.block import NULL_BLOCK_ID
from cb_engine.kv_cache.block_manager import Int32Array
from cb_engine.runner.buckets import Bucket
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

    def with_logits_of_all_rows(self) -> InputBatch:
        """The same with room for as many wanted rows as there are rows."""
        indices = self.logits_indices
        return replace(self, logits_indices=F.pad(indices, (0, self.bucket.num_tokens - indices.numel())))


@dataclass(frozen=True)
class PackedRows:
    """What a pass computes, as host arrays: for each request the position it starts at, how many tokens it computes
    (none is allowed), and all their ids, request after request.

    `hidden` tokens before each request's table are not looked at: positions count them, tables and `starts` do not.
    """

    starts: IntArray  # [B]
    lengths: IntArray  # [B]
    token_ids: Sequence[int]
    hidden: IntArray | None = None  # [B]


def make_input_batch(
    scheduled: Sequence[ScheduledRequest],
    block_tables: Sequence[Int32Array],
    bucket: Bucket,
    block_size: int,
    *,
    num_logits: int = 0,
    static_sizes: bool = False,
) -> InputBatch:
    """Packs a plan into tensors of the bucket's shape.

    Args:
        scheduled: the plan's requests; may be empty, for a warm-up step of padding alone.
        block_tables: per layer group [len(scheduled), width], width at most `bucket.num_blocks`.
        num_logits: pad the wanted logits rows to so many, so that the head's product has a static shape.
        static_sizes: see `pack_rows`.
    """
    starts: IntArray = np.fromiter((s.start for s in scheduled), np.int64, len(scheduled))
    lengths: IntArray = np.fromiter((s.num_tokens for s in scheduled), np.int64, len(scheduled))
    if all(item.num_tokens == 1 for item in scheduled):
        token_ids = [s.request.token_ids[s.start] for s in scheduled]
    else:
        token_ids = [t for s in scheduled for t in (*s.request.token_ids[s.start : s.end], *s.draft_token_ids)]
    wanted = _wanted_rows(scheduled, lengths)
    rows = PackedRows(starts, lengths, token_ids)
    return pack_rows(rows, block_tables, bucket, block_size, wanted, num_logits=num_logits, static_sizes=static_sizes)


def pack_rows(
    rows: PackedRows,
    block_tables: Sequence[Int32Array],
    bucket: Bucket,
    block_size: int,
    wanted: Sequence[int],
    *,
    num_logits: int = 0,
    static_sizes: bool = False,
) -> InputBatch:
    """Packs rows into tensors of the bucket's shape.

    Args:
        wanted: packed rows whose logits are wanted.
        static_sizes: the host's copies of sizes are those of the bucket, for devices to which another number is another
            shape.
    """
    num_seqs, total = len(rows.starts), int(rows.lengths.sum())
    ends: IntArray = np.cumsum(rows.lengths)
    seqs = np.repeat(np.arange(num_seqs), rows.lengths)
    positions = np.arange(total) + np.repeat(rows.starts - ends + rows.lengths, rows.lengths)
    decode = bucket.kind.is_decode
    at = seqs if decode else np.arange(total)  # where the rows lie in the packed tensors

    input_ids = np.zeros(bucket.num_tokens, np.int64)
    input_ids[at] = rows.token_ids
    position_ids = np.zeros(bucket.num_tokens, np.int64)
    position_ids[at] = positions if rows.hidden is None else positions + np.repeat(rows.hidden, rows.lengths)
    seq_lens = np.zeros(bucket.num_seqs, np.int32)
    seq_lens[:num_seqs] = np.where(rows.lengths > 0, rows.starts + rows.lengths, 0)
    if decode:
        query_start_loc = np.arange(bucket.num_seqs + 1, dtype=np.int32)
    else:
        query_start_loc = np.full(bucket.num_seqs + 1, total, np.int32)
        query_start_loc[0] = 0
        query_start_loc[1 : num_seqs + 1] = ends
    logits_indices = np.zeros(max(len(wanted), num_logits), np.int64)
    logits_indices[: len(wanted)] = wanted
    # The general path is taken for anything but a decode bucket, even if all rows hold one token.
    longest = max(2, bucket.width if static_sizes else int(rows.lengths.max(initial=0)))
    return InputBatch(
        bucket=bucket,
        input_ids=torch.from_numpy(input_ids).unsqueeze(0),
        position_ids=torch.from_numpy(position_ids).unsqueeze(0),
        query_start_loc=torch.from_numpy(query_start_loc),
        seq_lens=torch.from_numpy(seq_lens),
        logits_indices=torch.from_numpy(logits_indices),
        groups=tuple(_group_inputs(t, seqs, positions, at, bucket, block_size) for t in block_tables),
        max_query_len=1 if decode else longest,
        max_seq_len=bucket.num_blocks * block_size if static_sizes else int(seq_lens.max(initial=0)),
    )


def _group_inputs(
    table: Int32Array, seqs: IntArray, positions: IntArray, at: IntArray, bucket: Bucket, block_size: int
) -> GroupInputs:
    padded = np.full((bucket.num_seqs, bucket.num_blocks), NULL_BLOCK_ID, np.int32)
    padded[: table.shape[0], : table.shape[1]] = table
    slots = np.zeros(bucket.num_tokens, np.int64)
    slots[at] = padded[seqs, positions // block_size].astype(np.int64) * block_size + positions % block_size
    return GroupInputs(torch.from_numpy(slots), torch.from_numpy(padded))


def _wanted_rows(scheduled: Sequence[ScheduledRequest], lengths: IntArray) -> list[int]:
    """Rows whose logits are wanted: the last of each request that samples and those of its drafts, before them every
    row of a prompt whose log-probabilities were asked for."""
    wanted: list[int] = []
    for item, end in zip(scheduled, np.cumsum(lengths).tolist(), strict=True):
        wanted.extend(end - item.num_tokens + row for row in prompt_logprob_rows(item))
        wanted.extend(range(end - item.num_sampled_rows, end))
    return wanted


def prompt_logprob_rows(item: ScheduledRequest) -> range:
    """Rows of a request's chunk that predict a prompt token whose log-probability was asked for.

    The row at position p predicts the token at p + 1, so the prompt's last row predicts none of it.
    """
    request = item.request
    if request.sampling_params.prompt_logprobs is None or item.start >= request.num_prompt_tokens:
        return range(0)
    return range(min(item.num_tokens, request.num_prompt_tokens - 1 - item.start))
