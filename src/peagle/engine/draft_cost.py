"""How many draft tokens pay: from what a step costs on this machine and how often drafts are kept.

A step with K draft tokens runs the drafter once and the target over K + 1 rows, and emits one token and each draft that
is kept. With a(k) the share of steps in which the first k drafts are all kept (the per-position acceptance of a
drafter's card), it emits 1 + a(1) + ... + a(K) tokens on average, so

    speed(K) = (1 + a(1) + ... + a(K)) / (target(K + 1) + draft(K))        tokens a second
    speed-up(K) = speed(K) / speed(0)                                      against plain decoding

Worked example: a pass takes 30 ms for 1 row, 36 for 2, 40 for 3, a draft 10 ms, and the first draft is kept in 60 of
100 steps, the first two in 30. One draft gives 1.6 tokens in 46 ms, two give 1.9 in 50, plain decoding 1 in 30:

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

from peagle.drafter.card import DrafterCard
from peagle.errors import ConfigError

MIN_SPEED_UP = 1.02
"""a gain below this is not worth the drafter's memory and may be noise of the timing; plain decoding is kept"""


@dataclass(frozen=True)
class StepCosts:
    """Measured seconds: of a target pass by its number of rows, and of a draft by its number of draft tokens.

    Not every number must have been measured: those between two measured ones are interpolated linearly. Beyond the
    largest measured number nothing is assumed, so no K is considered that would need it.
    """

    target_seconds: Mapping[int, float]
    draft_seconds: Mapping[int, float]
    overhead_seconds: float = 0.0
    """what a drafting step costs besides the two passes: accepting, cutting caches back"""

    def __post_init__(self) -> None:
        if 1 not in self.target_seconds:
            raise ConfigError("the cost of a target pass over 1 row is needed", hint="it is the cost of plain decoding")
        for what, seconds in (("target", self.target_seconds), ("draft", self.draft_seconds)):
            wrong = {number: value for number, value in seconds.items() if number < 1 or not 0 < value < float("inf")}
            if wrong:
                raise ConfigError(f"{what}_seconds must map counts from 1 to positive seconds, got {wrong}")
        if not 0 <= self.overhead_seconds < float("inf"):
            raise ConfigError(f"overhead_seconds must be 0 or more, got {self.overhead_seconds}")

    @property
    def max_draft_tokens(self) -> int:
        """The largest K whose cost is known."""
        return min(max(self.target_seconds) - 1, max(self.draft_seconds, default=0))

    def step_seconds(self, num_draft_tokens: int) -> float:
        """A whole step; with 0 draft tokens the drafter does not run."""
        target = _interpolate(self.target_seconds, num_draft_tokens + 1)
        if num_draft_tokens == 0:
            return target
        return target + _interpolate(self.draft_seconds, num_draft_tokens) + self.overhead_seconds


@dataclass(frozen=True)
class ExpectedSpeed:
    """What one K is expected to give; the rows of `speed_table`."""

    num_draft_tokens: int
    acceptance_length: float
    step_seconds: float
    tokens_per_second: float
    speed_up: float
    """against plain decoding on the same machine"""

    def __str__(self) -> str:
        return (
            f"K {self.num_draft_tokens}: acceptance length {self.acceptance_length:.2f}, step "
            f"{1e3 * self.step_seconds:.1f} ms, {self.tokens_per_second:.1f} tokens/s, {self.speed_up:.2f} x"
        )


def speed_table(
    costs: StepCosts, acceptance_per_position: Sequence[float], max_draft_tokens: int | None = None
) -> tuple[ExpectedSpeed, ...]:
    """Expected speed for K = 0, 1, ... as far as costs and acceptance are known and `max_draft_tokens` allows.

    `acceptance_per_position[k]` is the share of steps in which drafts 0..k are all kept, so it cannot rise.
    """
    _check_acceptance(acceptance_per_position)
    largest = min(costs.max_draft_tokens, len(acceptance_per_position))
    if max_draft_tokens is not None:
        largest = min(largest, max_draft_tokens)
    plain = 1 / costs.step_seconds(0)
    rows = []
    for num_draft_tokens in range(largest + 1):
        length = 1 + sum(acceptance_per_position[:num_draft_tokens])
        seconds = costs.step_seconds(num_draft_tokens)
        rows.append(ExpectedSpeed(num_draft_tokens, length, seconds, length / seconds, length / seconds / plain))
    return tuple(rows)


def choose_num_draft_tokens(
    costs: StepCosts, acceptance_per_position: Sequence[float], max_draft_tokens: int | None = None
) -> int:
    """The K with the most expected tokens a second; the smaller one of equals, and 0 where drafting hardly pays."""
    best = max(speed_table(costs, acceptance_per_position, max_draft_tokens), key=lambda row: row.tokens_per_second)
    return best.num_draft_tokens if best.speed_up >= MIN_SPEED_UP else 0


def acceptance_from_card(acceptance: Mapping[str, Any]) -> tuple[float, ...] | None:
    """Per-position acceptance of a drafter card's `acceptance`, averaged over its prompt sets.

    Sets measured with real decoding (they name `num_draft_tokens`) go before replays of training data, which flatter.
    Positions that not every set has are left out. None where the card has no figures.
    """
    sets = [entry for entry in acceptance.values() if isinstance(entry, Mapping) and entry.get("per_position")]
    decoded = [entry for entry in sets if "num_draft_tokens" in entry]
    columns = zip(*(entry["per_position"] for entry in decoded or sets), strict=False)
    averages = tuple(sum(column) / len(column) for column in columns)
    return averages or None


def known_acceptance(card: DrafterCard) -> tuple[float, ...] | None:
    """What a card tells of acceptance: as it was measured, else that of the few answers recorded for the gate."""
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
                f"acceptance at position {position} is {share}, it must lie between 0 and {previous}, the last one",
                hint="give the share of steps that keep all drafts up to each position, as drafter_card.json does",
            )
        previous = share


def _interpolate(seconds: Mapping[int, float], number: int) -> float:
    """Seconds for `number`, on the line between its measured neighbors; below the smallest, the smallest's."""
    known = sorted(seconds)
    index = bisect_left(known, number)
    if index == len(known):
        raise ConfigError(f"nothing was measured for {number}, the largest is {known[-1] if known else 0}")
    above = known[index]
    if index == 0 or above == number:
        return seconds[above]
    below = known[index - 1]
    weight = (number - below) / (above - below)
    return (1 - weight) * seconds[below] + weight * seconds[above]
