"""Answer prompts in each of the ways that are compared: reference decoder, our engine, transformers."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from peagle.data.prompts import Prompt
from peagle.decoding.acceptance import Acceptance
from peagle.errors import RequestError
from peagle.sampling_params import SamplingParams

if TYPE_CHECKING:
    from peagle.drafter.model import Drafter
    from peagle.engine.outputs import RequestOutput
    from peagle.targets.hf import HFTarget

Answers = list[tuple[int, ...]]
"""Token ids of one answer per prompt."""
MAX_BATCH, PART = 16, 64
"""Prompts that run at the same time, and prompts between two reports of progress."""


def render_prompt(target: "HFTarget", prompt: Prompt) -> list[int]:
    """Token ids of a prompt. An error names the prompt by its id."""
    from peagle.decoding.reference import check_prompt
    from peagle.tokenizer import prompt_ids

    try:
        token_ids = prompt_ids(target.tokenizer, prompt.messages)
        check_prompt(target, token_ids)
    except RequestError as error:
        raise RequestError(f"prompt {prompt.id!r}: {error.message}", hint=error.hint) from error
    return token_ids


def decode_with_reference(
    target: "HFTarget",
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    drafter: "Drafter | None" = None,
    num_draft_tokens: int = 0,
    tree_nodes: int | None = None,
) -> tuple[Answers, Acceptance]:
    """Answers of the slow reference decoder, one prompt at a time: with a drafter, or plain without."""
    from peagle.decoding.reference import decode

    answers: Answers = []
    total = Acceptance(0, (0,) * num_draft_tokens)
    for prompt_ids, own in zip(prompts, params, strict=True):
        drafts: dict[str, Any] = {"num_draft_tokens": num_draft_tokens, "tree_nodes": tree_nodes}
        steps = list(decode(target, prompt_ids, own, drafter=drafter, **drafts))
        answers.append(tuple(token for step in steps for token in step.token_ids))
        accepted = [step.num_accepted_emitted for step in steps if step.draft_token_ids]
        total += Acceptance.of(accepted, num_draft_tokens)
    return answers, total


def answer_with_engine(
    target: "HFTarget",
    drafter: "Drafter",
    num_draft_tokens: int,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    on_part: Callable[[int], None] = lambda _: None,
    **settings: Any,
) -> tuple[Answers, list[Acceptance]]:
    """Answers of the engine that `peagle serve` runs, with drafts, batched; and the acceptance of each answer.

    It verifies all drafts of a chain, unless `settings`, fields of `EngineConfig`, say otherwise.
    """
    outputs = outputs_of_engine(target, drafter, num_draft_tokens, prompts, params, on_part, **settings)
    return [output.outputs[0].token_ids for output in outputs], [output.metrics.acceptance for output in outputs]


def outputs_of_engine(
    target: "HFTarget",
    drafter: "Drafter",
    num_draft_tokens: int,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    on_part: Callable[[int], None] = lambda _: None,
    **settings: Any,
) -> "list[RequestOutput]":
    """The same with all that the engine says about them. `on_part` gets the number of prompts answered so far."""
    from peagle.engine.llm import LLM

    num_drafts = settings.get("tree_nodes") or num_draft_tokens
    longest = max(map(len, prompts)) + max(each.max_tokens for each in params) + 2 * num_drafts
    settings |= {"max_batch": min(MAX_BATCH, len(prompts)), "max_length": min(longest, target.max_length)}
    outputs: list[RequestOutput] = []
    with LLM(target, drafter, num_draft_tokens, **{"verify_tokens": 0} | settings) as llm:
        for start in range(0, len(prompts), PART):
            part = slice(start, start + PART)
            outputs += llm.generate([list(prompt) for prompt in prompts[part]], list(params[part]))
            on_part(len(outputs))
    return outputs


def generate_with_transformers(target: "HFTarget", prompt_ids: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """The greedy answer of `transformers.generate`; of the model's generation config only the end tokens are used."""
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
