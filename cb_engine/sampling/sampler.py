"""Where a token is sampled.

Owns: the order of operations, and the cache of the batch's plan. For each row, from its logits in fp32:

    1. raw log-probabilities, if asked for, come from the logits as they are
    2. logit_bias is added                                                  edits.py
    3. repetition penalty (prompt and output), then frequency and presence (output)
    4. masks: allowed_token_ids, bad words, what would end the output before min_tokens   edits.py
       and what the request's grammar does not allow                        token_masks.py
    5. greedy: the best token                                               blocks.py, or the kernel `draw`
       else: temperature, then the cuts top_k, top_p, min_p                 truncation.py
             and a draw with one uniform number per (seed, position)        randomness.py, blocks.py; without
                                                                            cuts the kernel `draw`
    6. processed log-probabilities, if asked for, are those of what 5 chose from   logprobs.py

This is vLLM's order in 1-4, with the masks moved behind all that adds, and that of transformers' `generate`
in 5.

Does not know: models, requests, devices' names, stop conditions. It never changes the logits it is given, and
no row's result depends, in any bit, on the other rows of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cb_engine.grammar.masks import TokenMasks
from cb_engine.sampling import blocks, truncation
from cb_engine.sampling.logprobs import Distributions, TopLogprobs
from cb_engine.sampling.penalties import Penalties
from cb_engine.sampling.plan import Group, Plan, Rows, WholeGroup
from cb_engine.sampling.randomness import uniforms
from cb_engine.sampling.state import SamplingState
from cb_engine.sampling.token_masks import forbid
from cb_engine.sampling_params import SamplingParams

_GREEDY = SamplingState(SamplingParams(temperature=0.0), 0, (), (), frozenset(), ())


@dataclass(frozen=True)
class SamplerOutput:
    """One step's tokens, on the logits' device."""

    token_ids: Tensor  # [R] int64; of no meaning where failed
    failed: Tensor  # [R] bool: the row held NaN or +inf, or nothing was left to choose from
    logprobs: Tensor | None  # [R] fp32, NaN for rows that did not ask; None if no row asked
    top: TopLogprobs | None  # None if no row asked for more than its own token's

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> SamplerOutput:
        """Return a copy whose tensors are on `device`."""
        return SamplerOutput(
            token_ids=self.token_ids.to(device, non_blocking=non_blocking),
            failed=self.failed.to(device, non_blocking=non_blocking),
            logprobs=None if self.logprobs is None else self.logprobs.to(device, non_blocking=non_blocking),
            top=None if self.top is None else self.top.to(device, non_blocking=non_blocking),
        )


@dataclass(frozen=True)
class _Draft:
    """One step in the making: the edited logits, and what is filled in row by row."""

    logits: Tensor  # [R, V] fp32, padded to blocks, edited
    maxima: Tensor  # their block maxima
    peak: Tensor  # [R], the rows' maxima
    uniform: Tensor  # [R], wide dtype
    token_ids: Tensor  # [R] int64
    thresholds: Tensor  # [R] fp32
    log_sums: Tensor  # [R] fp32

    def put(self, rows: Rows, token_ids: Tensor, thresholds: Tensor, sums: Tensor) -> None:
        """Fill in what was drawn for `rows`, the lowest score kept and the sum of the weights kept."""
        self.token_ids.index_copy_(0, rows.index, token_ids)
        self.thresholds.index_copy_(0, rows.index, thresholds)
        self.log_sums.index_copy_(0, rows.index, sums.log().float())


class Sampler:
    """Samples one token per request of a batch. What it holds saves time; no result depends on it.

    Args:
        native: on a CPU, let `torch.ops.cb_engine.draw` sample the rows that have nothing but a temperature. It has
            to be loaded.
    """

    def __init__(self, *, native: bool = False) -> None:
        self._native = native
        self._penalties = Penalties()
        self._plan: Plan | None = None

    @torch.no_grad()
    def __call__(
        self, logits: Tensor, states: Sequence[SamplingState], masks: TokenMasks | None = None
    ) -> SamplerOutput:
        """Sample.

        Args:
            logits: `[R, V]`, bf16, fp16 or fp32, one row per state; padding rows are the caller's to drop.
            states: the requests, `R` of them.
            masks: what the grammars of some rows allow; None: no row has any.

        Returns:
            One token per row. A row that failed leaves the others as they would be without it.

        Raises:
            ValueError: if there is not exactly one row per state.
        """
        if logits.dim() != 2 or logits.shape[0] != len(states):
            raise ValueError(
                f"the sampler needs logits [R, V] with one row per state, got {tuple(logits.shape)} for "
                f"{len(states)} states; slice off the padding first"
            )
        plan = self._plan_for(states, logits)
        masked = plan.edits.pending()
        if plan.is_plain and masked is None and masks is None:
            token_ids, failed, _ = torch.ops.cb_engine.draw(_rows_of(logits), plan.odds, _uniform(plan))
            return SamplerOutput(token_ids, failed, None, None)
        draft, failed = _prepare(logits, plan, masked, masks)
        if (rows := plan.greedy) is not None:
            best = blocks.argmax(rows.take(draft.logits), rows.take(draft.maxima))
            draft.token_ids.index_copy_(0, rows.index, best)
        if (rows := plan.free) is not None:
            drawn, _, sums = torch.ops.cb_engine.draw(
                rows.take(draft.logits), rows.take(plan.odds), rows.take(draft.uniform)
            )
            draft.put(rows, drawn, torch.full_like(sums, float("-inf")), sums)
        wanting = [row for group in plan.candidate_groups for row in _draw_from_candidates(draft, group)]
        for part in [*plan.whole_groups, *plan.group_whole(wanting)]:
            _draw_from_rows(draft, part)
        logprobs, top = _report(logits, plan, draft)
        return SamplerOutput(draft.token_ids, failed, logprobs, top)

    def warmup(self, logits: Tensor) -> None:
        """Sample greedily from padding; no value is read. What other requests need compiles nothing."""
        self(logits, [_GREEDY] * len(logits))

    def _plan_for(self, states: Sequence[SamplingState], logits: Tensor) -> Plan:
        plan, vocab_size, device = self._plan, logits.shape[1], logits.device
        if plan is None or not plan.fits(states, vocab_size, device):
            known = None if plan is None else plan.requests
            plan = Plan.of(states, vocab_size, device, self._penalties, native=self._native, requests=known)
            self._plan = plan
        return plan


def _rows_of(logits: Tensor) -> Tensor:
    """Return the logits as the kernel reads them: rows in one piece each, of at most 32 bits."""
    narrow = logits.float() if logits.dtype is torch.float64 else logits
    return narrow if narrow.stride(1) == 1 else narrow.contiguous()


def _prepare(logits: Tensor, plan: Plan, masked: list[int] | None, masks: TokenMasks | None) -> tuple[_Draft, Tensor]:
    """Return the edited logits with room for the results, and which rows failed, `[R]` bool."""
    scores = logits.float().contiguous()
    failed = None
    if masked is not None or masks is not None:
        # An edit may hide a NaN or an infinity; the row is wrong all the same.
        failed = ~scores.amax(-1).isfinite()
        scores = scores.clone() if scores.data_ptr() == logits.data_ptr() else scores
        if masked is not None:
            plan.edits.apply(scores, masked)
        if masks is not None:
            forbid(scores, masks)
    scores = blocks.pad_to_blocks(scores)
    maxima = blocks.block_maxima(scores)
    peak = maxima.amax(-1)
    failed = ~peak.isfinite() if failed is None else failed | ~peak.isfinite()
    rows = len(plan.states)
    draft = _Draft(
        logits=scores,
        maxima=maxima,
        peak=peak,
        uniform=_uniform(plan),
        token_ids=torch.zeros(rows, dtype=torch.long, device=plan.device),
        thresholds=torch.full((rows,), float("-inf"), device=plan.device),
        log_sums=torch.zeros(rows, device=plan.device),
    )
    return draft, failed


def _uniform(plan: Plan) -> Tensor:
    positions = [len(state.output_token_ids) for state in plan.states]
    wide = blocks.wide_dtype(plan.device)
    return blocks.to_device(torch.from_numpy(uniforms(plan.seeds, positions)).to(wide), plan.device)


def _draw_from_candidates(draft: _Draft, group: Group) -> list[int]:
    """Sample a group from its rows' best tokens; return the rows for which those were too few."""
    rows, temperature = group.rows, group.temperature
    logits, peak = rows.take(draft.logits), rows.take(draft.peak)
    vocab = logits.shape[1]
    values, token_ids = blocks.topk(logits, rows.take(draft.maxima), min(group.candidates, vocab))
    scores = truncation.scale(values, peak, temperature)
    total = None
    if group.needs_sum:
        total = truncation.partition(logits, peak, temperature).to(group.cuts.top_p.dtype)
    best = truncation.cut_candidates(scores, group.cuts, total, vocab)
    # By token id, as in a whole row: the draw must not depend on how equal scores were ordered.
    token_ids, order = token_ids.sort(-1)
    index, sums = blocks.draw_small(best.weights.gather(1, order), rows.take(draft.uniform))
    drawn = token_ids.gather(1, index.unsqueeze(1)).squeeze(1)
    draft.put(rows, drawn, best.thresholds, sums)
    return [row for row, done in zip(rows.host, best.complete.tolist(), strict=True) if not done]


