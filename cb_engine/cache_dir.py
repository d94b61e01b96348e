"""The one folder in which the project keeps things between runs: converted models and built kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$CB_ENGINE_CACHE`, else `$XDG_CACHE_HOME/cb_engine`, else `~/.cache/cb_engine`."""
    if own := os.environ.get("CB_ENGINE_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "cb_engine"
