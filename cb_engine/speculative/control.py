"""Whether drafts pay, and how many of them: the switch.

Owns what has been measured: how often drafts of each kind are right, what a step costs with so many more rows, what
drafting costs. Does not know requests, devices or clocks: it is told numbers and answers with numbers.

A step of B requests that verifies n drafts, the i-th of which is right with probability P[i], gives B + sum(P) tokens
in the time T(B, n) + D. It is worth it if that is more tokens a second than B in T(B, 0). Drafts are taken in the order
of their P, up to the n for which the rate is highest; if that is 0 nothing is verified, and a proposer that costs time
is not even asked.

Such a proposer is probed: at first, and again after ever longer times. A probe verifies nothing. It drafts one token
for a few requests and waits for what the plain step after it gives in that place: a small part of what drafting and
verifying would cost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from cb_engine.speculative.proposer import Draft

_WORTH = 1.03  # the gain that is expected before anything is tried: estimates are noisy
_HOPE = 0.6  # how often a draft of an unknown kind is taken to be right
_TRUST = 3.0  # observations that an expectation weighs as much as
_MEMORY = 0.98  # weight of an observation after one more
_SMOOTH = 0.25  # weight of the latest time
_OUTLIER = 2.0  # a time beyond so many times the expected is taken for that
_PATIENCE = 64  # plain steps before the next probe; doubled with every probe in vain
_MOST_PATIENCE = 2048
_PROBE_SHARE = 0.02  # of the time, that probes may take
_PROVEN = 16  # steps in a row that verified: it pays, so the patience is short again
_PROBE = 6  # tokens that are drafted in a probe
_PROBED = 2  # requests that are drafted for at once in it
_SELDOM = 4  # one that costs none is asked every so many steps while nothing comes of it
_QUARTERS = 4  # rows are counted in quarters of the number of requests


class Mean:
    """A running mean of times that an outlier does not spoil."""

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        """Takes in one more. The first of all is often slow, so the second may take its place."""
        if self.count < 2:
            self.value = value if self.count == 0 else min(self.value, value)
        else:
            self.value += _SMOOTH * (min(value, _OUTLIER * self.value) - self.value)
        self.count += 1


class Acceptance:
    """How often drafts are right, by kind and by the place of a token among them, given that those before it were."""

    def __init__(self) -> None:
        self._counts: dict[int, list[tuple[float, float]]] = {}  # kind -> by place: (right, tried)

    def add(self, kind: int, num_offered: int, num_right: int) -> None:
        """Takes in one verified draft."""
        counts = self._counts.setdefault(kind, [])
        counts.extend([(0.0, 0.0)] * (num_offered - len(counts)))
        for place in range(min(num_right + 1, num_offered)):
            right, tried = counts[place]
            counts[place] = (right * _MEMORY + (place < num_right), tried * _MEMORY + 1.0)

    def odds(self, kind: int, num_tokens: int) -> list[float]:
        """The probability that all tokens up to each place are right: never rising, [num_tokens]."""
        counts = self._counts.get(kind, [])
        expected, whole = self._hope(kind), 1.0
        result = []
        for place in range(num_tokens):
            right, tried = counts[place] if place < len(counts) else (0.0, 0.0)
            expected = (right + _TRUST * expected) / (tried + _TRUST)
            whole *= expected
            result.append(whole)
        return result

    def fade(self) -> None:
        """What is known weighs no more than an expectation from here on."""
        for counts in self._counts.values():
            for place, (right, tried) in enumerate(counts):
                share = min(1.0, _TRUST / tried) if tried else 1.0
                counts[place] = (right * share, tried * share)

    def _hope(self, kind: int) -> float:
        """What to expect of a kind: as much as of the next lower one that is known."""
        lower = [other for other in self._counts if other < kind]
        if not lower:
            return _HOPE
        right, tried = self._counts[max(lower)][0]
        return (right + _TRUST * _HOPE) / (tried + _TRUST)


@dataclass
class _Curve:
    """What rows cost for batches of about one size, relative to a step without drafts."""

    ratios: dict[int, Mean] = field(default_factory=dict)  # by quarters

    def known(self) -> list[tuple[float, float]]:
        """(quarters, ratio) of what has been measured, in order; a step without drafts first."""
        return [(float(_QUARTERS), 1.0), *sorted((float(at), mean.value) for at, mean in self.ratios.items())]


def _ratio(known: Sequence[tuple[float, float]], quarters: float) -> float:
    """Measured, between two measured, or a guess: beyond what is known, as much again may come for free."""
    at = bisect_left(known, (quarters, 0.0))
    if at == len(known):
        last, value = known[-1]
        return value * max(1.0, quarters / (2 * last))
    high, value = known[at]
    if at == 0 or high == quarters:
        return value
    low, base = known[at - 1]
    return base + (quarters - low) / (high - low) * (value - base)


class StepCosts:
    """What steps cost."""

    def __init__(self) -> None:
        self._plain: dict[int, Mean] = {}  # by number of requests
        self._curves: dict[int, _Curve] = {}  # by its bit length

    def add(self, num_requests: int, num_rows: int, seconds: float) -> None:
        """Takes in a step without prompts."""
        if num_rows == num_requests:
            self._plain.setdefault(num_requests, Mean()).add(seconds)
            return
        plain = self.plain(num_requests)
        if plain is not None:
            ratios = self._curve(num_requests).ratios
            ratios.setdefault(_quarters(num_requests, num_rows), Mean()).add(seconds / plain)

    def plain(self, num_requests: int) -> float | None:
        """Seconds of a step without drafts; for a number not seen yet those of the nearest one."""
        if not self._plain:
            return None
        return self._plain[min(self._plain, key=lambda known: abs(known - num_requests))].value

    def ratios(self, num_requests: int, all_num_rows: Sequence[int]) -> list[float]:
        """What steps with so many rows cost, relative to one without drafts."""
        known = self._curve(num_requests).known()
        return [_ratio(known, _QUARTERS * num_rows / num_requests) for num_rows in all_num_rows]

    def measured_ratio(self, num_requests: int, num_rows: int) -> float | None:
        """The same, None if there was no such step yet."""
        mean = self._curve(num_requests).ratios.get(_quarters(num_requests, num_rows))
        return None if mean is None else mean.value

    def forget(self, num_requests: int) -> None:
        """What rows cost for batches of this size is to be found out anew."""
        self._curves.pop(num_requests.bit_length(), None)

    def _curve(self, num_requests: int) -> _Curve:
        return self._curves.setdefault(num_requests.bit_length(), _Curve())


def _quarters(num_requests: int, num_rows: int) -> int:
    return max(_QUARTERS + 1, round(_QUARTERS * num_rows / num_requests))


class DraftController:
    """See the module docstring.

    Args:
        num_tokens: k.
        adaptive: False: everything is drafted and verified.
        fixed_width: a step verifies k tokens of every request or none, for shapes that are known beforehand.
        costs_time: whether drafting does; if not, proposers are asked even when nothing is verified, which shows at no
            cost when drafts begin to be right.
    """

    def __init__(self, num_tokens: int, *, adaptive: bool, fixed_width: bool, costs_time: bool) -> None:
        self._num_tokens = num_tokens
        self._adaptive = adaptive
        self._fixed_width = fixed_width
        self._costs_time = costs_time
        self.acceptance = Acceptance()
        self.costs = StepCosts()
        self._drafting: dict[int, Mean] = {}  # seconds for one token each, by bit length of the number of requests
        self._is_probe = False  # whether the drafts that are out belong to one
        self._idle = 0  # plain steps since drafts were last verified
        self._busy = 0  # steps that have verified drafts since the last plain one
        self._patience = _PATIENCE
        self._probing = _PROBE if adaptive and costs_time else 0  # tokens of a probe that are left

    # ---- what is asked ---------------------------------------------------------------------------------------

    def to_draft(self, num_requests: int) -> tuple[int, int]:
        """For how many of so many requests to draft now, and how many tokens for each."""
        everything = (num_requests, self._num_tokens)
        if not self._adaptive:
            return everything
        if not self._costs_time:
            return (0, 0) if self._idle > _PATIENCE and self._idle % _SELDOM else everything
        if self._probing > 0:
            return min(_PROBED, num_requests), 1
        if self.costs.plain(num_requests) is None:
            return 0, 0  # nothing to compare with yet
        return everything if self._may_pay(num_requests) else (0, 0)

    def choose(self, drafts: Sequence[Draft], num_requests: int) -> list[int]:
        """How many tokens of each draft to verify in the next step, which will have so many requests."""
        everything = [len(draft.token_ids) for draft in drafts]
        if not self._adaptive:
            return everything
        if self._is_probe or self.costs.plain(num_requests) is None:
            return [0] * len(drafts)
        odds = self._odds(drafts)
        ranked = sorted(((p, index) for index, of_one in enumerate(odds) for p in of_one), reverse=True)
        lengths = [0] * len(drafts)
        for _, index in ranked[: self._best_number([p for p, _ in ranked], num_requests)]:
            lengths[index] += 1
        return lengths

    def _odds(self, drafts: Sequence[Draft]) -> list[list[float]]:
        """For each draft, the probability that all of its tokens up to each place are right."""
        known = {(d.kind, len(d.token_ids)): self.acceptance.odds(d.kind, len(d.token_ids)) for d in drafts}
        return [known[d.kind, len(d.token_ids)] for d in drafts]

    def _may_pay(self, num_requests: int) -> bool:
        """Whether drafts of k tokens for everybody, none of them known yet, would pay."""
        odds = self.acceptance.odds(0, self._num_tokens)
        return self._best_number([p for p in odds for _ in range(num_requests)], num_requests) > 0

    def _best_number(self, ranked: Sequence[float], num_requests: int) -> int:
        """Of draft tokens with these probabilities, the likeliest first, how many to verify for the highest rate."""
        # Costs are known by quarters, so there is nothing to be found between two of them.
        stride = len(ranked) if self._fixed_width else max(1, num_requests // _QUARTERS)
        numbers = [*range(stride, len(ranked), stride), len(ranked)] if ranked else []
        extra = self._num_tokens * self._seconds_a_token(num_requests) / (self.costs.plain(num_requests) or 1.0)
        expected = list(accumulate(ranked, initial=float(num_requests)))
        best, best_rate = 0, _WORTH
        for number, ratio in zip(numbers, self._ratios(num_requests, numbers), strict=True):
            rate = expected[number] / num_requests / (ratio + extra)
            if rate > best_rate:
                best, best_rate = number, rate
        return best

    def _ratios(self, num_requests: int, numbers: Sequence[int]) -> list[float]:
        """What steps with so many draft tokens cost. Of a fixed width, which cannot be approached in small steps, the
        best is hoped for until one step has shown what is true."""
        if not self._fixed_width:
            return self.costs.ratios(num_requests, [num_requests + number for number in numbers])
        return [self._wide_ratio(num_requests)] * len(numbers)

    def _wide_ratio(self, num_requests: int) -> float:
        """What a step of the fixed width costs, as far as is known; else as much as one without drafts."""
        measured = self.costs.measured_ratio(num_requests, num_requests * (1 + self._num_tokens))
        return 1.0 if measured is None else measured

    def _seconds_a_token(self, num_requests: int) -> float:
        """What drafting one token for each of so many requests takes; for a number not seen that of the nearest."""
        size = num_requests.bit_length()
        known = min(self._drafting, key=lambda other: abs(other - size), default=None)
        return 0.0 if known is None else self._drafting[known].value

    def _steps_per_probe(self, num_requests: int) -> float:
        """Plain steps that have to lie between two probes for these to take no more than their share. Where the width
        is fixed, a first step that verifies is a part of it."""
        probe = _PROBE / min(_PROBED, num_requests) * self._seconds_a_token(_PROBED)
        steps = probe / (self.costs.plain(num_requests) or 1.0)
        if self._fixed_width:
            steps += max(0.0, self._wide_ratio(num_requests) - 1.0)
        return steps / _PROBE_SHARE

    # ---- what is told ----------------------------------------------------------------------------------------

    def saw_step(self, num_requests: int, num_rows: int, seconds: float) -> None:
        """A step without prompts took so long.

        Args:
            num_rows: more than `num_requests` if drafts were verified; padding need not be counted.
        """
        if self._fixed_width and num_rows > num_requests:
            num_rows = num_requests * (1 + self._num_tokens)
        self.costs.add(num_requests, num_rows, seconds)
        if num_rows > num_requests:
            self._idle = 0
            self._busy += 1
            if self._busy >= _PROVEN:
                self._patience = _PATIENCE
            return
        self._idle += 1
        self._busy = 0
        if self._idle >= max(self._patience, self._steps_per_probe(num_requests)):
            self._idle = 0
            self._patience = min(2 * self._patience, _MOST_PATIENCE)
            self.costs.forget(num_requests)
            if self._costs_time:
                self.acceptance.fade()
                self._probing = _PROBE

    def saw_drafting(self, num_requests: int, num_tokens: int, seconds: float) -> None:
        """Drafting so many tokens for each of so many requests took so long."""
        self._drafting.setdefault(num_requests.bit_length(), Mean()).add(seconds / num_tokens)
        self._is_probe = self._probing > 0
        self._probing = max(0, self._probing - num_requests)

    def saw_draft(self, kind: int, num_offered: int, num_right: int) -> None:
        """A draft was verified, or its first token was seen to be right or wrong."""
        self.acceptance.add(kind, num_offered, num_right)
