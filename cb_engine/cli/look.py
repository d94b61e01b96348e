"""How the command line looks to its user: errors of one line, exit codes, help, version.

Does not know any command. Exit codes: 0, 1 for work that failed, 2 for wrong options, 130 for Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from cb_engine import __version__
from cb_engine.cli.spreading import one_line, spread

FAILED = 1
WRONG_OPTIONS = 2
INTERRUPTED = 130

HELP_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


class CommandFailedError(Exception):
    """Ends a command with one line and an exit code."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(one_line(message))
        self.exit_code = exit_code


class OneLineErrors(TyperGroup):
    """A group of commands whose errors are single lines on stderr; a command's result is the exit code."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Runs the command line and ends the process."""
        try:
            code = super().main(args, prog_name or "cb-engine", complete_var, False, windows_expand_args, **extra)
        except CommandFailedError as error:
            _complain("cb-engine", str(error))
            code = error.exit_code
        except typer.Abort:  # Ctrl-C or the end of input where an answer was wanted
            code = INTERRUPTED
        except Exception as error:
            # What the parser raises can say itself for people; its base class has another name in every Typer.
            if not hasattr(error, "format_message"):
                raise
            context = getattr(error, "ctx", None)
            _complain(context.command_path if context else "cb-engine", error.format_message())
            code = getattr(error, "exit_code", WRONG_OPTIONS)
        sys.exit(code if isinstance(code, int) else 0)


class GroupedHelp(TyperCommand):
    """A command whose help lists its options by panel, in plain text: names are never cut, whatever the width."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes one section for each panel, in the order in which they are declared; the rest comes last."""
        panels: dict[str, list[tuple[str, str]]] = {}
        rest: list[tuple[str, str]] = []
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            is_argument = param.param_type_name == "argument"
            panel = "Arguments" if is_argument else getattr(param, "rich_help_panel", None)
            (panels.setdefault(panel, []) if panel else rest).append(record)
        for title, records in (*panels.items(), ("Other options", rest)):
            if records:
                with formatter.section(title):
                    formatter.write_dl(records, col_max=34)


def _complain(command: str, message: str) -> None:
    typer.secho(f"{command}: {one_line(message)}", fg="red", err=True)


def note(message: str) -> None:
    """One line for people, on stderr."""
    typer.echo(f"cb-engine: {one_line(message)}", err=True)


def new_app(help_text: str) -> typer.Typer:
    """The command without its subcommands."""
    app = typer.Typer(
        name="cb-engine",
        cls=OneLineErrors,
        help=help_text,
        context_settings=HELP_SETTINGS,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback(invoke_without_command=True)(_top_level)
    return app


def add_command(app: typer.Typer, command: Callable[..., int]) -> None:
    """Registers a function as the command of its name; dataclasses among its parameters are groups of options."""
    app.command(cls=GroupedHelp, context_settings=HELP_SETTINGS)(spread(command))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cb-engine {__version__}")
        raise typer.Exit


def help_if_alone(context: typer.Context) -> None:
    """For a group of commands: without any of them it prints its help."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _top_level(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    help_if_alone(context)
