"""The engine's own exceptions. Bad arguments are plain `ValueError`/`TypeError` naming the argument and the fix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cb_engine.outputs import GenerationOutput


class CBEngineError(RuntimeError):
    """Base of all errors that are not about an argument."""


class UnsupportedModelError(ValueError):
    """The model has something that the engine would compute wrongly; raised by `attach`, never later."""


class EngineStoppedError(CBEngineError):
    """Something was asked of an engine that has stopped, or is stopping."""


class QueueFullError(CBEngineError):
    """Admission control turned a request away; nothing else was disturbed, try again later."""


class StaticShapeError(CBEngineError):
    """A step is none that the device, or strict mode, can run: the fault is the engine's, not a request's or a
    proposer's."""


class ShapeNotWarmedError(StaticShapeError):
    """Strict mode met a step shape that warm-up had not run."""


class ModelChangedError(CBEngineError):
    """The model under a living engine has become another one; the engine has to be made anew."""


class EngineError(CBEngineError):
    """The engine itself failed.

    Attributes:
        outputs: everything that had finished before, by request id, in the order of the requests.
    """

    def __init__(self, message: str, outputs: Mapping[str, GenerationOutput] | None = None) -> None:
        super().__init__(message)
        self.outputs: dict[str, GenerationOutput] = dict(outputs or {})
