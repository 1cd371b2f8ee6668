"""Measures training memory and the effect of settings: the tables of docs/guides/train.md and docs/log.md.

    python benchmarks/training.py memory [--shape llama-8b] [--length 20000] [--partitions 1 2 4 8] \\
        [--num-draft-tokens 8 16 32]
    python benchmarks/training.py ablations --data DIR --output DIR [--num-steps 500] [--only base tv lk ...] \\
        [--from-drafter shipped]

`memory` trains a random drafter for a few steps on sequences of random ids, for each number of depths and segments, and
prints planned and measured memory. `ablations` trains one drafter per changed setting, on the same data in the same
order, and prints loss and replayed acceptance. A few hundred steps from noise measure the first depths only, so with
--from-drafter all start from that drafter, with a low learning rate; changes of its shape are then left out. Finished
drafters are skipped, so rerun it to resume. Both need a GPU.
"""

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peagle.checkpoint.card import read_card
from peagle.checkpoint.native import drafter_directory
from peagle.data.conversations import Conversation
from peagle.objective.config import TrainConfig
from peagle.targets.hf import HFTarget
from peagle.targets.load import load_target
from peagle.targets.shapes import dummy_target
from peagle.training.distributed import World
from peagle.training.features import features_for
from peagle.training.initial_drafter import check_initial_drafter, initial_drafter
from peagle.training.planner import GIB, Sizes, estimate
from peagle.training.resume import RunState
from peagle.training.run import OBJECTIVES, train_drafter
from peagle.training.trainer import Trainer

