"""What the Scheduler and the ModelRunner tell each other. Frozen plans, no behaviour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cb_engine.kv_cache.block_manager import BlockCopy, Int32Array
from cb_engine.outputs import TokenLogprob
from cb_engine.request import Request


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """`num_tokens` tokens of a request, from position `start` on; the last of them may be drafts to be verified.

    token_ids      | .............. t | drafts
    positions                start ^    ^ request.num_tokens
    rows                           [ t  d1  d2 ]         the row of t predicts d1, that of d1 predicts d2, ...
    """

    request: Request
    start: int
    num_tokens: int
    draft_token_ids: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Tokens of the request that are in the cache after the step, drafts counted."""
        return self.start + self.num_tokens

    @property
    def samples(self) -> bool:
        """Whether this step catches up, so that its last row gives the next token."""
        return self.end - len(self.draft_token_ids) == self.request.num_tokens and self.request.max_tokens > 0

    @property
    def num_sampled_rows(self) -> int:
        """Rows that a token is sampled from: one, and one for every draft."""
        return 1 + len(self.draft_token_ids) if self.samples else 0


@dataclass(frozen=True)
class SchedulerOutput:
    """One step. Decodes (one token each, or 1 + its drafts) come first, prompt chunks after them."""

    scheduled: tuple[ScheduledRequest, ...] = ()
    block_tables: tuple[Int32Array, ...] = ()  # per layer group [len(scheduled), width], a copy
    block_copies: tuple[BlockCopy, ...] = ()  # to be done in this order, before the step

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(s.num_tokens for s in self.scheduled)

    @property
    def is_decode(self) -> bool:
        """Whether every request computes one token, the shape of the decode fast path."""
        return all(s.num_tokens == 1 for s in self.scheduled)

    @property
    def is_verify(self) -> bool:
        """Whether drafts are verified; every request then computes its last token and its drafts."""
        return any(s.draft_token_ids for s in self.scheduled)

    def part(self, start: int, end: int | None) -> SchedulerOutput:
        """The plan of requests `start:end` alone, its copies done already."""
        return SchedulerOutput(self.scheduled[start:end], tuple(t[start:end] for t in self.block_tables))


# Why a row has nothing to draw from.
NOT_FINITE = "the logits held NaN or infinity"
NOTHING_LEFT = "structured, logit_bias, allowed_token_ids and bad_words together left no token"


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What the runner drew for one request. `failed`, one of the above, tells that there was nothing to draw from."""

    token_id: int
    logprob: float | None = None
    top_logprobs: list[TokenLogprob] | None = None
    failed: str | None = None


@dataclass(frozen=True)
class ModelOutput:
    """The runner's answer to a plan, by request id. A request that computed only a prompt chunk has no tokens,
    one whose drafts were verified has one more than were right."""

    sampled: Mapping[str, Sequence[SampledToken]] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, list[list[TokenLogprob]]] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)  # requests whose step could not be computed
