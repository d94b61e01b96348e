"""One prompt and all it has become. Owns `Request` and its tokens; knows no scheduler, cache or device.

The Scheduler alone changes a Request; everyone else reads. One counter says how far it is:

    token_ids   | prompt ........................ | output ............ |
                0        num_computed_tokens^      num_prompt_tokens    num_tokens

A step computes tokens `num_computed_tokens ..` until the counter has caught up with `num_tokens`; then the last
row's logits give the next token. Chunked prefill, prefix hits, forks and preemption only move the counter, and so does
speculation: a step that verifies drafts computes rows beyond `num_tokens`; the counter stops at the first wrong one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from cb_engine.grammar.state import GrammarState
from cb_engine.outputs import FinishReason, TokenLogprob
from cb_engine.sampling_params import SamplingParams


class Status(Enum):
    """Where the Scheduler holds a request."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()  # waiting again, its blocks are gone and its tokens are kept
    FINISHED = auto()


@dataclass(eq=False)
class ForkGroup:
    """Requests with one prompt: the first computes it, all but its last token, and the others fork its blocks."""

    members: dict[str, Request] = field(default_factory=dict)  # unfinished ones

    def source(self) -> Request | None:
        """A running member that holds all of the prompt but its last token."""
        for member in self.members.values():
            if member.status is Status.RUNNING and member.num_computed_tokens >= member.num_prompt_tokens - 1:
                return member
        return None

    def prefill_under_way(self) -> bool:
        """Whether a member is computing the prompt right now, so that waiting for it pays."""
        return any(m.status is Status.RUNNING for m in self.members.values())

    def others_wait(self, request: Request) -> bool:
        """Whether another member could still fork the prompt's blocks."""
        return any(m.status is Status.WAITING and m is not request for m in self.members.values())


@dataclass(eq=False, slots=True, weakref_slot=True)
class Request:
    """See the module docstring. `max_tokens` is the resolved limit, never None."""

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling_params: SamplingParams
    max_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()  # all ids that end it: EOS (unless ignored) and the caller's
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    limited_by_model: bool = False  # max_tokens was cut to what the maximum length leaves
    family: str = ""  # the id of the prompt that this is a sample of
    seed: int = 0  # resolved, 64 bits
    arrival: int = 0  # order of submission, the tie-breaker among equal priorities
    streaming: bool = False
    deltas: bool = False  # each output holds what is new since the one before
    record_timestamps: bool = False
    fork_group: ForkGroup | None = None
    grammar: GrammarState | None = None  # made at its start, advanced by the Scheduler with every token
    created_time: float = field(default_factory=time.perf_counter)

    # Set by the Scheduler only.
    status: Status = Status.WAITING
    token_ids: list[int] = field(init=False)
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_hit_tokens: int = 0  # of those computed, how many were computed by others
    may_hit: bool = True  # whether others' blocks are trusted
    draft_token_ids: tuple[int, ...] = ()  # guesses at what follows `token_ids`, for the next step to verify
    num_draft_tokens: int = 0  # guesses verified so far
    num_accepted_tokens: int = 0  # and those of them that became output
    num_step_tokens: int = 0  # tokens that its last step has appended
    num_step_drafts: int = 0  # and the first so many of them were drafts
    first_scheduled_time: float = -1.0
    finished_time: float = -1.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    prompt_logprobs: list[list[TokenLogprob] | None] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    timestamps: list[float] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # one per full block, grown by the BlockManager

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.family = self.family or self.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.token_ids)

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens still to compute before the next one can be sampled."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        """Whether its terminal output exists."""
        return self.status is Status.FINISHED

    @property
    def sort_key(self) -> tuple[int, int]:
        """Who goes first: the lower priority value, then the earlier arrival."""
        return (self.sampling_params.priority, self.arrival)

    def append_token(self, token_id: int, weight_version: int) -> None:
        """Adds one sampled token and what is recorded per token."""
        self.token_ids.append(token_id)
        self.output_token_ids.append(token_id)
        self.weight_versions.append(weight_version)
        if self.record_timestamps:
            self.timestamps.append(time.perf_counter())

    def drop_tokens_after(self, num_outputs: int) -> int:
        """Forgets what its last step has generated behind the first `num_outputs` tokens; returns how many that was."""
        num_dropped = len(self.output_token_ids) - num_outputs
        if not num_dropped:
            return 0
        per_token = (self.weight_versions, self.timestamps, self.logprobs, self.top_logprobs)
        for values in (self.output_token_ids, *per_token):
            del values[num_outputs:]
        del self.token_ids[self.num_prompt_tokens + num_outputs :]
        self.num_step_tokens -= num_dropped
        num_lost = max(0, self.num_step_drafts - self.num_step_tokens)
        self.num_step_drafts -= num_lost
        self.num_accepted_tokens -= num_lost
        return num_dropped
