"""Is decoding with drafts lossless? Everything a sceptic would try, with numbers.

    greedy      answers with drafts, of the slow decoder and of the engine with all prompts in one batch, against plain
                decoding, and plain decoding against `transformers.generate`; token for token
    seeded      sampled answers with drafts against plain ones with the same seeds; token for token
    sampled     counts of openings over many seeds against the target's exact probabilities

In float32 nothing may differ. In a lower precision the same logits come out a little different when more rows are
computed at a time, so two answers may part where the target itself is undecided; each such place is listed with how
undecided it was, and one that is not is a failure.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from peagle.bench.acceptance import PIECE, gap_to_best, measured_near_tie
from peagle.bench.sampling_test import LENGTH, Fit, fit, fit_cells, opening_probs
from peagle.decoding.acceptance import Acceptance
from peagle.errors import ConfigError
from peagle.sampling_params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from peagle.drafter.model import Drafter
    from peagle.targets.hf import HFTarget

FALSE_ALARM = 1e-3
"""How often a lossless decoder may fail the distribution tests of one report, all of them together."""
CONTROL_TEMPERATURE = 1.6
"""The control: the same counts against the target at another temperature, which the test must tell apart."""

Answers = list[tuple[int, ...]]
Ask = Callable[[Sequence[Sequence[int]], Sequence[SamplingParams]], tuple[Answers, list[Acceptance]]]
"""Has an engine answer prompts with drafts, all at the same time: the answers, and what became of each one's drafts."""
OnStage = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    num_draft_tokens: int
    max_tokens: int = 48
    temperature: float = 1.0
    num_seeds: int = 4
    """sampled answers to each prompt that are compared token for token"""
    num_samples: int = 256
    """openings drawn for each prompt of the distribution test"""
    num_sampled_prompts: int = 2

    def __post_init__(self) -> None:
        for name in ("num_draft_tokens", "max_tokens", "num_seeds", "num_sampled_prompts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_samples < 50:
            raise ConfigError(
                f"num_samples must be at least 50, got {self.num_samples}", hint="fewer would tell nothing"
            )
        if self.temperature <= 0:
            raise ConfigError(f"temperature must be more than 0, got {self.temperature}", hint="greedy is compared too")


@dataclass(frozen=True)
class Parting:
    """Where two answers part, and how undecided the target was there."""

    prompt: int
    seed: int | None
    token: int
    """index of the first answer token that differs"""
    gap: float
    """greedy: from the best logit to the worse of the two tokens'; sampled: from the random number to the border of the
    two tokens' shares"""
    is_near_tie: bool


@dataclass(frozen=True)
class Comparison:
    """Two ways of answering the same prompts."""

    name: str
    num_answers: int
    num_tokens: int
    limit: float | None
    """largest gap that rounding explains; None for greedy answers in float32, where nothing is explained by it"""
    partings: tuple[Parting, ...]

    @property
    def holds(self) -> bool:
        return all(each.is_near_tie for each in self.partings)

    def report(self) -> dict[str, Any]:
        return asdict(self) | {
            "num_identical": self.num_answers - len(self.partings),
            "num_near_ties": sum(each.is_near_tie for each in self.partings),
            "largest_gap": max((each.gap for each in self.partings), default=None),
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
        """Whether the test would have told another distribution from this one."""
        return self.control_p_value < self.threshold

    def report(self) -> dict[str, Any]:
        verdict = {"threshold": self.threshold, "holds": self.holds, "is_sharp": self.is_sharp}
        return {"prompt": self.prompt} | self.fit.report() | {"control_p_value": self.control_p_value} | verdict


@dataclass(frozen=True)
class Findings:
    comparisons: tuple[Comparison, ...]
    distributions: tuple[Distribution, ...]
    acceptance: Acceptance
    """of the engine's greedy answers: a drafter that is never right proves nothing"""

    @property
    def is_lossless(self) -> bool:
        is_same = all(each.holds for each in self.comparisons) and all(each.holds for each in self.distributions)
        return is_same and self.acceptance.num_accepted > 0


def examine(
    target: "HFTarget",
    drafter: "Drafter",
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    ask: Ask,
    on_stage: OnStage = lambda _: None,
) -> Findings:
    """Make every comparison. `ask` must lend the target to its engine only while it runs."""
    drafter.check_num_draft_tokens(settings.num_draft_tokens)
    greedy = [SamplingParams(max_tokens=settings.max_tokens)] * len(prompts)
    on_stage("plain decoding")
    plain = [_decode(target, prompt, params) for prompt, params in zip(prompts, greedy, strict=True)]
    on_stage("transformers.generate")
    reference = [_generate(target, prompt, settings.max_tokens) for prompt in prompts]
    on_stage("the slow decoder with drafts")
    drafted = [
        _decode(target, prompt, params, drafter, settings.num_draft_tokens)
        for prompt, params in zip(prompts, greedy, strict=True)
    ]
    on_stage("the engine with drafts")
    seeded = _seeded_rows(prompts, settings)
    answers, accepted = ask(
        [*prompts, *(prompts[index] for index, _ in seeded)], [*greedy, *(own for _, own in seeded)]
    )
    served, acceptance = answers[: len(prompts)], _total(accepted[: len(prompts)])
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, plain, strict=True)]
    limit = None if _is_exact(target) else measured_near_tie(target, texts)
    pairs = (
        ("slow decoder with drafts, plain decoding", drafted, plain),
        ("engine with drafts, plain decoding", served, plain),
        ("engine with drafts, transformers.generate", served, reference),
    )
    comparisons = [_compare_greedy(target, name, prompts, ours, theirs, limit) for name, ours, theirs in pairs]
    on_stage("seeded answers")
    comparisons.append(_compare_seeded(target, prompts, settings, seeded, answers[len(prompts) :], texts))
    on_stage("the distribution of sampled answers")
    sampled = prompts[: settings.num_sampled_prompts]
    params = _sample_params(settings)
    drawn, _ = ask([prompt for prompt in sampled for _ in params], params * len(sampled))
    parts = [drawn[start : start + len(params)] for start in range(0, len(drawn), len(params))]
    distributions = [
        _distribution(target, index, prompt, settings, part)
        for index, (prompt, part) in enumerate(zip(sampled, parts, strict=True))
    ]
    return Findings(tuple(comparisons), tuple(distributions), acceptance)


