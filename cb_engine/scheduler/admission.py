"""Whose blocks a waiting request may share, and whom it waits for first. Made anew for every step.

Owns no request: the Scheduler does, and asks here in the order of its queue. Two kinds of request do not start at once:

    sibling     has the very prompt of another in its fork group that is computing it: it will fork that one's blocks
    follower    begins like a prompt that is being computed: it will hit that one's blocks in the prefix cache

Nobody waits for ever: a request waits only for those that come before it, and these go on, or end, step by step.
"""

from __future__ import annotations

from collections.abc import Iterable

from cb_engine.kv_cache.block_manager import BlockManager, SharedPrefix
from cb_engine.request import ForkGroup, Request, Status

_WORTH_WAITING = 8  # a prompt follows another if that spares it one token in so many


class Admission:
    """See the module docstring.

    Attributes:
        num_followers: how many requests were told to follow. Each keeps a seat, which others behind it in the queue
            would take for as long as they generate.
    """

    def __init__(self, blocks: BlockManager, running: Iterable[Request]) -> None:
        self._blocks = blocks
        self.num_followers = 0
        # Looked up once a step: a group may have thousands of members.
        self._sources: dict[ForkGroup, Request | None] = {}
        self._under_way: set[ForkGroup] = set()
        # Prompts that share enough to be hit begin with these tokens.
        self._leaders: dict[tuple[int, ...], list[Request]] = {}
        for request in running:
            if request.num_remaining_tokens > 1:
                self._lead(request)

    def is_sibling_under_way(self, request: Request) -> bool:
        """Whether another member of the request's group is computing this very prompt."""
        group = request.fork_group
        if group is not None and group not in self._sources:
            self._sources[group] = group.source()
            if self._sources[group] is None and group.prefill_under_way():
                self._under_way.add(group)
        return group in self._under_way

    def shared_prefix(self, request: Request) -> SharedPrefix | None:
        """What of the request is computed already: by a sibling, or in the cache."""
        source = self._source_of(request)
        fresh = request.status is Status.WAITING
        if source is not None and fresh and request.sampling_params.prompt_logprobs is None:
            forked = self._blocks.fork(source, request.num_prompt_tokens - 1)
            if forked is not None and forked.num_tokens > 0:
                return forked
        return self._blocks.match_prefix(request)

    def follows(self, request: Request, shared: SharedPrefix | None) -> bool:
        """Whether the request had better wait for a prompt under way, which will have more of it than `shared`."""
        if self._source_of(request) is not None:
            return False
        known = shared.num_tokens if shared else 0
        worth = max(1, (request.num_tokens - known) // _WORTH_WAITING)
        for leader in self._leaders.get(self._beginning(request), ()):
            before = leader.sort_key < request.sort_key
            if before and self._blocks.num_shareable_tokens(request, leader) - known >= worth:
                self.num_followers += 1
                if request.fork_group is not None:
                    self._under_way.add(request.fork_group)  # its siblings wait with it
                return True
        return False

    def admitted(self, request: Request) -> None:
        """The request computes its prompt, or the rest of it, from this step on."""
        if request.fork_group is not None and self._source_of(request) is None:
            self._under_way.add(request.fork_group)
        self._lead(request)

    def _source_of(self, request: Request) -> Request | None:
        return None if request.fork_group is None else self._sources.get(request.fork_group)

    def _lead(self, request: Request) -> None:
        self._leaders.setdefault(self._beginning(request), []).append(request)

    def _beginning(self, request: Request) -> tuple[int, ...]:
        return tuple(request.token_ids[: self._blocks.min_shared_tokens])
