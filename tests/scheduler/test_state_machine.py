"""Scheduler and BlockManager under random commands, with a model of what every KV slot holds.

The runner's part is played by `Shadow`: it carries out a plan's block copies in order and writes each scheduled
token where the plan's block tables say. A slot's content is what KV depends on: all tokens up to its own, and the
weight version. Before a token counts as computed, everything that its query can see is read back through the tables:
a wrong slot, a stale prefix hit, a missing or misplaced copy shows there at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cb_engine.kv_cache.block import hash_block, root_hash
from cb_engine.kv_cache.block_manager import BlockManager, KVGroup
from cb_engine.outputs import TokenLogprob
from cb_engine.request import Request, Status
from cb_engine.runner.input_batch import prompt_logprob_rows
from cb_engine.sampling_params import SamplingParams
from cb_engine.scheduler.output import ModelOutput, SampledToken, ScheduledRequest, SchedulerOutput
from cb_engine.scheduler.scheduler import Scheduler, SchedulerConfig, make_fork_groups

EOS = 6
# Prompts are heads of these: the first two share their first five tokens.
TEXTS = ((1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 4, 5, 1), (1, 2, 3, 1, 2, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1), (2,) * 15)
SALTS = (None, "salt")
MAX_STEPS_TO_DRAIN = 1500

INDICES = st.sampled_from([None, None, 0, 1, 2, 3])  # of a request in a plan, modulo its length
PROMPTS = st.builds(lambda text, length: text[:length], st.sampled_from(TEXTS), st.integers(1, 15))
OPTIONS = st.fixed_dictionaries(
    {
        "n": st.integers(1, 3),
        "max_tokens": st.integers(0, 12),
        "min_tokens": st.integers(0, 4),
        "priority": st.sampled_from([0, 0, -1, 1]),
        "salt": st.sampled_from([None, None, *SALTS]),
        "prompt_logprobs": st.sampled_from([None, None, None, 0]),
    }
)


def next_token(tokens: Sequence[int], variant: int) -> int:
    """The model: one of 1 .. 12, a function of all tokens and of the sample's variant."""
    state = variant
    for token in tokens:
        state = (state * 31 + token) % 1009
    return state % 12 + 1


def pick(requests: Sequence[Request], index: int | None) -> set[Request]:
    """The one at `index`, or none."""
    return set() if index is None or not requests else {requests[index % len(requests)]}


@dataclass(frozen=True)
class Content:
    """What a slot holds."""

    tokens: tuple[int, ...]  # the slot's own token and all before it
    version: int


