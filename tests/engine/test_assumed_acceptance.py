"""Assumed acceptance: an engine whose random drafts are accepted as often as it is told."""

import pytest

from harness.model_families import family_target
from peagle.drafter.create import config_for_target, create_drafter
from peagle.drafter.model import Drafter
from peagle.engine.llm import LLM
from peagle.engine.outputs import EngineStats
from peagle.errors import ConfigError
from peagle.sampling_params import SamplingParams
from peagle.targets.hf import HFTarget

PROMPTS = [[5 + index, 80, 33] for index in range(8)]
PARAMS = SamplingParams(max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def models() -> tuple[HFTarget, Drafter]:
    target = family_target("llama")
    config = config_for_target(target, num_layers=1, mask_token_id=3, num_draft_tokens=4)
    return target, create_drafter(target, config, "random", seed=0)


def run(models: tuple[HFTarget, Drafter], shares: tuple[float, ...]) -> EngineStats:
    target, drafter = models
    settings = {"max_batch": 8, "max_length": 128, "verify_tokens": 0, "reuse_prefixes": False}
    with LLM(target, drafter, 3, assumed_acceptance=shares, **settings) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        assert all(len(output.outputs[0].token_ids) == PARAMS.max_tokens for output in outputs)
        return llm.engine.stats()


def test_drafts_are_accepted_in_the_assumed_shares(models: tuple[HFTarget, Drafter]) -> None:
    stats = run(models, (0.8, 0.5, 0.1))
    found = [count / stats.num_drafts for count in stats.accepted_per_position]
    assert found == pytest.approx([0.8, 0.5, 0.1], abs=0.08), f"{stats.num_drafts} steps"


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_never_and_always_are_exact(models: tuple[HFTarget, Drafter], share: float) -> None:
    stats = run(models, (share,) * 3)
    # The last step of an answer may have more drafts than the answer has room for.
    expected = 0 if share == 0 else stats.num_drafts
    assert all(abs(count - expected) <= share * len(PROMPTS) for count in stats.accepted_per_position)


def test_depths_beyond_the_assumed_ones_are_left_to_the_target(models: tuple[HFTarget, Drafter]) -> None:
    stats = run(models, (1.0,))
    first, second, _ = stats.accepted_per_position
    assert first >= stats.num_drafts - len(PROMPTS) and second < 0.2 * stats.num_drafts


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"assumed_acceptance": (0.5, 0.7)}, "do not grow with depth"),
        ({"assumed_acceptance": (1.2,)}, "must be shares"),
        ({"assumed_acceptance": (0.5,), "tree_nodes": 16}, "is for chains"),
    ],
)
def test_shares_that_make_no_sense_are_refused(models: tuple[HFTarget, Drafter], settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(*models, 3, **settings)