def _total(parts: Sequence[Acceptance]) -> Acceptance:
    return sum(parts[1:], parts[0])


def _seeded_rows(prompts: Sequence[Sequence[int]], settings: Settings) -> list[tuple[int, SamplingParams]]:
    """The sampled answers that are compared token for token: numbers of prompts, and how they are drawn."""
    return [
        (index, SamplingParams(max_tokens=settings.max_tokens, temperature=settings.temperature, seed=seed))
        for index in range(len(prompts))
        for seed in range(settings.num_seeds)
    ]


def _sample_params(settings: Settings) -> list[SamplingParams]:
    """The draws of the distribution test. Two drafts are all that an opening can use; more would only take time."""
    common = SamplingParams(
        max_tokens=LENGTH,
        temperature=settings.temperature,
        ignore_eos=True,
        num_draft_tokens=min(LENGTH - 1, settings.num_draft_tokens),
    )
    return [replace(common, seed=1000 + seed) for seed in range(settings.num_samples)]


def _is_exact(target: "HFTarget") -> bool:
    return str(target.dtype) in ("torch.float32", "torch.float64")


def _decode(
    target: "HFTarget",
    prompt_ids: Sequence[int],
    params: SamplingParams,
    drafter: "Drafter | None" = None,
    num_draft_tokens: int = 0,
) -> tuple[int, ...]:
    from peagle.decoding.reference import decode

    steps = decode(target, prompt_ids, params, drafter=drafter, num_draft_tokens=num_draft_tokens)
    return tuple(token for step in steps for token in step.token_ids)


def _generate(target: "HFTarget", prompt_ids: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """transformers' own greedy answer, with nothing of the model's generation settings but its end tokens."""
    import torch
    from transformers import GenerationConfig

    ends = sorted(target.eos_token_ids)
    pad = getattr(target.tokenizer, "pad_token_id", None)
    row = torch.tensor([list(prompt_ids)], device=target.device)
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=min(max_tokens, target.max_length - len(prompt_ids)),
        eos_token_id=ends or None,
        pad_token_id=pad if pad is not None else (ends or [0])[0],
    )
    with torch.no_grad():
        output = target.model.generate(row, attention_mask=torch.ones_like(row), generation_config=config)
    target.forget_captured()
    return tuple(output[0, len(prompt_ids) :].tolist())


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    if list(ours) == list(theirs):
        return None
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(ours), len(theirs)))


