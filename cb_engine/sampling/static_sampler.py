"""The sampler of devices with static shapes.

Owns: what the device is given, and in which few makes. The meaning of everything is that of `Sampler` (the order of
operations stands in sampler.py); the division into groups of rows is not, since how large they are depends on the
batch. Here every row goes the same way, and what does not concern it is undone by its own numbers.
Does not know: whose rows they are, what a graph is.

A call's shapes follow from R, V and which of its parts are there:

    edits    whether any request edits its logits in this step, or has a grammar
    draw     greedy: no row draws; free: some do, from all tokens; cut: some have a top_k, top_p or min_p
    report   whether any request wants log-probabilities

So each (R, V) has `VARIANTS`, 12 of them, and `warmup` runs them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cb_engine.grammar.masks import TokenMasks
from cb_engine.sampling import blocks, truncation
from cb_engine.sampling.dense_edits import BatchEdits, DenseEdits
from cb_engine.sampling.logprobs import Distributions, TopLogprobs
from cb_engine.sampling.penalties import Penalties
from cb_engine.sampling.randomness import uniforms
from cb_engine.sampling.sampler import SamplerOutput
from cb_engine.sampling.state import SamplingState
from cb_engine.sampling.truncation import Cuts
from cb_engine.sampling_params import SamplingParams

Run = Callable[..., Any]  # (name of the function, function, its arguments): `Executor.run`


class Draw(StrEnum):
    """How the rows of a batch choose."""

    GREEDY = "greedy"
    FREE = "free"
    CUT = "cut"


class Variant(NamedTuple):
    """Which parts a call has; see the module docstring."""

    edits: bool
    draw: Draw
    report: bool


VARIANTS = tuple(Variant(*parts) for parts in product((True, False), reversed(Draw), (True, False)))


class Limits(NamedTuple):
    """`truncation.Cuts`, as a device takes them."""

    top_k: Tensor  # [R] int64, 0: off
    top_p: Tensor  # [R] wide dtype, 1: off
    min_p: Tensor  # [R] fp32, 0: off


class Odds(NamedTuple):
    """How rows draw."""

    temperature: Tensor  # [R] fp32; 0: greedy
    uniform: Tensor  # [R] wide dtype, in [0, 1)
    limits: Limits | None  # None: no row has any


class Report(NamedTuple):
    """Which log-probabilities are wanted."""

    asked: Tensor  # [R] bool: those of the token drawn
    raw: Tensor  # [R] bool: of the model's own distribution
    width: int  # how many of the best tokens


class Sampled(NamedTuple):
    """One call's results."""

    token_ids: Tensor  # [R] int64
    failed: Tensor  # [R] bool
    logprobs: Tensor | None  # [R] fp32, NaN where not asked for
    top_token_ids: Tensor | None  # [R, width] int64, best first
    top_logprobs: Tensor | None  # [R, width] fp32, -inf where cut off


