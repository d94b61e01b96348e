"""`cb-engine bench`: runs the measuring scripts of the repository, with all arguments passed through.

Owns their names. The scripts are no part of the installed package; where they are not, that is said.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import typer

from cb_engine.cli.look import HELP_SETTINGS, INTERRUPTED, WRONG_OPTIONS, CommandFailedError, help_if_alone

_IMPORTED_FROM = Path(__file__).parents[2]
_REPOSITORY = _IMPORTED_FROM  # unless the package is installed

BENCHMARKS = {  # name: (script, what it measures)
    "overall": ("continuous_batching_overall.py", "Throughput over many kinds of work, one row per label."),
    "peers": ("compare_peers.py", "The same cases on this engine and on others that are installed."),
    "spec-decode": ("spec_decode.py", "What speculative decoding gives: with and without, in turn."),
    "attention": ("bench_attention.py", "The paged attention kernels alone."),
    "demo": ("demo.py", "A real model answers 20 prompts at once."),
}
# Everything behind the name belongs to the script, --help included.
_PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def build_app() -> typer.Typer:
    """The group `bench`, with a command for each script."""
    app = typer.Typer(
        name="bench",
        help="Run the measuring scripts of the repository. All arguments go through to the script, --help too.",
        invoke_without_command=True,
        callback=help_if_alone,
        context_settings=HELP_SETTINGS,
        rich_markup_mode=None,
    )
    app.command("list", help="List the benchmarks and where their scripts are.")(list_benchmarks)
    for name, (script, summary) in BENCHMARKS.items():
        app.command(name, help=summary, context_settings=_PASS_THROUGH)(_runner(script))
    return app


def list_benchmarks() -> None:
    """Prints one line for each benchmark."""
    width = max(map(len, BENCHMARKS))
    for name, (script, summary) in BENCHMARKS.items():
        typer.echo(f"{name:{width}}  {summary}  ({find_script(script) or 'not here'})")
    if not any(find_script(script) for script, _ in BENCHMARKS.values()):
        typer.echo(_where_to_get_them(), err=True)


def _runner(script: str) -> Callable[[typer.Context], int]:
    def run(context: typer.Context) -> int:
        return run_script(script, context.args)

    return run


def find_script(script: str) -> Path | None:
    """Where a script is: in the repository that this package is in, or in the one that is the working directory."""
    for root in (_REPOSITORY, Path.cwd()):
        path = root / "scripts" / script
        if path.is_file() and (root / "cb_engine" / "__init__.py").is_file():  # not just any folder of scripts
            return path
    return None


def run_script(script: str, arguments: list[str]) -> int:
    """Runs a script in a process of its own, against this very package.

    Returns:
        its exit code; 128 + N if signal N ended it, as shells say.

    Raises:
        CommandFailedError: the script is not here.
    """
    path = find_script(script)
    if path is None:
        raise CommandFailedError(f"scripts/{script} is not here: {_where_to_get_them()}", WRONG_OPTIONS)
    search = [str(_IMPORTED_FROM), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(search)}
    with subprocess.Popen([sys.executable, str(path), *arguments], env=environment) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt:  # the script got it too, and ends by itself
            process.wait()
            return INTERRUPTED
    return code if code >= 0 else 128 - code


def _where_to_get_them() -> str:
    return (
        "benchmarks are in the repository, not in the installed package; get the repository and run this command in "
        "its folder"
    )
