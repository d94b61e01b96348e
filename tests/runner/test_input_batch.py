"""A plan as packed tensors, worked out by hand. Blocks hold 4 tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from cb_engine.request import Request
from cb_engine.runner.buckets import Bucket, StepKind
from cb_engine.runner.input_batch import InputBatch, make_input_batch, prompt_logprob_rows
from cb_engine.sampling_params import SamplingParams
from cb_engine.scheduler.output import ScheduledRequest

BS = 4


def item(
    tokens: Sequence[int], start: int, count: int, *, prompt: int | None = None, max_tokens: int = 9, **params: Any
) -> ScheduledRequest:
    """`count` tokens of a request from `start` on; its first `prompt` tokens are the prompt."""
    size = len(tokens) if prompt is None else prompt
    request = Request("r", list(tokens[:size]), SamplingParams(**params), max_tokens=max_tokens)
    for token in tokens[size:]:
        request.append_token(token, 0)
    return ScheduledRequest(request, start, count)


def pack(items: Sequence[ScheduledRequest], tables: Sequence[list[list[int]]], bucket: Bucket, **kw: Any) -> InputBatch:
    return make_input_batch(items, [np.array(t, np.int32) for t in tables], bucket, BS, **kw)


def test_a_mixed_step_is_packed_request_by_request():
    # One decode at position 7 and a chunk of positions 2 .. 6.
    items = [item(range(10, 18), 7, 1), item(range(50, 60), 2, 5)]
    batch = pack(items, [[[3, 9, 0], [5, 2, 7]]], Bucket(StepKind.PREFILL, 2, 6, 3))
    assert batch.input_ids.tolist() == [[17, 52, 53, 54, 55, 56]]
    assert batch.position_ids.tolist() == [[7, 2, 3, 4, 5, 6]]
    assert batch.query_start_loc.tolist() == [0, 1, 6]
    assert batch.seq_lens.tolist() == [8, 7]
    # Position 7 is offset 3 of block 9; 2 and 3 lie in block 5, 4 .. 6 in block 2.
    assert batch.groups[0].slot_mapping.tolist() == [39, 22, 23, 8, 9, 10]
    assert batch.groups[0].block_table.tolist() == [[3, 9, 0], [5, 2, 7]]
    assert batch.logits_indices.tolist() == [0]  # the chunk stops short of the prompt's end
    assert (batch.max_query_len, batch.max_seq_len) == (5, 8)


def test_a_chunk_that_reaches_the_end_wants_the_logits_of_its_last_row():
    items = [item(range(3), 0, 3), item(range(9), 4, 5)]
    batch = pack(items, [[[1, 0, 0], [2, 3, 4]]], Bucket(StepKind.PREFILL, 2, 8, 3))
    assert batch.logits_indices.tolist() == [2, 7]


def test_a_request_that_generates_nothing_wants_no_logits():
    batch = pack([item(range(3), 0, 3, max_tokens=0)], [[[1]]], Bucket(StepKind.PREFILL, 1, 3, 1))
    assert batch.logits_indices.tolist() == []


def test_every_group_has_slots_of_its_own():
    items = [item(range(9), 8, 1)]
    batch = pack(items, [[[4, 5, 6]], [[0, 8, 2]]], Bucket(StepKind.DECODE, 1, 1, 3))
    assert [g.slot_mapping.tolist() for g in batch.groups] == [[24], [8]]
    assert batch.groups[1].block_table.tolist() == [[0, 8, 2]]


def test_a_decode_step_is_padded_with_rows_that_write_to_the_null_block():
    items = [item(range(6), 5, 1), item(range(2), 1, 1), item(range(9), 8, 1)]
    batch = pack(items, [[[7, 3, 0], [5, 0, 0], [1, 2, 4]]], Bucket(StepKind.DECODE, 4, 1, 4))
    assert batch.input_ids.tolist() == [[5, 1, 8, 0]]
    assert batch.position_ids.tolist() == [[5, 1, 8, 0]]
    assert batch.seq_lens.tolist() == [6, 2, 9, 0]
    assert batch.query_start_loc.tolist() == [0, 1, 2, 3, 4]  # one row each, padding rows too
    assert batch.groups[0].slot_mapping.tolist() == [13, 21, 16, 0]
    assert batch.groups[0].block_table.tolist() == [[7, 3, 0, 0], [5, 0, 0, 0], [1, 2, 4, 0], [0, 0, 0, 0]]
    assert (batch.max_query_len, batch.max_seq_len) == (1, 9)


def test_a_mixed_step_is_padded_with_empty_requests_and_null_rows():
    batch = pack([item(range(5), 0, 5)], [[[6, 2]]], Bucket(StepKind.PREFILL, 2, 8, 3))
    assert batch.input_ids.tolist() == [[0, 1, 2, 3, 4, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 0, 0]]
    assert batch.query_start_loc.tolist() == [0, 5, 5]
    assert batch.seq_lens.tolist() == [5, 0]
    assert batch.groups[0].slot_mapping.tolist() == [24, 25, 26, 27, 8, 0, 0, 0]
    assert batch.groups[0].block_table.tolist() == [[6, 2, 0], [0, 0, 0]]


def test_single_tokens_in_a_general_bucket_take_the_general_path():
    batch = pack([item(range(3), 2, 1)], [[[1]]], Bucket(StepKind.PREFILL, 1, 1, 1))
    assert batch.max_query_len == 2


def test_static_logits_pad_the_wanted_rows_to_the_number_of_sequences():
    items = [item(range(3), 2, 1), item(range(9), 0, 4)]
    bucket = Bucket(StepKind.PREFILL, 4, 16, 3)
    tables = [[[1, 0, 0], [2, 0, 0]]]
    assert pack(items, tables, bucket, num_logits=4).logits_indices.tolist() == [0, 0, 0, 0]
    assert pack(items, tables, bucket).logits_indices.tolist() == [0]
    # More rows than sequences, for prompt logprobs, are never cut.
    many = [item(range(9), 0, 9, prompt_logprobs=0)]
    assert pack(many, [[[1, 2, 3]]], bucket, num_logits=4).logits_indices.tolist() == list(range(9))


def test_a_warm_up_step_is_padding_alone():
    batch = make_input_batch((), [np.zeros((0, 0), np.int32)] * 2, Bucket(StepKind.DECODE, 2, 1, 3), BS)
    assert batch.seq_lens.tolist() == [0, 0]
    assert batch.input_ids.tolist() == [[0, 0]]
    assert [g.slot_mapping.tolist() for g in batch.groups] == [[0, 0], [0, 0]]
    assert batch.groups[0].block_table.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert batch.logits_indices.tolist() == []
    batch = make_input_batch((), [np.zeros((0, 0), np.int32)], Bucket(StepKind.PREFILL, 2, 16, 3), BS)
    assert batch.query_start_loc.tolist() == [0, 0, 0]


def test_types_and_shapes_are_those_of_the_contract():
    batch = pack([item(range(5), 0, 5)], [[[6, 2]]], Bucket(StepKind.PREFILL, 2, 8, 3))
    assert batch.input_ids.dtype == batch.position_ids.dtype == batch.logits_indices.dtype == torch.int64
    assert batch.query_start_loc.dtype == batch.seq_lens.dtype == torch.int32
    assert batch.groups[0].slot_mapping.dtype == torch.int64
    assert batch.groups[0].block_table.dtype == torch.int32
    assert batch.input_ids.shape == batch.position_ids.shape == (1, 8)


@pytest.mark.parametrize(
    ("start", "count", "rows"),
    [
        (0, 9, range(8)),  # the last row of a prompt of 9 predicts the first output
        (0, 4, range(4)),
        (4, 4, range(4)),
        (4, 5, range(4)),
        (8, 1, range(0)),
        (8, 4, range(0)),  # recomputing the last prompt token and three outputs
        (6, 6, range(2)),
        (9, 1, range(0)),
        (11, 1, range(0)),
    ],
)
def test_rows_that_predict_prompt_tokens(start: int, count: int, rows: range):
    tokens = range(12)
    assert prompt_logprob_rows(item(tokens, start, count, prompt=9, prompt_logprobs=0)) == rows
    assert prompt_logprob_rows(item(tokens, start, count, prompt=9)) == range(0)


def test_prompt_rows_come_before_the_sampling_row_of_their_request():
    items = [item(range(3), 2, 1), item(range(4), 0, 4, prompt_logprobs=2), item(range(6), 0, 3, prompt_logprobs=0)]
    batch = pack(items, [[[1, 0], [2, 0], [3, 4]]], Bucket(StepKind.PREFILL, 3, 8, 2))
    # Packed rows: 0 | 1 2 3 4 | 5 6 7. The second samples from row 4, the third is not done.
    assert batch.logits_indices.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_recomputed_request_samples_from_its_last_output():
    items = [item(range(12), 4, 8, prompt=9, prompt_logprobs=0)]
    batch = pack(items, [[[1, 2, 3]]], Bucket(StepKind.PREFILL, 1, 8, 3))
    assert batch.logits_indices.tolist() == [0, 1, 2, 3, 7]
    assert batch.input_ids.tolist() == [[4, 5, 6, 7, 8, 9, 10, 11]]
