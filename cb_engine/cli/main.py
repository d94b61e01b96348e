"""The command line's entry, and the list of its commands.

A command is a function in a module of its own, registered by one line of `build_app`; it returns its exit code (None
is 0). Nothing that is imported here loads torch: commands do that when they run.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


def build_app() -> typer.Typer:
    """`cb-engine` with all its commands."""
    from cb_engine.cli import bench, chat, generate, look, serve

    app = look.new_app("Continuous batching for transformers models, on the command line.")
    look.add_command(app, serve.serve)
    look.add_command(app, generate.generate)
    look.add_command(app, chat.chat)
    app.add_typer(bench.build_app())
    return app


def main() -> None:
    """Runs the command line; ends the process with its exit code."""
    if importlib.util.find_spec("typer") is None:
        raise SystemExit("cb-engine: the command line needs Typer; run pip install 'cb-engine[serve]'")
    build_app()()
