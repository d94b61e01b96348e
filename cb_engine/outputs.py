"""What a caller receives. Owns `GenerationOutput` and `RequestStatus`; knows nothing of the engine.

The first fields are those of transformers' `GenerationOutput`, in its order and with its meaning.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestStatus(IntEnum):
    """Public life of a request. The first five are transformers' own, with equal values."""

    PENDING = 0
    PREFILLING = 1
    DECODING = 2
    FINISHED = 3
    FAILED = 4
    ABORTED = 5


@dataclass(frozen=True)
class TokenLogprob:
    """One candidate of a position. `rank` counts from 1, the likeliest token; None beyond the N asked for."""

    token_id: int
    logprob: float
    rank: int | None


@dataclass
class GenerationOutput:
    """A snapshot of one sample: a copy that the engine never touches again.

    Of a request that asked for deltas, `generated_tokens`, `text` and what is kept per token hold what is new since the
    output before, and the prompt comes with the first alone.

    Attributes:
        request_id: the id; sample `i` of `n` is `ID__child#i`, the last one is `ID` itself.
        prompt_ids, generated_tokens: token ids; an EOS that ended the request is included.
        logprobs: one per generated token if asked for, else empty.
        error: what went wrong, for `finish_reason == "error"`.
        created_time, lifespan: `time.perf_counter()` at submission, at first scheduling and at the end.
        timestamps: `time.perf_counter()` per generated token, if recorded.
        finish_reason: why it ended; None while it runs.
        stop_reason: the stop string, the stop token id, or a word on a length end
            (`"max_tokens"`, `"max_model_len"`, `"kv_cache_capacity"`).
        text: decoded text without the stop string; None without a tokenizer.
        top_logprobs: per generated token its N likeliest candidates, the chosen one included if outside.
        prompt_logprobs: per prompt token the same; entry 0 is None.
        num_cached_tokens: prompt tokens found in the prefix cache or in a sibling's blocks.
        num_preemptions: how often it lost its blocks and was recomputed.
        weight_version: per generated token, the version of the weights that produced it.
        num_draft_tokens, num_accepted_tokens: speculation's offers and hits.
    """

    request_id: str
    prompt_ids: list[int] = field(default_factory=list)
    generated_tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    error: str | None = None
    status: RequestStatus = RequestStatus.PENDING
    created_time: float = field(default_factory=time.perf_counter)
    lifespan: tuple[float, float] = (-1.0, -1.0)
    timestamps: list[float] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    text: str | None = None
    top_logprobs: list[list[TokenLogprob]] | None = None
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    weight_version: list[int] = field(default_factory=list)
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def is_finished(self) -> bool:
        """Whether this is the terminal output: nothing follows it."""
        return self.status >= RequestStatus.FINISHED


def join_deltas(deltas: Sequence[GenerationOutput]) -> GenerationOutput:
    """One output in place of several deltas of the same request, which follow each other at once."""
    first, last = deltas[0], deltas[-1]
    if first is last:
        return last
    texts = [delta.text for delta in deltas if delta.text is not None]
    return replace(
        last,
        prompt_ids=first.prompt_ids,
        prompt_logprobs=first.prompt_logprobs,
        text="".join(texts) if texts else None,
        generated_tokens=[token for delta in deltas for token in delta.generated_tokens],
        logprobs=[value for delta in deltas for value in delta.logprobs],
        timestamps=None if last.timestamps is None else [t for delta in deltas for t in delta.timestamps or ()],
        top_logprobs=None if last.top_logprobs is None else [t for delta in deltas for t in delta.top_logprobs or ()],
        weight_version=[version for delta in deltas for version in delta.weight_version],
    )
