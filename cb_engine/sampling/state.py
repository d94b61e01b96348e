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
    """Lives as long as its request. Nothing but the growing `output_token_ids` ever changes.

    A request that verifies drafts has several, one for each row, in order: the first row's, and those of the rows
    behind its drafts, whose outputs are the first one's with drafts after it.
    """

    params: SamplingParams
    seed: int  # resolved: `derive_seed` of params.seed and the sample's index, or one that the engine made
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]  # a live view; its length is the position that is drawn for
    stop_token_ids: frozenset[int]  # EOS (unless ignore_eos) and params.stop_token_ids: masked until min_tokens are out
    bad_words_ids: tuple[tuple[int, ...], ...]  # params.bad_words as token ids
    first: SamplingState | None = None  # the state of the request's first row; None: this is it

    @property
    def root(self) -> SamplingState:
        """The state of the request's first row: what is counted for the request is kept with it."""
        return self if self.first is None else self.first

    @property
    def must_go_on(self) -> bool:
        """Whether a token that would end the output is not legal yet."""
        return len(self.output_token_ids) < self.params.min_tokens
