"""What a pair head gains: trains one for a drafter and decodes with and without it, as a chain and as trees.

    python benchmarks/pair_head.py --prompts question.jsonl HumanEval.jsonl.gz --output runs/pairs

The target writes the text first, into OUTPUT/data, unless --data names some. With several --ranks and --tables, each
combination is trained. What is finished is kept, so rerun the command to resume. Made for a GPU; a tiny target also
runs on a CPU.
"""

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tree_acceptance import add_arguments, compare

from peagle.checkpoint.card import read_card
from peagle.checkpoint.native import drafter_directory, load_drafter
from peagle.data.config import SynthesisConfig, Until
from peagle.data.synthesis import write_synthesis
from peagle.objective.config import TrainConfig
from peagle.targets.hf import HFTarget
from peagle.targets.load import load_target
from peagle.training.run import train_drafter

SHAPE = ("num_layers", "num_draft_tokens", "fc_norm", "norm_before_fc", "embeddings")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--target", default=None, help="default: the embedded target")
    parser.add_argument("--drafter", default=None, help="default: the target's")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--data", type=Path, default=None, help="shards of `peagle data`, or conversations")
    parser.add_argument("--num-tokens", type=int, default=8_000_000, help="answer tokens to write without --data")
    parser.add_argument("--ranks", type=int, nargs="+", default=[128])
    parser.add_argument("--tables", nargs="+", choices=["projected", "free"], default=["projected"])
    parser.add_argument("--num-steps", type=int, default=1500)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    options = parser.parse_args(argv)
    logging.basicConfig(level="INFO", format="%(message)s")

    target = load_target(options.target, dtype=options.dtype)
    if options.data is None:
        options.data = options.output / "data"
        config = SynthesisConfig(max_length=options.max_length, num_held_out=96)
        write_synthesis(target, options.data, config, Until(num_tokens=options.num_tokens), (), config.described())
    drafters = {"no": load_drafter(options.drafter, target).without_pair_head()}
    for rank in options.ranks:
        for tables in options.tables:
            directory = trained(target, options, rank, tables)
            print_replay(directory, rank, tables)
            drafters[f"rank {rank} {tables}"] = load_drafter(directory, target)
    compare(target, drafters, options)


def trained(target: HFTarget, options: argparse.Namespace, rank: int, tables: Any) -> Path:
    """The directory of the drafter with a trained head."""
    earlier = drafter_directory(options.drafter, target)
    shape = load_drafter(earlier, target).config
    config = TrainConfig(
        data=options.data,
        output=options.output / f"{tables}-{rank}",
        from_drafter=earlier,
        pair_head=rank,
        pair_tables=tables,
        num_steps=options.num_steps,
        warmup_steps=max(1, options.num_steps // 20),
        save_every=max(1, options.num_steps // 3),
        log_every=max(1, options.num_steps // 30),
        batch_size=options.batch_size,
        max_length=options.max_length,
        learning_rate=options.learning_rate,
        draft_vocab_size=shape.draft_vocab_size if shape.draft_vocab_size < shape.vocab_size else None,
        **{name: getattr(shape, name) for name in SHAPE},
    )
    if not (config.output / "model.safetensors").exists():
        train_drafter(target, config, print_metrics)
    return config.output


def print_replay(directory: Path, rank: int, tables: str) -> None:
    """The held-out acceptance of the card, by depth."""
    card = read_card(directory)
    assert card is not None, "trained drafters have one"
    for name, entry in card.acceptance.items():
        shares = " ".join(f"{share:.3f}" for share in entry["per_position"])
        print(f"rank {rank} {tables}, {name}: {entry['acceptance_length']:.3f} ({shares})", flush=True)


def print_metrics(step: int, metrics: dict[str, Any] | None) -> None:
    if metrics is not None:
        print(json.dumps(metrics), flush=True)


if __name__ == "__main__":
    main()
