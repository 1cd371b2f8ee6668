"""Optimizers: which parameter is trained by which, and that joined ones are one."""

from pathlib import Path

import pytest
import torch

from peagle.errors import ConfigError
from peagle.training.config import TrainConfig
from peagle.training.optimizers import make_optimizer
from peagle.training.trainer import learning_rate
from tiny import tiny_drafter, tiny_target
from tiny_runs import conversations, ignore, metrics_of, new_trainer, settings


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


def test_muon_takes_the_matrices_between_states_and_adamw_all_else(target):
    drafter = tiny_drafter(target, embeddings="own").requires_grad_(True)
    optimizer = make_optimizer(drafter, TrainConfig(data=Path("d"), output=Path("o"), optimizer="muon"))
    muon, *others = optimizer.param_groups
    taken = names_of(drafter, muon)
    assert taken == {
        name for name, parameter in drafter.named_parameters() if parameter.dim() == 2 and "embed" not in name
    }
    assert {"fc.weight", "layers.0.self_attn.q_proj.weight", "layers.1.mlp.down_proj.weight"} <= taken
    rest = set().union(*(names_of(drafter, group) for group in others))
    assert not rest & taken and rest | taken == {name for name, _ in drafter.named_parameters()}


def test_frozen_parameters_are_left_out(target):
    drafter = tiny_drafter(target).requires_grad_(True)
    drafter.fc.requires_grad_(False)
    optimizer = make_optimizer(drafter, TrainConfig(data=Path("d"), output=Path("o"), optimizer="muon"))
    assert all("fc.weight" not in names_of(drafter, group) for group in optimizer.param_groups)


def test_a_run_with_muon_follows_the_schedule_and_learns(target, tmp_path):
    config = settings(tmp_path, optimizer="muon", num_steps=40, log_every=5, learning_rate=1e-2)
    trainer = new_trainer(target, config)
    trainer.train(conversations(2), ignore)
    losses = [line["loss"] for line in metrics_of(config)]
    assert losses[-1] < 0.7 * losses[0], losses
    assert {group["lr"] for group in trainer.optimizer.param_groups} == {learning_rate(39, config)}


def test_a_run_with_muon_goes_on_after_an_interruption_as_if_there_had_been_none(target, tmp_path):
    whole = new_trainer(target, settings(tmp_path / "whole", optimizer="muon"))
    whole.train(conversations(), ignore)

    def stop(step, metrics):
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        new_trainer(target, settings(tmp_path / "cut", optimizer="muon")).train(conversations(), stop)
    second = new_trainer(target, settings(tmp_path / "cut", optimizer="muon"))
    assert second.step == 3
    second.train(conversations(), ignore)
    for (name, left), (_, right) in zip(
        whole.drafter.named_parameters(), second.drafter.named_parameters(), strict=True
    ):
        assert torch.equal(left, right), name


def test_the_state_of_joined_optimizers_can_be_saved_and_loaded(target):
    drafter = tiny_drafter(target).requires_grad_(True)
    config = TrainConfig(data=Path("d"), output=Path("o"), optimizer="muon")
    optimizer = make_optimizer(drafter, config)
    for parameter in drafter.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    other = make_optimizer(drafter, config)
    other.load_state_dict(optimizer.state_dict())
    for left, right in zip(optimizer.optimizers, other.optimizers, strict=True):
        assert left.state and left.state.keys() == right.state.keys()
    other.param_groups[0]["lr"] = 0.125
    assert other.optimizers[0].param_groups[0]["lr"] == 0.125, "its groups are still theirs"


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
