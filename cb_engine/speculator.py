"""Speculation between two steps: what the last one has shown, and drafts for the next.

Owns the proposer, the switch and the drafts that are out. The next step verifies them, as the Scheduler plans it.

    step n                      after it                          step n + 1
    rows [t d1 d2] -> tokens    learn: d1 right, d2 wrong         rows [t' d1' ..]
                                propose -> choose -> set_draft
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from cb_engine.errors import StaticShapeError
from cb_engine.request import Request
from cb_engine.scheduler.output import ModelOutput, SchedulerOutput
from cb_engine.scheduler.scheduler import Scheduler
from cb_engine.speculative.control import DraftController
from cb_engine.speculative.proposer import Draft, DraftAsk, Proposer

logger = logging.getLogger(__name__)


class Speculator:
    """See the module docstring.

    Args:
        num_tokens: k.
        vocab_size: of the model; ids beyond are not drafted, whatever the proposer says.
        costs_time: whether the proposer runs a model.
        fixed_width: see `DraftController`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        proposer: Proposer,
        num_tokens: int,
        *,
        vocab_size: int,
        adaptive: bool,
        costs_time: bool,
        fixed_width: bool,
    ) -> None:
        self._scheduler = scheduler
        self._proposer = proposer
        self._controller = DraftController(
            num_tokens, adaptive=adaptive, fixed_width=fixed_width, costs_time=costs_time
        )
        self._vocab_size = vocab_size
        self._costs_time = costs_time
        self._drafts: dict[Request, Draft] = {}  # proposed after the last step
        self._works = True

    def after_step(self, plan: SchedulerOutput, output: ModelOutput, seconds: float) -> None:
        """Learns from a step that has been taken in, and gives the running requests their drafts."""
        if plan.is_verify or plan.is_decode:
            self._controller.saw_step(len(plan.scheduled), plan.num_tokens, seconds)
        for item in plan.scheduled:
            self._learn(item.request, item.draft_token_ids, output)
        if self._works:
            self._propose()

    def forget(self, requests: Sequence[Request]) -> None:
        """These requests have ended."""
        for request in requests:
            self._drafts.pop(request, None)
            try:
                self._proposer.forget(request)
            except Exception:
                self._switch_off()

    def _switch_off(self) -> None:
        """The proposer has just failed. All goes on without it."""
        if self._works:
            logger.exception("speculation is off from here on: the proposer failed")
        self._works = False

    def _learn(self, request: Request, verified: Sequence[int], output: ModelOutput) -> None:
        draft = self._drafts.pop(request, None)
        tokens = output.sampled.get(request.request_id, ())
        if draft is None or not draft.token_ids or not tokens or tokens[0].failed is not None:
            return
        if verified:
            self._controller.saw_draft(draft.kind, len(verified), len(tokens) - 1)
        else:  # what it would have been worth shows in its first token
            self._controller.saw_draft(draft.kind, 1, int(draft.token_ids[0] == tokens[0].token_id))

    def _propose(self) -> None:
        num_requests, num_tokens = self._controller.to_draft(max(1, self._scheduler.num_running))
        if not num_requests:
            return
        asks = self._scheduler.draftable(num_tokens, num_requests, with_blocks=self._costs_time)
        drafts = self._drafts_for(asks)
        lengths = self._controller.choose(drafts, self._scheduler.num_running) if drafts else []
        for ask, draft, length in zip(asks, drafts, lengths, strict=False):
            self._drafts[ask.request] = draft
            self._scheduler.set_draft(ask.request, draft.token_ids[:length])

    def _drafts_for(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """A draft for each ask; none for anybody from a proposer that has failed, without which all goes on."""
        started = time.perf_counter()
        try:
            proposed = self._proposer.propose(asks)
            drafts = [self._legal(draft, ask) for draft, ask in zip(proposed, asks, strict=True)]
        except StaticShapeError:
            raise
        except Exception:
            self._switch_off()
            return []
        num_drafted = sum(bool(draft.token_ids) for draft in drafts)
        if self._costs_time and num_drafted:
            seconds = time.perf_counter() - started - self._proposer.catch_up_seconds
            self._controller.saw_drafting(num_drafted, max(len(draft.token_ids) for draft in drafts), seconds)
        return drafts

    def _legal(self, draft: Draft, ask: DraftAsk) -> Draft:
        """As much of a draft as the model can take, and the request's grammar allows: the rest costs nothing then."""
        token_ids = tuple(draft.token_ids[: ask.max_tokens])
        wrong = next((i for i, token_id in enumerate(token_ids) if not 0 <= token_id < self._vocab_size), None)
        token_ids = token_ids[:wrong]
        if ask.request.grammar is not None:
            token_ids = token_ids[: ask.request.grammar.num_legal(token_ids)]
        return Draft(token_ids, int(draft.kind))


class NoSpeculation:
    """In a Speculator's place where there is none."""

    def after_step(self, plan: SchedulerOutput, output: ModelOutput, seconds: float) -> None:
        """See `Speculator.after_step`."""

    def forget(self, requests: Sequence[Request]) -> None:
        """See `Speculator.forget`."""
