"""Drafts of 32 tokens: chains and trees, across many pages, preempted and reused.

The engine verifies all of them (`verify_tokens=0`): how many would pay depends on the machine's step times.
"""

from typing import Any

import pytest

from harness.engine_runs import answer, run
from harness.model_families import family_target, sequential, trained_drafter
from peagle.decoding.reference import decode
from peagle.drafter.model import Drafter
from peagle.engine.engine import Engine
from peagle.sampling_params import SamplingParams
from peagle.scheduling.config import EngineConfig
from peagle.targets.hf import HFTarget

pytestmark = pytest.mark.slow

DEPTH = 32
PROMPTS = [[(11 * index + 5 * place) % 250 + 4 for place in range(3 + index % 6)] for index in range(5)]
GREEDY = SamplingParams(max_tokens=70, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=60, temperature=0.3, seed=5, ignore_eos=True)
TIGHT = {"page_size": 4, "num_pages": 88, "prefill_tokens": 24}


@pytest.fixture(scope="module")
def answers(target: HFTarget) -> list[tuple[int, ...]]:
    return [answer(target, prompt, GREEDY) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def sampled_answers(target: HFTarget) -> list[tuple[int, ...]]:
    return [answer(target, prompt, SAMPLED) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def drafter(target: HFTarget, answers: list[tuple[int, ...]]) -> Drafter:
    """Trained on the very answers, so that whole drafts are accepted at times."""
    texts = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, answers, strict=True)]
    return trained_drafter(target, texts, num_draft_tokens=DEPTH, num_steps=240, deep_every=6)


@pytest.mark.parametrize("tree", [None, 40, 62])
@pytest.mark.parametrize("settings", [{"page_size": 3}, TIGHT])
def test_drafts_of_32_tokens_change_no_answer(
    answers: list[tuple[int, ...]],
    sampled_answers: list[tuple[int, ...]],
    drafter: Drafter,
    tree: int | None,
    settings: dict[str, Any],
) -> None:
    config = EngineConfig(max_length=120, tree_nodes=tree, verify_tokens=0, **settings)
    engine = Engine(family_target("llama", seed=3), drafter, DEPTH, config)
    names = [engine.add(prompt, GREEDY) for prompt in PROMPTS] + [engine.add(prompt, SAMPLED) for prompt in PROMPTS]
    outputs = run(engine)
    stats = engine.stats()
    engine.close()
    assert [outputs[name].outputs[0].token_ids for name in names] == [*answers, *sampled_answers]
    assert 0 < stats.accepted_per_position[DEPTH // 2] < stats.num_drafts
    assert (settings is not TIGHT) or stats.num_preemptions > 0


def test_eagle3_drafts_32_tokens_too(answers: list[tuple[int, ...]], target: HFTarget, drafter: Drafter) -> None:
    engine = Engine(family_target("llama", seed=3), sequential(drafter, target), DEPTH, EngineConfig(max_length=120))
    names = [engine.add(prompt, GREEDY) for prompt in PROMPTS[:3]]
    outputs = run(engine)
    engine.close()
    assert [outputs[name].outputs[0].token_ids for name in names] == answers[:3]


def test_the_reference_decoder_drafts_32_tokens(
    answers: list[tuple[int, ...]], target: HFTarget, drafter: Drafter
) -> None:
    for tree in (None, 40):
        steps = list(decode(target, PROMPTS[0], GREEDY, drafter=drafter, num_draft_tokens=DEPTH, tree_nodes=tree))
        assert tuple(token for step in steps for token in step.token_ids) == answers[0]
        assert max(step.num_accepted for step in steps) > DEPTH // 2
