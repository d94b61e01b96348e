"""The sampler of static devices gives what `Sampler` gives, in calls of few makes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cb_engine.errors import ShapeNotWarmedError
from cb_engine.runner.executor import EagerExecutor
from cb_engine.runner.static_device import FakeStaticDevice, StaticDeviceError, _map_tensors
from cb_engine.sampling.static_sampler import VARIANTS, Draw, Limits, Odds, StaticSampler, sample_rows
from tests.sampling.common import make_sampler, peaky, state

INF = float("inf")
NAN = float("nan")
VOCAB = 500  # padded to 512 inside

FIELDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0, "logprobs": 2, "logprobs_mode": "raw", "logit_bias": {5: 30.0}},
    {"temperature": 0, "top_p": 0.3, "logprobs": 5},  # a greedy row has no limits
    {"temperature": 0, "top_k": 2, "logprobs": 5},
    {"temperature": 0, "min_p": 0.9, "logprobs": 5},
    {"temperature": 0.8},
    {"temperature": 1.7, "logprobs": 0},
    {"top_p": 0.9, "logprobs": 4},
    {"top_p": 0.999},
    {"top_k": 50, "logprobs": 2, "logprobs_mode": "raw"},
    {"top_k": 100, "top_p": 0.5},
    {"top_k": 400, "top_p": 0.9, "logprobs": 0},
    {"top_k": 9999, "logprobs": 2},
    {"min_p": 0.1, "temperature": 1.5, "logprobs": 20},
    {"min_p": 0.05, "top_k": 7, "top_p": 0.8, "temperature": 2.0, "logprobs": 7},
    {"repetition_penalty": 1.3, "top_p": 0.8, "logprobs": 1},
    {"repetition_penalty": 0.6, "presence_penalty": 2.0, "logit_bias": {3: -4.0, 5: 2.5, 400: 9.0}, "logprobs": 4},
    {"frequency_penalty": 0.7, "presence_penalty": 0.1, "temperature": 0},
    {"frequency_penalty": -0.5, "repetition_penalty": 1.1, "logprobs": 0},
    {"logit_bias": {5: 3.0, 6: -INF}, "logprobs": 6},
    {"allowed_token_ids": (1, 2, 30, 400), "top_k": 3, "logprobs": 9},
    {"allowed_token_ids": (1, 2, 30), "logit_bias": {1: 80.0, 77: 200.0}, "bad_words": ((1,),), "logprobs": 3},
    {"bad_words": ((7,), (3, 8)), "min_tokens": 9, "logprobs": 0},
    {"min_tokens": 9, "logit_bias": {2: 100.0}, "temperature": 0},
]


def make_states(rows: Sequence[int] = range(len(FIELDS)), seed: int = 0) -> list[Any]:
    return [
        state(seed=1000 * seed + row, prompt=(1, 2, 3, row), output=(5, row, 3), eos=(2,), **FIELDS[row])
        for row in rows
    ]


def make_static() -> StaticSampler:
    """One that remembers nothing."""
    return StaticSampler(EagerExecutor().run, max_logprobs=20)


def compare(found: Any, expected: Any, states: Sequence[Any]) -> None:
    """What `StaticSampler` said of its first rows against what `Sampler` said."""
    size = len(states)
    assert found.failed[:size].equal(expected.failed)
    sound = ~expected.failed
    assert found.token_ids[:size][sound].equal(expected.token_ids[sound])
    assert (found.logprobs is None) == (expected.logprobs is None)
    assert (found.top is None) == (expected.top is None)
    if expected.logprobs is not None:
        logprobs = found.logprobs[:size][sound]
        torch.testing.assert_close(logprobs, expected.logprobs[sound], atol=1e-5, rtol=1e-5, equal_nan=True)
        assert found.logprobs[size:].isnan().all()
    for row in range(size):
        pairs = None if expected.top is None or expected.failed[row] else expected.top.rows()[row]
        if pairs is not None:
            own = found.top.rows()[row]
            assert [i for i, _ in own] == [i for i, _ in pairs]
            assert [v for _, v in own] == pytest.approx([v for _, v in pairs], abs=1e-5)


# -- parity


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("padding", [0, 3])
def test_all_kinds_of_rows_in_one_batch(seed: int, padding: int) -> None:
    states = make_states(seed=seed)
    logits = peaky(len(states) + padding, VOCAB, seed)
    compare(make_static()(logits, states), make_sampler()(logits[: len(states)], states), states)


@pytest.mark.parametrize("row", range(len(FIELDS)), ids=lambda row: str(FIELDS[row]))
def test_each_kind_alone(row: int) -> None:
    logits = peaky(20, VOCAB, seed=row)
    for seed in range(10):
        states = make_states([row] * 20, seed=seed)
        for at, each in enumerate(states):
            each.seed += 7919 * at
        compare(make_static()(logits, states), make_sampler()(logits, states), states)


def test_flat_logits_and_half_precision() -> None:
    """Where the cuts keep hundreds of tokens. Equal bf16 logits leave open which is reported, so none is asked for."""
    rows = [row for row, fields in enumerate(FIELDS) if not fields.get("logprobs")]
    states = make_states(rows)
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = torch.randn(len(rows), VOCAB, generator=generator).to(dtype)
        compare(make_static()(logits, states), make_sampler()(logits, states), states)


def test_a_request_that_goes_on() -> None:
    """Counts, bad words, min_tokens and draws follow the output, through a batch that stays the same."""
    static, sampler = make_static(), make_sampler()
    states = make_states()
    for step in range(12):
        logits = peaky(len(states), VOCAB, seed=step)
        expected = sampler(logits, states)
        compare(static(logits, states), expected, states)
        for each, token_id in zip(states, expected.token_ids.tolist(), strict=True):
            each.output_token_ids.append(token_id % 9)  # few tokens, so that they repeat
        if step % 4 == 3:
            states = states[1:] + states[:1]


def test_drafts_that_are_taken_back() -> None:
    static = make_static()
    one = state(frequency_penalty=2.0, temperature=0, output=(5, 5))
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6] = 6.0, 1.0
    for tail, expected in (((), 5), ((5, 5), 6), ((5,), 6), ((), 5)):
        one.output_token_ids[2:] = tail
        assert static(logits, [one]).token_ids.item() == expected


def test_a_mask_wins_over_any_bias() -> None:
    """Even where the bias takes the logit beyond fp32."""
    logits = torch.full((1, 64), 3e38)
    request = state(temperature=0, logit_bias={3: 3e38}, bad_words=((3,),))
    output = make_static()(logits, [request])
    assert (output.failed.item(), output.token_ids.item()) == (False, 0)


# -- rows and their neighbours


def results(sampler: Any, logits: torch.Tensor, states: Sequence[Any]) -> dict[int, Any]:
    """Everything said of each request, keyed by its seed."""
    output = sampler(logits, states)
    found = {}
    for row, each in enumerate(states):
        logprob = None if each.params.logprobs is None else output.logprobs[row].item()
        top = None if output.top is None else output.top.rows()[row]
        found[each.seed] = (output.token_ids[row].item(), output.failed[row].item(), logprob, top)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_to_the_bit_whatever_is_beside_it(dtype: torch.dtype) -> None:
    logits = peaky(len(FIELDS), VOCAB).to(dtype)
    states = make_states()
    alone: dict[int, Any] = {}
    for row, each in enumerate(states):
        alone |= results(make_static(), logits[row : row + 1], [each])
    rng = random.Random(0)
    shared = make_static()
    for _ in range(8):
        rows = rng.sample(range(len(FIELDS)), rng.randint(1, len(FIELDS)))
        padded = torch.cat([logits[rows], torch.full((rng.randint(0, 3), VOCAB), NAN, dtype=dtype)])
        assert results(shared, padded, [states[row] for row in rows]) == {row: alone[row] for row in rows}


def test_logits_are_left_as_they_are() -> None:
    logits = peaky(len(FIELDS), VOCAB)
    before = logits.clone()
    make_static()(logits, make_states())
    assert logits.equal(before)


# -- what goes wrong


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_a_bad_row_fails_alone(bad: float, fields: dict[str, Any]) -> None:
    logits = peaky(3, VOCAB)
    states = [state(seed=row, output=(5,), eos=(2,), **fields) for row in range(3)]
    expected = results(make_static(), logits, states)
    logits[1, 77] = bad
    output = make_static()(logits, states)
    assert output.failed.tolist() == [False, True, False]
    assert 0 <= output.token_ids[1].item() < VOCAB
    found = results(make_static(), logits, states)
    assert (found[0], found[2]) == (expected[0], expected[2])


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": dict.fromkeys(range(10), -INF)},
        {"allowed_token_ids": (3,), "bad_words": ((3,),)},
        {"allowed_token_ids": (2,), "eos": (2,), "min_tokens": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_left_to_choose_from_fails(fields: dict[str, Any], temperature: float) -> None:
    output = make_static()(torch.zeros(3, 10), [state(temperature=temperature, **fields), state()])
    assert output.failed.tolist() == [True, False, False]


def test_an_eos_beyond_the_logits_is_no_trouble() -> None:
    assert make_static()(torch.zeros(1, 8), [state(temperature=0, eos=(70,), min_tokens=2)]).token_ids.item() == 0


def test_padding_is_greedy_and_asks_for_nothing() -> None:
    logits = peaky(4, VOCAB)
    output = make_static()(logits, [state(logprobs=1)])
    assert output.token_ids[1:].equal(logits[1:].argmax(-1))
    assert [output.top.rows()[row] is None for row in range(4)] == [False, True, True, True]
    assert make_static()(logits, []).token_ids.equal(logits.argmax(-1))


def test_the_same_requests_in_another_bucket() -> None:
    static, states = make_static(), make_states([6, 14])
    for size in (2, 4, 3):
        logits = peaky(size, VOCAB)
        compare(static(logits, states), make_sampler()(logits[:2], states), states)


def test_too_many_states_and_too_many_logprobs_are_refused() -> None:
    with pytest.raises(ValueError, match="a row for each state"):
        make_static()(torch.zeros(1, 8), [state(), state()])
    with pytest.raises(ValueError, match="a row for each state"):
        make_static()(torch.zeros(8), [])
    with pytest.raises(ValueError, match=r"logprobs must be at most 20 .* got 21"):
        make_static()(torch.zeros(1, 64), [state(logprobs=21)])


# -- shapes


@pytest.mark.parametrize("inference", [False, True])
def test_a_few_graphs_serve_every_batch(inference: bool) -> None:
    device = FakeStaticDevice()
    static = StaticSampler(device.run, max_logprobs=20)
    rng = random.Random(0)
    with torch.inference_mode(inference):
        with device.compile_only():
            for size in (8, 4):
                static.warmup(torch.full((size, VOCAB), NAN))
        assert device.num_compiles == 2 * len(VARIANTS) == 24
        assert device.num_reads == 0
        device.freeze()
        for seed in range(60):
            rows = rng.choices(range(len(FIELDS)), k=rng.randint(1, 8))
            states = make_states(rows[: rng.choice([1, 8])], seed)
            logits = peaky(4 if len(states) <= 4 else 8, VOCAB, seed)
            found = _map_tensors(static(logits, states), device.to_host)
            compare(found, make_sampler()(logits[: len(states)], states), states)
        with pytest.raises(ShapeNotWarmedError):
            static(peaky(5, VOCAB), [])
    assert device.num_compiles == 24
    assert len([uses for uses in device.keys.values() if uses]) > 10


def test_garbage_from_warm_up_leaves_no_trace() -> None:
    device = FakeStaticDevice()
    static = StaticSampler(device.run, max_logprobs=20)
    logits, states = peaky(len(FIELDS), VOCAB), make_states()
    with device.compile_only():
        static.warmup(logits)
        with pytest.raises(StaticDeviceError):
            device.read(static(logits, states).token_ids)
    compare(_map_tensors(static(logits, states), device.to_host), make_sampler()(logits, states), states)


def recording(calls: list[tuple[Any, ...]]) -> StaticSampler:
    """One that notes the arguments of all its calls."""

    def run(name: str, function: Any, *args: Any) -> Any:
        calls.append(args)
        return function(*args)

    return StaticSampler(run, max_logprobs=20)


@pytest.mark.parametrize(
    ("fields", "draw", "parts"),
    [
        ({"temperature": 0, "top_p": 0.5, "top_k": 3}, Draw.GREEDY, set()),
        ({"temperature": 0.7}, Draw.FREE, {"softmax"}),
        ({"top_k": 3}, Draw.CUT, {"softmax", "sort"}),
    ],
    ids=["greedy", "free", "cut"],
)
def test_nobody_pays_for_what_nobody_asked(fields: dict[str, Any], draw: Draw, parts: set[str]) -> None:
    calls: list[tuple[Any, ...]] = []
    with torch.profiler.profile() as profile:
        recording(calls)(torch.zeros(2, 256), [state(**fields)])
    ((_, edits, odds, report),) = calls
    assert (edits, report) == (None, None)
    assert (odds is None) == (draw is Draw.GREEDY)
    assert odds is None or (odds.limits is None) == (draw is Draw.FREE)
    used = {event.key.removeprefix("aten::") for event in profile.key_averages()}
    assert used & {"softmax", "sort", "topk"} == parts


def test_fixed_edits_are_made_once() -> None:
    calls: list[tuple[Any, ...]] = []
    static = recording(calls)
    states = [state(logit_bias={3: 1.0}, min_tokens=2, eos=(4,)), state()]
    for _ in range(4):
        static(torch.zeros(2, 64), states)
        states[0].output_token_ids.append(1)
    seen = [args[1] for args in calls]
    assert [edits.bias is seen[0].bias for edits in seen] == [True] * 4
    assert [edits.addend is seen[3].addend for edits in seen] == [False, False, True, True]


def test_a_draw_at_the_very_end_is_a_token() -> None:
    """Some devices have no float64, and round a number below 1 to 1."""
    logits = torch.tensor([[0.0, 1.0, 2.0, -INF]])
    limits = Limits(torch.tensor([2]), torch.ones(1), torch.zeros(1))
    for odds in (Odds(torch.ones(1), torch.ones(1), None), Odds(torch.ones(1), torch.ones(1), limits)):
        assert sample_rows(logits, None, odds, None).token_ids.item() == 2