def _draw_from_rows(draft: _Draft, group: WholeGroup) -> None:
    """Sample rows with any limits from all of their tokens."""
    rows = group.rows
    scores = truncation.scale(rows.take(draft.logits), rows.take(draft.peak), group.temperature)
    thresholds = scores.new_full(scores.shape[:1], float("-inf"))
    weights = scores.softmax(-1)
    if group.limited is not None:
        lowest = truncation.cut_rows(
            group.limited.take(scores), group.cuts, max_top_k=group.max_top_k, any_top_p=group.any_top_p
        )
        thresholds.index_copy_(0, group.limited.index, lowest)
        weights.masked_fill_(scores < thresholds.unsqueeze(1), 0.0)
    token_ids, sums = blocks.draw(weights, rows.take(draft.uniform))
    # Softmax has divided by the whole row's sum; the best token, whose weight was 1 before, tells by how much.
    draft.put(rows, token_ids, thresholds, sums / weights.amax(-1))


def _report(logits: Tensor, plan: Plan, draft: _Draft) -> tuple[Tensor | None, TopLogprobs | None]:
    """Return the log-probabilities that the rows asked for: of the tokens drawn, and of the best ones."""
    if not plan.processed and not plan.raw:
        return None, None
    size, width = len(plan.states), min(max(plan.counts), draft.logits.shape[1])
    chosen = draft.peak.new_full((size,), float("nan"))
    top = TopLogprobs(
        plan.counts,
        draft.token_ids.new_zeros((size, width)),
        draft.peak.new_full((size, width), float("-inf")),
    )
    for rows, of_them in _distributions(logits, plan, draft):
        chosen.index_copy_(0, rows.index, of_them.logprobs(rows.take(draft.token_ids)))
        if count := plan.counts[rows.host[0]]:
            token_ids, values = of_them.top(count)
            top.token_ids[:, : token_ids.shape[1]].index_copy_(0, rows.index, token_ids)
            top.logprobs[:, : values.shape[1]].index_copy_(0, rows.index, values)
    return chosen, top if width else None


def _distributions(logits: Tensor, plan: Plan, draft: _Draft) -> list[tuple[Rows, Distributions]]:
    """Return what each row's log-probabilities are of, for the rows that asked."""
    found: list[tuple[Rows, Distributions]] = []
    if (rows := plan.greedy_processed) is not None:
        plain = Distributions.uncut(rows.take(draft.logits), rows.take(draft.maxima))
        draft.log_sums.index_copy_(0, rows.index, plain.log_sums)
    drawn = Distributions(draft.logits, draft.maxima, draft.peak, plan.temperature, draft.thresholds, draft.log_sums)
    found += [(rows, drawn.take(rows)) for rows in plan.processed]
    for rows in plan.raw:
        untouched = blocks.pad_to_blocks(rows.take(logits).float())
        found.append((rows, Distributions.uncut(untouched, blocks.block_maxima(untouched))))
    return found
