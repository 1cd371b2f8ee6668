"""The plan of a build: how much text, how many steps, how long each stage takes, memory, disk and price.

Times come from rates that `measure.py` took on this machine. A budget is split like this: what checking and measuring
take is set aside, and the rest goes to text and to ten passes over it.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from peagle.building.config import Budget
from peagle.building.shape import Shape
from peagle.data.shards import BYTES_PER_TOKEN, LINE_BYTES_PER_TOKEN
from peagle.errors import CapacityError, ConfigError
from peagle.targets.prices import Price

PASSES = 10
"""Passes of training over the text, as in the recipe of the embedded drafter."""
ROW_SHARE = 0.75
"""Share of a row's tokens that are answer; the rest is the question."""
KEPT = 0.4
"""Share of the decoded tokens that become answers in the output; the rest are questions and dropped answers."""
MARGIN = 0.9
"""Share of a budget that is planned; the machine may be slower than when it was measured."""
LEAST_TOKENS, LEAST_STEPS = 500, 20
CPU_BUDGET = Budget("1h", seconds=3600.0)
LONG_BUDGET = 3600.0
"""Seconds from which more prompts are measured on a CPU."""
PROMPT_TOKENS = 20
"""of a usual prompt, as decoded ones: a batch reads them faster"""
GIB = 2**30
GREEDY_HELD_OUT = 96


@dataclass(frozen=True)
class Measured:
    """A target on this machine."""

    target: str
    num_parameters: int
    dtype: str
    device: str
    accelerator: str | None
    recipe: str | None
    options: dict[str, Any]
    """of `peagle train`, where they differ from the recipe"""
    full_tokens: int
    full_steps: int
    """text and steps of a build without a budget"""
    tokens_per_step: int
    max_length: int
    num_draft_tokens: int
    num_layers: int
    num_drafter_parameters: int
    feature_bytes: int
    """per token, if the target's hidden states are stored for training; else 0"""
    load_seconds: float
    start_seconds: float
    """of an engine"""
    tokens_per_second: float
    """of a batch, without drafts"""
    tokens_per_second_alone: float
    batch: int
    seconds_per_step: float
    memory_needed: int
    """most bytes in use while training steps were timed"""
    memory_free: int
    has_chat_template: bool

    @property
    def answers_per_second(self) -> float:
        """Answer tokens written per second."""
        return KEPT * self.tokens_per_second

    @property
    def shape(self) -> Shape:
        return Shape(self.recipe, self.options, self.full_tokens)


@dataclass(frozen=True)
class Effort:
    """How much is measured in the later stages."""

    eval_prompts: int
    bench_prompts: int
    max_tokens: int
    concurrency: tuple[int, ...]
    lossless: dict[str, int]
    """options of `peagle lossless`"""

    @classmethod
    def of(cls, measured: Measured, seconds: float | None) -> "Effort":
        few = {"limit": 1, "max_tokens": 16, "num_seeds": 1, "num_samples": 50}
        if measured.device == "cuda":
            return cls(
                40, 40, 256, (1, 8, 32), few | {"limit": 8, "max_tokens": 48, "num_seeds": 4, "num_samples": 256}
            )
        if seconds is None or seconds >= LONG_BUDGET:
            return cls(40, 12, 128, (1,), few | {"limit": 4, "num_samples": 64})
        return cls(8, 4, 32, (1,), few)


@dataclass(frozen=True)
class Plan:
    """How much text and training, and the seconds of each stage."""

    num_tokens: int
    num_steps: int
    seconds: dict[str, float]
    effort: Effort
    budget: Budget | None
    disk_bytes: int

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def save_every(self) -> int:
        """Steps between saves, about a minute and a half apart."""
        each = self.seconds["train"] / max(1, self.num_steps)
        return max(5, min(1000, int(90 / max(each, 1e-6))))

    def price(self, price: Price | None) -> float | None:
        return None if price is None else self.total / 3600 * price.usd_per_gpu_hour


def with_default(budget: Budget | None, device: str) -> Budget | None:
    return CPU_BUDGET if budget is None and device == "cpu" else budget


