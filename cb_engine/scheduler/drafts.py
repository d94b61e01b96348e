"""Drafts in a plan: who may be given some, and which of them a step verifies.

Owns which blocks are held for drafts alone. Decides nothing for anybody else: drafts come last, a step without prompts
verifies as many as budget and spare blocks allow, and nobody is preempted, or kept waiting, for them.
"""

from __future__ import annotations

from collections.abc import Sequence

from cb_engine.kv_cache.block_manager import BlockManager
from cb_engine.request import Request
from cb_engine.scheduler.output import ScheduledRequest
from cb_engine.scheduler.step import Step
from cb_engine.speculative.proposer import DraftAsk


class Drafts:
    """See the module docstring.

    Args:
        running: the Scheduler's own list.
    """

    def __init__(self, blocks: BlockManager, running: Sequence[Request]) -> None:
        self._blocks = blocks
        self._running = running
        self._has_spare = False  # whether requests may hold blocks for drafts alone
        self._has_any = False  # whether any request may have drafts

    def asks(self, num_tokens: int, num_requests: int, *, with_blocks: bool) -> list[DraftAsk]:
        """The requests whose next step is a decode, in order of urgency, with how many drafts each may be given.

        Args:
            num_tokens: at most so many, and no more than its length leaves.
            num_requests: the most that are returned.
            with_blocks: whether drafting writes to the cache: each gets blocks for its drafts now, or fewer drafts.
        """
        asks: list[DraftAsk] = []
        for request in sorted(self._running, key=lambda r: r.sort_key):
            if len(asks) == num_requests:
                break
            if request.num_remaining_tokens != 1 or not request.sampling_params.speculative:
                continue
            # The row behind the last draft gives a token too.
            left = request.max_tokens - len(request.output_token_ids) - 1
            room = min(num_tokens, left)
            if with_blocks:
                room = self._room(request, room)
            if room > 0:
                asks.append(DraftAsk(request, room))
        return asks

    def give(self, request: Request, token_ids: Sequence[int]) -> None:
        """Gives a request the drafts that its next step may verify."""
        request.draft_token_ids = tuple(token_ids)
        self._has_any |= bool(token_ids)

    def add_to(self, step: Step) -> None:
        """Lets the requests of a step without prompts verify their drafts, with what is left of budget and blocks."""
        if not self._has_any:
            return
        self._has_any = False
        items = list(step.items.values())
        if any(item.num_tokens > 1 or not item.samples for item in items):
            return  # what a prompt makes of the step would not be known beforehand
        for item in items:
            drafts = item.request.draft_token_ids[: max(0, step.budget)]
            drafts = drafts[: self._room(item.request, len(drafts))]
            if drafts:
                step.budget -= len(drafts)
                verified = ScheduledRequest(item.request, item.start, 1 + len(drafts), drafts)
                step.items[item.request.request_id] = verified

    def take_back(self, step: Step) -> bool:
        """Takes all blocks back that are held for drafts alone; whether there were any."""
        if not self._has_spare:
            return False
        self._has_spare = False
        freed = 0
        for request in self._running:
            item = step.items.get(request.request_id)
            freed += self._blocks.trim(request, item.end if item else request.num_computed_tokens)
        return freed > 0

    def _room(self, request: Request, wanted: int) -> int:
        """How many of `wanted` drafts there are blocks for, which are taken."""
        size, first = self._blocks.block_size, request.num_computed_tokens + 1
        while wanted > 0:
            if self._blocks.allocate_spare(request, 1 + wanted, reserve=len(self._running)):
                self._has_spare = True
                return wanted
            wanted = (first + wanted - 1) // size * size - first  # a block less
        return 0
