"""Results of one cell of a sweep: latencies, time per step by phase, and the comparison with plain decoding.

A cell is one method with one number of draft tokens at one concurrency. Times are in seconds; reports use milliseconds.
"""

import logging
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

from peagle.compare.divergence import Divergence, first_difference, first_divergence, measured_near_tie
from peagle.decoding.acceptance import Acceptance, VerifiedDraft, acceptance_by_length
from peagle.errors import interrupt_behind
from peagle.sampling_params import SamplingParams

if TYPE_CHECKING:
    from peagle.targets.hf import HFTarget

log = logging.getLogger(__name__)

PLAIN = "none"
PERCENTILES = (5, 25, 50, 75, 95, 99)
"""of latencies"""
NUM_SAMPLES = 2
"""Answers used to measure the target's rounding error."""


@dataclass(frozen=True)
class Cell:
    method: str
    """none, eagle3, p-eagle, or the name of an anchor"""
    num_draft_tokens: int | None
    """verified in every step; 0 without speculation, None if the engine decides"""
    concurrency: int
    quantize: str | None = None
    """form that the target's weights are rounded to, where a sweep has several; None: as they are"""

    @property
    def label(self) -> str:
        """Name of a curve in plots and tables."""
        name = "plain" if self.method == PLAIN else self.method
        name = f"{name} K={self.num_draft_tokens}" if self.num_draft_tokens else name
        return name if self.quantize is None else f"{name}, {self.quantize}"


@dataclass(frozen=True)
class Answer:
    """One finished request."""

    prompt: int
    """index of the prompt in the workload"""
    token_ids: tuple[int, ...]
    ttft: float | None = None
    """time to first token; None if the method does not report it"""
    seconds_per_token: float | None = None
    """after the first token (TPOT); None for an answer of one token"""
    acceptance: Acceptance | None = None
    turn: int = 0
    """number of the turn in its conversation"""
    asked: tuple[int, ...] | None = None
    """token ids of the prompt of a later turn: they depend on the answers before it"""
    drafts: Sequence[VerifiedDraft] = ()


