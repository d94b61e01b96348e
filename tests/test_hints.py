"""Workload hints: names, values, and transformers' dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from cb_engine.hints import WorkloadHints, normalize_hints


@dataclass
class TheirHints:
    max_prompt_length: int = 0
    max_generated_length: int = 0
    num_requests: int = 0


@dataclass
class OtherHints:
    batch: int = 3


def test_no_hints_are_no_knowledge():
    assert normalize_hints(None) == {}
    assert normalize_hints({}) == {}


def test_known_hints_are_kept():
    hints: WorkloadHints = {"max_prompt_length": 10, "max_generated_length": 20, "num_requests": 3}
    assert normalize_hints(hints) == hints


@pytest.mark.parametrize("unknown", [0, None])
def test_zero_and_none_mean_unknown(unknown: int | None):
    assert normalize_hints({"max_prompt_length": unknown, "num_requests": 3}) == {"num_requests": 3}


def test_a_dataclass_with_these_fields_is_accepted():
    assert normalize_hints(TheirHints(num_requests=3)) == {"num_requests": 3}


def test_the_input_is_not_changed_and_the_result_is_a_copy():
    hints = {"num_requests": 0}
    assert normalize_hints(hints) is not hints
    assert hints == {"num_requests": 0}


@pytest.mark.parametrize("hints", [{"max_prompt_len": 3}, {"batch": None}, OtherHints()])
def test_an_unknown_key_is_an_error_that_names_it(hints: Any):
    with pytest.raises(ValueError, match=r"unknown key '(max_prompt_len|batch)'.*max_prompt_length"):
        normalize_hints(hints)


@pytest.mark.parametrize("key", ["max_prompt_length", "max_generated_length", "num_requests"])
@pytest.mark.parametrize("bad", [1.5, "3", True])
def test_a_wrong_type_is_an_error_that_names_the_key(key: str, bad: Any):
    with pytest.raises(TypeError, match=key):
        normalize_hints({key: bad})


@pytest.mark.parametrize("key", ["max_prompt_length", "max_generated_length", "num_requests"])
def test_a_negative_value_is_an_error_that_names_the_key(key: str):
    with pytest.raises(ValueError, match=key):
        normalize_hints({key: -1})


@pytest.mark.parametrize("bad", [3, "num_requests", [("num_requests", 3)], TheirHints])
def test_anything_else_is_refused(bad: Any):
    with pytest.raises(TypeError, match="workload_hints"):
        normalize_hints(bad)
