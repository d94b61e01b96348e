"""What kept work was made with. Owns the check that a run goes on with the same, and how files appear whole."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def check_same(kept: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    """Raises ValueError if a file's settings are not this run's."""
    for name in sorted(kept.keys() | wanted.keys()):
        if kept.get(name) != wanted.get(name):
            raise ValueError(
                f"{path} was made with {name}={kept.get(name)!r}, this run has {wanted.get(name)!r}; "
                "give the same again, delete the file, or give another --output"
            )


def save_whole(contents: Mapping[str, Any], path: Path) -> None:
    """Writes with `torch.save`: the file appears whole or not at all."""
    scratch = path.with_name(path.name + ".new")
    torch.save(dict(contents), scratch)
    os.replace(scratch, path)