def make_plan(measured: Measured, budget: Budget | None, *, most_tokens: int | None = None) -> Plan:
    """The plan within a budget; without one, the recipe's. `most_tokens`: there is no more text to be had."""
    budget = with_default(budget, measured.device)
    limit = None if budget is None else budget.seconds
    effort = Effort.of(measured, limit)
    fixed = fixed_seconds(measured, effort)
    full = min(measured.full_tokens, most_tokens or measured.full_tokens)
    num_tokens, num_steps = full, measured.full_steps
    if budget is not None and limit is not None:
        room = MARGIN * limit - sum(fixed.values())
        least = LEAST_TOKENS * seconds_per_answer_token(measured) + LEAST_STEPS * measured.seconds_per_step
        if room < least:
            minimum = math.ceil((sum(fixed.values()) + least) / MARGIN / 60)
            raise ConfigError(
                f"--budget {budget.text} is too small: checking and measuring take {minutes(sum(fixed.values()))} "
                f"here, {LEAST_TOKENS} tokens of text and {LEAST_STEPS} steps {minutes(least)}",
                hint=f"pass --budget {minimum}m or more, or use a faster machine",
            )
        per_token = seconds_per_answer_token(measured)
        per_token += PASSES / ROW_SHARE / measured.tokens_per_step * measured.seconds_per_step
        num_tokens = min(full, max(LEAST_TOKENS, int(room / per_token)))
        left = room - num_tokens * seconds_per_answer_token(measured)
        num_steps = steps_within(measured, left, num_tokens)
    fixed["data"] += num_tokens / measured.answers_per_second
    fixed["train"] += features_seconds(measured, num_tokens) + num_steps * measured.seconds_per_step
    return Plan(num_tokens, num_steps, fixed, effort, budget, disk_bytes(measured, num_tokens))


def seconds_per_answer_token(measured: Measured) -> float:
    """to write an answer token and to store its features"""
    return 1 / measured.answers_per_second + features_seconds(measured, 1)


def row_seconds(measured: Measured) -> float:
    """Time to write a row, which a batch of them takes, too."""
    return measured.max_length * measured.batch / measured.tokens_per_second


def features_seconds(measured: Measured, num_tokens: int) -> float:
    """Time to store the hidden states of the text; a pass over a row is about as fast as a decoded batch."""
    return num_tokens / ROW_SHARE / measured.tokens_per_second if measured.feature_bytes else 0.0


def steps_within(measured: Measured, seconds: float, num_tokens: int) -> int:
    """Training steps in a time: not more than make ten passes, nor than the recipe has."""
    passes = math.ceil(PASSES * num_tokens / ROW_SHARE / measured.tokens_per_step)
    most = min(measured.full_steps, passes)
    return max(LEAST_STEPS, min(most, int(seconds / measured.seconds_per_step)))


def fixed_seconds(measured: Measured, effort: Effort) -> dict[str, float]:
    """What each stage takes apart from writing text and from training steps."""
    load, start = measured.load_seconds, measured.start_seconds
    alone, batched = 1 / measured.tokens_per_second_alone, 1 / measured.tokens_per_second
    answers, proof = effort.max_tokens, effort.lossless
    # Two prompts are sampled from. Each sample reads the prompt and has three tokens.
    sampled = min(2, proof["limit"]) * proof["num_samples"] * (PROMPT_TOKENS + 3)
    return {
        "check": 2 * load + start + 4 * measured.seconds_per_step,
        "data": load + start + row_seconds(measured),  # the last rows are finished after the limit
        "train": 2 * load + 4 * start + 2048 * batched + 64 * alone,  # the new drafter is measured several times
        "eval": load + start + 2 * effort.eval_prompts * answers * batched,
        "gate": load + start + 150 * alone,
        "lossless": load + 3 * start + 5 * proof["limit"] * proof["max_tokens"] * alone + sampled * batched,
        "bench": load + 2 * start + 2.5 * effort.bench_prompts * answers * alone * len(effort.concurrency),
        "report": 2.0,
    }


def disk_bytes(measured: Measured, num_tokens: int) -> int:
    """Text, the drafter, and its training state: weights and two moments in float32, twice while it is replaced."""
    text = num_tokens / ROW_SHARE * (BYTES_PER_TOKEN + LINE_BYTES_PER_TOKEN)
    text += num_tokens / ROW_SHARE * measured.feature_bytes
    return int(text + measured.num_drafter_parameters * (2 * 12 + 3 * 2))


def check_disk(plan: Plan, disk_free: int) -> None:
    """Refuse a plan that the disk cannot hold. Memory was checked when training steps were timed."""
    if plan.disk_bytes > disk_free:
        raise CapacityError(
            f"the build needs {plan.disk_bytes / GIB:.1f} GiB of disk, but {disk_free / GIB:.1f} GiB are free",
            hint="pass an --output on another disk, or a smaller --budget",
        )


def minutes(seconds: float) -> str:
    """
    >>> minutes(8), minutes(90), minutes(5400), minutes(3 * 86400)
    ('8 s', '1.5 min', '1.5 h', '3.0 days')
    """
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= unit * (2 if unit == 86400 else 1):
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.0f} s"


def outcome_of(measured: Measured) -> dict[str, Any]:
    return asdict(measured)


def measured_from(outcome: Mapping[str, Any]) -> Measured:
    return Measured(**outcome)
