"""How many draft tokens pay: from the cost of a step on this machine, and the acceptance rates of the drafter.

A step with K draft tokens runs the drafter once and the target over K + 1 tokens. It emits one token plus the accepted
drafts. With a(k) the share of steps that accept the first k drafts (the per-position acceptance on a drafter's card), a
step emits 1 + a(1) + ... + a(K) tokens on average, so

    speed(K) = (1 + a(1) + ... + a(K)) / (target(K + 1) + draft(K))        tokens per second
    speed-up(K) = speed(K) / speed(0)                                      over plain decoding

Example: a target pass takes 30 ms for 1 token, 36 for 2, 40 for 3; a draft takes 10 ms. 60% of the steps accept the
first draft, 30% the first two. One draft gives 1.6 tokens in 46 ms, two give 1.9 in 50, plain decoding 1 in 30:

>>> costs = StepCosts({1: 0.030, 2: 0.036, 3: 0.040}, {1: 0.010, 2: 0.010})
>>> [round(row.speed_up, 3) for row in speed_table(costs, [0.6, 0.3])]
[1.0, 1.043, 1.14]
>>> choose_num_draft_tokens(costs, [0.6, 0.3])
2
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peagle.checkpoint.card import DrafterCard, trusted_acceptance
from peagle.errors import ConfigError

MIN_SPEED_UP = 1.02
"""a smaller gain is not worth the drafter's memory, and may be noise"""


@dataclass(frozen=True)
class StepCosts:
    """Measured seconds: of a target pass by number of tokens, and of a draft by number of draft tokens.

    Numbers between two measured ones are interpolated linearly. There is no extrapolation: a K beyond the largest
    measured number is not considered.
    """

    target_seconds: Mapping[int, float]
    draft_seconds: Mapping[int, float]

    def __post_init__(self) -> None:
        if 1 not in self.target_seconds:
            raise ConfigError("target_seconds has no entry for 1 token", hint="it is the cost of plain decoding")
        for what, seconds in (("target", self.target_seconds), ("draft", self.draft_seconds)):
            wrong = {number: value for number, value in seconds.items() if number < 1 or not 0 < value < float("inf")}
            if wrong:
                raise ConfigError(f"{what}_seconds must map counts from 1 to positive seconds, got {wrong}")

    @property
    def max_draft_tokens(self) -> int:
        """The largest K whose cost is known."""
        return min(max(self.target_seconds) - 1, max(self.draft_seconds, default=0))

    def step_seconds(self, num_draft_tokens: int) -> float:
        """Seconds of a whole step; with 0 draft tokens the drafter does not run."""
        target = _interpolate(self.target_seconds, num_draft_tokens + 1)
        if num_draft_tokens == 0:
            return target
        return target + _interpolate(self.draft_seconds, num_draft_tokens)


@dataclass(frozen=True)
class ExpectedSpeed:
    """Expected throughput with one K."""

    num_draft_tokens: int
    acceptance_length: float
    step_seconds: float
    tokens_per_second: float
    speed_up: float
    """over plain decoding on the same machine"""

    def __str__(self) -> str:
        return (
            f"K {self.num_draft_tokens}: acceptance length {self.acceptance_length:.2f}, step "
            f"{1e3 * self.step_seconds:.1f} ms, {self.tokens_per_second:.1f} tokens/s, {self.speed_up:.2f} x"
        )


def speed_table(costs: StepCosts, acceptance_per_position: Sequence[float]) -> tuple[ExpectedSpeed, ...]:
    """Expected throughput for K = 0, 1, ..., as far as costs and acceptance are known.

    `acceptance_per_position[k]` is the share of steps that accept drafts 0 .. k, so it cannot rise.
    """
    _check_acceptance(acceptance_per_position)
    largest = min(costs.max_draft_tokens, len(acceptance_per_position))
    plain = 1 / costs.step_seconds(0)
    rows = []
    for num_draft_tokens in range(largest + 1):
        length = 1 + sum(acceptance_per_position[:num_draft_tokens])
        seconds = costs.step_seconds(num_draft_tokens)
        rows.append(ExpectedSpeed(num_draft_tokens, length, seconds, length / seconds, length / seconds / plain))
    return tuple(rows)


def choose_num_draft_tokens(costs: StepCosts, acceptance_per_position: Sequence[float]) -> int:
    """The K with the highest expected throughput; the smaller one of equals, and 0 if drafting hardly pays."""
    best = max(speed_table(costs, acceptance_per_position), key=lambda row: row.tokens_per_second)
    return best.num_draft_tokens if best.speed_up >= MIN_SPEED_UP else 0


def acceptance_from_card(acceptance: Mapping[str, Any]) -> tuple[float, ...] | None:
    """Per-position acceptance of a drafter card, averaged over its prompt sets; None if the card has no figures.

    Sets measured by decoding take precedence over replays of training data, which are optimistic. Positions that not
    every set has are left out.
    """
    columns = zip(*(entry["per_position"] for entry in trusted_acceptance(acceptance).values()), strict=False)
    averages = tuple(sum(column) / len(column) for column in columns)
    return averages or None


def known_acceptance(card: DrafterCard) -> tuple[float, ...] | None:
    """Acceptance on a card: measured, else that of the few completions recorded as evidence."""
    measured = acceptance_from_card(card.acceptance)
    gate = None if card.evidence is None else card.evidence.acceptance
    if measured is not None or gate is None or not gate.num_drafts:
        return measured
    return tuple(count / gate.num_drafts for count in gate.accepted_per_position)


def _check_acceptance(acceptance_per_position: Sequence[float]) -> None:
    previous = 1.0
    for position, share in enumerate(acceptance_per_position):
        if not 0 <= share <= previous:
            raise ConfigError(
                f"acceptance at position {position} is {share}; it must lie between 0 and {previous}, the previous one",
                hint="pass the share of steps that accept all drafts up to each position, as drafter_card.json does",
            )
        previous = share


def _interpolate(seconds: Mapping[int, float], number: int) -> float:
    """Seconds for `number`, interpolated between its measured neighbors; below the smallest, those of the smallest."""
    known = sorted(seconds)
    index = bisect_left(known, number)
    if index == len(known):
        raise ConfigError(f"no measurement covers {number}; the largest is {known[-1] if known else 0}")
    above = known[index]
    if index == 0 or above == number:
        return seconds[above]
    below = known[index - 1]
    weight = (number - below) / (above - below)
    return (1 - weight) * seconds[below] + weight * seconds[above]
