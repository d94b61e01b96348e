"""Decides how many tokens each request computes this step, and what a finished step means.

Owns all Requests and their queues, and is alone in changing them. Does not know devices, text or threads.
One counter, no modes: a running request gets `num_tokens - num_computed_tokens` tokens, or as many of them as the
step's budget leaves. Decodes go first, so a long prompt never holds them up; prompts take what is left, in
chunks; when blocks run out, the latest of the least urgent requests gives its own back and is recomputed later.
Drafts come last (`drafts.py`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from cb_engine.config import RunningPolicy
from cb_engine.kv_cache.block_manager import BlockManager, SharedPrefix
from cb_engine.outputs import FinishReason
from cb_engine.request import ForkGroup, Request, Status
from cb_engine.scheduler.admission import Admission
from cb_engine.scheduler.drafts import Drafts
from cb_engine.scheduler.output import ModelOutput, SampledToken, ScheduledRequest, SchedulerOutput
from cb_engine.scheduler.queue import WaitingQueue
from cb_engine.scheduler.step import Step
from cb_engine.speculative.proposer import DraftAsk

Ending = tuple[FinishReason, int | str | None]  # and the stop reason


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step. `prefill_first` lets prompts under way use the budget before decodes do."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_chunk: int
    prefill_first: bool = False


@dataclass
class SchedulerCounters:
    """Running totals, read by metrics."""

    num_preemptions: int = 0
    prefix_query_tokens: int = 0  # of prompts that were looked up in the prefix cache
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    num_drafts: int = 0  # times that drafts of a request were verified
    draft_tokens: int = 0  # tokens in them
    accepted_per_position: list[int] = field(default_factory=list)  # how often the i-th of them became output


class Scheduler:
    """Invariant: a request is waiting (no blocks), running (a row and blocks) or finished (forgotten)."""

    def __init__(self, config: SchedulerConfig, block_manager: BlockManager) -> None:
        self.config = config
        self.counters = SchedulerCounters()
        self._blocks = block_manager
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue()
        self._running: list[Request] = []
        self._drafts = Drafts(block_manager, self._running)
        self._lacks_blocks = False  # whether the first in line found too few of them in the latest step
        self._ended_outside_step: list[Request] = []

    # ---- questions -------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def num_free_seats(self) -> int:
        """Requests that may still be let in; none while the first in line lacks blocks."""
        return 0 if self._lacks_blocks else max(0, self.config.max_num_seqs - len(self._running))

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their first step, or for another after a preemption."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of these."""
        return self._waiting.num_prompt_tokens

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished, or an ended one is still to be delivered."""
        return bool(self._requests or self._ended_outside_step)

    def unfinished(self) -> list[Request]:
        """All unfinished requests, in order of arrival."""
        return sorted(self._requests.values(), key=lambda r: r.arrival)

    # ---- commands --------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: its id is in use.
        """
        if request.request_id in self._requests:
            raise ValueError(f"request_id {request.request_id!r} is in use; give another, or wait for it to finish")
        self._requests[request.request_id] = request
        self.counters.prompt_tokens += request.num_prompt_tokens
        self._waiting.push(request)

    def abort(self, request_id: str) -> Request | None:
        """Ends a request with what it has. Unknown and finished ids are passed over."""
        request = self._requests.get(request_id)
        if request is not None:
            self.finish(request, "abort")
            self._ended_outside_step.append(request)
        return request

    def fail(self, request: Request, error: str) -> None:
        """Ends a request that went wrong outside a step."""
        request.error = error
        self.finish(request, "error")
        self._ended_outside_step.append(request)

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """The one place where requests end and give everything back."""
        if request.is_finished:
            return
        if request.status is Status.RUNNING:
            self._running.remove(request)
            self._blocks.free(request, forget=reason == "error")  # what failed is never hit again
        else:
            self._waiting.remove(request)
        del self._requests[request.request_id]
        if request.fork_group is not None:
            request.fork_group.members.pop(request.request_id, None)
        request.status = Status.FINISHED
        request.draft_token_ids = ()
        request.finish_reason, request.stop_reason = reason, stop_reason
        request.finished_time = time.perf_counter()

    def stop_on_text(self, request: Request, stop: str, num_tokens: int) -> None:
        """Ends a request whose text holds a stop string, completed by its `num_tokens`-th token. It wins over a length
        limit met by the same token, and over whatever ended the request with a later one of the same step."""
        later = num_tokens < len(request.output_token_ids)
        if later:
            self._count_drafts(request, -1)
            self.counters.generated_tokens -= request.drop_tokens_after(num_tokens)
            self._count_drafts(request, 1)
        if request.is_finished and (later or request.finish_reason == "length"):
            request.finish_reason, request.stop_reason = "stop", stop
        else:
            self.finish(request, "stop", stop)

    def fail_on_text(self, request: Request, error: str) -> None:
        """Ends a request whose tokens cannot be turned into text, also one that has just ended otherwise."""
        request.error = error
        self.finish(request, "error")
        request.finish_reason = "error"

    def take_ended(self) -> list[Request]:
        """Requests that ended outside `update_from_output` since the last call."""
        ended, self._ended_outside_step = self._ended_outside_step, []
        return ended

    def change_weights(self, version: int, running: RunningPolicy) -> None:
        """The weights are new from the next step on. What happens to running requests is the caller's choice:
        recompute their KV, continue on the old KV, or abort them."""
        if running == "abort":
            for request in [r for r in self._requests.values() if r.status is not Status.WAITING]:
                self.abort(request.request_id)
        elif running == "recompute":
            for request in list(self._running):
                self._preempt(request)
        self._blocks.set_weight_version(version)
        for request in self._requests.values():
            request.block_hashes.clear()

    # ---- the plan --------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Plans one step; an empty plan means that nothing can run now."""
        step = Step(self.config.max_num_batched_tokens)
        self._schedule_running(step)
        if not step.preempted:  # taking newcomers in would only preempt again
            self._schedule_waiting(step)
        self._drafts.add_to(step)
        scheduled = sorted(step.items.values(), key=_plan_order)
        width = max((-(-s.end // self._blocks.block_size) for s in scheduled), default=0)
        tables = self._blocks.block_tables([s.request for s in scheduled], width)
        return SchedulerOutput(tuple(scheduled), tables, self._blocks.take_copies())

    def _step_order(self, request: Request) -> tuple[bool, tuple[int, int]]:
        is_prefill = request.num_remaining_tokens > 1
        return (is_prefill != self.config.prefill_first, request.sort_key)

    def _schedule_running(self, step: Step) -> None:
        """Gives running requests their next tokens."""
        for request in sorted(self._running, key=self._step_order):
            num_tokens = self._chunk(request, request.num_computed_tokens, step.budget)
            if request.status is not Status.RUNNING or num_tokens <= 0:
                continue  # preempted by an earlier one in this very loop, or no budget left
            num_tokens = self._make_room(request, num_tokens, step)
            if num_tokens:
                step.add(ScheduledRequest(request, request.num_computed_tokens, num_tokens))

    def _make_room(self, request: Request, num_tokens: int, step: Step) -> int:
        """Allocates for a running request, preempting others as long as it takes, itself at the last.

        Returns:
            the tokens it got room for: fewer than asked if it is alone and the pool holds no more, 0 if it must stop.
        """
        while not self._blocks.allocate(request, num_tokens):
            if self._drafts.take_back(step):
                continue
            if len(self._running) == 1:
                num_tokens //= 2
                if not num_tokens:
                    self._end_for_lack_of_blocks(request)
                    return 0
                continue
            victim = max(self._running, key=lambda r: r.sort_key)
            step.drop(victim)
            self._preempt(victim)
            if victim is request:
                return 0
        return num_tokens

    def _preempt(self, request: Request, *, forget: bool = False) -> None:
        self._blocks.free(request, forget=forget)
        self._running.remove(request)
        request.status = Status.PREEMPTED
        request.num_computed_tokens = 0
        request.draft_token_ids = ()
        request.num_preemptions += 1
        self.counters.num_preemptions += 1
        self._waiting.push(request)

    def _end_for_lack_of_blocks(self, request: Request) -> None:
        """Ends a request that is alone and still has not enough blocks for one more token."""
        self.finish(request, "length", "kv_cache_capacity")
        self._ended_outside_step.append(request)

    def _schedule_waiting(self, step: Step) -> None:
        """Admits waiting requests in order while sequences, budget and blocks last."""
        reserve = len(self._running)
        admission = Admission(self._blocks, self._running)
        self._lacks_blocks = False
        for request in self._waiting:
            if step.budget <= 0 or len(self._running) + admission.num_followers >= self.config.max_num_seqs:
                break
            if admission.is_sibling_under_way(request):
                continue
            shared = admission.shared_prefix(request)
            if admission.follows(request, shared):
                continue
            num_tokens = self._admit(request, shared, step.budget, reserve)
            if num_tokens == 0 and self._drafts.take_back(step):
                num_tokens = self._admit(request, shared, step.budget, reserve)
            if num_tokens == 0:
                self._lacks_blocks = True
                break  # whoever is first in line goes first: no overtaking by smaller requests
            admission.admitted(request)
            step.add(ScheduledRequest(request, request.num_computed_tokens, num_tokens))

    # ---- drafts ----------------------------------------------------------------------------------------------

    def draftable(self, num_tokens: int, num_requests: int, *, with_blocks: bool) -> list[DraftAsk]:
        """See `Drafts.asks`. None if the next step will compute prompts, as far as can be told: it verifies nothing."""
        return [] if self._expects_prompts else self._drafts.asks(num_tokens, num_requests, with_blocks=with_blocks)

    @property
    def _expects_prompts(self) -> bool:
        return bool(len(self._waiting) and self.num_free_seats) or any(
            r.num_remaining_tokens > 1 for r in self._running
        )

    def set_draft(self, request: Request, token_ids: Sequence[int]) -> None:
        """Gives a request the drafts that its next step may verify."""
        self._drafts.give(request, token_ids)

    # ---- room ------------------------------------------------------------------------------------------------

    def _chunk(self, request: Request, num_computed_tokens: int, budget: int) -> int:
        """Tokens that a request may compute in this step.

        While siblings wait to fork its blocks, the prompt's last token is left for a step of its own: they join in
        that step, before the first of them can end and take the blocks away.
        """
        limit = request.num_tokens - num_computed_tokens
        before_last = request.num_prompt_tokens - 1 - num_computed_tokens
        if request.fork_group is not None and before_last > 0 and request.fork_group.others_wait(request):
            limit = min(limit, before_last)
        return min(limit, budget, self.config.max_prefill_chunk)

    def _admit(self, request: Request, shared: SharedPrefix | None, budget: int, reserve: int) -> int:
        """Starts a waiting request; returns the tokens it computes in this step, 0 if it has to wait.

        It must fit whole, not only with its first chunk, and every running request must be able to grow by a
        block: otherwise its admission would be paid with a preemption a few steps later. A request that would be
        alone takes what there is, in smaller chunks if need be.
        """
        if shared is not None and not self._fits(request, shared, reserve):
            shared = self._blocks.without_copy(shared)  # the copy takes a block more
        if self._running and not self._fits(request, shared, reserve):
            return 0
        known = shared.num_tokens if shared else 0
        num_tokens = self._chunk(request, known, budget)
        while not self._blocks.allocate(request, num_tokens, shared):
            if self._running:
                return 0
            num_tokens //= 2
            if not num_tokens:
                self._end_for_lack_of_blocks(request)
                return 0
        self._start(request, known)
        return num_tokens

    def _fits(self, request: Request, shared: SharedPrefix | None, reserve: int) -> bool:
        known = shared.num_tokens if shared else 0
        return self._blocks.has_room_for(request.num_tokens - known, self.config.max_prefill_chunk, reserve, shared)

    def _start(self, request: Request, num_known_tokens: int) -> None:
        self._waiting.remove(request)
        self._running.append(request)
        if request.status is Status.WAITING:
            request.num_cached_tokens = num_known_tokens
            request.first_scheduled_time = time.perf_counter()
            self.counters.prefix_query_tokens += request.num_prompt_tokens
            self.counters.prefix_hit_tokens += num_known_tokens
        request.status = Status.RUNNING
        request.num_computed_tokens = request.num_hit_tokens = num_known_tokens

    # ---- the update ------------------------------------------------------------------------------------------

    def update_from_output(self, plan: SchedulerOutput, output: ModelOutput) -> list[Request]:
        """Takes a finished step in: moves counters, appends tokens, ends requests.

        Returns:
            the requests that got a token, were ended by it, or failed, in plan order.
        """
        changed: list[Request] = []
        for item in plan.scheduled:
            request = item.request
            if request.is_finished:
                continue  # ended while the step ran: what was computed for it is dropped here
            request.draft_token_ids = ()
            if request.request_id in output.errors:
                request.error = output.errors[request.request_id]
                self.finish(request, "error")
                changed.append(request)
                continue
            self._collect_prompt_logprobs(request, item, output)
            tokens = output.sampled.get(request.request_id, ())
            if tokens and tokens[0].failed is not None:
                ending = self._grammars_ending(request)
                if ending is None and request.num_hit_tokens:
                    self._try_without_hits(request)
                    continue
                request.num_computed_tokens = item.end - len(item.draft_token_ids)
                if ending is None:
                    request.error = tokens[0].failed
                self.finish(request, *(ending or ("error", None)))
            else:
                self._take_in(item, tokens)
            if tokens or request.is_finished:
                changed.append(request)
        return changed

    def _take_in(self, item: ScheduledRequest, tokens: Sequence[SampledToken]) -> None:
        """Moves a request's counter over what is right of the rows it computed, and appends what was sampled.

        rows        [ t  d1  d2  d3 ]
        sampled       s1  s2  s3         d1 == s1 and d2 == s2 were right, d3 was not: three tokens, two of them drafts;
        in the cache  t  d1  d2          what d3's row wrote is overwritten by the next step
        """
        request = item.request
        ending: Ending | None = None
        num_kept = 0
        for token in tokens:
            self._append(request, token)
            num_kept += 1
            ending = self._ending(request, token.token_id)
            if ending is not None:
                break  # what was drafted beyond the end is dropped
        num_drafts = len(item.draft_token_ids)
        request.num_computed_tokens = item.end - num_drafts + max(0, num_kept - 1)
        request.num_step_tokens, request.num_step_drafts = num_kept, min(num_kept, max(0, len(tokens) - 1))
        if num_drafts:
            request.num_draft_tokens += num_drafts
            request.num_accepted_tokens += request.num_step_drafts
            self.counters.num_drafts += 1
            self.counters.draft_tokens += num_drafts
            self._count_drafts(request, 1)
        self._blocks.cache_computed_blocks(request)
        if not tokens and item.end == request.num_tokens:  # max_tokens == 0: only the prompt was wanted
            ending = ("length", "max_tokens")
        if ending is not None:
            self.finish(request, *ending)

    def _count_drafts(self, request: Request, times: int) -> None:
        """Counts, or takes back, the drafts that its last step has made output."""
        positions = self.counters.accepted_per_position
        positions.extend([0] * (request.num_step_drafts - len(positions)))
        for position in range(request.num_step_drafts):
            positions[position] += times

    def _try_without_hits(self, request: Request) -> None:
        """Starts a request that failed anew, with nothing that others have computed.

        A prompt that spoils its own keys and values, with NaN in the states of one token, is found out only when it
        samples. If it ends before, its blocks may be hit, and whoever hits them is not to blame.
        """
        request.may_hit = False
        self._preempt(request, forget=True)

    def _append(self, request: Request, token: SampledToken) -> None:
        request.append_token(token.token_id, self._blocks.weight_version)
        self.counters.generated_tokens += 1
        if token.logprob is not None:
            request.logprobs.append(token.logprob)
        if token.top_logprobs is not None:
            request.top_logprobs.append(token.top_logprobs)

    def _ending(self, request: Request, token_id: int) -> Ending | None:
        """Whether and how the token that was just appended ends the request; if it is no stop token, the request's
        grammar takes it in."""
        num_outputs = len(request.output_token_ids)
        if token_id in request.stop_token_ids and num_outputs > request.sampling_params.min_tokens:
            return "stop", token_id
        if request.grammar is not None:
            request.grammar.advance(token_id)
            if ending := self._grammars_ending(request):
                return ending
        if num_outputs >= request.max_tokens:
            return "length", "max_model_len" if request.limited_by_model else "max_tokens"
        return None

    def _grammars_ending(self, request: Request) -> Ending | None:
        """Whether and how a request's grammar ends it: it has failed, or the text is whole. No EOS need tell that: not
        all models have one, and some requests ignore it."""
        if request.grammar is None:
            return None
        request.error = request.grammar.error
        if request.error is not None:
            return "error", None
        return ("stop", None) if request.grammar.is_complete else None

    def _collect_prompt_logprobs(self, request: Request, item: ScheduledRequest, output: ModelOutput) -> None:
        """Appends the entries of this chunk that are not known yet (a recomputed prompt gives them again)."""
        entries = output.prompt_logprobs.get(request.request_id)
        if entries is None:
            return
        if not request.prompt_logprobs:
            request.prompt_logprobs.append(None)
        # The row at position p predicts the token at p + 1; entry i of this chunk belongs to start + i + 1.
        known = len(request.prompt_logprobs) - (item.start + 1)
        request.prompt_logprobs.extend(entries[known:])


def _plan_order(item: ScheduledRequest) -> tuple[bool, tuple[int, int]]:
    is_chunk = item.num_tokens > 1 and not item.draft_token_ids
    return is_chunk, item.request.sort_key


def make_fork_groups(requests: Sequence[Request]) -> None:
    """Groups requests of one call whose prompts are equal, so that each prompt is computed once."""
    groups: dict[tuple[str | None, tuple[int, ...]], ForkGroup] = {}
    for request in requests:
        key = (request.sampling_params.cache_salt, tuple(request.prompt_token_ids))
        group = groups.setdefault(key, ForkGroup())
        group.members[request.request_id] = request
        request.fork_group = group
