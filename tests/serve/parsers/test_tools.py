"""Tool definitions are checked at the door, and the message names the place and the fix."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cb_engine.serve.parsers import Tool, validate_tools


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": fields}


def test_good_definitions_become_tools():
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "any": True}, "required": ["city"]}
    checked = validate_tools(
        [
            function(name="get_weather", description="The weather.", parameters=schema, strict=True),
            function(name="a-b_C9"),
            function(name="empty", parameters={}, description=None, strict=None),
            function(name="n" * 64, parameters={"properties": {}}),
        ]
    )
    assert checked == (
        Tool("get_weather", "The weather.", schema, True),
        Tool("a-b_C9"),
        Tool("empty", parameters={}),
        Tool("n" * 64, parameters={"properties": {}}),
    )


def test_no_tools_are_no_tools():
    assert validate_tools([]) == ()


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        ("f", r"tools\[1\]: must be an object"),
        ({"function": {"name": "f"}}, r'tools\[1\]\.type: must be "function", got None'),
        ({"type": "retrieval"}, r'tools\[1\]\.type: must be "function", got \'retrieval\''),
        ({"type": "function"}, r"tools\[1\]\.function: must be an object with a name, got None"),
        (function(), r"tools\[1\]\.function\.name: is missing"),
        (function(name=3), r"tools\[1\]\.function\.name: must be 1 to 64 letters.*got 3"),
        (function(name=""), r"tools\[1\]\.function\.name: must be"),
        (function(name="get weather"), r"\.name: must be 1 to 64 letters, digits, '_' or '-'.*got 'get weather'"),
        (function(name="naïve"), r"\.name: must be"),
        (function(name="f\n"), r"\.name: must be"),
        (function(name="n" * 65), r"\.name: must be"),
        (function(name="first"), r"tools\[1\]\.function\.name: 'first' is the name of tools\[0\] too; give each"),
        (function(name="f", description=1), r"tools\[1\]\.function\.description: must be a string, got 1"),
        (function(name="f", strict="yes"), r"tools\[1\]\.function\.strict: must be true or false, got 'yes'"),
        (function(name="f", parameters=[]), r"tools\[1\]\.function\.parameters: must be a JSON schema"),
        (function(name="f", parameters={"type": "string"}), r"parameters\.type: .*must be \"object\", got 'string'"),
        (function(name="f", parameters={"properties": ["a"]}), r"parameters\.properties: must be an object"),
        (function(name="f", parameters={"properties": {"a": 1}}), r"parameters\.properties\['a'\]: must be a JSON"),
        (function(name="f", parameters={"required": "a"}), r"parameters\.required: must be a list of names, got 'a'"),
        (function(name="f", parameters={"required": [1]}), r"parameters\.required: must be a list of names"),
    ],
)
def test_a_bad_definition_is_named_with_its_place(definition, message):
    with pytest.raises(ValueError, match=message) as error:
        validate_tools([function(name="first"), definition])
    assert re.search(r"tools\[1\]", str(error.value))
