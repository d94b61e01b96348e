"""A step while it is planned: what the Scheduler and `drafts.py` put into it."""

from __future__ import annotations

from dataclasses import dataclass, field

from cb_engine.request import Request
from cb_engine.scheduler.output import ScheduledRequest


@dataclass
class Step:
    """See the module docstring."""

    budget: int  # tokens that may still be added
    items: dict[str, ScheduledRequest] = field(default_factory=dict)
    preempted: bool = False

    def add(self, item: ScheduledRequest) -> None:
        """Takes a request in."""
        self.items[item.request.request_id] = item
        self.budget -= item.num_tokens

    def drop(self, request: Request) -> None:
        """Takes a preempted request out again, if it was in."""
        self.preempted = True
        item = self.items.pop(request.request_id, None)
        if item is not None:
            self.budget += item.num_tokens
