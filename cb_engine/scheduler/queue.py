"""The waiting line. Owns the order of requests that hold no blocks; knows no cache and no budget."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from cb_engine.request import Request


class WaitingQueue:
    """Requests by (priority, arrival). A preempted one keeps its arrival, hence goes back to its old place."""

    def __init__(self) -> None:
        self._items: list[Request] = []
        self.num_prompt_tokens = 0  # of all of them

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._items))

    def push(self, request: Request) -> None:
        """Puts a request in its place."""
        insort(self._items, request, key=lambda r: r.sort_key)
        self.num_prompt_tokens += request.num_prompt_tokens

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it stands."""
        self._items.remove(request)
        self.num_prompt_tokens -= request.num_prompt_tokens