def spread_ms(seconds: Iterable[float | None]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds of the values that are not None; None if there are none."""
    known = [1e3 * value for value in seconds if value is not None]
    if not known:
        return None
    figures = {"mean": sum(known) / len(known)} | {f"p{share}": percentile(known, share) for share in PERCENTILES}
    return {name: round(value, 4) for name, value in figures.items()}


def percentile(values: Sequence[float], percent: float) -> float:
    """Percentile with linear interpolation."""
    import numpy as np  # loads slowly; `--help` does not need it

    return float(np.percentile(values, percent))


def rounded(value: float | None, digits: int, scale: float = 1.0) -> float | None:
    return None if value is None else round(scale * value, digits)


@dataclass(frozen=True)
class StepSplit:
    """Where the time of a decode step goes, without prefill."""

    wall: float
    """from the end of one step to the end of the next, as the caller sees it"""
    device: float | None = None
    """time of the captured step on the device; None without CUDA graphs"""
    verify: float | None = None
    draft: float | None = None

    @property
    def host_gap(self) -> float | None:
        """Time the device waits for the host; negative timer noise counts as 0."""
        return None if self.device is None else max(0.0, self.wall - self.device)

    def report(self) -> dict[str, float | None]:
        gap = self.host_gap
        parts = {"wall": self.wall, "device": self.device, "verify": self.verify, "draft": self.draft, "host_gap": gap}
        milliseconds = {f"{name}_ms": rounded(value, 4, 1e3) for name, value in parts.items()}
        return milliseconds | {"host_gap_share": rounded(gap, 4, 1 / self.wall)}


@dataclass(frozen=True)
class Comparison:
    """Greedy answers against those of plain decoding at the lowest concurrency of the sweep."""

    num_compared: int
    divergences: tuple[Divergence, ...]
    near_tie: float | None
    """logit gap up to which a divergence counts as rounding error; None if the target was not asked"""

    @property
    def num_at_near_ties(self) -> int | None:
        """None if that is unknown."""
        if self.divergences and self.near_tie is None:
            return None
        return sum(each.is_near_tie for each in self.divergences)

    def report(self) -> dict[str, Any]:
        gaps = sorted(each.target_gap for each in self.divergences if each.target_gap is not None)
        return {
            "num_compared": self.num_compared,
            "num_divergences": len(self.divergences),
            "num_divergences_at_near_ties": self.num_at_near_ties,
            "near_tie": rounded(self.near_tie, 4),
            "median_gap": round(percentile(gaps, 50), 4) if gaps else None,
            "largest_gap": round(gaps[-1], 4) if gaps else None,
        }


@dataclass
class CellResult:
    """Measurements of a cell, or `failure`: why it could not run."""

    cell: Cell
    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0
    steady_tokens_per_second: float | None = None
    """throughput while the batch was full; None if the engine does not count tokens"""
    acceptance: Acceptance | None = None
    step: StepSplit | None = None
    memory_bytes: int | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    comparison: Comparison | None = None
    failure: str | None = None
    num_verified: int = 0
    """draft tokens that were verified"""

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def tokens_per_second(self) -> float | None:
        return self.num_tokens / self.seconds if self.seconds else None

    def by_category(self, categories: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Speed of single requests and acceptance, by the category of the prompt."""
        found: dict[str, list[Answer]] = {name: [] for name in categories}
        for answer in self.answers if categories else ():
            found[categories[answer.prompt]].append(answer)
        return {name: _category(answers) for name, answers in found.items() if answers}

    def report(self) -> dict[str, Any]:
        """A JSON-ready summary; None for what was not measured."""
        acceptance, drafts = self.acceptance, [draft for answer in self.answers for draft in answer.drafts]
        compared = (self.comparison or Comparison(0, (), 0.0)).report()
        return {
            "method": self.cell.method,
            "num_draft_tokens": self.cell.num_draft_tokens,
            "concurrency": self.cell.concurrency,
            "quantize": self.cell.quantize,
            "label": self.cell.label,
            "failure": self.failure,
            "num_requests": len(self.answers),
            "num_output_tokens": self.num_tokens,
            "seconds": round(self.seconds, 4),
            "output_tokens_per_second": rounded(self.tokens_per_second, 2),
            "steady_tokens_per_second": rounded(self.steady_tokens_per_second, 2),
            "ttft_ms": spread_ms(answer.ttft for answer in self.answers),
            "time_per_output_token_ms": spread_ms(answer.seconds_per_token for answer in self.answers),
            "acceptance_length": None if acceptance is None else round(acceptance.acceptance_length, 4),
            "per_position": None if acceptance is None else [round(share, 4) for share in acceptance.per_position],
            "num_drafts": None if acceptance is None else acceptance.num_drafts,
            "by_length": None if acceptance is None else acceptance_by_length(drafts),
            "num_verified_draft_tokens": None if acceptance is None else self.num_verified,
            "step": None if self.step is None else self.step.report(),
            "memory_bytes": self.memory_bytes,
            "num_cached_tokens": self.num_cached_tokens,
            "num_preemptions": self.num_preemptions,
        } | (dict.fromkeys(compared) if self.comparison is None else compared)


def _category(answers: Sequence[Answer]) -> dict[str, Any]:
    timed = [(len(each.token_ids) - 1, each.seconds_per_token) for each in answers if each.seconds_per_token]
    seconds = sum(num_tokens * per_token for num_tokens, per_token in timed)
    drafted = [each.acceptance for each in answers if each.acceptance is not None]
    acceptance = reduce(operator.add, drafted) if drafted else None
    return {
        "num_requests": len(answers),
        "num_output_tokens": sum(len(each.token_ids) for each in answers),
        "tokens_per_second_per_request": round(sum(count for count, _ in timed) / seconds, 2) if seconds else None,
        "acceptance_length": None if acceptance is None else round(acceptance.acceptance_length, 4),
        "num_drafts": None if acceptance is None else acceptance.num_drafts,
    }


def compare_cells(
    target: "HFTarget",
    prompts: Sequence[Sequence[int]],
    results: Sequence[CellResult],
    params: SamplingParams,
    stop: BaseException | None = None,
) -> BaseException | None:
    """Compare the cells of a sweep that `stop` ended early, if it is given. Returns it, or what ends the comparison.

    After an interrupt the target is not asked for near ties: that takes time.
    """
    compare_with_plain(None, prompts, results, params)
    if isinstance(stop, KeyboardInterrupt):
        return stop
    try:
        compare_with_plain(target, prompts, results, params)
    except (Exception, KeyboardInterrupt) as error:
        log.warning("stopped: near ties were not looked for in all answers")
        return stop or interrupt_behind(error)
    return stop


def compare_with_plain(
    target: "HFTarget | None", prompts: Sequence[Sequence[int]], results: Sequence[CellResult], params: SamplingParams
) -> None:
    """Set `comparison` of every cell, if decoding is greedy and plain decoding was measured.

    The reference for all cells is plain decoding at its lowest concurrency, so plain cells at higher concurrency show
    what batching alone changes in low precision. A later turn is compared if its prompt is the same, so not behind an
    answer that differs. Runs the target once per place of divergence, so it must be idle. Without a target it is not
    known which divergences are at near ties.
    """
    plain = [result for result in results if result.cell.method == PLAIN and result.answers]
    if not plain or not params.is_greedy:
        return
    reference = min(plain, key=lambda result: result.cell.concurrency)
    expected: dict[tuple[int, ...], tuple[int, ...]] = {}
    for answer in reference.answers:
        expected.setdefault(asked_of(answer, prompts), answer.token_ids)
    samples = [[*prompt, *expected[prompt]] for prompt in list(expected)[:NUM_SAMPLES]]
    limit = None if target is None else measured_near_tie(target, samples)
    seen: dict[tuple[tuple[int, ...], tuple[int, ...]], Divergence | None] = {}
    for result in results:
        own = [(asked_of(answer, prompts), answer) for answer in result.answers if result.failure is None]
        compared = [(asked, answer) for asked, answer in own if asked in expected]
        found = []
        for asked, answer in compared:
            wanted = expected[asked]
            if (place := first_difference(wanted, answer.token_ids)) is None:
                continue
            key = (asked, answer.token_ids[: place + 1])
            if target is None:
                seen[key] = Divergence(place, None, False)
            elif key not in seen:
                seen[key] = first_divergence(target, asked, wanted, answer.token_ids, params, limit)
            found.append(seen[key])
        if compared:
            result.comparison = Comparison(len(compared), tuple(filter(None, found)), limit)


def asked_of(answer: Answer, prompts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Token ids of the prompt of an answer."""
    return tuple(prompts[answer.prompt]) if answer.asked is None else answer.asked
