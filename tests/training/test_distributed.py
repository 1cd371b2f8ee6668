"""Several processes learn what one does. Each test starts real ones, which talk over the loopback."""

import pytest
import torch

from harness.joined_processes import run_processes
from harness.tiny_models import tiny_target
from harness.tiny_training import conversations, ignore, metrics_of, new_trainer, settings
from peagle.errors import ConfigError
from peagle.training.distributed import World, joined_world

SETTINGS = {"batch_size": 4, "log_every": 1, "num_steps": 4, "save_every": 2, "max_gradient_norm": 0.5}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Losses and weights of one process."""
    config = settings(tmp_path_factory.mktemp("alone"), **SETTINGS)
    trainer = new_trainer(tiny_target(), config)
    trainer.train(conversations(), ignore)
    return metrics_of(config), trainer.drafter.state_dict()


def check_same(alone, output):
    lines = metrics_of(settings(output))
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line, expected in zip(lines, alone[0], strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert line["accuracy_by_depth"] == expected["accuracy_by_depth"]
    weights = torch.load(output / "weights.pt", weights_only=True)
    assert weights.keys() == alone[1].keys()
    for name, tensor in alone[1].items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_have_the_losses_of_one(alone, tmp_path, parallel):
    assert run_processes(tmp_path, 2, **SETTINGS, parallel=parallel) == [0, 0]
    check_same(alone, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_run_of_two_processes_goes_on_where_it_was_saved(alone, tmp_path, parallel):
    assert run_processes(tmp_path, 2, **SETTINGS, parallel=parallel, stop_after=3) == [7, 7]
    assert not (tmp_path / "weights.pt").exists()
    assert run_processes(tmp_path, 2, **SETTINGS, parallel=parallel) == [0, 0]
    check_same(alone, tmp_path)


def test_a_run_of_two_processes_that_shard_is_gone_on_with_by_one(alone, tmp_path):
    run_processes(tmp_path, 2, **SETTINGS, parallel="fsdp", stop_after=3)
    config = settings(tmp_path, **SETTINGS)
    trainer = new_trainer(tiny_target(), config)
    assert trainer.step == 2
    trainer.train(conversations(), ignore)
    torch.save(trainer.drafter.state_dict(), tmp_path / "weights.pt")
    check_same(alone, tmp_path)


@pytest.mark.slow
def test_two_processes_that_shard_learn_the_control_as_one_does(tmp_path):
    config = settings(tmp_path / "alone", method="eagle3", **SETTINGS)
    trainer = new_trainer(tiny_target(), config)
    trainer.train(conversations(), ignore)
    output = tmp_path / "together"
    assert run_processes(output, 2, **SETTINGS, parallel="fsdp", method="eagle3") == [0, 0]
    check_same((metrics_of(config), trainer.drafter.state_dict()), output)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_learn_the_pair_head_that_one_does(tmp_path, parallel):
    paired = {"pair_head": 4, "from_drafter": "earlier", "learning_rate": 0.1}
    config = settings(tmp_path / "alone", **SETTINGS, **paired)
    trainer = new_trainer(tiny_target(), config)
    untrained = trainer.drafter.pair_head.left.clone()
    trainer.train(conversations(), ignore)
    assert not torch.allclose(trainer.drafter.pair_head.left, untrained)
    output = tmp_path / "together"
    assert run_processes(output, 2, **SETTINGS, **paired, parallel=parallel) == [0, 0]
    check_same((metrics_of(config), trainer.drafter.state_dict()), output)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch_size": 1},
        {"micro_batch_size": 1, "num_partitions": 2, "checkpoint_activations": True, "parallel": "fsdp"},
    ],
    ids=["ddp", "fsdp"],
)
def test_micro_batches_of_two_processes_add_up(alone, tmp_path, changes):
    assert run_processes(tmp_path, 2, **(SETTINGS | changes)) == [0, 0]
    check_same(alone, tmp_path)


def test_a_batch_that_cannot_be_shared_is_refused(tmp_path):
    with pytest.raises(ConfigError) as caught:
        World(0, 3).check(settings(tmp_path, batch_size=4))
    assert caught.value.message == "batch_size 4 is not divisible by 3 processes"
    assert caught.value.hint == "use a multiple of 3"


def test_one_process_is_a_world_of_its_own():
    assert World.current() == World(0, 1) and World().is_main
    assert World().total(5) == World().least(5) == 5


@pytest.mark.parametrize("number", ["2", "two"])
def test_a_number_of_processes_that_nobody_started_is_explained(monkeypatch, number):
    monkeypatch.setenv("WORLD_SIZE", number)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError) as caught, joined_world():
        pass
    assert caught.value.message.startswith(f"WORLD_SIZE is {number!r}, but the process group cannot start: ")
    assert "RANK expected" in caught.value.message
    assert caught.value.hint == "start the processes with torchrun, or unset WORLD_SIZE to train in one process"
