"""Streams of chunks, as chats and completions have them: batch by batch, and one way to end, whatever happens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from cb_engine.serve.errors import as_api_error
from cb_engine.serve.generation import Generation, Sample, Usage
from cb_engine.serve.protocol.base import SamplingFields
from cb_engine.serve.sse import DONE, event


async def stream_chunks(
    generation: Generation,
    first: Sequence[Sample],
    write: Callable[[Sample], bytes],
    *,
    usage_chunk: Callable[[], dict[str, Any]] | None,
    retry_after: int,
) -> AsyncGenerator[bytes, None]:
    """Yields the events of all samples, then one on usage if it is wanted, then `[DONE]`; an error takes their place.

    Args:
        first: the first batch, which was waited for before the answer's status was certain.
        write: the events of a sample's new piece.
        usage_chunk: the chunk that the usage goes into.
    """
    batch = list(first)
    try:
        while batch:
            for sample in batch:
                yield write(sample)
            batch = await generation.next_batch()
        if usage_chunk is not None:
            yield event({**usage_chunk(), "usage": generation.usage.as_openai()})
    except Exception as error:
        yield event(as_api_error(error, retry_after=retry_after).body())
    yield DONE


def usage_so_far(request: SamplingFields, usage: Usage) -> dict[str, Any]:
    """The field of every chunk, where usage is wanted at all: null, unless it is wanted all the time."""
    if not request.includes_usage:
        return {}
    return {"usage": usage.as_openai() if request.includes_usage_so_far else None}
