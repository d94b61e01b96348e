"""What the text of a request must be: a JSON schema, a regular expression, a choice, a grammar.

Owns the names, legal values and size limits of `StructuredOutput`; one that exists is well-formed JSON or text of a
sensible size. Does not know grammars or tokenizers: whether a schema or an expression means anything shows when it is
compiled (`cb_engine/grammar`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, cast

Constraint = Literal["json_schema", "json_object", "regex", "choice", "grammar"]

# What an expression of such a length can make one step cost stays below a fifth of a second, and only once: whatever
# is that dear runs out of fuel and fails. Schemas and choices are cheap for their length.
_MAX_CHARS: dict[str, int] = {"json_schema": 2**17, "choice": 2**17, "grammar": 2**16, "regex": 2**13}
_MAX_PATTERN_CHARS = _MAX_CHARS["regex"]  # of all patterns of a schema together


@dataclass(frozen=True, kw_only=True)
class StructuredOutput:
    """Exactly one of the constraints. Immutable, hashable and picklable; equal constraints compare equal.

    `json_schema` accepts a mapping or JSON text and is stored as JSON text without spaces, the order of its keys kept
    (properties are generated in that order); `choice` accepts any sequence of strings and is stored as a tuple.

    Raises:
        TypeError: if a field has the wrong type.
        ValueError: if not exactly one constraint is given, or one is empty, malformed or too long.
    """

    json_schema: Mapping[str, Any] | str | None = None
    json_object: bool = False  # any JSON object
    regex: str | None = None  # of the whole text, in the syntax of Rust's regex, without look-around
    choice: Sequence[str] | None = None
    grammar: str | None = None  # in llguidance's dialect of Lark, from the rule `start`
    compact: bool = False  # of JSON: no whitespace between its parts. Otherwise up to 64 characters anywhere

    def __post_init__(self) -> None:
        """Check every field and store it in its one normal form."""
        for name in ("json_object", "compact"):
            if type(getattr(self, name)) is not bool:
                raise TypeError(f"structured.{name} must be True or False, got {getattr(self, name)!r}")
        given = [name for name in _CONSTRAINTS if self._has(name)]
        if len(given) != 1:
            raise ValueError(
                f"structured must have exactly one of {', '.join(_CONSTRAINTS)}, got {' and '.join(given) or 'none'}"
            )
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name))
        if self.compact and not (self.json_schema or self.json_object):
            raise ValueError(
                f"structured.compact is about JSON and has no meaning for a {self.constraint}; leave it out"
            )
        limit = _MAX_CHARS.get(self.constraint, self.num_chars)
        if self.num_chars > limit:
            raise ValueError(
                f"structured.{self.constraint} has {self.num_chars} characters, at most {limit} are taken; shorten it"
            )

    @classmethod
    def of(cls, value: object) -> StructuredOutput:
        """Return `value`, which is one or a mapping of its fields.

        Raises:
            TypeError, ValueError: as the constructor, or if a name is not a field.
        """
        if isinstance(value, StructuredOutput):
            return value
        if not isinstance(value, Mapping):
            raise TypeError(f"structured must be a StructuredOutput or a dict of its fields, got {value!r}")
        names = [field.name for field in fields(cls)]
        unknown = [key for key in value if key not in names]
        if unknown:
            raise ValueError(f"structured has no field {unknown[0]!r}; its fields are {', '.join(names)}")
        return cls(**value)

    @property
    def constraint(self) -> Constraint:
        """The name of the field that is given."""
        return next(name for name in _CONSTRAINTS if self._has(name))

    def _has(self, name: Constraint) -> bool:
        return self.json_object if name == "json_object" else getattr(self, name) is not None

    @property
    def num_chars(self) -> int:
        """The length of what is given."""
        value = cast("str | tuple[str, ...] | bool", getattr(self, self.constraint))
        return sum(map(len, value)) if isinstance(value, (str, tuple)) else 0


_CONSTRAINTS: tuple[Constraint, ...] = ("json_schema", "json_object", "regex", "choice", "grammar")


def _check_text(name: str, text: object) -> str:
    if not isinstance(text, str):
        raise TypeError(f"structured.{name} must be a string, got {text!r}")
    if not text:
        raise ValueError(f"structured.{name} must not be empty, got ''; leave structured out to allow any text")
    check_unicode(f"structured.{name}", text)
    return text


def check_unicode(name: str, text: str) -> None:
    """Raises for a text that UTF-8 has no bytes for.

    Raises:
        ValueError: it holds half of a surrogate pair; beginning with `name`.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} holds half of a surrogate pair at {error.start}; remove it") from None


def _choices(value: object) -> tuple[str, ...]:
    if isinstance(value, (str, bytes, Mapping, set, frozenset)) or not hasattr(value, "__iter__"):
        raise TypeError(f"structured.choice must be a list or tuple of strings, got {value!r}")
    choices = tuple(dict.fromkeys(_check_text("choice", text) for text in value))
    if not choices:
        raise ValueError("structured.choice must not be empty, got (); leave structured out to allow any text")
    return choices


def _schema_text(value: object) -> str:
    """A schema as JSON text in normal form."""
    if isinstance(value, str):
        _check_text("json_schema", value)
        if len(value) > 4 * _MAX_CHARS["json_schema"]:  # not worth parsing
            raise ValueError(f"structured.json_schema has {len(value)} characters; shorten it")
    elif not isinstance(value, Mapping):
        raise TypeError(f"structured.json_schema must be a mapping or JSON text, got {value!r}")
    try:
        schema = json.loads(value) if isinstance(value, str) else dict(value)
        if not isinstance(schema, dict):
            raise ValueError(f"it is no JSON object but {type(schema).__name__}")
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except TypeError as error:
        raise TypeError(f"structured.json_schema cannot be written as JSON: {error}") from None
    except RecursionError:
        raise ValueError("structured.json_schema is nested too deeply; use $ref and $defs") from None
    except ValueError as error:
        raise ValueError(f"structured.json_schema is not a JSON schema: {error}") from None
    length = _pattern_chars(schema)
    if length > _MAX_PATTERN_CHARS:
        raise ValueError(
            f"structured.json_schema has patterns of {length} characters, at most {_MAX_PATTERN_CHARS} are taken; "
            "shorten them"
        )
    return _check_text("json_schema", text)


def _pattern_chars(schema: Any) -> int:
    """The length of all regular expressions in a schema."""
    total, todo = 0, [schema]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            patterns = (value.get("pattern"), value.get("whitespace_pattern"))  # the latter in `x-guidance`
            by_pattern = value.get("patternProperties")
            total += sum(len(pattern) for pattern in patterns if isinstance(pattern, str))
            total += sum(map(len, by_pattern)) if isinstance(by_pattern, dict) else 0
            todo += value.values()
        elif isinstance(value, (list, tuple)):
            todo += value
    return total
