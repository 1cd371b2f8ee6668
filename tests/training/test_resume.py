"""What happens to a run's state when something goes wrong: a number that is none, a disk that is full."""

import dataclasses
import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from harness.tiny_models import tiny_target
from harness.tiny_training import conversations, ignore, metrics_of, new_trainer, settings
from peagle.checkpoint.card import read_card
from peagle.errors import CheckpointError, ConfigError
from peagle.objective.batches import Batches
from peagle.training.run import train_drafter


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
    message = f"training diverged: loss or gradient is NaN or infinite in step 4 (rows {batch}); "
    assert caught.value.message == message + "the last saved state is from before it"
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
            full_disk(config.output / "run" / "state.pt.tmp")

    with pytest.raises(CheckpointError) as caught:
        trainer.train(conversations(), on_step)
    assert "cannot write the state of step 4 to" in caught.value.message
    assert "No space left on device" in caught.value.message and "GiB free" in caught.value.message
    assert caught.value.message.endswith("the previous state is intact")
    assert "rerun the command to resume" in caught.value.hint
    assert not (config.output / "run" / "state.pt.tmp").exists()
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
    assert caught.value.message.startswith("cannot write metrics.jsonl to")
    assert f"[Errno {errno.ENOSPC}]" in caught.value.message
    assert caught.value.message.endswith("no state was saved before")


@pytest.mark.slow
def test_a_run_resumes_without_the_drafter_it_started_from(target, tmp_path):
    """The saved state has the weights, settings.json the shape and the hash: `--from` may be gone."""
    data, earlier = tmp_path / "rows.jsonl", tmp_path / "earlier"
    rows = [{"prompt_ids": [3, 4, 5], "answer_ids": list(range(start, start + 12))} for start in (20, 40, 60, 80)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def config_of(output, **changes):
        shape = {"num_steps": 3, "log_every": 1, "draft_vocab_size": 30, "num_held_out": 0}
        return dataclasses.replace(settings(output, **shape | changes), data=data)

    def interrupt(step, metrics):
        raise KeyboardInterrupt

    train_drafter(target, config_of(earlier, aux_layer_ids=(0, 2)), ignore)
    unbroken = config_of(tmp_path / "unbroken", from_drafter=earlier, num_draft_tokens=2)
    train_drafter(target, unbroken, ignore)
    config = dataclasses.replace(unbroken, output=tmp_path / "resumed")
    with pytest.raises(KeyboardInterrupt):
        train_drafter(target, config, interrupt)
    shutil.rmtree(earlier)
    train_drafter(target, config, ignore)
    assert metrics_of(config) == metrics_of(unbroken)
    cards = [read_card(one.output) for one in (config, unbroken)]
    assert cards[0].training["from_drafter"] == cards[1].training["from_drafter"]
    assert cards[0].data == cards[1].data and cards[0].aux_layer_ids == (0, 2)
    found, expected = (load_file(one.output / "model.safetensors") for one in (config, unbroken))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
