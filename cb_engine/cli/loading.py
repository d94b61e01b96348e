"""A model by its name, attached and ready to make an engine: what every command that runs one does first.

Owns which errors of loading become one line. The first import of torch and transformers happens here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cb_engine.cli.look import WRONG_OPTIONS, CommandFailedError
from cb_engine.cli.options import ENGINE_FIELDS, ModelOptions
from cb_engine.cli.spreading import naming_options

if TYPE_CHECKING:
    from cb_engine.api.manager import ContinuousBatchingManager
    from cb_engine.config import EngineConfig
    from cb_engine.hints import WorkloadHints

logger = logging.getLogger(__name__)


def load_attached(name: str, options: ModelOptions, *, progress: bool) -> tuple[Any, Any]:
    """Loads a model and its tokenizer and attaches the engine's interface.

    Args:
        name: `demo`, a local folder, or a hub id.
        progress: let transformers show its progress bars.

    Raises:
        CommandFailedError: it cannot be loaded, or the engine would compute it wrongly.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # prompts come one by one, from threads
    import transformers

    from cb_engine.api.attach import attach
    from cb_engine.models import load_model

    if not progress:
        transformers.utils.logging.disable_progress_bar()
    try:
        model, tokenizer = load_model(name, **options.load_arguments())
    except Exception as error:  # whatever a checkpoint, a device or a hub can be wrong about
        logger.debug("loading failed", exc_info=True)
        raise CommandFailedError(_load_failure(name, options, error), WRONG_OPTIONS) from error
    try:
        attach(model, tokenizer=tokenizer)
    except (ValueError, RuntimeError) as error:  # UnsupportedModelError is the first
        raise CommandFailedError(f"the engine cannot run model {name!r}: {error}", WRONG_OPTIONS) from error
    return model, tokenizer


def _load_failure(name: str, options: ModelOptions, error: Exception) -> str:
    text = f"{error}" if isinstance(error, OSError | ImportError) else f"{type(error).__name__}: {error}"
    said = text if "cannot load model" in text else f"cannot load model {name!r}: {text}"
    given = [f"--{part} {value}" for part, value in (("device", options.device), ("dtype", options.dtype))]
    return said if options == ModelOptions() else f"{said} (loaded with {', '.join(given)})"


def make_manager(model: Any, config: EngineConfig, hints: WorkloadHints) -> ContinuousBatchingManager:
    """A manager of an attached model, not yet started.

    Raises:
        OptionError: settings that do not suit the model, naming the option. CommandFailedError: no memory, for one.
    """
    with _one_line_errors("the engine could not be made"), naming_options(ENGINE_FIELDS):
        manager = model.init_continuous_batching(continuous_batching_config=config, workload_hints=hints)
    return manager  # type: ignore[no-any-return]


@contextmanager
def running(manager: ContinuousBatchingManager, *, progress: bool) -> Iterator[None]:
    """Warms the manager up and runs it; at the end what is unfinished is aborted.

    Raises:
        CommandFailedError: warm-up failed.
    """
    with _one_line_errors("warm-up failed"):
        manager.warmup(progress)
    manager.start()
    try:
        yield
    finally:
        manager.destroy()


def own_sampling(model: Any) -> Any:
    """The model's generation config in the engine's words, a `GenerationSettings`."""
    from cb_engine.api.generation_config import GenerationSettings

    no_overrides: Mapping[str, Any] = {}
    return GenerationSettings.of(getattr(model, "generation_config", None), None, no_overrides)


@contextmanager
def _one_line_errors(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ImportError) as error:
        logger.debug("%s", what, exc_info=True)
        raise CommandFailedError(f"{what}: {error}") from error
