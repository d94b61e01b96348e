"""Rows of logits become tokens of requests: which rows are whose, and what each of them knows of drafts before it."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cb_engine.grammar.masks import TokenMasks
from cb_engine.request import Request
from cb_engine.runner.buckets import Bucket, StepKind
from cb_engine.runner.executor import EagerExecutor
from cb_engine.runner.row_sampler import RowSampler, _WithDrafts
from cb_engine.runner.static_device import FakeStaticDevice
from cb_engine.sampling import Sampler, SamplingState
from cb_engine.sampling.static_sampler import StaticSampler
from cb_engine.sampling_params import SamplingParams
from cb_engine.scheduler.output import ModelOutput, ScheduledRequest

VOCAB = 32


def make_request(name: str, prompt: Sequence[int], output: Sequence[int] = (), **params: Any) -> Request:
    request = Request(name, list(prompt), SamplingParams(**{"temperature": 0.0, **params}), max_tokens=20)
    for token_id in output:
        request.append_token(token_id, 0)
    return request


def decode(request: Request, drafts: Sequence[int] = ()) -> ScheduledRequest:
    return ScheduledRequest(request, request.num_tokens - 1, 1 + len(drafts), tuple(drafts))


def logits_for(*token_ids: int) -> torch.Tensor:
    """A row for each, whose best token it is; the others are unlike each other."""
    logits = torch.randn(len(token_ids), VOCAB, generator=torch.Generator().manual_seed(0))
    logits[range(len(token_ids)), list(token_ids)] = 9.0
    return logits


@pytest.fixture(params=["eager", "static"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make_sampler(kind: str) -> RowSampler:
    if kind == "eager":
        return RowSampler(Sampler(), EagerExecutor())
    device = FakeStaticDevice()
    return RowSampler(StaticSampler(device.run, max_logprobs=5), device)


def sampled(
    kind: str, scheduled: Sequence[ScheduledRequest], logits: torch.Tensor, sampler: RowSampler | None = None
) -> ModelOutput:
    """One step; on a static device with rows of padding, which are garbage."""
    count = sum(item.num_sampled_rows for item in scheduled)
    width = 1 + max(len(item.draft_token_ids) for item in scheduled)
    sampler = sampler or make_sampler(kind)
    if kind == "eager":
        return sampler.sample(scheduled, logits, 0, (len(scheduled), width))
    rows = (len(scheduled) + 2) * width
    padded = torch.cat([logits, torch.full((max(0, rows - len(logits)), VOCAB), float("nan"))])
    return sampler.sample(scheduled, padded, max(rows, count), (len(scheduled) + 2, width))


def ids(output: ModelOutput) -> dict[str, list[int]]:
    return {name: [token.token_id for token in tokens] for name, tokens in output.sampled.items()}


def test_rows_go_to_their_requests(kind: str) -> None:
    items = [
        decode(make_request("a", [1], [2])),
        decode(make_request("b", [1, 2], [3])),
        decode(make_request("c", [4])),
    ]
    assert ids(sampled(kind, items, logits_for(5, 6, 7))) == {"a": [5], "b": [6], "c": [7]}


def test_a_chunk_that_is_not_the_last_has_no_rows(kind: str) -> None:
    chunk = ScheduledRequest(make_request("b", range(1, 9)), 0, 4)
    items = [decode(make_request("a", [1], [2])), chunk, decode(make_request("c", [4]))]
    assert ids(sampled(kind, items, logits_for(5, 7))) == {"a": [5], "c": [7]}
    output = make_sampler(kind).sample([chunk], logits_for(), 0, (1, 1))
    assert output == ModelOutput()


def test_drafts_are_kept_up_to_the_first_that_is_wrong(kind: str) -> None:
    items = [
        decode(make_request("right", [1], [2]), [5, 6, 7]),
        decode(make_request("none", [1], [3])),
        decode(make_request("wrong", [1], [4]), [5, 6]),
        decode(make_request("half", [1], [5]), [5, 6, 7]),
    ]
    logits = logits_for(5, 6, 7, 8, 9, 4, 6, 7, 5, 6, 3, 1)
    assert ids(sampled(kind, items, logits)) == {
        "right": [5, 6, 7, 8],
        "none": [9],
        "wrong": [4],
        "half": [5, 6, 3],
    }


@pytest.mark.parametrize("seed", range(6))
def test_at_random_it_is_sampling_one_after_the_other(kind: str, seed: int) -> None:
    """With penalties, limits, log-probabilities and seeds: what a step with drafts gives is what steps without give."""
    rng = random.Random(seed)
    wishes: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 5, "logprobs": 2},
        {"repetition_penalty": 1.8, "presence_penalty": 0.7, "logprobs": 1},
        {"temperature": 0.9, "frequency_penalty": 1.5, "top_k": 6, "seed": 3},
        {"min_tokens": 6, "stop_token_ids": [1, 2, 3], "bad_words": [[7, 8], [4]], "logprobs": 0},
    ]
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2  # logits after each token
    requests = [make_request(str(i), [1, i], [rng.randrange(VOCAB)], **wish) for i, wish in enumerate(wishes)]
    twins = [
        make_request(str(i), r.prompt_token_ids, r.output_token_ids, **w)
        for i, (r, w) in enumerate(zip(requests, wishes, strict=True))
    ]
    together, alone = make_sampler(kind), make_sampler("eager")
    num_accepted = 0
    for _ in range(5):
        items, rows = [], []
        futures = []
        for twin in twins:  # what each would say, one token at a time
            future = []
            for _ in range(4):
                step = sampled("eager", [decode(twin)], table[[twin.token_ids[-1]]], alone)
                future.append(step.sampled[twin.request_id][0])
                twin.append_token(future[-1].token_id, 0)
            futures.append(future)
        for request, future in zip(requests, futures, strict=True):
            right = rng.randrange(4)
            drafts = [t.token_id for t in future[:right]] + [rng.randrange(VOCAB)] * rng.randrange(4 - right)
            items.append(decode(request, drafts))
            rows += [request.token_ids[-1], *drafts]
        output = sampled(kind, items, table[rows], together)
        for item, future, twin in zip(items, futures, twins, strict=True):
            tokens = output.sampled[item.request.request_id]
            count = len(tokens)
            num_accepted += count - 1
            agreeing = next(
                (i for i, d in enumerate(item.draft_token_ids) if d != future[i].token_id), len(item.draft_token_ids)
            )
            assert count == agreeing + 1
            assert [t.token_id for t in tokens] == [t.token_id for t in future[:count]]
            for token, wanted in zip(tokens, future, strict=False):
                assert token.logprob == pytest.approx(wanted.logprob, abs=1e-5)
                assert [e.token_id for e in token.top_logprobs or []] == [e.token_id for e in wanted.top_logprobs or []]
            for token in tokens:
                item.request.append_token(token.token_id, 0)
            del twin.output_token_ids[len(item.request.output_token_ids) :]
            del twin.token_ids[len(item.request.token_ids) :]
    assert num_accepted > 10


def test_a_row_without_any_token_fails_its_request_alone(kind: str) -> None:
    logits = logits_for(5, 6, 7, 8)
    logits[1] = float("nan")
    logits[3] = float("-inf")
    items = [decode(make_request("a", [1], [2]), [5, 6]), decode(make_request("b", [1], [3]))]
    output = sampled(kind, items, logits)
    assert ids(output)["a"] == [5], "what comes before the row is good"
    assert output.sampled["a"][0].failed is None
    (token,) = output.sampled["b"]
    assert "the logits held NaN" in str(token.failed)
    (token,) = sampled(kind, [items[1]], logits[3:]).sampled["b"]
    assert "the logits held NaN" in str(token.failed)


def test_rows_of_prompt_tokens_are_not_sampled(kind: str) -> None:
    """A prompt of four whose log-probabilities are wanted: three rows that predict it, then the one to sample from."""
    prompt = make_request("p", [1, 5, 6, 7], prompt_logprobs=1)
    items = [decode(make_request("a", [1], [2])), ScheduledRequest(prompt, 0, 4), decode(make_request("b", [1], [3]))]
    output = sampled(kind, items, logits_for(9, 5, 6, 8, 10, 11))
    assert ids(output) == {"a": [9], "p": [10], "b": [11]}
    ranks = [{entry.token_id: entry.rank for entry in of_one} for of_one in output.prompt_logprobs["p"]]
    assert ranks == [{5: 1}, {6: 1}, {8: 1, 7: None}], "7 is not among the best"


def test_what_warm_up_has_run_is_all_that_steps_run() -> None:
    warmed: list[int] = []

    class Noting(StaticSampler):
        def warmup(self, logits: torch.Tensor) -> None:
            warmed.append(len(logits))
            super().warmup(logits)

    device = FakeStaticDevice()
    sampler = RowSampler(Noting(device.run, max_logprobs=5), device)
    with device.compile_only():
        sampler.warm(torch.zeros(8, VOCAB), 8, Bucket(StepKind.VERIFY, 2, 4, 1))
        sampler.warm(torch.zeros(8, VOCAB), 8, Bucket(StepKind.DECODE, 8, 1, 1))
        sampler.warm(torch.zeros(16, VOCAB), 8, Bucket(StepKind.PREFILL, 8, 16, 1))  # more logits than are sampled from
    assert device.num_reads == 0
    assert warmed == [8], "once for so many rows"
    device.freeze()
    request, other = make_request("a", [1], [2], logprobs=1), make_request("b", [1], [2], temperature=1.0)
    logits = logits_for(5, 6, 7, 8, 9, 1, 1, 1)
    for drafts in ([5, 6, 7], [5], [9, 9]):
        output = sampler.sample([decode(request, drafts), decode(other)], logits, 8, (2, 4))
        assert ids(output)["a"] == ([5, 6, 7, 8][: 1 + len(drafts)] if drafts[0] == 5 else [5])
    wanted = ScheduledRequest(make_request("p", [1, 5, 6], prompt_logprobs=0), 0, 3)
    output = sampler.sample([wanted], torch.cat([logits, logits]), 8, (8, 16))
    assert ids(output) == {"p": [7]}


def test_states_die_with_their_request() -> None:
    sampler = make_sampler("eager")
    request = make_request("a", [1], [2])
    sampled("eager", [decode(request, [3, 4])], logits_for(3, 4, 5), sampler)
    assert len(sampler._states) == 1
    del request
    gc.collect()
    assert len(sampler._states) == 0


def test_states_are_the_same_from_step_to_step() -> None:
    """The sampler keeps what it has counted beside them."""
    seen: list[list[SamplingState]] = []

    class Noting(Sampler):
        def __call__(
            self, logits: torch.Tensor, states: Sequence[SamplingState], masks: TokenMasks | None = None
        ) -> Any:
            seen.append(list(states))
            return super().__call__(logits, states, masks)

    sampler = RowSampler(Noting(), EagerExecutor())
    request = make_request("a", [1], [2])
    for drafts in ([3, 4], [3], [3, 4, 5]):
        sampled("eager", [decode(request, drafts)], logits_for(3, 4, 5, 6)[: 1 + len(drafts)], sampler)
    assert all(a is b for states in seen for a, b in zip(states, seen[2], strict=False))
    assert [list(state.output_token_ids) for state in seen[2]] == [[2], [2, 3], [2, 3, 4], [2, 3, 4, 5]]


@pytest.mark.parametrize("count", range(4))
def test_a_view_of_output_and_drafts_is_the_list_it_stands_for(count: int) -> None:
    output, drafts = [10, 11, 12], [20, 21, 22]
    view = _WithDrafts(output, drafts, count)
    for _ in range(2):
        wanted = output + drafts[:count]
        assert list(view) == wanted
        assert len(view) == len(wanted)
        for index in range(-len(wanted), len(wanted)):
            assert view[index] == wanted[index]
        for index in (len(wanted), -len(wanted) - 1):
            with pytest.raises(IndexError):
                view[index]
        bounds = [None, *range(-8, 9)]
        for start in bounds:
            for stop in bounds:
                for step in (None, 1, 2, 3, -1, -2):
                    assert view[start:stop:step] == wanted[start:stop:step]
        output += [13, 14]  # it is live
        drafts[:] = [30, 31, 32]
