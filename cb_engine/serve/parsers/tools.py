"""The tools of a request, checked.

Owns: what a tool definition has to be. Does not know: how a model is told of it, or calls it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True)
class Tool:
    """One function that the model may call."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None  # a JSON schema of an object; None: any object
    strict: bool = False  # asked for by the client; a grammar follows the schema to the letter either way


def validate_tools(tools: Iterable[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """Check the `tools` of a request, as OpenAI's API defines them, and return them as our own type.

    Args:
        tools: dictionaries `{"type": "function", "function": {"name": ..., "parameters": ...}}`.

    Raises:
        ValueError: naming `tools[i]` and the fix.
    """
    checked: list[Tool] = []
    first_use: dict[str, int] = {}
    for index, definition in enumerate(tools):
        tool = _validate_tool(f"tools[{index}]", definition)
        if tool.name in first_use:
            raise ValueError(
                f"tools[{index}].function.name: {tool.name!r} is the name of tools[{first_use[tool.name]}] too; "
                "give each function its own name"
            )
        first_use[tool.name] = index
        checked.append(tool)
    return tuple(checked)


def _validate_tool(where: str, definition: object) -> Tool:
    if not isinstance(definition, Mapping):
        raise ValueError(f'{where}: must be an object {{"type": "function", "function": ...}}, got {definition!r}')
    if definition.get("type") != "function":
        raise ValueError(f'{where}.type: must be "function", got {definition.get("type")!r}')
    function = definition.get("function")
    if not isinstance(function, Mapping):
        raise ValueError(f"{where}.function: must be an object with a name, got {function!r}")
    where += ".function"
    description, strict = function.get("description"), function.get("strict")
    if not isinstance(description, str | None):
        raise ValueError(f"{where}.description: must be a string, got {description!r}")
    if not isinstance(strict, bool | None):
        raise ValueError(f"{where}.strict: must be true or false, got {strict!r}")
    return Tool(
        name=_validate_name(where, function),
        description=description,
        parameters=_validate_parameters(where, function.get("parameters")),
        strict=bool(strict),
    )


def _validate_name(where: str, function: Mapping[str, Any]) -> str:
    name = function.get("name")
    if name is None:
        raise ValueError(f"{where}.name: is missing; name the function")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{where}.name: must be 1 to 64 letters, digits, '_' or '-' ({_NAME.pattern}), got {name!r}")
    return name


def _validate_parameters(where: str, schema: object) -> Mapping[str, Any] | None:
    where += ".parameters"
    if schema is None:
        return None
    if not isinstance(schema, Mapping):
        raise ValueError(f"{where}: must be a JSON schema, got {schema!r}; leave it out for any object")
    if schema.get("type", "object") != "object":
        raise ValueError(
            f'{where}.type: arguments are an object, so it must be "object", got {schema["type"]!r}; '
            "put a single value into a property"
        )
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise ValueError(f"{where}.properties: must be an object of schemas by name, got {properties!r}")
    for name, value in properties.items():
        if not isinstance(value, Mapping | bool):
            raise ValueError(f"{where}.properties[{name!r}]: must be a JSON schema, got {value!r}")
    required = schema.get("required", [])
    if not isinstance(required, list | tuple) or not all(isinstance(name, str) for name in required):
        raise ValueError(f"{where}.required: must be a list of names, got {required!r}")
    return schema
