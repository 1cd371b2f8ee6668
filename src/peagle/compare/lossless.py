"""Is decoding with drafts lossless? Three tests, with numbers.

    greedy    reference decoder and batched engine, both with drafts, against plain decoding; and the engine against
              `transformers.generate`; token by token
    seeded    sampled answers with drafts against plain ones with the same seeds; token by token
    sampled   counts of openings over many seeds against the target's exact probabilities

In float32 nothing may differ. In lower precision logits depend slightly on the number of rows computed at once, so two
answers may diverge at a near tie of the target. Each divergence is listed with its gap, and a wide gap is a failure.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from peagle.compare.answers import Answers, answer_with_engine, decode_with_reference, generate_with_transformers
from peagle.compare.divergence import first_difference, first_divergence, measured_near_tie, measured_rounding
from peagle.compare.sampling_test import LENGTH, Fit, fit, fit_cells, opening_probs
from peagle.decoding.acceptance import Acceptance
from peagle.errors import ConfigError
from peagle.sampling_params import SamplingParams
from peagle.scheduling.config import EngineConfig

if TYPE_CHECKING:
    from torch import Tensor

    from peagle.drafter.model import Drafter
    from peagle.targets.hf import HFTarget

FALSE_ALARM = 1e-3
"""Chance that lossless decoding fails the distribution tests of one report."""
CONTROL_TEMPERATURE = 1.6
"""Factor on the temperature of the control, a wrong distribution that the test must reject."""


@dataclass(frozen=True)
class Settings:
    num_draft_tokens: int
    max_tokens: int = 48
    temperature: float = 1.0
    num_seeds: int = 4
    """sampled answers per prompt that are compared token by token"""
    num_samples: int = 256
    """openings drawn per prompt of the distribution test"""
    num_sampled_prompts: int = 2
    tree_nodes: int | None = None
    """drafts are trees of this many nodes, and `num_draft_tokens` is their depth"""
    verify_tokens: int | None = 0
    """tokens of a verification pass, as in `EngineConfig`; 0: all drafts, None: those that pay"""

    def __post_init__(self) -> None:
        for name in ("num_draft_tokens", "max_tokens", "num_seeds", "num_sampled_prompts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_samples < 50:
            raise ConfigError(
                f"num_samples must be at least 50, got {self.num_samples}", hint="fewer samples prove nothing"
            )
        if self.temperature <= 0:
            raise ConfigError(
                f"temperature must be more than 0, got {self.temperature}", hint="greedy answers are always compared"
            )

    def with_drafts(self, drafter: "Drafter", num_draft_tokens: int | None) -> "Settings":
        """Chains of that many tokens, all verified; None: the drafts that an engine makes by default."""
        from peagle.engine.checks import check_drafts

        depth, config = check_drafts(drafter, num_draft_tokens, EngineConfig())
        verify_tokens = None if num_draft_tokens is None else 0
        return replace(self, num_draft_tokens=depth, tree_nodes=config.tree_nodes, verify_tokens=verify_tokens)


@dataclass(frozen=True)
class Difference:
    """Where two answers diverge, and how close the target's decision was."""

    prompt: int
    seed: int | None
    token: int
    """index of the first answer token that differs"""
    gap: float
    """greedy: logit gap from the best token to the worse of the two; sampled: distance from the random number to the
    interval of the other token"""
    is_near_tie: bool


@dataclass(frozen=True)
class Comparison:
    """Two ways of answering the same prompts."""

    name: str
    num_answers: int
    num_tokens: int
    limit: float | None
    """largest gap that rounding explains; None for greedy answers in float32, where none is accepted"""
    differences: tuple[Difference, ...]

    @property
    def holds(self) -> bool:
        return all(each.is_near_tie for each in self.differences)

    def report(self) -> dict[str, Any]:
        return asdict(self) | {
            "num_identical": self.num_answers - len(self.differences),
            "num_near_ties": sum(each.is_near_tie for each in self.differences),
            "largest_gap": max((each.gap for each in self.differences), default=None),
            "holds": self.holds,
        }


