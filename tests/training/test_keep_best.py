"""keep_best: a run ends with the save of the best replayed acceptance, also if it was interrupted after that save."""

import json

import pytest
import torch

from harness.tiny_models import tiny_target
from harness.tiny_training import conversations, ignore, settings
from peagle.checkpoint.card import read_card
from peagle.checkpoint.native import load_drafter
from peagle.decoding.acceptance import Acceptance
from peagle.errors import ConfigError
from peagle.training import run
from peagle.training.data import RunText
from peagle.training.run import train_drafter


def text(num_held_out=2):
    facts = {"num_conversations": 5, "num_answer_tokens": 60, "num_cut": 0, "num_dropped": 0, "name": "random"}
    return RunText(conversations(), conversations(7)[:num_held_out], facts)


@pytest.mark.slow
def test_the_best_save_is_kept_and_an_interrupted_run_remembers_it(tmp_path, monkeypatch):
    """Replay finds the second of four saves best; the run is interrupted after it."""
    target, measure, saved = tiny_target(), run._replayed, []

    def measured(target, drafter, rows, depth):
        saved.append({name: tensor.clone() for name, tensor in drafter.state_dict().items()})
        accepted = [1, 3, 2, 0]
        if len(saved) > len(accepted):
            return measure(target, drafter, rows, depth)
        return Acceptance.of([accepted[len(saved) - 1]], depth), {}

    def interrupt(step, metrics):
        if step == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(run, "_replayed", measured)
    config = settings(tmp_path / "drafter", num_steps=8, save_every=2, log_every=2, keep_best=True)
    with pytest.raises(KeyboardInterrupt):
        train_drafter(target, config, interrupt, text())
    assert len(saved) == 2
    train_drafter(target, config, ignore, text())
    kept = load_drafter(config.output, target).state_dict()
    assert all(torch.equal(kept[name], tensor) for name, tensor in saved[1].items())
    assert any(not torch.equal(kept[name], tensor) for name, tensor in saved[3].items())
    assert read_card(config.output).training["num_steps_done"] == 4
    lines = [json.loads(line) for line in (config.output / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["replay"]["acceptance_length"] for line in lines if "replay" in line] == [2.0, 4.0, 3.0, 1.0]
    assert not (config.output / "run" / "best").exists()


def test_without_held_out_answers_there_is_no_best(tmp_path):
    with pytest.raises(ConfigError, match="keep_best needs held-out answers"):
        train_drafter(tiny_target(), settings(tmp_path / "drafter", keep_best=True), ignore, text(num_held_out=0))
