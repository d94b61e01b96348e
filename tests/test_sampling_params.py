"""What SamplingParams accepts, what it makes of it, and what it says to the rest."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cb_engine.sampling_params import SamplingParams
from cb_engine.structured_output import StructuredOutput

INF = float("inf")
FULL: dict[str, Any] = {
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.5,
    "seed": 7,
    "max_tokens": 10,
    "min_tokens": 2,
    "stop": ("a", "bc"),
    "stop_token_ids": (1, 2),
    "ignore_eos": True,
    "logprobs": 5,
    "prompt_logprobs": 0,
    "logprobs_mode": "raw",
    "logit_bias": {3: 1.5, 1: -INF},
    "allowed_token_ids": (1, 3, 5),
    "bad_words": ("x", (4, 5)),
    "priority": -1,
    "cache_salt": "tenant",
    "structured": StructuredOutput(regex="a+"),
    "speculative": False,
    "skip_special_tokens": False,
}


def test_every_field_is_covered_here():
    assert FULL.keys() == {field.name for field in dataclasses.fields(SamplingParams)}


def test_values_come_back():
    params = SamplingParams(**FULL)
    assert {name: getattr(params, name) for name in FULL} == FULL


def test_defaults_are_neutral():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (params.stop, params.stop_token_ids, params.bad_words) == ((), (), ())
    assert params.max_tokens is None
    assert params.logprobs is None


@pytest.mark.parametrize("name", FULL)
def test_hash_and_equality_see_every_field(name):
    params = SamplingParams(**FULL)
    assert params == SamplingParams(**FULL)
    assert hash(params) == hash(SamplingParams(**FULL))
    default = dataclasses.MISSING
    for field in dataclasses.fields(SamplingParams):
        if field.name == name:
            default = field.default
    changed = params.clone(**{name: default})
    assert changed != params
    assert hash(changed) != hash(params)


def test_pickle_and_replace():
    params = SamplingParams(**FULL)
    assert pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params) == params
    assert params.clone(seed=8).seed == 8
    assert params.clone(seed=8).logit_bias == FULL["logit_bias"]
    with pytest.raises(ValueError, match="top_p"):
        params.clone(top_p=2.0)
    with pytest.raises(TypeError, match="topp"):
        params.clone(topp=0.5)


def test_none_means_none_of_them():
    params: Any = SamplingParams(stop=None, stop_token_ids=None, bad_words=None)  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids, params.bad_words) == ((), (), ())
    assert params == SamplingParams()


def test_nobody_can_change_it():
    bias = {1: 2.0}
    params: Any = SamplingParams(logit_bias=bias)
    bias[2] = 1.0
    assert dict(params.logit_bias) == {1: 2.0}
    assert repr(params.logit_bias) == "{1: 2.0}"
    with pytest.raises(TypeError):
        params.logit_bias[3] = 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2


def test_normal_forms():
    numpy_values: dict[str, Any] = {
        "stop_token_ids": np.array([1, 2]),
        "n": np.int64(3),
        "top_p": np.float32(0.5),
        "bad_words": ["x", [1, 2], np.array([3])],
        "logit_bias": {np.int32(5): 2, 1: 0.5},
    }
    params: Any = SamplingParams(
        top_k=-1,
        stop="end",
        temperature=1,
        allowed_token_ids=range(3),
        **numpy_values,
    )
    assert params.top_k == 0
    assert params.stop == ("end",)
    assert params.stop_token_ids == (1, 2)
    assert (type(params.n), type(params.temperature), type(params.top_p)) == (int, float, float)
    assert params.bad_words == ("x", (1, 2), (3,))
    assert params.allowed_token_ids == (0, 1, 2)
    assert list(params.logit_bias.items()) == [(1, 0.5), (5, 2.0)]
    assert {type(token_id) for token_id in (*params.stop_token_ids, *params.logit_bias)} == {int}


def test_is_greedy():
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=1e-4).is_greedy
    assert SamplingParams(temperature=1e-50) == SamplingParams(temperature=0), "what fp32 cannot divide by is greedy"


def test_no_generated_token_is_legal():
    assert SamplingParams(max_tokens=0, prompt_logprobs=1).max_tokens == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", INF),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("top_k", -2),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", INF),
        ("frequency_penalty", float("nan")),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop_token_ids", [-1]),
        ("logprobs", -1),
        ("prompt_logprobs", -1),
        ("logprobs_mode", "logits"),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: INF}),
        ("logit_bias", {1: float("nan")}),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-3]),
        ("bad_words", [""]),
        ("bad_words", [[]]),
        ("bad_words", [[-1]]),
        ("cache_salt", ""),
    ],
)
def test_illegal_values_are_named(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", True),
        ("n", 1.0),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", None),
        ("top_k", 5.0),
        ("min_p", "0"),
        ("repetition_penalty", None),
        ("presence_penalty", False),
        ("frequency_penalty", "x"),
        ("seed", 1.5),
        ("max_tokens", True),
        ("min_tokens", None),
        ("stop", 5),
        ("stop", [5]),
        ("stop", {"a"}),
        ("stop_token_ids", 5),
        ("stop_token_ids", "12"),
        ("stop_token_ids", [1.0]),
        ("ignore_eos", 1),
        ("speculative", 1),
        ("speculative", None),
        ("logprobs", True),
        ("prompt_logprobs", "1"),
        ("logit_bias", [1, 2]),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {1: True}),
        ("allowed_token_ids", {1: 2}),
        ("bad_words", "x"),
        ("bad_words", [5]),
        ("priority", 1.0),
        ("priority", False),
        ("cache_salt", 5),
    ],
)
def test_wrong_types_are_named(name, value):
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: value})


def test_messages_say_value_and_fix():
    with pytest.raises(ValueError, match=r"top_p must be above 0 and at most 1, got 0\.0; use 1 to turn it off"):
        SamplingParams(top_p=0)
    with pytest.raises(ValueError, match="min_tokens=5 and max_tokens=4; lower min_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_token_ids": [10]},
        {"allowed_token_ids": [1, 10]},
        {"logit_bias": {10: 1.0}},
        {"bad_words": ["a", [1, 10]]},
    ],
    ids=str,
)
def test_validate_vocab(fields):
    params = SamplingParams(**fields)
    params.validate_vocab(11)
    with pytest.raises(ValueError, match=rf"{next(iter(fields))} holds token id 10, .* use ids from 0 to 9"):
        params.validate_vocab(10)


@pytest.mark.parametrize("module", ["cb_engine.sampling_params", "cb_engine.detokenizer"])
def test_no_torch_is_needed(module):
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.split(".")[0])
    assert not imported & {"torch", "transformers", "tokenizers", "numpy"}


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e39}, {"temperature": 10**400}, {"top_k": 2**63}, {"n": 2**40}, {"min_tokens": 2**31},
        {"max_tokens": 2**31}, {"logprobs": 2**31}, {"logit_bias": {1: 1e300}}, {"logit_bias": {1: -4e38}},
    ],
    ids=str,
)  # fmt: skip
def test_numbers_that_a_device_could_not_hold_are_refused(fields):
    (name,) = fields
    with pytest.raises(ValueError, match=name):
        SamplingParams(**fields)
