"""Greedy decoding with drafts equals `transformers.generate` on the embedded target, in float32, token for token.

A difference is forgiven only where both tokens lie within NEAR_TIE of the target's best; such cases are counted and
printed.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from peagle.checkpoint.native import load_drafter
from peagle.compare.divergence import gap_to_best
from peagle.decoding.reference import decode
from peagle.drafter.model import Drafter
from peagle.sampling_params import SamplingParams
from peagle.targets.hf import HFTarget
from peagle.targets.load import load_target
from peagle.targets.near_tie import NEAR_TIE
from peagle.tokenizer import render_chat

pytestmark = pytest.mark.parity

MAX_TOKENS = 16
PROMPTS = json.loads((Path(__file__).parent / "prompts.json").read_text())


@pytest.fixture(scope="module")
def target() -> HFTarget:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # a real model, unlike those of the other tests
    return load_target(dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def parallel(target: HFTarget) -> Drafter:
    return load_drafter(None, target)


@pytest.fixture(scope="module")
def sequential(target: HFTarget, parallel: Drafter) -> Drafter:
    """The shipped weights drafting one token at a time, as EAGLE-3 does."""
    config = replace(parallel.config, parallel=False, mask_token_id=None)
    twin = Drafter(config, target.embedding_VD, target.head_VD)
    weights = parallel.without_pair_head().state_dict()
    twin.load_state_dict({name: weight for name, weight in weights.items() if not name.startswith("mask_")})
    return twin.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def expected(target: HFTarget) -> list[tuple[list[int], list[int]]]:
    """Prompt ids and transformers' own greedy answers."""
    pairs = []
    for prompt in PROMPTS:
        prompt_ids = render_chat(target.tokenizer, [{"role": "user", "content": prompt["prompt"]}])
        row = torch.tensor([prompt_ids])
        output = target.model.generate(
            row, attention_mask=torch.ones_like(row), max_new_tokens=MAX_TOKENS, do_sample=False
        )
        pairs.append((prompt_ids, output[0, len(prompt_ids) :].tolist()))
    return pairs


def check(target: HFTarget, drafter: Drafter, num_draft_tokens: int, pairs: list[tuple[list[int], list[int]]]) -> None:
    num_near_ties = num_accepted = 0
    params = SamplingParams(max_tokens=MAX_TOKENS)
    for prompt_ids, answer in pairs:
        steps = list(decode(target, prompt_ids, params, drafter=drafter, num_draft_tokens=num_draft_tokens))
        token_ids = [token for step in steps for token in step.token_ids]
        num_accepted += sum(step.num_accepted for step in steps)
        if token_ids != answer:
            part = next(i for i, (ours, theirs) in enumerate(zip(token_ids, answer, strict=False)) if ours != theirs)
            gap = gap_to_best(target, [*prompt_ids, *answer[:part]], (token_ids[part], answer[part]))
            assert gap < NEAR_TIE, f"token {part} of {prompt_ids} differs where the gap to the target's best is {gap}"
            num_near_ties += 1
    print(f"K = {num_draft_tokens}: {len(pairs)} answers, {num_near_ties} part at a near tie, {num_accepted} accepted")
    assert num_accepted > 0, "a drafter that is never right proves nothing"


def test_there_are_enough_prompts_of_mixed_kinds() -> None:
    assert len(PROMPTS) >= 20 and len({prompt["kind"] for prompt in PROMPTS}) >= 4


@pytest.mark.parametrize("num_draft_tokens", range(1, 9))
def test_p_eagle_answers_equal_transformers(
    target: HFTarget, parallel: Drafter, expected: list[tuple[list[int], list[int]]], num_draft_tokens: int
) -> None:
    check(target, parallel, num_draft_tokens, spread(expected, num_draft_tokens, every=4))


@pytest.mark.parametrize("num_draft_tokens", range(1, 9))
def test_eagle3_answers_equal_transformers(
    target: HFTarget, sequential: Drafter, expected: list[tuple[list[int], list[int]]], num_draft_tokens: int
) -> None:
    check(target, sequential, num_draft_tokens, spread(expected, num_draft_tokens, every=8))


def spread(
    pairs: list[tuple[list[int], list[int]]], num_draft_tokens: int, every: int
) -> list[tuple[list[int], list[int]]]:
    """Every `every`-th prompt, others for each depth: over eight depths each prompt is used `8 / every` times."""
    return [pair for index, pair in enumerate(pairs) if (index + num_draft_tokens) % every == 0]
