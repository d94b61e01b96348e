"""Continuous batching inside a transformers-style generate API.

import cb_engine
cb_engine.attach(model, tokenizer=tokenizer)
outputs = model.generate_batch(["Hello", "How are you?"], max_new_tokens=32)
"""

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

__version__ = "0.1.0"

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
    "TokenLogprob",
    "UnsupportedModelError",
    "WorkloadHints",
    "attach",
    "detach",
    "weights_changed",
]
