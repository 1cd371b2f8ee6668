"""Decoding a prompt file for real, plainly and with drafts: acceptance, speed, and whether the texts are the same."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from peagle.bench.workloads import Prompt
from peagle.decoding.acceptance import Acceptance
from peagle.errors import RequestError
from peagle.sampling_params import SamplingParams

if TYPE_CHECKING:
    from peagle.decoding.reference import StartsDrafting, Step
    from peagle.targets.hf import HFTarget

NEAR_TIE = 1e-3
"""A gap between logits of the target below which two ways of computing them may choose differently."""
NEAR_TIE_IN_STEPS = 32
"""The same in low precision, in rounding steps of the number 1: two steps of a logit of 16, so 0.25 in bfloat16."""

PIECE = 8
"""Tokens of the pieces by which rounding is measured: as many rows as a verification has."""
WARMUP_TOKENS = 16
"""Answer length before the clock runs: a few steps of each kind, so that no first use is measured."""


@dataclass(frozen=True)
class Divergence:
    """Where two answers to one prompt part."""

    token: int
    """index of the first answer token that differs"""
    target_gap: float | None
    """how far the worse of the two tokens is below the target's best there, in logits; None for sampled answers, of
    which it says little"""
    is_near_tie: bool
    """whether rounding explains it"""


def first_divergence(
    target: "HFTarget",
    prompt_ids: Sequence[int],
    plain: Sequence[int],
    drafted: Sequence[int],
    params: SamplingParams,
    limit: float | None = None,
) -> Divergence | None:
    """Where the answer with drafts leaves the plain one; None when they are the same.

    With exact arithmetic there is no such place, and in low precision it must sit at a near tie of the target's own:
    both tokens at most `limit` below its best logit, by default `near_tie`. An answer that goes on after the other's
    end is no tie: up to there they are the same text.
    """
    if list(plain) == list(drafted):
        return None
    pairs = zip(plain, drafted, strict=False)
    token = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(plain), len(drafted)))
    if not params.is_greedy:
        return Divergence(token, None, False)
    emitted = [answer[token] for answer in (plain, drafted) if token < len(answer)]
    gap = gap_to_best(target, [*prompt_ids, *plain[:token]], emitted)
    return Divergence(token, gap, len(emitted) == 2 and gap <= (near_tie(target) if limit is None else limit))


def gap_to_best(target: "HFTarget", text: Sequence[int], token_ids: Sequence[int]) -> float:
    """How far the worst of these tokens is below the target's best one after `text`, in logits."""
    import torch

    logits_V = target.forward(torch.tensor([list(text)], device=target.device)).logits_BTV[0, -1].float()
    return float(logits_V.max() - logits_V[list(token_ids)].min())


def near_tie(target: "HFTarget") -> float:
    """The largest gap that counts as a near tie in the target's precision."""
    import torch

    return max(NEAR_TIE, NEAR_TIE_IN_STEPS * torch.finfo(target.dtype).eps)


def measured_near_tie(target: "HFTarget", texts: Sequence[Sequence[int]]) -> float:
    """The same from the target itself: twice the most its top-two gap changes with how a text is computed.

    Each text is run whole and again in short pieces, which in exact arithmetic is the same. Twice, because both the
    decision and the gap it is judged by are off by so much.
    """
    import torch

    largest = 0.0
    for text in texts:
        token_ids_1T = torch.tensor([list(text)], device=target.device)
        whole_TV = target.forward(token_ids_1T).logits_BTV[0].float()
        cache = target.new_cache()
        pieces = token_ids_1T.split(PIECE, dim=1)
        pieces_TV = torch.cat([target.forward(piece, cache).logits_BTV[0].float() for piece in pieces])
        gaps = [top[:, 0] - top[:, 1] for top in (logits.topk(2).values for logits in (whole_TV, pieces_TV))]
        largest = max(largest, float((gaps[0] - gaps[1]).abs().max()))
    return max(NEAR_TIE, 2 * largest)


