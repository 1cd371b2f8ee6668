"""Measure a drafter's acceptance by decoding prompts, and record it on its card."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.checkpoint.card import BASELINE, CARD_NAME, DECODED, SAMPLED_BASELINE, card_of, pair_head_of
from peagle.compare.answers import answer_with_engine, decode_with_reference, outputs_of_engine
from peagle.compare.evidence import render_texts
from peagle.data.shards import write_whole
from peagle.decoding.acceptance import Acceptance, acceptance_by_length
from peagle.errors import ConfigError
from peagle.sampling_params import SamplingParams

if TYPE_CHECKING:
    from peagle.drafter.model import Drafter
    from peagle.targets.hf import HFTarget

MIXED_PROMPTS_PATH = Path(__file__).parents[1] / "assets" / "mixed_prompts.json"
MIXED_PROMPTS = "mixed_prompts"
TRAINING_PROMPTS, TRAINING_MAX_TOKENS = 8, 32  # seconds on a CPU; `peagle eval --record` measures all of them
"""Size of the measurement at the end of training, which may have to run the slow reference decoder."""


def mixed_prompts(target: "HFTarget", max_tokens: int) -> list[list[int]]:
    """Token ids of the prompts that ship: chat, code, math, summarisation and rewriting in turn.

    Prompts that do not fit into the target's context together with an answer are left out.
    """
    kinds = json.loads(MIXED_PROMPTS_PATH.read_text(encoding="utf-8")).values()
    texts = [text for turn in zip_longest(*kinds) for text in turn if text is not None]
    return render_texts(target.tokenizer, texts, target.max_length - max_tokens)


def measure(
    target: "HFTarget",
    drafter: "Drafter",
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    num_draft_tokens: int,
    on_part: Callable[[int], None] = lambda _: None,
) -> tuple[Acceptance, int, dict[str, Any]]:
    """Acceptance of our engine, the number of answer tokens, and acceptance by length of the text.

    `on_part` gets the number of prompts answered so far.
    """
    drafter.check_num_draft_tokens(num_draft_tokens)
    outputs = outputs_of_engine(target, drafter, num_draft_tokens, prompts, [params] * len(prompts), on_part)
    found = sum((output.metrics.acceptance for output in outputs), Acceptance(0, (0,) * num_draft_tokens))
    drafts = [draft for output in outputs for draft in output.verified_drafts]
    return found, sum(len(output.outputs[0].token_ids) for output in outputs), acceptance_by_length(drafts)


def entry(
    drafter: "Drafter", acceptance: Acceptance, prompts: str, num_prompts: int, params: SamplingParams
) -> dict[str, Any]:
    """A card's entry for acceptance that was measured by decoding."""
    return pair_head_of(drafter) | {
        "kind": DECODED,
        "prompts": prompts,
        "num_prompts": num_prompts,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "num_draft_tokens": len(acceptance.accepted_per_position),
        "acceptance_length": round(acceptance.acceptance_length, 4),
        "per_position": [round(share, 4) for share in acceptance.per_position],
        "num_drafts": acceptance.num_drafts,
    }


def baseline_after_training(target: "HFTarget", drafter: "Drafter", *, with_engine: bool) -> dict[str, Any]:
    """The card's baseline entries of a new drafter; empty if no mixed prompt fits. Every process takes part.

    The engine answers all prompts, greedy and sampled, in one batch. It needs memory of its own and all layers of the
    target; the reference decoder does not.
    """
    fitting = mixed_prompts(target, TRAINING_MAX_TOKENS)
    prompts = fitting[:: -(-len(fitting) // TRAINING_PROMPTS) or 1]
    if not prompts:
        return {}
    depth = drafter.config.num_draft_tokens or drafter.config.usual_num_draft_tokens
    both = [SamplingParams(max_tokens=TRAINING_MAX_TOKENS, temperature=temperature) for temperature in (0.0, 1.0)]
    if with_engine:
        params = [own for own in both for _ in prompts]
        _, found = answer_with_engine(target, drafter, depth, prompts * len(both), params)
        parts = found[: len(prompts)], found[len(prompts) :]
        halves = [sum(part, Acceptance(0, (0,) * depth)) for part in parts]
    else:
        halves = [decode_with_reference(target, prompts, [own] * len(prompts), drafter, depth)[1] for own in both]
    entries = {}
    for own, acceptance in zip(both, halves, strict=True):
        entries[baseline_key(own.temperature)] = entry(drafter, acceptance, MIXED_PROMPTS, len(prompts), own)
    return entries


def baseline_key(temperature: float) -> str:
    return SAMPLED_BASELINE if temperature else BASELINE


def record(
    directory: Path, target: "HFTarget", drafter: "Drafter", measured: dict[str, Any], *, as_baseline: bool
) -> None:
    """Write `measured` to the directory's card: under the name of its prompts, or as the baseline of such requests."""
    if not measured["num_drafts"]:
        raise ConfigError("nothing was drafted, so there is no acceptance to record", hint="use more or longer prompts")
    card, temperature = card_of(drafter, target), measured["temperature"]
    key = baseline_key(temperature) if as_baseline else f"{measured['prompts']} at temperature {temperature:g}"
    card = dataclasses.replace(card, acceptance=card.acceptance | {key: measured})
    write_whole(directory / CARD_NAME, card.to_json().encode())
