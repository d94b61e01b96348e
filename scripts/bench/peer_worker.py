"""One engine in a process of its own: loads the model, then runs the cases it is given.

    python peer_worker.py ENGINE SPEC.json

ENGINE is cb_engine, transformers, static or vllm. Runs under any Python that has the engine: nothing but the engine
itself is imported, so vLLM may live in another environment. Talks by lines on standard output that start with `@@`:
`{"event": "first_token"}` as soon as a first token exists, `{"event": "ready"}` after a warm-up, then a line per case.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Protocol

_MARK = "@@"


class Peer(Protocol):
    """An engine with a loaded model."""

    def generate(self, prompts: list[list[int]], max_new: int, temperature: float, n: int) -> list[list[int]]:
        """The new tokens of every sample, those of one prompt side by side. EOS is off."""


class CBEngine:
    """`generate_batch` of this project, with a persistent manager: as a caller of many batches would use it."""

    def __init__(self, model: str, limits: dict[str, int]) -> None:
        import cb_engine
        from cb_engine.models import load_model

        self._params = cb_engine.SamplingParams
        self._model, _ = load_model(model)
        cb_engine.attach(self._model)

    def generate(self, prompts: list[list[int]], max_new: int, temperature: float, n: int) -> list[list[int]]:
        params = self._params(n=n, temperature=temperature, max_tokens=max_new, ignore_eos=True)
        outputs = self._model.generate_batch(prompts, sampling_params=params, persistent_manager=True)
        return [output.generated_tokens for output in outputs.values()]


class Transformers:
    """transformers' own `generate_batch`."""

    def __init__(self, model: str, limits: dict[str, int]) -> None:
        self._model = _load(model)

    def generate(self, prompts: list[list[int]], max_new: int, temperature: float, n: int) -> list[list[int]]:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        config = GenerationConfig(
            max_new_tokens=max_new,
            num_return_sequences=n,
            eos_token_id=-1,  # its way to say "none"
            pad_token_id=0,
            do_sample=temperature > 0,
            **({"temperature": temperature, "top_k": 0} if temperature > 0 else {}),
        )
        outputs = self._model.generate_batch(
            prompts, generation_config=config, continuous_batching_config=ContinuousBatchingConfig(seed=0)
        )
        return [output.generated_tokens for output in outputs.values()]


class Static:
    """`generate` on one left-padded batch."""

    def __init__(self, model: str, limits: dict[str, int]) -> None:
        self._model = _load(model)
        self._model.generation_config.eos_token_id = None

    def generate(self, prompts: list[list[int]], max_new: int, temperature: float, n: int) -> list[list[int]]:
        import torch

        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        sampling = {"temperature": temperature, "top_k": 0} if temperature > 0 else {}
        out = self._model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max_new,
            num_return_sequences=n,
            do_sample=temperature > 0,
            pad_token_id=0,
            **sampling,
        )
        tokens: list[list[int]] = out[:, width:].tolist()
        return tokens


class VLLM:
    """vLLM's offline `LLM`."""

    def __init__(self, model: str, limits: dict[str, int]) -> None:
        from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

        self._params = SamplingParams
        self._llm = LLM(model=model, dtype="bfloat16", max_model_len=limits["max_model_len"], seed=0)

    def generate(self, prompts: list[list[int]], max_new: int, temperature: float, n: int) -> list[list[int]]:
        params = self._params(
            n=n, temperature=temperature, max_tokens=max_new, min_tokens=max_new, ignore_eos=True, detokenize=False
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(requests, params, use_tqdm=False)
        return [list(sample.token_ids) for output in outputs for sample in output.outputs]


def _load(model: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()


PEERS: dict[str, Any] = {"cb_engine": CBEngine, "transformers": Transformers, "static": Static, "vllm": VLLM}


def say(message: dict[str, Any]) -> None:
    """One line for the process that watches."""
    print(_MARK + json.dumps(message), flush=True)


def run_case(peer: Peer, case: dict[str, Any]) -> dict[str, Any]:
    """Runs a case; the clock covers the call alone."""
    start = time.perf_counter()
    outputs = peer.generate(case["prompts"], case["max_new"], case["temperature"], case["n"])
    seconds = time.perf_counter() - start
    return {"event": "case", "label": case["label"], "seconds": seconds, "outputs": outputs}


def main(name: str, spec_path: str) -> None:
    """Runs all cases of a spec."""
    with open(spec_path, encoding="utf-8") as file:
        spec = json.load(file)
    peer: Peer = PEERS[name](spec["model"], spec["limits"])
    peer.generate([spec["warm_prompts"][0]], 1, 0.0, 1)
    say({"event": "first_token"})
    peer.generate(spec["warm_prompts"], 8, 0.0, 1)
    say({"event": "ready"})
    for case in spec["cases"]:
        try:
            say(run_case(peer, case))
        except Exception as error:  # an engine's failure is its result for this case
            say({"event": "failed", "label": case["label"], "reason": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
