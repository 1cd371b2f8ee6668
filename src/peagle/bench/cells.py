"""What one cell of a sweep measured: spreads, the split of a step, and whether the answers are plain decoding's.

A cell is one method with one number of draft tokens at one concurrency. Seconds everywhere; reports say milliseconds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from peagle.bench.acceptance import first_divergence, measured_near_tie
from peagle.decoding.acceptance import Acceptance
from peagle.sampling_params import SamplingParams

if TYPE_CHECKING:
    from peagle.bench.acceptance import Divergence
    from peagle.targets.hf import HFTarget

PLAIN = "none"
NUM_SAMPLES = 2
"""Answers by which the rounding of the target is measured."""


@dataclass(frozen=True)
class Cell:
    method: str
    """none, eagle3, p-eagle, or the name of an anchor"""
    num_draft_tokens: int
    """0 where nothing is drafted"""
    concurrency: int

    @property
    def label(self) -> str:
        """What a curve over concurrency is called."""
        if self.method == PLAIN:
            return "plain"
        return f"{self.method} K={self.num_draft_tokens}" if self.num_draft_tokens else self.method


@dataclass(frozen=True)
class Answer:
    """One finished request."""

    prompt: int
    """index of its prompt in the workload"""
    token_ids: tuple[int, ...]
    ttft: float | None = None
    """seconds from its start to its first token; None where the method does not say"""
    seconds_per_token: float | None = None
    """after the first token; None for an answer of one token"""


@dataclass(frozen=True)
class Spread:
    mean: float
    p50: float
    p95: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread | None":
        """Over the values that there are; None where there is none."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        return cls(sum(known) / len(known), percentile(known, 50), percentile(known, 95))

    def milliseconds(self) -> dict[str, float]:
        return {name: round(1e3 * getattr(self, name), 4) for name in ("mean", "p50", "p95")}


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie, between two neighbors by their distance."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class StepSplit:
    """Where the time of one step goes when all requests decode and none is being prefilled."""

    wall: float
    """from one step's end to the next one's, as the caller sees it"""
    device: float | None = None
    """of the captured step alone; None where nothing is captured, on a CPU for one"""
    verify: float | None = None
    draft: float | None = None

    @property
    def host_gap(self) -> float | None:
        """What the device waits for the host; timer noise may make it a trifle negative, which counts as nothing."""
        return None if self.device is None else max(0.0, self.wall - self.device)

    def report(self) -> dict[str, float | None]:
        gap = self.host_gap
        parts = {"wall": self.wall, "device": self.device, "verify": self.verify, "draft": self.draft, "host_gap": gap}
        milliseconds = {f"{name}_ms": None if value is None else round(1e3 * value, 4) for name, value in parts.items()}
        return milliseconds | {"host_gap_share": None if gap is None else round(gap / self.wall, 4)}


@dataclass(frozen=True)
class Comparison:
    """Greedy answers held against plain decoding's at the lowest concurrency of the sweep."""

    num_compared: int
    divergences: tuple["Divergence", ...]
    near_tie: float
    """the gap up to which a divergence is put down to rounding"""

    @property
    def num_at_near_ties(self) -> int:
        return sum(each.is_near_tie for each in self.divergences)

    @classmethod
    def none(cls) -> dict[str, None]:
        """The report of a cell that was not compared."""
        return dict.fromkeys(cls(0, (), 0.0).report())

    def report(self) -> dict[str, Any]:
        gaps = sorted(each.target_gap for each in self.divergences if each.target_gap is not None)
        return {
            "num_compared": self.num_compared,
            "num_divergences": len(self.divergences),
            "num_divergences_at_near_ties": self.num_at_near_ties,
            "near_tie": round(self.near_tie, 4),
            "median_gap": round(percentile(gaps, 50), 4) if gaps else None,
            "largest_gap": round(gaps[-1], 4) if gaps else None,
        }


