"""AdamW: which parameters it trains and decays."""

from pathlib import Path

import pytest

from harness.tiny_models import tiny_drafter, tiny_target
from harness.tiny_training import settings
from peagle.errors import ConfigError
from peagle.objective.config import TrainConfig
from peagle.training.optimizer import make_optimizer


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def names_of(drafter, group):
    return {name for name, parameter in drafter.named_parameters() if any(parameter is own for own in group["params"])}


def test_adamw_decays_matrices_only(target):
    drafter = tiny_drafter(target).requires_grad_(True)
    optimizer = make_optimizer(drafter, TrainConfig(data=Path("d"), output=Path("o"), weight_decay=0.3))
    matrices, vectors = optimizer.param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert "fc.weight" in names_of(drafter, matrices)
    assert {"mask_hidden", "mask_embedding", "norm.weight"} <= names_of(drafter, vectors)


def test_frozen_parameters_are_left_out(target):
    drafter = tiny_drafter(target).requires_grad_(True)
    drafter.fc.requires_grad_(False)
    optimizer = make_optimizer(drafter, TrainConfig(data=Path("d"), output=Path("o")))
    assert all("fc.weight" not in names_of(drafter, group) for group in optimizer.param_groups)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ((1.0, 2.0), "must be 3 numbers"),
        ((1.0, -1.0, 1.0), "got [1.0, -1.0, 1.0]"),
        ((0.0, 0.0, 0.0), "not all 0"),
    ],
)
def test_depth_weights_must_be_one_for_each_depth(tmp_path, weights, words):
    with pytest.raises(ConfigError) as caught:
        settings(tmp_path, depth_weights=weights)
    assert words in caught.value.message