class Shadow:
    """Physical KV slots. `None` is garbage."""

    def __init__(self, windows: Sequence[int | None], block_size: int) -> None:
        self.windows = windows
        self.block_size = block_size
        self.slots: dict[tuple[int, int, int], Content | None] = {}
        self.versions: dict[Request, list[int]] = {}  # of running requests: the weights under each computed token

    def execute(self, plan: SchedulerOutput, version: int, broken: set[Request]) -> None:
        """Plays a step; what `broken` requests write is garbage."""
        for copy in plan.block_copies:
            assert copy.src != 0
            assert copy.dst != 0
            for offset in range(self.block_size):
                self.slots[copy.group, copy.dst, offset] = self.slots.get((copy.group, copy.src, offset))
        for row, item in enumerate(plan.scheduled):
            if item.request not in self.versions:  # admitted now: what it shares has to be of these weights
                self.versions[item.request] = [version] * item.start
            assert len(self.versions[item.request]) == item.start
            self.versions[item.request] += [version] * item.num_tokens
            for position in range(item.start, item.end):
                content = Content(tuple(item.request.token_ids[: position + 1]), version)
                for group in range(len(self.windows)):
                    slot = self.slot(plan, group, row, position)
                    assert slot[1] != 0, "a token is written to the null block"
                    self.slots[slot] = None if item.request in broken else content
        for row, item in enumerate(plan.scheduled):
            if item.request not in broken:
                self.verify(plan, row, item)

    def slot(self, plan: SchedulerOutput, group: int, row: int, position: int) -> tuple[int, int, int]:
        """(group, block, offset) of a position."""
        block = int(plan.block_tables[group][row, position // self.block_size])
        return group, block, position % self.block_size

    def verify(self, plan: SchedulerOutput, row: int, item: ScheduledRequest) -> None:
        """Reads all that the queries of this step see, after every write of the step."""
        versions = self.versions[item.request]
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(0, item.start - window + 1)
            for position in range(first, item.end):
                expected = Content(tuple(item.request.token_ids[: position + 1]), versions[position])
                slot = self.slot(plan, group, row, position)
                assert self.slots.get(slot) == expected, f"{item.request.request_id}, position {position}, slot {slot}"

    def forget_stopped(self) -> None:
        """Drops the histories of requests that hold no blocks any more."""
        self.versions = {r: v for r, v in self.versions.items() if r.status is Status.RUNNING}


class EngineMachine(RuleBasedStateMachine):
    """A real Scheduler and BlockManager between random callers and the shadow."""

    sound = False

    @initialize(
        caching=st.booleans(),
        prefill_first=st.booleans(),
        block_size=st.sampled_from([2, 4]),
        window=st.sampled_from([3, 6]),
        num_blocks=st.integers(7, 20),
        num_window_blocks=st.integers(4, 20),
        seqs=st.integers(1, 6),
        budget=st.integers(5, 16),
        chunk=st.integers(2, 16),
    )
    def start(
        self,
        caching: bool,
        prefill_first: bool,
        block_size: int,
        window: int,
        num_blocks: int,
        num_window_blocks: int,
        seqs: int,
        budget: int,
        chunk: int,
    ) -> None:
        self.chunk = min(chunk, budget)
        windows = (None, window)
        self.blocks = BlockManager(
            [KVGroup(None, num_blocks + 1), KVGroup(window, num_window_blocks + 1)],
            block_size=block_size,
            max_num_seqs=seqs,
            max_model_len=64,
            enable_prefix_caching=caching,
        )
        self.scheduler = Scheduler(SchedulerConfig(seqs, budget, self.chunk, prefill_first), self.blocks)
        self.shadow = Shadow(windows, block_size)
        self.requests: list[Request] = []
        self.ends: Counter[str] = Counter()
        self.sound = True

    # ---- commands ------------------------------------------------------------------------------------------------

    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=3), options=OPTIONS)
    def add(self, prompts: list[tuple[int, ...]], options: dict[str, Any]) -> None:
        """One call of a user: samples of several prompts."""
        n, max_tokens = options["n"], options["max_tokens"]
        params = SamplingParams(
            min_tokens=min(options["min_tokens"], max_tokens),
            priority=options["priority"],
            cache_salt=options["salt"],
            prompt_logprobs=options["prompt_logprobs"],
        )
        # The intake turns away what could never fit.
        more = max_tokens > 1
        fitting = [p for p in prompts if self.blocks.capacity_shortage(len(p) + more, self.chunk) is None]
        requests = []
        for prompt in [p for p in fitting for _ in range(n)]:
            number = len(self.requests)
            request = Request(
                f"r{number}",
                prompt,
                params,
                max_tokens=max_tokens,
                eos_token_ids=frozenset({EOS}),
                stop_token_ids=frozenset({EOS}),
                arrival=number,
            )
            self.requests.append(request)
            requests.append(request)
        make_fork_groups(requests)
        for request in requests:
            self.scheduler.add(request)

    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=3), options=OPTIONS, count=st.integers(1, 3))
    def add_and_step(self, prompts: list[tuple[int, ...]], options: dict[str, Any], count: int) -> None:
        self.add(prompts, options)
        self.steps(count)

    @precondition(lambda self: self.scheduler.num_running)
    @rule(error=INDICES, failed=INDICES, gone=INDICES)
    def eventful_step(self, error: int | None, failed: int | None, gone: int | None) -> None:
        """A step in which requests may break, fail to sample or be aborted while it runs."""
        self.step(error, failed, gone)

    @rule(count=st.integers(1, 4))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    @precondition(lambda self: self.scheduler.has_work)
    @rule(index=st.integers(0, 10**6), on_text=st.booleans())
    def end_one(self, index: int, on_text: bool) -> None:
        """Aborts any request, finished ones too, or ends a running one by a stop string."""
        running = [r for r in self.requests if r.status is Status.RUNNING]
        if on_text and running:
            request = running[index % len(running)]
            self.scheduler.stop_on_text(request, "text", len(request.output_token_ids))
            self.ends[request.request_id] += 1
        else:
            self.scheduler.abort(self.requests[index % len(self.requests)].request_id)

    @precondition(lambda self: self.scheduler.has_work)
    @rule(policy=st.sampled_from(["recompute", "recompute", "continue", "continue", "abort"]))
    def change_weights(self, policy: Any) -> None:
        self.scheduler.change_weights(self.blocks.weight_version + 1, policy)
        self.shadow.forget_stopped()

    @precondition(lambda self: self.blocks.num_cached_blocks)
    @rule()
    def reset_prefix_cache(self) -> None:
        self.blocks.reset_prefix_cache()
        assert self.blocks.num_cached_blocks == 0

    # ---- one step ------------------------------------------------------------------------------------------------

    def step(self, error: int | None = None, failed: int | None = None, gone: int | None = None) -> None:
        self.sound = False  # until the step's end, so that a failure in it is not followed by others in teardown
        self.shadow.forget_stopped()
        plan = self.scheduler.schedule()
        self.shadow.forget_stopped()
        if not plan.scheduled:
            self.sound = True
            return
        assert plan.num_tokens <= self.scheduler.config.max_num_batched_tokens
        assert len(plan.scheduled) <= self.scheduler.config.max_num_seqs
        planned = [item.request for item in plan.scheduled]
        sampling = [item.request for item in plan.scheduled if item.samples]
        errors = pick(planned, error)
        failures = pick(sampling, failed) - errors
        self.shadow.execute(plan, self.blocks.weight_version, errors | failures)
        output = self.model_output(plan, errors, failures)
        for request in pick(planned, gone):
            self.scheduler.abort(request.request_id)
        for request in self.scheduler.update_from_output(plan, output):
            self.ends[request.request_id] += request.is_finished
        self.sound = True

    def model_output(self, plan: SchedulerOutput, errors: set[Request], failures: set[Request]) -> ModelOutput:
        """What the runner would answer."""
        sampled: dict[str, list[SampledToken]] = {}
        prompt_logprobs: dict[str, list[list[TokenLogprob]]] = {}
        for item in plan.scheduled:
            request = item.request
            if request in errors:
                continue
            if item.samples:
                token = next_token(request.token_ids, request.arrival % 2)
                sampled[request.request_id] = [SampledToken(token, failed="NaN" if request in failures else None)]
            if request.sampling_params.prompt_logprobs is not None:
                targets = [item.start + row + 1 for row in prompt_logprob_rows(item)]
                prompt_logprobs[request.request_id] = [[TokenLogprob(0, -float(t), 1)] for t in targets]
        return ModelOutput(sampled, prompt_logprobs, {r.request_id: "broken" for r in errors})

    # ---- what always holds ---------------------------------------------------------------------------------------

    @invariant()
    def books_agree(self) -> None:
        self.blocks.check()
        assert (
            self.blocks.num_live_blocks + self.blocks.num_cached_blocks + self.blocks.num_free_blocks
            == self.blocks.num_total_blocks
        )
        statuses = Counter(r.status for r in self.requests)
        assert self.scheduler.num_running == statuses[Status.RUNNING]
        assert self.scheduler.num_waiting == statuses[Status.WAITING] + statuses[Status.PREEMPTED]
        if not self.scheduler.num_running:
            assert self.blocks.num_live_blocks == 0

    @invariant()
    def every_request_is_sound(self) -> None:
        for request in self.scheduler.take_ended():
            self.ends[request.request_id] += 1
        for request in self.requests:
            assert self.ends[request.request_id] == request.is_finished
            assert request.num_computed_tokens <= request.num_tokens
            if request.status in (Status.WAITING, Status.PREEMPTED):
                assert request.num_computed_tokens == 0
            assert (request.finish_reason is not None) == request.is_finished
            assert len(request.weight_versions) == len(request.output_token_ids)
            assert len(request.output_token_ids) <= request.max_tokens
            self.check_output(request)

    @invariant()
    def names_tell_what_blocks_hold(self) -> None:
        """Every block that can be found holds exactly the tokens, after exactly the prefix, of its name."""
        size = self.blocks.block_size
        for index, group in enumerate(self.blocks._groups):
            for name, block in group.pool._by_hash.items():
                contents = [self.shadow.slots[index, block.block_id, offset] for offset in range(size)]
                last = contents[-1]
                assert last is not None
                lengths = range(len(last.tokens) - size + 1, len(last.tokens) + 1)
                assert contents == [Content(last.tokens[:n], last.version) for n in lengths]
                assert block.token_ids == last.tokens[-size:]
                assert name in {self.chained_hash(last, salt) for salt in SALTS}

    def chained_hash(self, content: Content, salt: str | None) -> bytes:
        """The name of the block that ends with this slot."""
        name = root_hash(content.version, salt)
        size = self.blocks.block_size
        for start in range(0, len(content.tokens), size):
            name = hash_block(name, content.tokens[start : start + size])
        return name

    def check_output(self, request: Request) -> None:
        """The tokens are the model's, and a normal end is where the model's tokens say."""
        tokens = list(request.prompt_token_ids)
        ended: str | None = "length" if request.max_tokens == 0 else None
        for count, token in enumerate(request.output_token_ids, start=1):
            assert ended is None, "a token after the end"
            assert token == next_token(tokens, request.arrival % 2)
            tokens.append(token)
            if token == EOS and count > request.sampling_params.min_tokens:
                ended = "stop"
            elif count == request.max_tokens:
                ended = "length"
        assert tokens == request.token_ids
        if request.max_tokens and ended is not None:
            assert request.is_finished
            assert request.finish_reason == ended or request.stop_reason == "text"
        if request.finish_reason == "length" and request.stop_reason != "kv_cache_capacity":
            assert ended == "length"
        if request.sampling_params.prompt_logprobs is not None and request.prompt_logprobs:
            positions = [None if e is None else -e[0].logprob for e in request.prompt_logprobs]
            assert positions == [None, *range(1, len(positions))]
            assert len(positions) == request.num_prompt_tokens or not request.output_token_ids

    def teardown(self) -> None:
        if not self.sound:
            return
        for _ in range(MAX_STEPS_TO_DRAIN):
            if not self.scheduler.unfinished():
                break
            self.step()
        assert self.scheduler.unfinished() == [], "the scheduler is stuck"
        self.every_request_is_sound()
        self.books_agree()
        assert [self.ends[r.request_id] for r in self.requests] == [1] * len(self.requests)
        assert self.blocks.num_live_blocks == 0


TestEngineMachine = pytest.mark.timeout(600)(EngineMachine.TestCase)  # it takes seconds; shrinking a failure, minutes
TestEngineMachine.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, derandomize=True, report_multiple_bugs=False
)