@dataclass
class CellResult:
    """What a cell measured; `failure` holds the reason instead where it could not be run."""

    cell: Cell
    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0
    steady_tokens_per_second: float | None = None
    """while as many requests were in flight as the cell allows; None where the engine does not count tokens"""
    acceptance: Acceptance | None = None
    step: StepSplit | None = None
    memory_bytes: int | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    comparison: Comparison | None = None
    failure: str | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def tokens_per_second(self) -> float | None:
        return self.num_tokens / self.seconds if self.seconds else None

    def report(self) -> dict[str, Any]:
        """A JSON-ready summary. What was not measured is None."""
        ttft = Spread.of(answer.ttft for answer in self.answers)
        per_token = Spread.of(answer.seconds_per_token for answer in self.answers)
        acceptance, comparison = self.acceptance, self.comparison
        return {
            "method": self.cell.method,
            "num_draft_tokens": self.cell.num_draft_tokens,
            "concurrency": self.cell.concurrency,
            "label": self.cell.label,
            "failure": self.failure,
            "num_requests": len(self.answers),
            "num_output_tokens": self.num_tokens,
            "seconds": round(self.seconds, 4),
            "output_tokens_per_second": _rounded(self.tokens_per_second, 2),
            "steady_tokens_per_second": _rounded(self.steady_tokens_per_second, 2),
            "ttft_ms": None if ttft is None else ttft.milliseconds(),
            "time_per_output_token_ms": None if per_token is None else per_token.milliseconds(),
            "acceptance_length": None if acceptance is None else round(acceptance.acceptance_length, 4),
            "per_position": None if acceptance is None else [round(share, 4) for share in acceptance.per_position],
            "num_drafts": None if acceptance is None else acceptance.num_drafts,
            "step": None if self.step is None else self.step.report(),
            "memory_bytes": self.memory_bytes,
            "num_cached_tokens": self.num_cached_tokens,
            "num_preemptions": self.num_preemptions,
        } | (Comparison.none() if comparison is None else comparison.report())


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def compare_with_plain(
    target: "HFTarget", prompts: Sequence[Sequence[int]], results: Sequence[CellResult], params: SamplingParams
) -> None:
    """Set `comparison` of every cell that can be compared: greedy, and plain decoding is part of the sweep.

    The reference is one for all cells, plain decoding at its lowest concurrency, so that plain cells at a higher one
    show what the batch alone changes in low precision. The target is run where answers part, so nothing may be using
    it; each place is looked at once, however many cells part there.
    """
    plain = [result for result in results if result.cell.method == PLAIN and result.answers]
    if not plain or not params.is_greedy:
        return
    reference = min(plain, key=lambda result: result.cell.concurrency)
    expected: dict[int, tuple[int, ...]] = {}
    for answer in reference.answers:
        expected.setdefault(answer.prompt, answer.token_ids)
    samples = [[*prompts[prompt], *expected[prompt]] for prompt in list(expected)[:NUM_SAMPLES]]
    limit = measured_near_tie(target, samples)
    seen: dict[tuple[int, tuple[int, ...]], Divergence | None] = {}
    for result in results:
        found, num_compared = [], 0
        for answer in result.answers:
            if answer.prompt not in expected or result.failure is not None:
                continue
            num_compared += 1
            wanted = expected[answer.prompt]
            key = (answer.prompt, _until_divergence(wanted, answer.token_ids))
            if key not in seen:
                seen[key] = first_divergence(target, prompts[answer.prompt], wanted, answer.token_ids, params, limit)
            if (divergence := seen[key]) is not None:
                found.append(divergence)
        if num_compared:
            result.comparison = Comparison(num_compared, tuple(found), limit)


def _until_divergence(wanted: Sequence[int], given: Sequence[int]) -> tuple[int, ...]:
    """The given answer up to and including the first token that is not the wanted one."""
    for index, (ours, theirs) in enumerate(zip(wanted, given, strict=False)):
        if ours != theirs:
            return tuple(given[: index + 1])
    return tuple(given)
