"""The training loop: its gradients, its schedule, and going on after an interruption as if there had been none."""

import math
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.tiny_models import tiny_drafter, tiny_target
from harness.tiny_training import NUM_DRAFT_TOKENS, conversations, ignore, metrics_of, new_trainer, settings
from peagle.data.conversations import Conversation
from peagle.errors import CheckpointError, ConfigError
from peagle.objective.batches import Batches
from peagle.objective.p_eagle import ParallelObjective
from peagle.training.features import OnlineFeatures
from peagle.training.optimizer import learning_rate
from peagle.training.resume import RunState
from peagle.training.trainer import Trainer


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def stop_after(num_steps):
    def on_step(step, metrics):
        if step == num_steps:
            raise KeyboardInterrupt

    return on_step


def weights(trainer):
    return {name: tensor.clone() for name, tensor in trainer.drafter.state_dict().items()}


def assert_same_weights(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def test_overfitting_one_batch_lowers_the_loss_and_leaves_the_target_alone(target, tmp_path):
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    config = settings(tmp_path, num_steps=40, log_every=5, learning_rate=3e-3)
    trainer = new_trainer(target, config)
    trainer.train(conversations(2), ignore)
    losses = [line["loss"] for line in metrics_of(config)]
    assert losses[-1] < 0.5 * losses[0], losses
    accuracies = [line["accuracy_by_depth"] for line in metrics_of(config)]
    assert accuracies[-1][0] > accuracies[0][0]
    for name, tensor in target.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_own_embeddings_are_trained_and_the_targets_are_not(target, tmp_path):
    table = target.embedding_VD.clone()
    trainer = new_trainer(target, settings(tmp_path, embeddings="own", num_steps=2))
    trainer.train(conversations(), ignore)
    assert torch.equal(target.embedding_VD, table)
    assert not torch.equal(trainer.drafter.embed_tokens.weight, table)


def test_a_batch_without_labels_leaves_no_trace_but_weight_decay(target, tmp_path):
    rows = [Conversation(np.arange(5, 9, dtype=np.int32), np.array([False, False, False, True]))]
    trainer = new_trainer(target, settings(tmp_path, num_steps=1, weight_decay=0.0))
    before = weights(trainer)
    trainer.train(rows, ignore)
    assert_same_weights(weights(trainer), before)
    assert metrics_of(trainer.config)[0]["loss"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_target_in_half_precision_can_be_imitated_on_a_cpu_too(tmp_path, dtype):
    target = tiny_target(num_layers=2)
    target.model.to(dtype)
    config = settings(tmp_path, num_steps=3, log_every=1)
    trainer = new_trainer(target, config)
    trainer.train(conversations(), ignore)
    assert all(math.isfinite(line["loss"]) for line in metrics_of(config))
    assert {parameter.dtype for parameter in trainer.drafter.parameters()} == {torch.float32}


def test_a_run_that_diverges_is_stopped_with_advice_and_its_state_is_not_saved(target, tmp_path):
    trainer = new_trainer(target, settings(tmp_path))
    with torch.no_grad():
        trainer.drafter.fc.weight.fill_(float("nan"))
    with pytest.raises(ConfigError) as caught:
        trainer.train(conversations(), ignore)
    assert caught.value.message.startswith("training diverged: loss or gradient is NaN or infinite in step 1 (rows ")
    assert caught.value.message.endswith("; no state was saved before it")
    assert "learning_rate" in caught.value.hint and not trainer.run.can_continue


def test_the_optimizer_follows_the_schedule_and_decays_matrices_only(target, tmp_path):
    trainer = new_trainer(target, settings(tmp_path))
    matrices, vectors = trainer.optimizer.param_groups
    assert matrices["weight_decay"] == 0.05 and vectors["weight_decay"] == 0.0
    assert any(parameter is trainer.drafter.mask_hidden for parameter in vectors["params"])
    trainer.train_step(Batches(conversations(), trainer.config).make(0))
    assert matrices["lr"] == vectors["lr"] == learning_rate(0, trainer.config)
    assert trainer.step == 1


def test_a_line_of_metrics_is_the_mean_over_the_labels_since_the_last_one(target, tmp_path, uninterrupted):
    config = settings(tmp_path, log_every=1, num_steps=6)
    new_trainer(target, config).train(conversations(), ignore)
    counts = [Batches(conversations(), config).make(step).num_labels for step in range(6)]
    losses = [line["loss"] for line in metrics_of(config)]
    for line, steps in zip(uninterrupted[1], (slice(0, 3), slice(3, 6)), strict=True):
        assert line["loss"] == pytest.approx(np.average(losses[steps], weights=counts[steps]), rel=1e-5)


@pytest.fixture(scope="module")
def uninterrupted(target, tmp_path_factory):
    config = settings(tmp_path_factory.mktemp("uninterrupted"))
    trainer = new_trainer(target, config)
    trainer.train(conversations(), ignore)
    return weights(trainer), metrics_of(config)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 5])
