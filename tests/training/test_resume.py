"""What happens to a run's state when something goes wrong: a number that is none, a disk that is full."""

import dataclasses
import errno
from pathlib import Path

import pytest

from peagle.errors import CheckpointError, ConfigError
from peagle.training.batches import Batches
from tiny import tiny_target
from tiny_runs import conversations, ignore, metrics_of, new_trainer, settings


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.mark.parametrize("culprit", ["weights", "gradient"])
def test_a_run_that_diverges_names_the_batch_and_keeps_the_state_from_before_it(target, tmp_path, culprit):
    config = settings(tmp_path, save_every=2, log_every=6)
    trainer = new_trainer(target, config)

    def on_step(step, metrics):
        if step == 3 and culprit == "weights":
            trainer.drafter.fc.weight.data.fill_(float("nan"))
        elif step == 3:
            trainer.drafter.fc.weight.register_hook(lambda grad: grad * float("inf"))

    rows = [dataclasses.replace(row, number=100 + index) for index, row in enumerate(conversations())]
    with pytest.raises(ConfigError) as caught:
        trainer.train(rows, on_step)
    batch = ", ".join(str(100 + index) for index in Batches(rows, config).documents(3))
    message = f"the loss or its gradient is not a number in step 4, of rows {batch}: training diverged; "
    assert caught.value.message.startswith(message)
    assert caught.value.message.endswith("training diverged; the state saved last is from before it")
    assert "lower learning_rate" in caught.value.hint and "inspect --rows" in caught.value.hint
    again = new_trainer(target, config)
    assert again.step == 2
    assert all(parameter.isfinite().all() for parameter in again.drafter.parameters())


def full_disk(path: Path) -> None:
    """Whatever is written to `path` meets a disk without room."""
    path.symlink_to("/dev/full")


def test_a_disk_that_is_full_while_saving_costs_only_the_steps_since_the_last_state(target, tmp_path):
    config = settings(tmp_path / "disturbed", save_every=2, log_every=2)
    trainer = new_trainer(target, config)

    def on_step(step, metrics):
        if step == 3:
            full_disk(config.output / "run" / "state.tmp")

    with pytest.raises(CheckpointError) as caught:
        trainer.train(conversations(), on_step)
    assert "the state after step 4 cannot be written to" in caught.value.message
    assert "No space left on device" in caught.value.message and "GiB free" in caught.value.message
    assert caught.value.message.endswith("the state saved before stands")
    assert "give the same command again" in caught.value.hint
    assert not (config.output / "run" / "state.tmp").exists()
    again = new_trainer(target, config)
    assert again.step == 2
    again.train(conversations(), ignore)
    quiet = settings(tmp_path / "quiet", save_every=2, log_every=2)
    new_trainer(target, quiet).train(conversations(), ignore)
    assert metrics_of(config) == metrics_of(quiet)


def test_metrics_that_cannot_be_written_are_said(target, tmp_path):
    config = settings(tmp_path, log_every=1)
    trainer = new_trainer(target, config)
    full_disk(tmp_path / "run" / "metrics.jsonl")
    with pytest.raises(CheckpointError) as caught:
        trainer.train(conversations(), ignore)
    assert caught.value.message.startswith("the metrics cannot be written to")
    assert f"[Errno {errno.ENOSPC}]" in caught.value.message
    assert caught.value.message.endswith("no state was saved before")
