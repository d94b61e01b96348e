"""A scheduler without a model: the answers are made by hand. Blocks hold 4 tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cb_engine.kv_cache.block_manager import BlockManager, KVGroup
from cb_engine.outputs import TokenLogprob
from cb_engine.request import Request
from cb_engine.runner.input_batch import prompt_logprob_rows
from cb_engine.sampling_params import SamplingParams
from cb_engine.scheduler.output import ModelOutput, SampledToken, SchedulerOutput
from cb_engine.scheduler.scheduler import Scheduler, SchedulerConfig, make_fork_groups

EOS = 99


class Rig:
    """A scheduler and a model whose every token is 7 unless a test says otherwise."""

    def __init__(
        self,
        *,
        blocks: int | Sequence[int] = 64,
        windows: Sequence[int | None] = (None,),
        seqs: int = 8,
        budget: int = 64,
        chunk: int | None = None,
        caching: bool = False,
        prefill_first: bool = False,
    ) -> None:
        sizes = [blocks] * len(windows) if isinstance(blocks, int) else blocks
        self.blocks = BlockManager(
            [KVGroup(w, n + 1) for w, n in zip(windows, sizes, strict=True)],
            block_size=4,
            max_num_seqs=seqs,
            max_model_len=256,
            enable_prefix_caching=caching,
        )
        self.scheduler = Scheduler(SchedulerConfig(seqs, budget, chunk or budget, prefill_first), self.blocks)
        self.plan = SchedulerOutput()
        self._arrivals = 0

    def make(
        self, prompt: int | Sequence[int], name: str | None = None, max_tokens: int = 50, **params: Any
    ) -> Request:
        """A request; `prompt` may be a length."""
        tokens = list(range(100, 100 + prompt)) if isinstance(prompt, int) else list(prompt)
        sampling = SamplingParams(**params)
        stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else {EOS})
        self._arrivals += 1
        return Request(
            name or f"r{self._arrivals}",
            tokens,
            sampling,
            max_tokens=max_tokens,
            eos_token_ids=frozenset({EOS}),
            stop_token_ids=stops,
            arrival=self._arrivals,
        )

    def add(self, prompt: int | Sequence[int], name: str | None = None, **options: Any) -> Request:
        request = self.make(prompt, name, **options)
        self.scheduler.add(request)
        return request

    def add_group(self, prompt: int | Sequence[int], count: int, **options: Any) -> list[Request]:
        """Requests with one prompt, submitted in one call."""
        requests = [self.make(prompt, **options) for _ in range(count)]
        make_fork_groups(requests)
        for request in requests:
            self.scheduler.add(request)
        return requests

    def schedule(self) -> dict[str, tuple[int, int]]:
        """Plans a step: id -> (start, number of tokens), in plan order."""
        self.plan = self.scheduler.schedule()
        self.blocks.check()
        assert self.plan.num_tokens <= self.scheduler.config.max_num_batched_tokens
        return {s.request.request_id: (s.start, s.num_tokens) for s in self.plan.scheduled}

    def answer(
        self,
        tokens: Mapping[str, int] | None = None,
        *,
        errors: Mapping[str, str] | None = None,
        failed: Sequence[str] = (),
    ) -> list[str]:
        """The model's answer to the latest plan; returns the ids of the requests that changed."""
        sampled = {}
        prompt_logprobs = {}
        for item in self.plan.scheduled:
            name = item.request.request_id
            if item.samples and name not in (errors or {}):
                token = (tokens or {}).get(name, 7)
                sampled[name] = [SampledToken(token, failed="NaN" if name in failed else None)]
            if item.request.sampling_params.prompt_logprobs is not None:
                targets = [item.start + row + 1 for row in prompt_logprob_rows(item)]
                prompt_logprobs[name] = [[TokenLogprob(item.request.token_ids[t], -float(t), 1)] for t in targets]
        changed = self.scheduler.update_from_output(self.plan, ModelOutput(sampled, prompt_logprobs, errors or {}))
        self.blocks.check()
        return [r.request_id for r in changed]

    def step(self, tokens: Mapping[str, int] | None = None) -> dict[str, tuple[int, int]]:
        plan = self.schedule()
        self.answer(tokens)
        return plan

    def drain(self, limit: int = 500) -> None:
        """Steps until nothing is left; a step that plans nothing while requests wait would never end."""
        for _ in range(limit):
            if not self.scheduler.unfinished():
                break
            self.step()
        assert self.scheduler.unfinished() == [], "the scheduler is stuck"
        assert self.blocks.num_live_blocks == 0