class StaticSampler:
    """Samples one token per request of a padded batch. What it holds saves time; no result depends on it.

    Args:
        run: all work on the device goes through it.
        max_logprobs: the most best tokens that a request may ask for. Requests that ask for more have to be turned
            away before they get here.
    """

    def __init__(self, run: Run, *, max_logprobs: int) -> None:
        self._run = run
        self.max_logprobs = max_logprobs
        self._penalties = Penalties()
        self._batch: _Batch | None = None

    @torch.no_grad()
    def __call__(
        self, logits: Tensor, states: Sequence[SamplingState], masks: TokenMasks | None = None
    ) -> SamplerOutput:
        """Sample.

        Args:
            logits: `[R, V]`, bf16, fp16 or fp32.
            states: the requests, at most `R` of them; the rows beyond are padding.
            masks: what the grammars of some rows allow; None: no row has any.

        Returns:
            One token for each of the `R` rows. A row that failed leaves the others as they would be without it.

        Raises:
            ValueError: if there are more states than rows, or one asks for more than `max_logprobs`.
        """
        batch = self._batch
        if batch is None or not batch.fits(states, logits):
            self._check(logits, states)
            batch = self._batch = _Batch(states, logits, self._penalties)
        masked = batch.edits.pending()
        sampled = self._sample(
            logits,
            None if masked is None and masks is None else batch.edits.dense(masked or [], masks),
            batch.odds(batch.draw),
            batch.report(self.max_logprobs) if batch.reports else None,
        )
        top = None
        if sampled.top_token_ids is not None and sampled.top_logprobs is not None and any(batch.counts):
            top = TopLogprobs(batch.counts, sampled.top_token_ids, sampled.top_logprobs)
        return SamplerOutput(sampled.token_ids, sampled.failed, sampled.logprobs, top)

    @torch.no_grad()
    def warmup(self, logits: Tensor) -> None:
        """Run every variant over `logits [R, V]`, whatever they hold, reading no value.

        Args:
            logits: in the shape and dtype of the calls to come.
        """
        batch = _Batch((), logits, self._penalties)
        for variant in VARIANTS:
            self._sample(
                logits,
                batch.edits.dense([]) if variant.edits else None,
                batch.odds(variant.draw),
                batch.report(self.max_logprobs) if variant.report else None,
            )

    def _sample(self, logits: Tensor, edits: DenseEdits | None, odds: Odds | None, report: Report | None) -> Sampled:
        sampled: Sampled = self._run("sample", sample_rows, logits, edits, odds, report)
        return sampled

    def _check(self, logits: Tensor, states: Sequence[SamplingState]) -> None:
        if logits.dim() != 2 or logits.shape[0] < len(states):
            raise ValueError(
                f"the sampler needs logits [R, V] with a row for each state, got {tuple(logits.shape)} for "
                f"{len(states)} states"
            )
        most = max((state.params.logprobs or 0 for state in states), default=0)
        if most > self.max_logprobs:
            raise ValueError(
                f"logprobs must be at most {self.max_logprobs} where shapes are static, got {most}; ask for fewer"
            )


class _Batch:
    """What is known of a batch before its step; good as long as the same states come in the same order."""

    def __init__(self, states: Sequence[SamplingState], logits: Tensor, penalties: Penalties) -> None:
        # Kept to compare identities with.
        self._states = tuple(states)
        self._shape, self._device = logits.shape, logits.device
        rows, vocab_size = logits.shape
        self.edits = BatchEdits(self._states, (rows, vocab_size), self._device, penalties)
        self._seeds = np.array([state.seed % 2**64 for state in states], dtype=np.uint64)
        params = [state.params for state in states]
        params += [_PADDING] * (rows - len(params))
        self.draw = max((_draw_of(p) for p in params), key=list(Draw).index, default=Draw.GREEDY)
        self.counts = tuple(p.logprobs or 0 for p in params)
        self.reports = any(p.logprobs is not None for p in params)
        wide = blocks.wide_dtype(self._device)
        # A greedy row has no limits: its log-probabilities are those of all its tokens.
        self._limits = Limits(
            top_k=self._put([0 if p.is_greedy else p.top_k for p in params], torch.long),
            top_p=self._put([1.0 if p.is_greedy else p.top_p for p in params], wide),
            min_p=self._put([0.0 if p.is_greedy else p.min_p for p in params], torch.float32),
        )
        self._temperature = self._put([p.temperature for p in params], torch.float32)
        self._asked = self._put([p.logprobs is not None for p in params], torch.bool)
        self._raw = self._put([p.logprobs_mode == "raw" for p in params], torch.bool)

    def fits(self, states: Sequence[SamplingState], logits: Tensor) -> bool:
        """Whether this is the batch of these states, in this order, over such logits."""
        return (
            len(states) == len(self._states)
            and logits.shape == self._shape
            and logits.device == self._device
            and all(a is b for a, b in zip(states, self._states, strict=True))
        )

    def odds(self, draw: Draw) -> Odds | None:
        """How the rows draw their next tokens."""
        if draw is Draw.GREEDY:
            return None
        uniform = np.zeros(self._shape[0])
        uniform[: len(self._states)] = uniforms(self._seeds, [len(state.output_token_ids) for state in self._states])
        on_device = self._put(uniform, blocks.wide_dtype(self._device))
        return Odds(self._temperature, on_device, self._limits if draw is Draw.CUT else None)

    def report(self, width: int) -> Report:
        """Which rows want log-probabilities."""
        return Report(self._asked, self._raw, width)

    def _put(self, values: Any, dtype: torch.dtype) -> Tensor:
        return blocks.to_device(torch.as_tensor(values, dtype=dtype), self._device)