def test_a_run_interrupted_after_n_steps_goes_on_with_the_very_losses(target, tmp_path, uninterrupted, num_steps):
    config = settings(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        new_trainer(target, config).train(conversations(), stop_after(num_steps))
    second = new_trainer(target, config)
    assert second.step == num_steps
    second.train(conversations(), ignore)
    assert_same_weights(weights(second), uninterrupted[0])
    assert metrics_of(config) == uninterrupted[1]


def test_a_killed_run_goes_on_from_the_last_saved_state_with_the_very_losses(target, tmp_path, uninterrupted):
    config = settings(tmp_path, save_every=2)

    class Killed(BaseException):
        pass

    def on_step(step, metrics):
        if step == 5:
            raise Killed

    with pytest.raises(Killed):
        new_trainer(target, config).train(conversations(), on_step)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # cut off while it was written
    second = new_trainer(target, config)
    assert second.step == 4
    second.train(conversations(), ignore)
    assert_same_weights(weights(second), uninterrupted[0])
    assert metrics_of(config) == uninterrupted[1]


@pytest.mark.parametrize("place", ["before", "accumulate_gradients", "optimizer"])
def test_an_interruption_in_the_middle_of_a_step_does_not_tear_the_state(
    target, tmp_path, monkeypatch, uninterrupted, place
):
    config = settings(tmp_path, save_every=2)
    first = new_trainer(target, config)

    def interrupted(function):
        def run(*arguments, **settings):
            result = function(*arguments, **settings)
            if first.step == 3:
                raise KeyboardInterrupt
            return result

        return run

    with monkeypatch.context() as patch:
        if place == "before":
            patch.setattr(first.optimizer, "zero_grad", interrupted(first.optimizer.zero_grad))
        elif place == "accumulate_gradients":
            patch.setattr(first, "accumulate_gradients", interrupted(first.accumulate_gradients))
        else:
            patch.setattr(first.optimizer, "step", interrupted(first.optimizer.step))
        with pytest.raises(KeyboardInterrupt):
            first.train(conversations(), ignore)
    second = new_trainer(target, config)
    assert second.step == (2 if place == "optimizer" else 3)
    second.train(conversations(), ignore)
    assert_same_weights(weights(second), uninterrupted[0])
    assert metrics_of(config) == uninterrupted[1]


def test_a_process_that_is_killed_leaves_a_state_another_process_goes_on_from(tmp_path, target, uninterrupted):
    script = textwrap.dedent(
        """
        import os, signal, sys
        from pathlib import Path
        import torch
        torch.set_num_threads(1)
        sys.path[:0] = sys.argv[2:]
        from test_trainer import conversations, new_trainer, settings, tiny_target

        def on_step(step, metrics):
            if step == 5:
                os.kill(os.getpid(), signal.SIGKILL)

        new_trainer(tiny_target(), settings(Path(sys.argv[1]), save_every=2)).train(conversations(), on_step)
        """
    )
    here = Path(__file__).parent
    command = [sys.executable, "-c", script, str(tmp_path), str(here), str(here.parent)]
    status = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert status.returncode == -signal.SIGKILL, status.stderr
    config = settings(tmp_path, save_every=2)
    second = new_trainer(target, config)
    assert second.step == 4
    second.train(conversations(), ignore)
    assert_same_weights(weights(second), uninterrupted[0])
    assert metrics_of(config) == uninterrupted[1]


def test_measurements_are_logged_at_every_save_once_even_if_one_was_interrupted(target, tmp_path):
    config = settings(tmp_path, save_every=2, log_every=100)
    measured = []

    def measure(step):
        measured.append(step)
        if measured == [2, 4]:
            raise KeyboardInterrupt
        return {"value": step * 10}

    with pytest.raises(KeyboardInterrupt):
        new_trainer(target, config).train(conversations(), ignore, measure)
    new_trainer(target, config).train(conversations(), ignore, measure)
    assert measured == [2, 4, 4, 6]
    lines = [line for line in metrics_of(config) if "loss" not in line]
    assert lines == [{"step": step, "value": step * 10} for step in (2, 4, 6)]
    new_trainer(target, config).train(conversations(), ignore, measure)
    assert measured == [2, 4, 4, 6], "a finished run has nothing left to measure"


def interrupted_run(target, output, **changes):
    config = settings(output, **changes)
    with pytest.raises(KeyboardInterrupt):
        new_trainer(target, config).train(conversations(), stop_after(2))
    return config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"learning_rate": 0.5}, "learning_rate was 0.001, is 0.5"),
        ({"seed": 4}, "seed was 0, is 4"),
        ({"aux_layer_ids": (1, 2)}, "aux_layer_ids was None, is [1, 2]"),
        ({"held_out": Path("x")}, "held_out was None, is 'x'"),
    ],
)
def test_an_unfinished_run_with_other_settings_is_refused_with_the_setting(target, tmp_path, change, words):
    interrupted_run(target, tmp_path)
    before = (tmp_path / "run" / "settings.json").read_text()
    with pytest.raises(ConfigError) as caught:
        RunState(settings(tmp_path, **change))
    assert words in caught.value.message and "unfinished run with other settings" in caught.value.message
    assert "a new --output" in caught.value.hint
    assert (tmp_path / "run" / "settings.json").read_text() == before


