"""`cb-engine bench`: finding the scripts and passing everything through."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from cli_rig import Command

from cb_engine.cli import bench

SCRIPT = """\
import os, sys
print(sys.argv[1:], flush=True)
import cb_engine
print(cb_engine.__file__, flush=True)
sys.exit(int(sys.argv[1])) if sys.argv[1:2] != ["die"] else os.kill(os.getpid(), 9)
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with scripts that tell how they were called; the package is in no repository."""
    (tmp_path / "cb_engine").mkdir()
    (tmp_path / "cb_engine" / "__init__.py").touch()  # it looks like the repository
    (tmp_path / "scripts").mkdir()
    for script, _ in bench.BENCHMARKS.values():
        (tmp_path / "scripts" / script).write_text(SCRIPT)
    monkeypatch.setattr(bench, "_REPOSITORY", tmp_path / "nowhere")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_benchmark_is_in_this_repository() -> None:
    for script, _ in bench.BENCHMARKS.values():
        assert bench.find_script(script) == Path(bench.__file__).parents[2] / "scripts" / script


def test_scripts_of_any_other_folder_are_left_alone(repository: Path) -> None:
    (repository / "cb_engine" / "__init__.py").unlink()
    assert bench.find_script("demo.py") is None


def test_list(command: Command, repository: Path) -> None:
    lines = command("bench", "list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(bench.BENCHMARKS)
    assert str(repository / "scripts" / "continuous_batching_overall.py") in lines[0]


@pytest.mark.parametrize("name", bench.BENCHMARKS)
def test_arguments_and_exit_code_go_through(
    name: str, command: Command, repository: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    done = command("bench", name, "3", "--samples", "64", "--help", "-n=2", "x")
    printed, package = capfd.readouterr().out.splitlines()
    assert done.code == 3
    assert printed == str(["3", "--samples", "64", "--help", "-n=2", "x"])
    assert package == str(Path(bench.__file__).parents[1] / "__init__.py")  # this very package, wherever it is


def test_help_is_the_scripts(command: Command, capfd: pytest.CaptureFixture[str]) -> None:
    assert command("bench", "attention", "--help").code == 0
    assert "--block-sizes" in capfd.readouterr().out


def test_a_killed_script_ends_as_in_a_shell(command: Command, repository: Path) -> None:
    assert command("bench", "demo", "die").code == 128 + signal.SIGKILL


def test_without_the_repository_it_says_where_benchmarks_are(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_REPOSITORY", tmp_path)
    monkeypatch.chdir(tmp_path)
    done = command("bench", "overall", "--samples", "1")
    assert done.code == 2
    assert done.error.startswith("cb-engine: scripts/continuous_batching_overall.py is not here: benchmarks are in the")
    listed = command("bench", "list")
    assert listed.stdout.count("(not here)") == len(bench.BENCHMARKS)
    assert "get the repository" in listed.error


def test_the_environment_is_kept(command: Command, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = repository / "scripts" / "demo.py"
    script.write_text("import os, sys; sys.exit(41 + (os.environ['MARK'] in sys.path))")
    monkeypatch.setenv("MARK", str(repository))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(repository), "/other"]))
    assert command("bench", "demo").code == 42
