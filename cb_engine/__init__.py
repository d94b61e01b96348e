"""Continuous batching inside a transformers-style generate API.

import cb_engine
cb_engine.attach(model, tokenizer=tokenizer)
outputs = model.generate_batch(["Hello", "How are you?"], max_new_tokens=32)

The public names are imported when they are first asked for: `cb-engine --help` needs none of them, and torch alone
takes seconds.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from cb_engine.version import __version__ as __version__

if TYPE_CHECKING:
    from cb_engine.api.async_engine import AsyncEngine
    from cb_engine.api.attach import attach, detach, weights_changed
    from cb_engine.api.manager import ContinuousBatchingManager
    from cb_engine.config import EngineConfig
    from cb_engine.engine import Engine
    from cb_engine.errors import (
        CBEngineError,
        EngineError,
        EngineStoppedError,
        QueueFullError,
        ShapeNotWarmedError,
        UnsupportedModelError,
    )
    from cb_engine.hints import WorkloadHints
    from cb_engine.metrics import EngineStats
    from cb_engine.outputs import GenerationOutput, RequestStatus, TokenLogprob
    from cb_engine.sampling_params import SamplingParams
    from cb_engine.speculative_config import SpeculativeConfig
    from cb_engine.structured_output import StructuredOutput

__all__ = [
    "AsyncEngine",
    "CBEngineError",
    "ContinuousBatchingManager",
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineStats",
    "EngineStoppedError",
    "GenerationOutput",
    "QueueFullError",
    "RequestStatus",
    "SamplingParams",
    "ShapeNotWarmedError",
    "SpeculativeConfig",
    "StructuredOutput",
    "TokenLogprob",
    "UnsupportedModelError",
    "WorkloadHints",
    "attach",
    "detach",
    "weights_changed",
]

# Where each of them is.
_MODULES = {
    "cb_engine.api.async_engine": ("AsyncEngine",),
    "cb_engine.api.attach": ("attach", "detach", "weights_changed"),
    "cb_engine.api.manager": ("ContinuousBatchingManager",),
    "cb_engine.config": ("EngineConfig",),
    "cb_engine.engine": ("Engine",),
    "cb_engine.errors": (
        "CBEngineError",
        "EngineError",
        "EngineStoppedError",
        "QueueFullError",
        "ShapeNotWarmedError",
        "UnsupportedModelError",
    ),
    "cb_engine.hints": ("WorkloadHints",),
    "cb_engine.metrics": ("EngineStats",),
    "cb_engine.outputs": ("GenerationOutput", "RequestStatus", "TokenLogprob"),
    "cb_engine.sampling_params": ("SamplingParams",),
    "cb_engine.speculative_config": ("SpeculativeConfig",),
    "cb_engine.structured_output": ("StructuredOutput",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Imports a public name, or a module of the package, on its first use."""
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")  # `cb_engine.models` after `import cb_engine`
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
