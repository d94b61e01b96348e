"""Draft models and heads that are named by where they are.

Owns what was loaded: for each target the latest, which is kept as long as the target lives, so that every engine for it
need not read the disk again. Does not check that it fits: that is up to who asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from cb_engine.models import load_weights, resolve_model
from cb_engine.runner.drafters.eagle3_checkpoint import kind_of, load_eagle3
from cb_engine.runner.drafters.eagle3_head import Eagle3Head

_latest: WeakKeyDictionary[nn.Module, tuple[tuple[object, ...], nn.Module]] = WeakKeyDictionary()  # by target


def load_draft_model(path: str | Path, target: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A causal LM for a target, in evaluation mode. Nobody else has it, so its weights stay.

    Raises:
        ValueError: it cannot be loaded, or is an EAGLE-3 head.
    """
    if kind_of(path) == "eagle3":  # transformers would load it, with random weights for what a head has not
        raise ValueError(f"speculative model={str(path)!r} holds an EAGLE-3 head; give method='eagle3'")
    key = ("draft_model", *_state_of(resolve_model(str(path))), dtype)
    found = _latest.get(target)
    if found is None or found[0] != key:
        _latest.pop(target, None)  # the old one goes before the new one comes
        with _naming(path, "give the folder or the hub id of a causal LM, or a loaded one"):
            found = _latest[target] = (key, load_weights(str(path), dtype=dtype))
    return found[1]


def load_head(path: str | Path, target: Any, device: torch.device, dtype: torch.dtype) -> Eagle3Head:
    """An EAGLE-3 head that shares what it lacks with the target.

    Raises:
        ValueError: see `load_eagle3`; with the name of the setting.
    """
    embeddings, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
    # The modules that it shares are kept by the head itself, so their ids are nobody else's.
    key = ("eagle3", *_state_of(path), device, dtype, id(embeddings), id(lm_head))
    found = _latest.get(target)
    if found is not None and found[0] == key and isinstance(found[1], Eagle3Head):
        return found[1]
    _latest.pop(target, None)
    is_lm = kind_of(path) == "causal_lm"
    with _naming(path, "it holds a causal LM: give method='draft_model', or the folder of a head" if is_lm else ""):
        head = load_eagle3(path, target_embeddings=embeddings, target_config=target.config, target_lm_head=lm_head)
    _latest[target] = (key, head.to(device, dtype))
    return head


@contextmanager
def _naming(path: str | Path, fix: str) -> Iterator[None]:
    """Says which setting led there, and what to give instead."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ValueError("; ".join(filter(None, (f"speculative model={str(path)!r}: {error}", fix)))) from error


def _state_of(path: str | Path) -> tuple[object, ...]:
    """Changes when the files of a folder do; a hub id is taken to be what it was."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return (str(path),)
    files = sorted(file for file in folder.iterdir() if file.is_file())
    return str(folder.resolve()), tuple((file.name, (s := file.stat()).st_mtime_ns, s.st_size) for file in files)
