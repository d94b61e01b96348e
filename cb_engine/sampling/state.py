"""One request as the sampler sees it.

Owns: nothing; it is a view of things that others own, and its identity is the key of the sampler's caches.
Does not know: requests, schedulers, tokenizers. Words have become token ids before they get here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cb_engine.sampling_params import SamplingParams


# Compared by identity and weakly referable: the sampler keeps what it counted for a request beside its state,
# and forgets it when the request does.
@dataclass(slots=True, eq=False, weakref_slot=True)
class SamplingState:
    """Lives as long as its request. Nothing but the growing `output_token_ids` ever changes."""

    params: SamplingParams
    seed: int  # resolved: `derive_seed` of params.seed and the sample's index, or one that the engine made
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]  # a live view; its length is the position that is drawn for
    stop_token_ids: frozenset[int]  # EOS (unless ignore_eos) and params.stop_token_ids: masked until min_tokens are out
    bad_words_ids: tuple[tuple[int, ...], ...]  # params.bad_words as token ids

    @property
    def must_go_on(self) -> bool:
        """Whether a token that would end the output is not legal yet."""
        return len(self.output_token_ids) < self.params.min_tokens
