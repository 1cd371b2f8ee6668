"""How many drafts a verification pass should have: those that bring more tokens per second than they cost.

A step emits one token per request, plus the accepted drafts. The drafter's probabilities say how many drafts are
accepted if the likeliest ones are verified: the sum of their probabilities, corrected by what was really accepted
lately. Measured step times say what a pass of that size costs. The best size has the most tokens per second; without
drafts the drafter does not run at all.

Four requests. Verifying 8 tokens, one draft each, takes 10% longer than plain decoding, 16 tokens take 50% longer. If
the first drafts are accepted with probability 0.6, and the others hardly ever, 8 tokens are best:

>>> budget = DraftBudget({4: {4: 1.0, 8: 1.1, 16: 1.5}})
>>> budget.observe(DraftCurve((4, 12), (0.6 * 4, 0.6 * 4 + 0.05 * 8)), num_requests=4)
>>> choice = budget.choose(batch=4, num_drafting=4)
>>> choice.num_tokens, round(choice.num_expected, 2)
(8, 2.4)

They are accepted far less often than the drafter says, so plain decoding is best:

>>> for _ in range(100):
...     budget.observe_accepted(0, choice.num_expected)
>>> budget.choose(batch=4, num_drafting=4).num_tokens
4
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

MEMORY = 0.95
"""weight of the past per step, in the averages of probabilities and of accepted drafts"""
PRIOR = 8.0
"""drafts that are taken as accepted as expected before the first step"""


class DraftCurve(NamedTuple):
    """The drafts of a batch by probability: how many are above each of falling thresholds, and their sum."""

    counts: Sequence[float]
    sums: Sequence[float]

    def expected(self, num_drafts: float) -> float:
        """Accepted drafts if the `num_drafts` likeliest are verified, by linear interpolation."""
        index = bisect_left(self.counts, num_drafts)
        if index == len(self.counts):
            return self.sums[-1]
        below_count, below_sum = (self.counts[index - 1], self.sums[index - 1]) if index else (0.0, 0.0)
        width = self.counts[index] - below_count
        share = (num_drafts - below_count) / width if width else 0.0
        return below_sum + share * (self.sums[index] - below_sum)


class Choice(NamedTuple):
    """The size of a verification pass, and the drafts that should be accepted by the drafter's probabilities."""

    num_tokens: int
    num_expected: float


class DraftBudget:
    """Chooses the tokens of each verification pass.

    `seconds` has the time per step by batch size and tokens of the verification pass. As many tokens as requests mean
    plain decoding, without the drafter. `memory` is the weight of earlier drafts in the average: 0 if the drafts to be
    verified are observed themselves, as on a CPU.
    """

    def __init__(self, seconds: Mapping[int, Mapping[int, float]], memory: float = MEMORY) -> None:
        self._seconds, self._memory = seconds, memory
        self._curve: DraftCurve | None = None
        """averages per request"""
        self._num_expected = self._num_accepted = PRIOR

    @property
    def honesty(self) -> float:
        """Accepted drafts per expected one, lately."""
        return self._num_accepted / self._num_expected

    def observe(self, curve: DraftCurve, num_requests: int) -> None:
        """Take the drafts of `num_requests` requests into account."""
        new = [[value / num_requests for value in values] for values in curve]
        if self._curve is not None and self._memory:
            new = [
                [self._memory * old + (1 - self._memory) * value for old, value in zip(olds, values, strict=True)]
                for olds, values in zip(self._curve, new, strict=True)
            ]
        self._curve = DraftCurve(*new)

    def observe_accepted(self, num_accepted: int, num_expected: float) -> None:
        """Take the accepted drafts of a pass into account; `num_expected` as in its `Choice`."""
        self._num_expected = MEMORY * self._num_expected + num_expected
        self._num_accepted = MEMORY * self._num_accepted + num_accepted

    def choose(self, batch: int, num_drafting: int) -> Choice:
        """The best size of the next pass of `batch` requests, of which `num_drafting` have drafts."""
        sizes = self._seconds[batch]
        if self._curve is None:
            return Choice(max(sizes), 0.0)
        curve = self._curve
        choices = [Choice(size, num_drafting * curve.expected((size - batch) / num_drafting)) for size in sizes]
        return max(choices, key=lambda each: (batch + self.honesty * each.num_expected) / sizes[each.num_tokens])
