"""Who runs a workload: this engine, transformers' own continuous batching, and padded `generate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import ContinuousBatchingConfig, ContinuousMixin, GenerationConfig

import cb_engine
from bench.workloads import Workload

# Sizes in which the pool of few_blocks is cut: small blocks here, transformers' own page there.
_OUR_BLOCK_SIZE = 64
_TRANSFORMERS_PAGE_SIZE = 256

_STATIC_BATCH = 64


@dataclass(frozen=True)
class Outcome:
    """What a run has produced, and how long it took without loading and warm-up."""

    tokens: int
    seconds: float


@dataclass(frozen=True)
class Engine:
    """A way to run a workload.

    Attributes:
        run: `(model, workload, seed)`; the model is the run's own and freshly loaded.
        cannot: the reason why this engine has no such row, or None.
    """

    name: str
    run: Callable[[Any, Workload, int], Outcome]
    cannot: Callable[[Workload], str | None]


def make_engines(
    names: Iterable[str], static_batch: int = _STATIC_BATCH, speculative: cb_engine.SpeculativeConfig | None = None
) -> list[Engine]:
    """The engines of these names, in this order.

    Args:
        names: from `cb_engine`, `transformers`, `static`.
        static_batch: sequences in one padded batch.
        speculative: for cb_engine; None: no speculation.
    """
    known = {
        "cb_engine": Engine(
            "cb_engine", lambda model, workload, seed: run_cb_engine(model, workload, seed, speculative), _can_always
        ),
        "transformers": Engine("transformers", run_transformers, _can_always),
        "static": Engine(
            "static",
            lambda model, workload, seed: run_static(model, workload, seed, static_batch),
            _static_cannot,
        ),
    }
    for name in names:
        if name not in known:
            raise ValueError(f"unknown engine {name!r}; known ones: {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)]


def _can_always(workload: Workload) -> None:
    """Nothing keeps the engine from this."""


def run_cb_engine(
    model: Any, workload: Workload, seed: int, speculative: cb_engine.SpeculativeConfig | None = None
) -> Outcome:
    """`generate_batch` of this project. Token ids only, as the others: no text is decoded."""
    config: dict[str, Any] = {"seed": seed, "speculative": speculative}
    # On a CPU fused modules are faster than compiled ones, and need no compiling.
    if workload.compile or (workload.compile is None and model.device.type != "cpu"):
        config["compile"] = True
    if not workload.fast_decode:
        config["decode_fast_path"] = False
    if workload.pool_tokens is not None:
        null_block = 1
        config["block_size"] = _OUR_BLOCK_SIZE
        config["num_blocks"] = workload.pool_tokens // _OUR_BLOCK_SIZE + null_block
    params = cb_engine.SamplingParams(
        temperature=workload.temperature,
        top_p=workload.top_p,
        n=workload.n,
        max_tokens=workload.max_new,
        ignore_eos=True,
    )
    cb_engine.attach(model)
    try:
        outputs = model.generate_batch(
            workload.prompts, sampling_params=params, continuous_batching_config=config, progress_bar=True
        )
    finally:
        cb_engine.detach(model)
    return _outcome(outputs.values())


def run_transformers(model: Any, workload: Workload, seed: int) -> Outcome:
    """transformers' own `generate_batch`."""
    config = ContinuousBatchingConfig(seed=seed)
    if workload.compile is not False:
        config.default_compile_level = 1
    if not workload.fast_decode:
        config.max_blocks_per_request = 0
    if workload.pool_tokens is not None:
        config.page_size = _TRANSFORMERS_PAGE_SIZE
        config.num_blocks = workload.pool_tokens // _TRANSFORMERS_PAGE_SIZE
    outputs = ContinuousMixin.generate_batch(
        model,
        workload.prompts,
        generation_config=_generation_config(model, workload, eos_token_id=-1),  # its way to say "none"
        continuous_batching_config=config,
        progress_bar=True,
    )
    errors = [output.error for output in outputs.values() if output.error]
    if errors:
        raise RuntimeError(f"{len(errors)} requests failed: {errors[0]}")
    if not outputs:
        raise RuntimeError("the generation thread ended without a result; its log stands above")
    return _outcome(outputs.values())


def run_static(model: Any, workload: Workload, seed: int, batch: int = _STATIC_BATCH) -> Outcome:
    """`generate` on left-padded batches, one after the other, in the prompts' order."""
    torch.manual_seed(seed)
    model.generation_config.eos_token_id = None  # `generate` would fill it in
    config = _generation_config(model, workload, eos_token_id=None)
    size = max(1, batch // workload.n)
    batches = [workload.prompts[i : i + size] for i in range(0, len(workload.prompts), size)]
    warm_ids, warm_mask = _left_pad(batches[0][:2], config.pad_token_id, model.device)
    model.generate(warm_ids, attention_mask=warm_mask, pad_token_id=config.pad_token_id, max_new_tokens=2)
    tokens = 0
    start = time.perf_counter()
    for prompts in tqdm(batches, desc="static", unit="batch"):
        ids, mask = _left_pad(prompts, config.pad_token_id, model.device)
        out = model.generate(ids, attention_mask=mask, generation_config=config)
        tokens += out.shape[0] * (out.shape[1] - ids.shape[1])
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return Outcome(tokens, time.perf_counter() - start)


def _static_cannot(workload: Workload) -> str | None:
    if workload.pool_tokens is not None:
        return "padded generate has no block pool"
    if not workload.fast_decode:
        return "padded generate has one path only: see gsm8k_default"
    if workload.label == "gsm8k_compile":
        return "padded generate grows its cache every step: compiling is for static caches"
    return None


def _generation_config(model: Any, workload: Workload, eos_token_id: int | None) -> GenerationConfig:
    pad = model.generation_config.pad_token_id
    sampling = {"temperature": workload.temperature, "top_p": workload.top_p, "top_k": 0}
    return GenerationConfig(
        max_new_tokens=workload.max_new,
        num_return_sequences=workload.n,
        eos_token_id=eos_token_id,
        pad_token_id=0 if pad is None else pad,
        do_sample=workload.temperature > 0,
        **(sampling if workload.temperature > 0 else {}),
    )


def _left_pad(prompts: list[list[int]], pad: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return ids, mask


def _outcome(outputs: Iterable[Any]) -> Outcome:
    """Upstream's metric: all generated tokens over the time from the first submission to the last end."""
    done = list(outputs)
    tokens = sum(len(output.generated_tokens) for output in done)
    seconds = max(output.lifespan[1] for output in done) - min(output.created_time for output in done)
    return Outcome(tokens, seconds)