NUM_MEASURED_STEPS = 3
NUM_DRAFT_TOKENS = 8
BASE: dict[str, Any] = {"num_draft_tokens": NUM_DRAFT_TOKENS, "init": "random", "loss": "ce"}
MORE_LAYERS = "the default ones and those halfway between"  # depends on the target
LOW_LEARNING_RATE = 3e-4  # of runs that start from a trained drafter
DECAY = tuple(round(0.8**depth, 6) for depth in range(NUM_DRAFT_TOKENS))
CHANGES: dict[str, dict[str, Any]] = {
    "base": {},
    "tv": {"loss": "tv+ce"},
    "tv-decay": {"loss": "tv+ce", "depth_weights": DECAY},
    "lk": {"loss": "lk"},
    "lk-decay": {"loss": "lk", "depth_weights": DECAY},
    "until-failure": {"labels": "until-failure"},
    "on-policy": {"labels": "on-policy"},
    "five-target-layers": {"aux_layer_ids": MORE_LAYERS},
    "six-layers": {"num_layers": 6},
    "two-layers": {"num_layers": 2},
    "one-layer": {"num_layers": 1},
    "own-embeddings": {"embeddings": "own"},
    "no-fc-norm": {"fc_norm": False},
    "retention": {"retention": 0.6},
    "all-labels": {"labels": "all"},
    "depth-weights": {"depth_weights": DECAY},
    "depth-16": {"num_draft_tokens": 16},
    "depth-16-no-floor": {"num_draft_tokens": 16, "deep_floor": 0.0},
    "from-target": {"init": "target"},
    "kl": {"loss": "kl"},
}
SHAPES = ("six-layers", "two-layers", "one-layer", "own-embeddings", "no-fc-norm", "from-target")
"""Changes that a trained drafter cannot take over."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    memory = actions.add_parser("memory", help="planned and measured memory by number of segments")
    memory.add_argument("--shape", default="llama-8b", help="shape of `peagle bench --dummy`, or a config.json")
    memory.add_argument("--length", type=int, default=20_000, help="tokens of the sequence")
    memory.add_argument("--partitions", type=int, nargs="+", default=[1, 2, 4, 8])
    memory.add_argument("--num-draft-tokens", type=int, nargs="+", default=[NUM_DRAFT_TOKENS])
    memory.add_argument("--batch-size", type=int, default=1, help="sequences of a step")
    memory.add_argument("--num-layers", type=int, default=4)
    ablations = actions.add_parser("ablations", help="one drafter per changed setting")
    ablations.add_argument("--data", type=Path, required=True, help="shards of `peagle data`")
    ablations.add_argument("--held-out", type=Path, default=None, help="default: some of the data's answers")
    ablations.add_argument("--output", type=Path, required=True)
    ablations.add_argument("--target", default=None, help="default: the embedded target")
    ablations.add_argument("--only", nargs="+", choices=list(CHANGES), default=None)
    ablations.add_argument("--from-drafter", default=None, help="directory, or `shipped`: start from this drafter")
    ablations.add_argument("--num-steps", type=int, default=500)
    ablations.add_argument("--batch-size", type=int, default=64)
    ablations.add_argument("--max-length", type=int, default=512)
    ablations.add_argument("--settings", nargs="*", default=[], metavar="NAME=JSON", help="TrainConfig of every run")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level="INFO", format="%(message)s")
    if arguments.action == "memory":
        compare_memory(arguments)
    else:
        compare_settings(arguments)


def compare_memory(arguments: argparse.Namespace) -> None:
    target = dummy_target(arguments.shape)
    rows = [f"{'depths':>6}  {'segments':>8}  {'planned':>9}  {'measured':>9}  {'s/step':>8}"]
    print(rows[0], flush=True)
    for num_draft_tokens, num_partitions in product(arguments.num_draft_tokens, arguments.partitions):
        planned, measured, seconds = train_on_noise(target, arguments, num_draft_tokens, num_partitions)
        held = "-" if measured is None else f"{measured / GIB:.1f} GiB"
        sizes = f"{num_draft_tokens:>6}  {num_partitions:>8}"
        rows.append(f"{sizes}  {planned / GIB:>5.1f} GiB  {held:>9}  {seconds:>8.3f}")
        print(rows[-1], flush=True)
    print("\n".join(["", *rows]))


def train_on_noise(
    target: HFTarget, arguments: argparse.Namespace, num_draft_tokens: int, num_partitions: int
) -> tuple[int, int | None, float]:
    """Planned bytes, peak bytes (None on a CPU), and seconds of the fastest step."""
    length, num_rows = arguments.length, arguments.batch_size
    token_ids = np.random.default_rng(0).integers(0, target.vocab_size, (num_rows, length)).astype(np.int32)
    conversations = [Conversation(row, np.arange(length) >= length // 20, n) for n, row in enumerate(token_ids, 1)]
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            data=Path(folder),
            output=Path(folder) / "drafter",
            num_layers=arguments.num_layers,
            num_draft_tokens=num_draft_tokens,
            mask_token_id=0,
            max_length=length,
            batch_size=num_rows,
            micro_batch_size=num_rows,
            num_partitions=num_partitions,
            num_steps=NUM_MEASURED_STEPS,
            log_every=1,
        )
        check_initial_drafter(target, config)
        drafter = initial_drafter(target, config, None)
        features_of = features_for(target, config, conversations, World())
        trainer = Trainer(drafter, OBJECTIVES[config.method](drafter, config), features_of, config, RunState(config))
        planned = estimate(Sizes.of(target, drafter, config), config, num_rows, num_partitions).total
        if target.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        times = [time.monotonic()]
        trainer.train(conversations, lambda step, metrics: times.append(time.monotonic()))
    seconds = min(end - start for start, end in pairwise(times))
    return planned, torch.cuda.max_memory_allocated() if target.device.type == "cuda" else None, seconds


def compare_settings(arguments: argparse.Namespace) -> None:
    target = load_target(arguments.target)
    common = {name: json.loads(value) for name, value in (pair.split("=", 1) for pair in arguments.settings)}
    names = arguments.only or list(CHANGES)
    if arguments.from_drafter is not None:
        path = None if arguments.from_drafter == "shipped" else arguments.from_drafter
        common = {"from_drafter": drafter_directory(path, target), "learning_rate": LOW_LEARNING_RATE} | common
        names = arguments.only or [name for name in names if name not in SHAPES]
    rows = [f"{'change':<18}  {'loss':>6}  {'replayed':>8}  {'K = 7':>6}  {'steps/s':>7}  accepted by depth"]
    for name in names:
        config = TrainConfig(
            data=arguments.data,
            held_out=arguments.held_out,
            output=arguments.output / name,
            max_length=arguments.max_length,
            batch_size=arguments.batch_size,
            num_steps=arguments.num_steps,
            warmup_steps=max(1, arguments.num_steps // 10),
            save_every=arguments.num_steps,
            log_every=max(1, arguments.num_steps // 10),
            **_changed(target, BASE | common | CHANGES[name]),
        )
        if not (config.output / "model.safetensors").exists():
            train_drafter(target, config, print_metrics)
        rows.append(_row(name, config.output))
        print("\n".join(["", *rows, ""]), flush=True)


def _changed(target: HFTarget, settings: dict[str, Any]) -> dict[str, Any]:
    if settings.get("aux_layer_ids") != MORE_LAYERS:
        return settings
    usual = target.default_aux_layer_ids
    between = {(lower + upper) // 2 for lower, upper in pairwise(usual)}
    return settings | {"aux_layer_ids": tuple(sorted({*usual, *between}))}


def print_metrics(step: int, metrics: dict[str, Any] | None) -> None:
    if metrics is not None:
        print(json.dumps(metrics), flush=True)


def _row(name: str, directory: Path) -> str:
    card = read_card(directory)
    assert card is not None, "trained drafters have one"
    lines = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "loss" in line][-1]
    replayed = card.acceptance.get("held_out_replay", {"acceptance_length": float("nan"), "per_position": []})
    shares = " ".join(f"{share:.3f}" for share in replayed["per_position"])
    chain = 1 + sum(replayed["per_position"][:7])  # what deeper drafters are compared by
    figures = f"{last['loss']:>6.3f}  {replayed['acceptance_length']:>8.3f}  {chain:>6.3f}"
    return f"{name:<18}  {figures}  {last['steps_per_second']:>7.2f}  {shares}"


if __name__ == "__main__":
    main()