@dataclass(frozen=True)
class Distribution:
    """One prompt of the distribution test."""

    prompt: int
    fit: Fit
    control_p_value: float
    threshold: float

    @property
    def holds(self) -> bool:
        return self.fit.p_value >= self.threshold

    @property
    def is_sharp(self) -> bool:
        """Whether the test rejected the control."""
        return self.control_p_value < self.threshold

    def report(self) -> dict[str, Any]:
        verdict = {"threshold": self.threshold, "holds": self.holds, "is_sharp": self.is_sharp}
        return {"prompt": self.prompt} | self.fit.report() | {"control_p_value": self.control_p_value} | verdict


@dataclass(frozen=True)
class Findings:
    comparisons: tuple[Comparison, ...]
    distributions: tuple[Distribution, ...]
    acceptance: Acceptance
    """of the engine's greedy answers; if no draft token is accepted, nothing was tested"""

    @property
    def is_lossless(self) -> bool:
        is_same = all(each.holds for each in self.comparisons) and all(each.holds for each in self.distributions)
        return is_same and self.acceptance.num_accepted > 0


def examine(
    target: "HFTarget",
    drafter: "Drafter",
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    on_stage: Callable[[str], None] = lambda _: None,
) -> Findings:
    """Run all tests; `on_stage` gets the name of each."""
    depth = settings.num_draft_tokens
    drafter.check_num_draft_tokens(depth)
    greedy = [SamplingParams(max_tokens=settings.max_tokens)] * len(prompts)
    on_stage("plain decoding")
    plain, _ = decode_with_reference(target, prompts, greedy)
    on_stage("transformers.generate")
    generated = [generate_with_transformers(target, prompt, settings.max_tokens) for prompt in prompts]
    on_stage("the reference decoder with drafts")
    drafted, _ = decode_with_reference(target, prompts, greedy, drafter, depth, settings.tree_nodes)
    on_stage("the engine with drafts")
    seeded = _seeded(prompts, settings)
    rows, params = [*prompts, *(prompts[index] for index, _ in seeded)], [*greedy, *(own for _, own in seeded)]
    served_as: dict[str, Any] = {"tree_nodes": settings.tree_nodes, "verify_tokens": settings.verify_tokens}
    answers, accepted = answer_with_engine(target, drafter, depth, rows, params, **served_as)
    served, acceptance = answers[: len(prompts)], sum(accepted[1 : len(prompts)], accepted[0])
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, plain, strict=True)]
    is_exact = str(target.dtype) in ("torch.float32", "torch.float64")
    limit = None if is_exact else measured_near_tie(target, texts)
    pairs = (
        ("reference decoder with drafts, plain decoding", drafted, plain),
        ("engine with drafts, plain decoding", served, plain),
        ("engine with drafts, transformers.generate", served, generated),
    )
    comparisons = [_compare_greedy(target, name, prompts, ours, theirs, limit) for name, ours, theirs in pairs]
    on_stage("seeded answers")
    comparisons.append(_compare_seeded(target, prompts, seeded, answers[len(prompts) :], texts))
    on_stage("the distribution of sampled answers")
    sampled = prompts[: settings.num_sampled_prompts]
    first = SamplingParams(max_tokens=LENGTH, temperature=settings.temperature, ignore_eos=True)
    draws = [replace(first, seed=1000 + seed) for seed in range(settings.num_samples)]
    # An opening can use drafts of two tokens; longer ones would only take time.
    rows = [prompt for prompt in sampled for _ in draws]
    drawn, _ = answer_with_engine(target, drafter, min(LENGTH - 1, depth), rows, draws * len(sampled), **served_as)
    parts = [drawn[start : start + len(draws)] for start in range(0, len(drawn), len(draws))]
    distributions = [
        _distribution(target, index, prompt, settings, part)
        for index, (prompt, part) in enumerate(zip(sampled, parts, strict=True))
    ]
    return Findings(tuple(comparisons), tuple(distributions), acceptance)