@dataclass
class Evaluation:
    """Totals over the prompts decoded so far."""

    num_draft_tokens: int
    acceptance: Acceptance
    num_prompts: int = 0
    num_compared: int = 0
    divergences: list[tuple[str, Divergence]] = field(default_factory=list)
    """with the ids of the prompts, which a file may give twice"""
    num_tokens: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0
    plain_tokens: int = 0

    @property
    def num_identical(self) -> int:
        return self.num_compared - len(self.divergences)

    def add(self, steps: "Sequence[Step]", seconds: float) -> None:
        """Count an answer with drafts."""
        accepted = [step.num_accepted_emitted for step in steps if step.draft_token_ids]
        self.acceptance += Acceptance.of(accepted, self.num_draft_tokens)
        self.num_tokens += len(_tokens(steps))
        self.seconds += seconds
        self.num_prompts += 1

    def add_plain(self, steps: "Sequence[Step]", seconds: float) -> None:
        """Count a plain answer that the one with drafts is compared with."""
        self.plain_tokens += len(_tokens(steps))
        self.plain_seconds += seconds
        self.num_compared += 1

    def report(self) -> dict[str, Any]:
        """A JSON-ready summary. `identical_to_plain` is None when plain decoding was not run."""
        speed = self.num_tokens / max(self.seconds, 1e-9)
        plain_speed = self.plain_tokens / self.plain_seconds if self.plain_seconds else None
        return {
            "acceptance_length": round(self.acceptance.acceptance_length, 4),
            "per_position": [round(share, 4) for share in self.acceptance.per_position],
            "num_drafts": self.acceptance.num_drafts,
            "num_prompts": self.num_prompts,
            "num_tokens": self.num_tokens,
            "num_draft_tokens": self.num_draft_tokens,
            "identical_to_plain": not self.divergences if self.num_compared else None,
            "num_identical": self.num_identical,
            "num_compared": self.num_compared,
            "divergences": [
                {
                    "prompt": prompt_id,
                    "token": each.token,
                    "target_gap": None if each.target_gap is None else round(each.target_gap, 6),
                    "is_near_tie": each.is_near_tie,
                }
                for prompt_id, each in self.divergences
            ],
            "num_divergences_at_near_ties": sum(each.is_near_tie for _, each in self.divergences),
            "tokens_per_second": round(speed, 2),
            "plain_tokens_per_second": None if plain_speed is None else round(plain_speed, 2),
            "speedup": None if plain_speed is None else round(speed / plain_speed, 3),
        }


def evaluate(
    target: "HFTarget",
    drafter: "StartsDrafting",
    prompts: Sequence[Prompt],
    params: SamplingParams,
    num_draft_tokens: int,
    *,
    compare: bool = True,
    on_prompt: Callable[[Evaluation], None] = lambda _: None,
) -> Evaluation:
    """Decode every prompt with drafts and, with `compare`, plainly; `on_prompt` follows each one.

    All prompts are checked before the first is decoded. Both ways are warmed up, and take turns in going first, so that
    neither has the better of a machine that warms up or slows down.
    """
    from peagle.decoding import reference

    def decode(prompt_ids: list[int], is_plain: bool, params: SamplingParams = params) -> "tuple[list[Step], float]":
        drafts: dict[str, Any] = {} if is_plain else {"drafter": drafter, "num_draft_tokens": num_draft_tokens}
        started = time.perf_counter()
        steps = list(reference.decode(target, prompt_ids, params, **drafts))
        return steps, time.perf_counter() - started

    drafter.check_num_draft_tokens(num_draft_tokens)
    rendered = [render_prompt(target, prompt) for prompt in prompts]
    totals = Evaluation(num_draft_tokens, Acceptance(0, (0,) * num_draft_tokens))
    order = (False, True) if compare else (False,)
    for is_plain in order if rendered else ():
        decode(rendered[0], is_plain, replace(params, max_tokens=min(params.max_tokens, WARMUP_TOKENS)))
    for prompt, prompt_ids in zip(prompts, rendered, strict=True):
        found = {is_plain: decode(prompt_ids, is_plain) for is_plain in order}
        totals.add(*found[False])
        if compare:
            totals.add_plain(*found[True])
            plain, drafted = (_tokens(found[is_plain][0]) for is_plain in (True, False))
            divergence = first_divergence(target, prompt_ids, plain, drafted, params)
            if divergence is not None:
                totals.divergences.append((prompt.id, divergence))
        order = order[::-1]
        on_prompt(totals)
    return totals


def _tokens(steps: "Sequence[Step]") -> list[int]:
    return [token for step in steps for token in step.token_ids]


def render_prompt(target: "HFTarget", prompt: Prompt) -> list[int]:
    """Token ids of a prompt; one that the target cannot answer is refused by its id."""
    from peagle.decoding.reference import check_prompt
    from peagle.tokenizer import render_chat

    try:
        prompt_ids = render_chat(target.tokenizer, prompt.messages)
        check_prompt(target, prompt_ids)
    except RequestError as error:
        raise RequestError(f"prompt {prompt.id!r}: {error.message}", hint=error.hint) from error
    return prompt_ids
