"""Logits in, tokens out: the sampler and what it needs to know of a request."""

from cb_engine.sampling.logprobs import PromptLogprobs, TopLogprobs, prompt_logprobs
from cb_engine.sampling.randomness import derive_seed
from cb_engine.sampling.sampler import Sampler, SamplerOutput
from cb_engine.sampling.state import SamplingState

__all__ = [
    "PromptLogprobs",
    "Sampler",
    "SamplerOutput",
    "SamplingState",
    "TopLogprobs",
    "derive_seed",
    "prompt_logprobs",
]
