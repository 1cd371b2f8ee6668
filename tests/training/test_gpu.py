"""Compiled training on a GPU: what a CPU learns in float32, within the memory that was planned."""

import argparse
import json
import runpy
from pathlib import Path

import numpy as np
import pytest

from harness.tiny_models import tiny_target
from peagle.objective.config import TrainConfig
from peagle.targets.shapes import dummy_target
from peagle.training.run import train_drafter

pytestmark = [
    pytest.mark.gpu,
    # torch's compiler asks every tensor for its gradient, and hides the warning from all who do not make it an error.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "training.py"))
SHAPE = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32_000,
    "max_position_embeddings": 8192,
}


def losses_on(device: str, directory: Path, **changes: object) -> list[float]:
    """The losses of a few steps on random text, in float32."""
    chance = np.random.default_rng(0)
    rows = [chance.integers(3, 260, length).tolist() for length in (60, 100, 33, 128, 90, 41)]
    data = directory / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt_ids": ids[:7], "answer_ids": ids[7:]}) + "\n" for ids in rows))
    target = tiny_target()
    target.model.to(device)
    settings = {"num_layers": 2, "num_draft_tokens": 4, "max_length": 128, "batch_size": 2, "num_steps": 5}
    settings |= {"warmup_steps": 1, "log_every": 1, "num_held_out": 0}
    if changes.get("method") != "eagle3":
        settings["labels"] = "all"  # of random text hardly any label is reached
    settings |= changes
    losses: list[float] = []

    def on_step(step: int, metrics: dict | None) -> None:
        assert metrics is not None
        losses.append(metrics["loss"])

    train_drafter(target, TrainConfig(data=data, output=directory / device, **settings), on_step)
    return losses


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_partitions": 3},
        {"labels": "reached", "loss": "kl+ce", "checkpoint_activations": True},
        {"embeddings": "own", "draft_vocab_size": 100, "micro_batch_size": 1},
        {"method": "eagle3", "num_layers": 1},
        {"features": "cached"},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())) or "default",
)
def test_a_gpu_learns_what_a_cpu_does(tmp_path: Path, changes: dict[str, object]) -> None:
    expected = losses_on("cpu", tmp_path, compile="off", **changes)
    assert len(expected) == 5 and expected[-1] < expected[0]
    assert losses_on("cuda", tmp_path, compile="on", **changes) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("num_partitions", [1, 4])
def test_a_step_holds_the_memory_that_was_planned(tmp_path: Path, num_partitions: int) -> None:
    (tmp_path / "shape.json").write_text(json.dumps(SHAPE))
    target = dummy_target(str(tmp_path / "shape.json"), device="cuda")
    options = argparse.Namespace(length=8192, num_layers=4, batch_size=1)
    planned, measured, _ = BENCHMARK["train_on_noise"](target, options, 8, num_partitions)
    assert measured == pytest.approx(planned, rel=0.15)
