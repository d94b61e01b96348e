"""Workload hints: what the caller knows about the work to come. Owns their names and validation only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, TypedDict


class WorkloadHints(TypedDict, total=False):
    """Sizes of the work to come; a key left out, or 0, means unknown.

    They size the step (sequences, block-table width, buckets) and so turn the decode fast path on by themselves.
    """

    max_prompt_length: int  # tokens of the longest prompt
    max_generated_length: int  # tokens the longest request may generate
    num_requests: int  # samples in all, n counted


def normalize_hints(hints: WorkloadHints | Mapping[str, Any] | object | None) -> WorkloadHints:
    """Returns the known, positive hints as a plain dict.

    Args:
        hints: a dict, or any dataclass with these fields (transformers' `WorkloadHints` is one), or None.

    Raises:
        ValueError: an unknown key or a negative value. TypeError: a value that is no integer.
    """
    if hints is None:
        return {}
    if is_dataclass(hints) and not isinstance(hints, type):
        raw: Mapping[str, Any] = asdict(hints)
    elif isinstance(hints, Mapping):
        raw = hints
    else:
        raise TypeError(f"workload_hints must be a dict or a dataclass, not {type(hints).__name__}")
    known = WorkloadHints.__annotations__
    for key, value in raw.items():
        if key not in known:
            raise ValueError(f"workload_hints has an unknown key {key!r}; known keys: {', '.join(known)}")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"workload_hints[{key!r}] must be an integer, not {value!r}")
        if value is not None and value < 0:
            raise ValueError(f"workload_hints[{key!r}] must be 0 (unknown) or positive, not {value}")
    cleaned: WorkloadHints = {key: value for key, value in raw.items() if value}  # type: ignore[assignment]
    return cleaned