def test_an_unfinished_run_on_another_target_or_other_data_is_refused(tmp_path, target):
    config = settings(tmp_path)
    drafter = tiny_drafter(target, num_layers=1, num_draft_tokens=NUM_DRAFT_TOKENS).requires_grad_(True)
    objective, run = ParallelObjective(drafter, config), RunState(config, {"target_weights": "a"})
    trainer = Trainer(drafter, objective, OnlineFeatures(target), config, run)
    with pytest.raises(KeyboardInterrupt):
        trainer.train(conversations(), stop_after(1))
    RunState(config, {"target_weights": "a"})
    with pytest.raises(ConfigError, match="target_weights was 'a', is 'b'"):
        RunState(config, {"target_weights": "b"})


def test_how_often_a_run_saves_and_logs_may_change_when_it_goes_on(target, tmp_path, uninterrupted):
    interrupted_run(target, tmp_path)
    second = new_trainer(target, settings(tmp_path, save_every=1, log_every=1))
    second.train(conversations(), ignore)
    assert_same_weights(weights(second), uninterrupted[0])


@pytest.mark.parametrize("damage", ["truncated", "empty", "text", "other"])
def test_a_state_that_cannot_be_read_is_refused_with_a_hint(target, tmp_path, damage):
    config = interrupted_run(target, tmp_path)
    state = tmp_path / "run" / "state.pt"
    if damage == "truncated":
        state.write_bytes(state.read_bytes()[:-2000])
    elif damage == "other":
        torch.save({"step": 1}, state)
    else:
        state.write_bytes(b"" if damage == "empty" else b"not a state")
    with pytest.raises(CheckpointError) as caught:
        new_trainer(target, config)
    assert str(state) in caught.value.message and "cannot read" in caught.value.message
    assert caught.value.hint.endswith("delete it to train from the start")
    state.unlink()
    assert new_trainer(target, config).step == 0, "the hint works"


@pytest.mark.parametrize("content", [None, '{"seed"'])
def test_a_state_without_readable_settings_is_refused(target, tmp_path, content):
    config = interrupted_run(target, tmp_path)
    path = tmp_path / "run" / "settings.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(CheckpointError) as caught:
        RunState(config)
    assert (
        "settings.json, the settings of the unfinished run" in caught.value.message and "state.pt" in caught.value.hint
    )


def test_finishing_drops_the_state_and_keeps_settings_and_metrics(target, tmp_path):
    config = settings(tmp_path)
    trainer = new_trainer(target, config)
    trainer.train(conversations(), ignore)
    assert trainer.run.can_continue, "until the drafter is written, the run can be gone on with"
    trainer.run.finish()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["metrics.jsonl", "settings.json"]
