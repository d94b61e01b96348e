"""The command as a whole: help, errors of one line, what is imported when."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

import cb_engine
from cb_engine.cli.main import build_app


def all_commands() -> Iterator[tuple[str, Any]]:
    """Every command by its name, those of groups included."""
    todo: list[tuple[str, Any]] = [("", typer.main.get_command(build_app()))]
    while todo:
        name, command = todo.pop()
        yield name, command
        todo += [(f"{name} {sub}".strip(), child) for sub, child in getattr(command, "commands", {}).items()]


COMMANDS = dict(all_commands())


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_commands() -> None:
    assert {"generate", "chat", "bench", "bench list", "bench overall"} <= COMMANDS.keys()


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_and_option_has_help(name: str) -> None:
    command = COMMANDS[name]
    assert command.help
    for param in command.params:
        assert param.help, f"{name}: {param.name} has no help"


@pytest.mark.parametrize("name", sorted(name for name in COMMANDS if not name.startswith("bench ")))
def test_help_lists_every_option_by_its_whole_name(name: str, command: Any) -> None:
    done = command(*name.split(), "--help")
    assert done.code == 0
    assert done.stderr == ""
    for param in COMMANDS[name].params:
        for option in (*param.opts, *param.secondary_opts):
            if option.startswith("-"):
                assert option in done.stdout
    assert command(*name.split(), "-h").stdout == done.stdout


def test_options_stand_in_their_panels(command: Any) -> None:
    sections = [line for line in command("generate", "--help").stdout.splitlines() if line and line[0] != " "]
    assert sections[1:] == [
        "Arguments:",
        "Prompts:",
        "Sampling:",
        "Answers:",
        "Model:",
        "Engine:",
        "Workload hints:",
        "Other options:",
    ]


@pytest.mark.parametrize(
    "arguments", ["--help", "generate --help", "chat --help", "bench --help", "--version", "generate"]
)
def test_torch_is_not_loaded_for_help_and_errors(arguments: str) -> None:
    code = (
        "import sys; from cb_engine.cli.main import main\n"
        f"sys.argv = ['cb-engine', *{arguments.split()!r}]\n"
        "try: main()\n"
        "except SystemExit: print(sorted({'torch', 'transformers', 'numpy'} & sys.modules.keys()))"
    )
    assert python(code).stdout.endswith("[]\n")


def test_version(command: Any) -> None:
    done = command("--version")
    assert (done.code, done.stdout) == (0, f"cb-engine {cb_engine.__version__}\n")


def test_python_dash_m() -> None:
    done = subprocess.run([sys.executable, "-m", "cb_engine", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"cb-engine {cb_engine.__version__}\n"


def test_without_a_command_there_is_help(command: Any) -> None:
    assert command().stdout == command("--help").stdout
    assert command().code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "cb-engine: No such command 'nonsense'."),
        (["--nonsense"], "cb-engine: No such option: --nonsense"),
        (["bench", "nonsense"], "cb-engine bench: No such command 'nonsense'."),
        (["generate"], "cb-engine generate: Missing argument 'MODEL'."),
        (["generate", "demo", "--n", "x"], "cb-engine generate: Invalid value for '--n' / '-n': "),
        (["generate", "demo", "--dtype", "int3"], "cb-engine generate: Invalid value for '--dtype': "),
        (["generate", "demo", "--top-p", "3"], "cb-engine generate: --top-p must be above 0 and at most 1, got 3.0"),
        (["chat"], "cb-engine chat: MODEL is missing: give one, `cb-engine chat demo` for example, or --base-url"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_is_one_line_and_exit_code_2(arguments: list[str], message: str, command: Any) -> None:
    done = command(*arguments)
    assert done.code == 2
    assert done.stdout == ""
    assert done.error.startswith(message)


def test_without_typer_one_line_names_the_extra() -> None:
    done = python("import sys; sys.modules['typer'] = None; from cb_engine.cli.main import main; main()")
    assert done.returncode == 1
    assert done.stderr == "cb-engine: the command line needs Typer; run pip install 'cb-engine[serve]'\n"


def test_shell_completion_knows_the_commands() -> None:
    code = (
        "import os, sys; from cb_engine.cli.main import main; sys.argv = ['cb-engine']\n"
        "os.environ |= {'_CB_ENGINE_COMPLETE': 'complete_bash', 'COMP_WORDS': 'cb-engine ge', 'COMP_CWORD': '1'}\n"
        "main()"
    )
    assert python(code).stdout.split() == ["generate"]
