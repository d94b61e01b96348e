"""The constraint's own rules: one of five, in one normal form, of a sensible size."""

from __future__ import annotations

import dataclasses
import json
import pickle
from types import MappingProxyType
from typing import Any

import pytest

from cb_engine import SamplingParams, StructuredOutput

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": "é"}}}
GIVEN: dict[str, Any] = {
    "json_schema": SCHEMA,
    "json_object": True,
    "regex": "a+",
    "choice": ("yes", "no"),
    "grammar": 'start: "a"',
}


@pytest.mark.parametrize("name", GIVEN)
def test_each_constraint_comes_back(name: str) -> None:
    value = StructuredOutput(**{name: GIVEN[name]})
    assert value.constraint == name
    assert hash(value) == hash(StructuredOutput(**{name: GIVEN[name]}))
    assert pickle.loads(pickle.dumps(value)) == value
    assert dataclasses.replace(value) == value
    assert [getattr(value, other) for other in GIVEN if other != name] == [
        False if other == "json_object" else None for other in GIVEN if other != name
    ]


def test_every_field_tells_values_apart() -> None:
    values = {StructuredOutput(**{name: value}) for name, value in GIVEN.items()}
    values |= {StructuredOutput(json_object=True, compact=True), StructuredOutput(json_schema=SCHEMA, compact=True)}
    assert len(values) == 7
    assert {*GIVEN, "compact"} == {field.name for field in dataclasses.fields(StructuredOutput)}


def test_a_schema_has_one_form_and_keeps_the_order_of_its_keys() -> None:
    text = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"const":"é"}}}'
    for given in (SCHEMA, MappingProxyType(SCHEMA), text, json.dumps(SCHEMA, indent=3), json.dumps(SCHEMA)):
        assert StructuredOutput(json_schema=given).json_schema == text  # type: ignore[arg-type]
    reordered = {"properties": SCHEMA["properties"], "type": "object"}
    assert StructuredOutput(json_schema=reordered) != StructuredOutput(json_schema=SCHEMA)


def test_choices_are_a_tuple_without_repetition() -> None:
    assert StructuredOutput(choice=["b", "a", "b"]).choice == ("b", "a")


def test_nobody_can_change_it() -> None:
    schema = {"type": "object", "properties": {}}
    value: Any = StructuredOutput(json_schema=schema)
    schema["properties"] = {"x": {}}
    assert value.json_schema == '{"type":"object","properties":{}}'
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.regex = "a"


DEEP: Any = []
for _ in range(5000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({}, ValueError, "exactly one of json_schema, .*, got none"),
        ({"json_object": False}, ValueError, "got none"),
        ({"regex": "a", "json_object": True}, ValueError, "got json_object and regex"),
        ({"json_schema": 5}, TypeError, "json_schema must be a mapping or JSON text, got 5"),
        ({"json_schema": ["a"]}, TypeError, "json_schema must be a mapping"),
        ({"json_schema": "[1]"}, ValueError, "json_schema is not a JSON schema: it is no JSON object but list"),
        ({"json_schema": "{"}, ValueError, "json_schema is not a JSON schema: Expecting"),
        ({"json_schema": ""}, ValueError, "json_schema must not be empty"),
        ({"json_schema": {"const": float("nan")}}, ValueError, "json_schema is not a JSON schema"),
        ({"json_schema": {"const": {1}}}, TypeError, "json_schema cannot be written as JSON"),
        ({"json_schema": {"const": "\ud800"}}, ValueError, "json_schema holds half of a surrogate pair"),
        ({"json_schema": {"const": DEEP}}, ValueError, "json_schema is nested too deeply"),
        ({"json_schema": '{"const":' + "[" * 5000 + "]" * 5000 + "}"}, ValueError, "json_schema is nested too deeply"),
        ({"json_schema": {"const": "x" * 2**17}}, ValueError, r"json_schema has \d+ characters, at most 131072"),
        ({"json_schema": "x" * 2**20}, ValueError, "json_schema has 1048576 characters"),
        (
            {"json_schema": {"allOf": [{"pattern": "x" * 5000}, {"items": [{"patternProperties": {"x" * 5000: {}}}]}]}},
            ValueError,
            "json_schema has patterns of 10000 characters, at most 8192",
        ),
        (
            {"json_schema": {"x-guidance": {"whitespace_pattern": " ?" * 5000}}},
            ValueError,
            "json_schema has patterns of 10000 characters",
        ),
        ({"json_object": 1}, TypeError, "json_object must be True or False, got 1"),
        ({"regex": 5}, TypeError, "regex must be a string, got 5"),
        ({"regex": False}, TypeError, "regex must be a string, got False"),
        ({"regex": ""}, ValueError, "regex must not be empty"),
        ({"regex": "\udc00"}, ValueError, "regex holds half of a surrogate pair"),
        ({"regex": "x" * 8193}, ValueError, "regex has 8193 characters, at most 8192 are taken; shorten it"),
        ({"choice": "yes"}, TypeError, "choice must be a list or tuple of strings, got 'yes'"),
        ({"choice": {"yes", "no"}}, TypeError, "choice must be a list or tuple"),
        ({"choice": 7}, TypeError, "choice must be a list or tuple"),
        ({"choice": []}, ValueError, "choice must not be empty"),
        ({"choice": ["a", 1]}, TypeError, "choice must be a string, got 1"),
        ({"choice": ["a", ""]}, ValueError, "choice must not be empty, got ''"),
        ({"choice": [str(i) + "x" * 1000 for i in range(200)]}, ValueError, "choice has 200490 characters"),
        ({"grammar": b"start"}, TypeError, "grammar must be a string"),
        ({"grammar": "x" * 65537}, ValueError, "grammar has 65537 characters"),
        ({"regex": "a", "compact": True}, ValueError, "compact is about JSON and has no meaning for a regex"),
        ({"json_object": True, "compact": None}, TypeError, "compact must be True or False, got None"),
    ],
    ids=lambda value: None if not isinstance(value, str) else value[:30],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"structured.*{message}"):
        StructuredOutput(**fields)


# ---- in SamplingParams ---------------------------------------------------------------------------------------------


def test_sampling_params_take_it_or_its_fields() -> None:
    value = StructuredOutput(json_schema=SCHEMA)
    assert SamplingParams(structured=value).structured is value
    assert SamplingParams(structured={"json_schema": SCHEMA}).structured == value
    assert SamplingParams(structured={"json_schema": SCHEMA}) == SamplingParams(structured=value)
    assert SamplingParams().structured is None


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("json", TypeError, "structured must be a StructuredOutput or a dict of its fields, got 'json'"),
        ({"json": {}}, ValueError, "structured has no field 'json'; its fields are json_schema, json_object"),
        ({}, ValueError, "exactly one"),
        ({"regex": 1}, TypeError, "structured.regex must be a string"),
    ],
    ids=["text", "unknown", "empty", "type"],
)
def test_sampling_params_refuse_the_rest(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SamplingParams(structured=value)
