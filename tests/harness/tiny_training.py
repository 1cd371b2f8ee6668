"""Training runs of a few steps on random text."""

import json
from pathlib import Path

import numpy as np

from harness.tiny_models import tiny_drafter
from peagle.data.conversations import Conversation
from peagle.objective.config import TrainConfig
from peagle.training.distributed import World, shard
from peagle.training.features import OnlineFeatures
from peagle.training.initial_drafter import with_new_pair_head
from peagle.training.resume import RunState
from peagle.training.run import OBJECTIVES
from peagle.training.trainer import Trainer

NUM_DRAFT_TOKENS = 3


def settings(output, **changes):
    values = {
        "num_layers": 1,
        "num_draft_tokens": NUM_DRAFT_TOKENS,
        "max_length": 16,
        "batch_size": 2,
        "num_steps": 6,
        "warmup_steps": 2,
        "log_every": 3,
        "save_every": 100,
        "compile": "off",
    }
    if changes.get("method") != "eagle3":
        values["labels"] = "all"  # random text is not what the target finds likeliest, so hardly any is reached
    return TrainConfig(data=Path("data.jsonl"), output=output, **(values | changes))


def conversations(num_rows=5, length=16):
    chance = np.random.default_rng(0)
    mask = np.arange(length) >= 4
    return [Conversation(chance.integers(3, 260, length).astype(np.int32), mask) for _ in range(num_rows)]


def new_trainer(target, config, world=World()):  # noqa: B008  # frozen
    switches = {"embeddings": config.embeddings, "parallel": config.method == "p-eagle"}
    drafter = tiny_drafter(target, num_layers=1, num_draft_tokens=NUM_DRAFT_TOKENS, **switches).requires_grad_(True)
    if config.pair_head is not None:
        drafter = with_new_pair_head(drafter, config.pair_head, config)
    if config.parallel == "fsdp" and world.size > 1:
        shard(drafter, target)
    objective = OBJECTIVES["pair head" if config.pair_head else config.method](drafter, config)
    return Trainer(drafter, objective, OnlineFeatures(target), config, RunState(config, world=world))


def ignore(step, metrics): ...


def metrics_of(config, without=("steps_per_second",)):
    lines = (config.output / "run" / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in without} for line in lines]
