"""The loader of the native kernel: where it caches, and what happens where nothing can be compiled."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from cb_engine.attention.native_backend import NativeBackend
from cb_engine.native import build


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A process that has not tried to load yet, with an empty cache."""
    monkeypatch.setattr(build, "_loaded", None)
    monkeypatch.setenv("CB_ENGINE_CACHE", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "native"


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("CB_ENGINE_CACHE", "/own")
    assert build.library_dir() == Path("/own/native")
    monkeypatch.delenv("CB_ENGINE_CACHE")
    assert build.library_dir() == Path("/xdg/cb_engine/native")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert build.library_dir() == Path.home() / ".cache" / "cb_engine" / "native"


def test_cxx_names_the_compiler_first(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "true --with-an-option")
    assert build.find_compiler() == ("true", "--with-an-option")


def test_without_a_compiler_it_warns_once_and_declines(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.warns(RuntimeWarning, match=r"no C\+\+ compiler found; install g\+\+"):
        assert not build.load()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not build.load()
        assert not NativeBackend.is_available()
    with pytest.raises(RuntimeError, match="could not be built"):
        NativeBackend()


def test_a_failing_compiler_is_quoted(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text(
        '#!/bin/sh\ntest "$1" = --version && echo broken 1.0 && exit\necho "error: no luck" >&2\nexit 1\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.warns(RuntimeWarning, match=r"(?s)broken failed.*error: no luck"):
        assert not build.load()
    assert not list(fresh.rglob("*.so"))
    assert not [path for path in fresh.rglob("*") if path.is_dir() and path.parent.parent == fresh], "no litter"


def test_a_cached_library_is_used_even_without_a_compiler(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pretend(compiler: tuple[str, ...], library: Path) -> None:
        library.write_bytes(b"built")

    monkeypatch.setattr(build, "_compile", pretend)
    monkeypatch.setattr(build, "find_compiler", lambda: ("true",))
    library = build.build()
    assert library.parent.parent == fresh

    def unexpected(compiler: tuple[str, ...], library: Path) -> None:
        raise AssertionError("built twice")

    monkeypatch.setattr(build, "_compile", unexpected)
    assert build.build() == library
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    assert build.build() == library