def _seeded(prompts: Sequence[Sequence[int]], settings: Settings) -> list[tuple[int, SamplingParams]]:
    """The sampled answers that are compared token by token: prompt index and sampling parameters."""
    return [
        (index, SamplingParams(max_tokens=settings.max_tokens, temperature=settings.temperature, seed=seed))
        for index in range(len(prompts))
        for seed in range(settings.num_seeds)
    ]


def _compare_greedy(
    target: "HFTarget", name: str, prompts: Sequence[Sequence[int]], ours: Answers, theirs: Answers, limit: float | None
) -> Comparison:
    differences = []
    for index, (prompt, one, other) in enumerate(zip(prompts, ours, theirs, strict=True)):
        found = first_divergence(target, prompt, other, one, SamplingParams(), -1.0 if limit is None else limit)
        if found is not None:
            assert found.target_gap is not None, "greedy answers have a gap"
            differences.append(Difference(index, None, found.token, found.target_gap, found.is_near_tie))
    return Comparison(name, len(ours), sum(map(len, theirs)), limit, tuple(differences))


def _compare_seeded(
    target: "HFTarget",
    prompts: Sequence[Sequence[int]],
    rows: Sequence[tuple[int, SamplingParams]],
    served: Answers,
    texts: list[list[int]],
) -> Comparison:
    # The tokens' intervals lie so close that rounding sometimes moves a border past a random number, even in float32.
    limit = measured_rounding(target, texts, lambda logits_TV: _shares(logits_TV, rows[0][1].temperature))
    plain, _ = decode_with_reference(target, [prompts[index] for index, _ in rows], [own for _, own in rows])
    differences = []
    for (index, own), answer, other in zip(rows, served, plain, strict=True):
        token = first_difference(answer, other)
        if token is not None:
            text, drawn = [*prompts[index], *other[:token]], [*answer[token : token + 1], *other[token : token + 1]]
            # One answer may continue after the other's end, which no draw explains.
            gap = _border_distance(target, text, own, drawn) if len(drawn) == 2 else 1.0
            differences.append(Difference(index, own.seed, token, gap, gap <= limit))
    num_tokens = sum(map(len, plain))
    return Comparison("seeded sampling: engine with drafts, plain", len(rows), num_tokens, limit, tuple(differences))


def _shares(logits_V: "Tensor", temperature: float) -> "Tensor":
    """Cumulative probabilities by token id. A random number below 1 draws the token whose interval it falls into."""
    from peagle.kernels.choose import target_probs

    return target_probs(logits_V, temperature, 0, 1.0, 0.0).double().cumsum(-1)


def _border_distance(target: "HFTarget", text: list[int], params: SamplingParams, drawn: Sequence[int]) -> float:
    """Distance from the random number of the position after `text` to the farthest interval of the drawn tokens."""
    import torch

    from peagle.kernels.random_numbers import STREAM_DRAW, uniform

    row = torch.tensor([text], device=target.device)
    mass_V = _shares(target.forward(row).logits_BTV[0, -1], params.temperature)
    number = float(uniform(torch.tensor([params.seed]), torch.tensor([len(text)]), STREAM_DRAW)) * float(mass_V[-1])
    distances = [0.0]
    for token in drawn:
        low = float(mass_V[token - 1]) if token else 0.0
        distances += [low - number, number - float(mass_V[token])]
    return max(distances)


def _distribution(
    target: "HFTarget", index: int, prompt: Sequence[int], settings: Settings, drawn: Answers
) -> Distribution:
    probs = opening_probs(target, prompt, settings.temperature)
    found, threshold = fit(drawn, probs), FALSE_ALARM / settings.num_sampled_prompts
    if not found.openings:
        return Distribution(index, found, 1.0, threshold)  # no opening is likely enough to be tested
    at_other = opening_probs(target, prompt, settings.temperature * CONTROL_TEMPERATURE, found.openings)
    control = fit_cells(found.openings, found.observed[:-1], len(drawn), at_other)
    return Distribution(index, found, control.p_value, threshold)
