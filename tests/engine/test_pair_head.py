"""With a pair head the engine drafts, token by token, what the reference decoder drafts; and answers stay the target's.

Every draft is compared, not only how many of them were accepted.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from harness.model_families import trained_drafter
from harness.pair_heads import knowing_head, random_head
from harness.tiny_models import tiny_target
from peagle.decoding.reference import Step, decode
from peagle.drafter.model import Drafter
from peagle.drafter.pair_head import PairHead
from peagle.engine.engine import Engine
from peagle.sampling_params import SamplingParams
from peagle.scheduling.config import EngineConfig
from peagle.targets.hf import HFTarget

DEPTHS = 8
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
NEAR = 1e-5
PROMPTS = [[1, 117, 115, 200, 17], [1, 9, 33, 260], [1, 41, 77, 8, 150, 64]]


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target(num_layers=4)


@pytest.fixture(scope="module")
def texts(target: HFTarget) -> list[list[int]]:
    plain = [decode(target, prompt, SamplingParams(max_tokens=32, ignore_eos=True)) for prompt in PROMPTS]
    answers = [[token for step in steps for token in step.token_ids] for steps in plain]
    return [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]


@pytest.fixture(scope="module")
def drafter(target: HFTarget, texts: list[list[int]]) -> Drafter:
    return trained_drafter(target, texts, num_draft_tokens=DEPTHS, num_steps=40)


@pytest.fixture(scope="module")
def small_vocabulary(target: HFTarget, texts: list[list[int]], drafter: Drafter) -> Drafter:
    """The same drafter over the 150 tokens that its texts end with: draft ids are not target ids."""
    size = 150
    used = sorted({token for text in texts for token in text})
    kept = torch.tensor(sorted([*used, *(token for token in range(288) if token not in used)][:size]))
    small = Drafter(replace(drafter.config, draft_vocab_size=size), target.embedding_VD, target.head_VD)
    state = drafter.without_pair_head().state_dict()
    small.load_state_dict(state | {"d2t": kept - torch.arange(size), "lm_head.weight": drafter.lm_head.weight[kept]})
    return small.eval().requires_grad_(False)


def with_head(drafter: Drafter, head: PairHead | None) -> Drafter:
    drafter.pair_head = head
    return drafter


def engine_drafts(target: HFTarget, drafter: Drafter, prompt: list[int], depth: int, **settings: Any) -> list[Any]:
    """The newest token and the drafts behind it, with their scores, after each step of an engine, and the answer."""
    engine = Engine(target, drafter, depth, EngineConfig(max_batch=1, max_length=96, verify_tokens=0, **settings))
    engine.add(prompt, GREEDY)
    found, outputs = [], []
    while engine.has_work:
        outputs += engine.step()
        state = engine.runner.state
        newest, *drafts = state.tokens[0].tolist()
        scored = zip(drafts, state.confidence[0].tolist(), strict=True)
        found.append((newest, [(token, score) for token, score in scored if score > float("-inf")]))
    engine.close()
    return [*found, list(outputs[0].outputs[0].token_ids)]


def reference_drafts(steps: list[Step]) -> list[Any]:
    newest = [step.token_ids[-1] for step in steps]
    drafts = [list(step.draft_token_ids) for step in steps[1:]]
    return list(zip(newest, drafts, strict=False))


def in_order_of(expected: list[int], scored: list[tuple[int, float]]) -> list[int]:
    """The drafts of an engine; neighbors whose scores differ by rounding alone are in the order expected."""
    for place, ((token, score), (other, lower)) in enumerate(pairwise(scored)):
        if score - lower < NEAR and expected[place : place + 2] == [other, token]:
            scored = [*scored[:place], (other, lower), (token, score), *scored[place + 2 :]]
    return [token for token, _ in scored]


def assert_same_drafts(target: HFTarget, drafter: Drafter, depth: int, tree_nodes: int | None) -> list[list[Any]]:
    all_drafts = []
    for prompt in PROMPTS:
        settings: dict[str, Any] = {"num_draft_tokens": depth, "tree_nodes": tree_nodes}
        steps = list(decode(target, prompt, GREEDY, drafter=drafter, **settings))
        *found, answer = engine_drafts(target, drafter, prompt, depth, tree_nodes=tree_nodes)
        expected = reference_drafts(steps)[1:]  # an engine's first step prefills and decodes
        assert 0 < len(expected) <= len(found)
        for (newest, scored), (expected_newest, drafts) in zip(found, expected, strict=False):
            assert newest == expected_newest and in_order_of(drafts, scored) == drafts
        assert answer == [token for step in steps for token in step.token_ids]
        all_drafts.append(expected)
    return all_drafts


@pytest.mark.parametrize("tree_nodes", [9, *(pytest.param(nodes, marks=pytest.mark.slow) for nodes in (None, 24))])
@pytest.mark.parametrize("depth", [4, *(pytest.param(depth, marks=pytest.mark.slow) for depth in (1, 3, 8))])
def test_the_engine_drafts_the_pairs_of_the_reference_decoder(
    target: HFTarget, drafter: Drafter, depth: int, tree_nodes: int | None
) -> None:
    plain = assert_same_drafts(target, with_head(drafter, None), depth, tree_nodes)
    paired = assert_same_drafts(target, with_head(drafter, random_head(drafter)), depth, tree_nodes)
    assert (plain == paired) == (depth == 1), "a strong head changes drafts, but not the first"


@pytest.mark.parametrize("tree_nodes", [None, 9])
def test_pairs_are_scored_by_draft_ids(
    target: HFTarget, small_vocabulary: Drafter, texts: list[list[int]], tree_nodes: int | None
) -> None:
    head = knowing_head(small_vocabulary, texts)
    assert_same_drafts(target, with_head(small_vocabulary, head), 4, tree_nodes)


@pytest.mark.parametrize("tree_nodes", [None, 9])
def test_a_head_that_knows_the_text_gets_more_drafts_accepted(
    target: HFTarget, drafter: Drafter, texts: list[list[int]], tree_nodes: int | None
) -> None:
    num_steps = []
    for head in (None, knowing_head(drafter, texts)):
        decoded = [
            list(
                decode(
                    target,
                    prompt,
                    GREEDY,
                    drafter=with_head(drafter, head),
                    num_draft_tokens=6,
                    tree_nodes=tree_nodes,
                )
            )
            for prompt in PROMPTS
        ]
        num_steps.append(sum(map(len, decoded)))
        answers = [[token for step in steps for token in step.token_ids] for steps in decoded]
        assert answers == [text[len(prompt) :][:24] for text, prompt in zip(texts, PROMPTS, strict=True)]
    assert num_steps[1] < num_steps[0]


@pytest.mark.parametrize("tree_nodes", [pytest.param(None, marks=pytest.mark.slow), 16])
def test_a_head_of_zeros_changes_no_draft(target: HFTarget, drafter: Drafter, tree_nodes: int | None) -> None:
    zeros = torch.zeros(drafter.config.draft_vocab_size, 3)
    found = [
        assert_same_drafts(target, with_head(drafter, head), 5, tree_nodes) for head in (None, PairHead(zeros, zeros))
    ]
    assert found[0] == found[1]