_PADDING = SamplingParams(temperature=0.0)


def _draw_of(params: SamplingParams) -> Draw:
    if params.is_greedy:
        return Draw.GREEDY
    return Draw.CUT if params.top_k or params.top_p < 1.0 or params.min_p else Draw.FREE


# ---- on the device -------------------------------------------------------------------------------------------


def sample_rows(logits: Tensor, edits: DenseEdits | None, odds: Odds | None, report: Report | None) -> Sampled:
    """All of a step's sampling. No shape depends on a value, and no row's result on the other rows."""
    plain = logits.float()
    scores = blocks.pad_to_blocks(plain if edits is None else edits.apply(plain))
    maxima = blocks.block_maxima(scores)
    failed = ~maxima.amax(-1).isfinite()
    if edits is not None:
        # An edit may hide a NaN or an infinity; the row is wrong all the same.
        failed = failed | ~plain.amax(-1).isfinite()
    token_ids = blocks.argmax(scores, maxima)
    chosen_from = None
    if odds is not None:
        token_ids, chosen_from = _choose(token_ids, scores, maxima, odds)
    if report is None:
        return Sampled(token_ids, failed, None, None, None)
    untouched = blocks.pad_to_blocks(plain)
    raw = _uncut(untouched, blocks.block_maxima(untouched))
    reported = _select(report.raw, raw, chosen_from or _uncut(scores, maxima))
    logprobs = torch.where(report.asked, reported.logprobs(token_ids), float("nan"))
    return Sampled(token_ids, failed, logprobs, *reported.top(report.width))


def _choose(best: Tensor, scores: Tensor, maxima: Tensor, odds: Odds) -> tuple[Tensor, Distributions]:
    """Draw a token for every row and take the `best` one in greedy rows; return also what it was chosen from."""
    peak = maxima.amax(-1)
    greedy = odds.temperature == 0
    temperature = odds.temperature.masked_fill(greedy, 1.0)
    scaled = truncation.scale(scores, peak, temperature)
    weights = scaled.softmax(-1)
    of_all = _log_sums(weights)
    thresholds = torch.full_like(peak, float("-inf"))
    if odds.limits is not None:
        ranked = scaled.sort(-1, descending=True).values
        thresholds = truncation.cut_candidates(ranked, Cuts(*odds.limits), None, ranked.shape[1]).thresholds
        weights = weights.masked_fill(scaled < thresholds.unsqueeze(1), 0.0)
    drawn, sums = blocks.draw(weights, odds.uniform)
    of_kept = (sums / weights.amax(-1)).log().float()
    # A greedy row's are those that it has in a batch where nobody draws, to the bit.
    log_sums = torch.where(greedy, of_all, of_kept)
    chosen_from = Distributions(scores, maxima, peak, temperature, thresholds, log_sums)
    return torch.where(greedy, best, drawn), chosen_from


def _uncut(logits: Tensor, maxima: Tensor) -> Distributions:
    """`Distributions.uncut`, without its passes over a few rows at a time."""
    peak = maxima.amax(-1)
    ones = torch.ones_like(peak)
    log_sums = _log_sums(truncation.scale(logits, peak, ones).softmax(-1))
    return Distributions(logits, maxima, peak, ones, torch.full_like(peak, float("-inf")), log_sums)


def _log_sums(weights: Tensor) -> Tensor:
    """Return the logarithms `[R]` of what softmax has divided by: the best token, whose weight was 1 before, tells."""
    return weights.amax(-1).reciprocal().log()


def _select(first: Tensor, a: Distributions, b: Distributions) -> Distributions:
    """Return the rows of `a` where `first [R]`, else those of `b`."""
    column = first.unsqueeze(1)
    return Distributions(
        logits=torch.where(column, a.logits, b.logits),
        maxima=torch.where(column, a.maxima, b.maxima),
        peak=torch.where(first, a.peak, b.peak),
        temperature=torch.where(first, a.temperature, b.temperature),
        thresholds=torch.where(first, a.thresholds, b.thresholds),
        log_sums=torch.where(first, a.log_sums, b.log_sums),
    )
