"""Groups of options as dataclasses: declared once, taken by any command, and errors that name the option.

Owns how a dataclass becomes options and how a message about a field becomes one about its option. Does not know any
option. A command that takes a group is written so, and the group's fields, whose annotations are Typer's, become its
options:

    def serve(model: Annotated[str, typer.Argument()], engine: EngineOptions, port: ...) -> int: ...

    app.command()(spread(serve))
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, get_type_hints

import typer


class OptionError(typer.BadParameter):
    """A wrong value; the message names the option and the fix. Ends the command with exit code 2."""

    def format_message(self) -> str:
        """The message alone: it begins with the option."""
        return self.message


def spread(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces each parameter that is annotated with a dataclass by that dataclass's fields, for Typer.

    Raises:
        TypeError: two groups, or a group and the command, have a parameter of the same name.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        hint = hints[name]
        if isinstance(hint, type) and is_dataclass(hint):
            groups[name] = hint
            types = get_type_hints(hint, include_extras=True)
            parameters += [_parameter(field, types[field.name]) for field in fields(hint)]
        else:
            parameters.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))
    names = [parameter.name for parameter in parameters]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise TypeError(f"{command.__name__}: the option {twice[0]!r} is declared twice; leave one of them out")

    def run(**given: Any) -> Any:
        made = {name: group(**{f.name: given.pop(f.name) for f in fields(group)}) for name, group in groups.items()}
        return command(**made, **given)

    run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
    run.__annotations__ = {}  # all types are in the signature
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _parameter(field: Field[Any], hint: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def option_name(field: str) -> str:
    """`max_num_seqs` -> `--max-num-seqs`: options are called like the fields that they set."""
    return "--" + field.replace("_", "-")


@contextmanager
def naming_options(names: Iterable[str]) -> Iterator[None]:
    """Turns a ValueError or TypeError about fields into an OptionError about their options.

    Args:
        names: the fields; each is replaced by its option where the message mentions it.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        known = set(names)
        message = re.sub(r"[-\w]+", lambda word: option_name(word[0]) if word[0] in known else word[0], str(error))
        raise OptionError(one_line(message.replace("or None to", "or be left out to"))) from error


def one_line(message: object) -> str:
    """A message without its line breaks."""
    return " ".join(str(message).split())
