"""On a CPU the depth of the drafted trees follows the accepted drafts."""

import pytest
import torch

from harness.model_families import trained_drafter
from harness.tiny_models import tiny_target
from peagle.engine.llm import LLM
from peagle.sampling_params import SamplingParams
from peagle.worker.drafting import FIRST_DEPTH, Drafting

DEPTH = 8
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
PROMPT = [1, 117, 115, 200, 17]


def test_trees_grow_deeper_where_drafts_are_accepted_and_shallower_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter trained on one answer is right about it to the end, and wrong about another."""
    target = tiny_target(num_layers=2)
    row = target.model.generate(torch.tensor([PROMPT]), max_new_tokens=40, do_sample=False, eos_token_id=None)
    drafter = trained_drafter(target, [row[0].tolist()], num_draft_tokens=DEPTH, num_steps=120)
    depths: list[int] = []
    choose = Drafting._choose
    monkeypatch.setattr(Drafting, "_choose", lambda self, *args: depths.append(args[-1]) or choose(self, *args))
    monkeypatch.setattr("peagle.scheduling.draft_budget.WARM_UP", 1e9)  # drafting does not pay for so small a target
    with LLM(target, drafter, max_batch=1, max_length=96) as llm:
        depths.clear()
        [known] = llm.generate([PROMPT], GREEDY)
        known_depths = list(depths)
        depths.clear()
        [other] = llm.generate([[1, 9, 33, 260, 5, 6]], GREEDY)
        other_depths = list(depths)
    assert known.metrics.acceptance.acceptance_length > other.metrics.acceptance.acceptance_length
    assert known_depths[0] == FIRST_DEPTH and max(known_depths) > FIRST_DEPTH
    assert min(other_depths) == FIRST_DEPTH, "back to the least depth"
    assert list(known.outputs[0].token_ids) == row[0, len(PROMPT) :].tolist(), "the answer is the target's"


def test_with_a_fixed_number_of_verified_drafts_trees_keep_their_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(num_layers=2)
    row = target.model.generate(torch.tensor([PROMPT]), max_new_tokens=40, do_sample=False, eos_token_id=None)
    drafter = trained_drafter(target, [row[0].tolist()], num_draft_tokens=DEPTH, num_steps=5)
    with LLM(target, drafter, max_batch=1, max_length=96, verify_tokens=0) as llm:
        llm.generate([PROMPT], GREEDY)
        drafting = llm.engine.runner.step.drafting
        assert drafting is not None and drafting.num_depths == DEPTH