def _compare_greedy(
    target: "HFTarget",
    name: str,
    prompts: Sequence[Sequence[int]],
    ours: Answers,
    theirs: Answers,
    limit: float | None,
) -> Comparison:
    partings = []
    for index, (prompt, one, other) in enumerate(zip(prompts, ours, theirs, strict=True)):
        token = _first_difference(one, other)
        if token is not None:
            emitted = [answer[token] for answer in (one, other) if token < len(answer)]
            gap = gap_to_best(target, [*prompt, *other[:token]], emitted)
            # One answer that went on after the other's end is no tie: up to there they are the same text.
            is_near_tie = limit is not None and len(emitted) == 2 and gap <= limit
            partings.append(Parting(index, None, token, gap, is_near_tie))
    return Comparison(name, len(ours), sum(map(len, theirs)), limit, tuple(partings))


def _compare_seeded(
    target: "HFTarget",
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    rows: Sequence[tuple[int, SamplingParams]],
    served: Answers,
    texts: list[list[int]],
) -> Comparison:
    # Borders of shares lie so close that rounding moves one past a random number now and then, in float32 too.
    limit = _measured_shift(target, texts, settings.temperature)
    partings, num_tokens = [], 0
    for (index, own), answer in zip(rows, served, strict=True):
        plain = _decode(target, prompts[index], own)
        num_tokens += len(plain)
        token = _first_difference(answer, plain)
        if token is not None:
            gap = _border_distance(target, [*prompts[index], *plain[:token]], own.seed, answer, plain, token, settings)
            partings.append(Parting(index, own.seed, token, gap, gap <= limit))
    return Comparison("seeded sampling: engine with drafts, plain", len(rows), num_tokens, limit, tuple(partings))


def _shares(logits_V: "Tensor", temperature: float) -> "Tensor":
    """Cumulative probabilities by token id: a number below 1 draws the token into whose share it falls."""
    from peagle.decoding.sampling import target_probs

    return target_probs(logits_V, temperature, 0, 1.0, 0.0).double().cumsum(-1)


def _border_distance(
    target: "HFTarget",
    text: list[int],
    seed: int,
    ours: Sequence[int],
    theirs: Sequence[int],
    token: int,
    settings: Settings,
) -> float:
    """How far the random number of a position lies from where the farther of the two tokens would have been drawn."""
    import torch

    from peagle.decoding.sampling import STREAM_DRAW, uniform

    if token >= min(len(ours), len(theirs)):
        return 1.0  # one answer went on after the other's end: no draw explains that
    row = torch.tensor([text], device=target.device)
    mass_V = _shares(target.forward(row).logits_BTV[0, -1], settings.temperature)
    number = float(uniform(torch.tensor([seed]), torch.tensor([len(text)]), STREAM_DRAW)) * float(mass_V[-1])
    distances = [0.0]
    for drawn in (ours[token], theirs[token]):
        low = float(mass_V[drawn - 1]) if drawn else 0.0
        distances += [low - number, number - float(mass_V[drawn])]
    return max(distances)


def _measured_shift(target: "HFTarget", texts: Sequence[Sequence[int]], temperature: float) -> float:
    """Twice the most that a border between two tokens' shares moves with how a text is computed."""
    import torch

    largest = 0.0
    for text in texts:
        row = torch.tensor([list(text)], device=target.device)
        whole_TV = _shares(target.forward(row).logits_BTV[0], temperature)
        cache, start = target.new_cache(), 0
        for piece in row.split(PIECE, dim=1):
            pieces_TV = _shares(target.forward(piece, cache).logits_BTV[0], temperature)
            largest = max(largest, float((whole_TV[start : start + len(pieces_TV)] - pieces_TV).abs().max()))
            start += len(pieces_TV)
    return 2 * largest


def _distribution(
    target: "HFTarget", index: int, prompt: Sequence[int], settings: Settings, drawn: Answers
) -> Distribution:
    probs = opening_probs(target, prompt, settings.temperature)
    found, threshold = fit(drawn, probs), FALSE_ALARM / settings.num_sampled_prompts
    if not found.openings:
        return Distribution(index, found, 1.0, threshold)  # so many openings that none is drawn often enough
    at_other = opening_probs(target, prompt, settings.temperature * CONTROL_TEMPERATURE, found.openings)
    control = fit_cells(found.openings, found.observed[:-1], len(drawn), at_other)
    return Distribution(index, found, control.p_value, threshold)
