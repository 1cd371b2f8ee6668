"""Decoding a prompt file for real, plainly and with drafts: acceptance, speed, and whether the texts are the same."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from peagle.bench.workloads import Prompt
from peagle.decoding.acceptance import Acceptance
from peagle.sampling_params import SamplingParams

if TYPE_CHECKING:
    from peagle.drafter.model import Drafter
    from peagle.targets.hf import HFTarget

NEAR_TIE = 1e-3
"""A top-two logit gap of the target below which two ways of computing the same logits may choose differently."""


@dataclass
class Evaluation:
    """Totals over the prompts decoded so far."""

    num_draft_tokens: int
    acceptance: Acceptance
    num_prompts: int = 0
    num_compared: int = 0
    num_identical: int = 0
    divergences: list[dict[str, Any]] = field(default_factory=list)
    num_tokens: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0
    plain_tokens: int = 0

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
            "identical_to_plain": self.num_identical == self.num_compared if self.num_compared else None,
            "num_identical": self.num_identical,
            "num_compared": self.num_compared,
            "divergences": self.divergences,
            "num_divergences_at_near_ties": sum(each["target_gap"] < NEAR_TIE for each in self.divergences),
            "tokens_per_second": round(speed, 2),
            "plain_tokens_per_second": None if plain_speed is None else round(plain_speed, 2),
            "speedup": None if plain_speed is None else round(speed / plain_speed, 3),
        }


def evaluate(
    target: "HFTarget",
    drafter: "Drafter",
    prompts: Sequence[Prompt],
    params: SamplingParams,
    num_draft_tokens: int,
    *,
    compare: bool = True,
    on_prompt: Callable[[Evaluation], None] = lambda _: None,
) -> Evaluation:
    """Decode every prompt with drafts and, with `compare`, plainly; `on_prompt` follows each one.

    A first greedy token that differs is recorded with the target's own top-two gap there: with exact arithmetic there
    is none, and in low precision it must sit at a near tie.
    """
    from peagle.decoding.reference import check_prompt, decode
    from peagle.tokenizer import render_chat

    drafter.check_num_draft_tokens(num_draft_tokens)
    rendered = [render_chat(target.tokenizer, prompt.messages) for prompt in prompts]
    for prompt_ids in rendered:
        check_prompt(target, prompt_ids)
    totals = Evaluation(num_draft_tokens, Acceptance(0, (0,) * num_draft_tokens))
    for prompt, prompt_ids in zip(prompts, rendered, strict=True):
        started = time.perf_counter()
        steps = list(decode(target, prompt_ids, params, drafter=drafter, num_draft_tokens=num_draft_tokens))
        totals.seconds += time.perf_counter() - started
        accepted = [step.num_accepted_emitted for step in steps if step.draft_token_ids]
        totals.acceptance += Acceptance.of(accepted, num_draft_tokens)
        token_ids = [token for step in steps for token in step.token_ids]
        totals.num_tokens += len(token_ids)
        totals.num_prompts += 1
        if compare:
            started = time.perf_counter()
            plain = [token for step in decode(target, prompt_ids, params) for token in step.token_ids]
            totals.plain_seconds += time.perf_counter() - started
            totals.plain_tokens += len(plain)
            _record_comparison(totals, target, prompt, prompt_ids, plain, token_ids)
        on_prompt(totals)
    return totals


def _record_comparison(
    totals: Evaluation,
    target: "HFTarget",
    prompt: Prompt,
    prompt_ids: list[int],
    plain: list[int],
    token_ids: list[int],
) -> None:
    totals.num_compared += 1
    if plain == token_ids:
        totals.num_identical += 1
        return
    index = next((i for i, pair in enumerate(zip(plain, token_ids, strict=False)) if pair[0] != pair[1]), 0)
    gap = target.top_two_gap([*prompt_ids, *plain[:index]])
    totals.divergences.append({"prompt": prompt.id, "token": index, "target_gap": round(gap, 6)})


