"""Engines over a tiny Llama target, run until idle, and the reference decoder's tokens to compare with."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from harness.model_families import family_target, sequential, trained_drafter
from peagle.decoding.reference import decode
from peagle.drafter.model import Drafter
from peagle.engine.engine import Engine
from peagle.engine.outputs import RequestOutput
from peagle.sampling_params import SamplingParams
from peagle.scheduling.config import EngineConfig
from peagle.targets.hf import HFTarget

NUM_DRAFT_TOKENS = 4
TREE_NODES = 9
SEED = 3
"""seed of the weights of every target here"""


PROMPTS = [[(7 * index + 3 * place) % 260 + 4 for place in range(1 + 5 * index % 23)] for index in range(16)]


@cache
def practised_drafter() -> Drafter:
    """Trained on greedy answers to PROMPTS, so that whole drafts are often accepted; once per process."""
    engine = start(None, page_size=4)
    outputs = serve(engine, PROMPTS, [SamplingParams(max_tokens=30, ignore_eos=True)] * len(PROMPTS))
    engine.close()
    texts = [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(PROMPTS, outputs, strict=True)]
    return trained_drafter(family_target("llama", seed=SEED), texts, num_steps=120)


def mixed_cells(roomy: Any, tight: Any, *slow: Any) -> list[Any]:
    """Methods and engine settings. `make test` takes P-EAGLE's chains and trees once, and both settings."""
    fast = [("p-eagle", roomy), ("p-eagle tree", tight)]
    others = [
        ("none", tight),
        ("eagle3", tight),
        ("p-eagle tree", roomy),
        *(("p-eagle tree", settings) for settings in slow),
    ]
    return [*(pytest.param(*cell) for cell in fast), *(pytest.param(*cell, marks=pytest.mark.slow) for cell in others)]


def answer(target: HFTarget, prompt: list[int], params: SamplingParams, **drafting: Any) -> tuple[int, ...]:
    """Tokens of the reference decoder."""
    return tuple(token for step in decode(target, prompt, params, **drafting) for token in step.token_ids)


def drafting(method: str, drafter: Drafter, target: HFTarget) -> tuple[Drafter | None, dict[str, int]]:
    """The drafter of a method, and the settings of an engine that drafts with it."""
    if method == "p-eagle tree":
        return drafter, {"tree_nodes": TREE_NODES}
    return {"none": None, "eagle3": sequential(drafter, target), "p-eagle": drafter}[method], {}


def start(drafter: Drafter | None, **settings: Any) -> Engine:
    """An engine over its own target. The caller closes it."""
    num_draft_tokens = 0 if drafter is None else NUM_DRAFT_TOKENS
    return Engine(
        family_target("llama", seed=SEED), drafter, num_draft_tokens, EngineConfig(**{"verify_tokens": 0} | settings)
    )


def run(engine: Engine) -> dict[str, RequestOutput]:
    """Run until idle, and return the outputs by request id. No page may be left in use."""
    outputs: dict[str, RequestOutput] = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
        engine.check_integrity()
    assert engine.stats().num_pages_used == 0, "an idle engine holds no pages"
    return outputs


def serve(engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[RequestOutput]:
    """Complete prompts in one batch."""
    ids = [engine.add(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    outputs = run(engine)
    return [outputs[name] for name in ids]
