"""How the drafters that ship for the embedded target were trained.

    python recipes/embedded_drafter.py synthesize --work runs/embedded --seconds 200 --given gsm8k_train.jsonl
    python recipes/embedded_drafter.py answer     --work runs/embedded --prompts mt_bench=question.jsonl ...
    python recipes/embedded_drafter.py train      --work runs/embedded --settings num_steps=6000
    python recipes/embedded_drafter.py replay     --work runs/embedded
    python recipes/embedded_drafter.py average    --work runs/embedded --drafters DIR DIR --share 0.7 --output averaged

The shipped drafters took 7,800 steps on rows of 512 tokens in three runs, the first with KL and all labels. P-EAGLE's
took 2,900 more on rows of 8,192, an average with the drafter before (share 0.7), 3,200 more, a pair head, and such an
average again (docs/log.md). This script does what `peagle data` and `peagle train` do with these settings, but needs
only torch, transformers, numpy and safetensors. Needs one GPU. Rerun an interrupted stage and it resumes.
"""

import argparse
import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from peagle.checkpoint.layouts import PAIR_HEAD_NAME, WEIGHTS_NAME
from peagle.checkpoint.native import load_drafter
from peagle.data.config import RegenerationConfig, SynthesisConfig, Until
from peagle.data.conversations import read_conversations
from peagle.data.generation import drafter_for
from peagle.data.prompts import read_dialogs
from peagle.data.regeneration import answer_dialogs
from peagle.data.synthesis import write_synthesis
from peagle.objective.config import TrainConfig
from peagle.targets.hf import HFTarget
from peagle.targets.load import load_target
from peagle.training.replay import replay
from peagle.training.run import train_drafter

NUM_HELD_OUT = 96  # greedy answers held out to measure acceptance during training
NUM_ANSWER_TOKENS = 256  # per greedy answer of the replayed sets
NUM_REPLAYED = 80  # prompts per replayed set
TRAINING: dict[str, Any] = {
    "num_layers": 4,
    "num_draft_tokens": 8,
    "init": "random",
    "loss": "ce",
    "batch_size": 64,
    "log_every": 50,
    "save_every": 1000,
}
REPLAYED_DEPTHS = (3, 5, 7)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", choices=["synthesize", "answer", "train", "average", "replay"])
    parser.add_argument("--work", type=Path, required=True, help="working directory")
    parser.add_argument("--target", default=None, help="directory or GGUF file (default: the embedded target)")
    parser.add_argument("--given", type=Path, nargs="*", default=[], help="prompt files the target also answers")
    parser.add_argument("--prompts", nargs="*", default=[], metavar="NAME=FILE", help="sets to replay, 80 of each")
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--drafter", default=None, help="for synthesize; default: the shipped one; none: no drafts")
    parser.add_argument("--num-tokens", type=int, default=None, help="stop at this many answer tokens")
    parser.add_argument("--max-batch", type=int, default=None, help="default: 1024 on a GPU, 16 on a CPU")
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--max-answer-tokens", type=int, default=1024)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.0, 0.7, 1.0], help="of the answers")
    parser.add_argument("--kinds", default=None, help="share of each kind of text, as in `peagle data synthesize`")
    parser.add_argument("--strict", action="store_true", help="drop truncated and looping answers")
    parser.add_argument("--settings", nargs="*", default=[], metavar="NAME=JSON", help="of TrainConfig")
    parser.add_argument("--output", default="drafter", help="name of the drafter's directory inside --work")
    parser.add_argument("--drafters", type=Path, nargs=2, help="to average; the second gives config and card")
    parser.add_argument("--share", type=float, default=0.5, help="of the second drafter in the average")
    arguments = parser.parse_args(argv)
    if "average" in arguments.stages and arguments.drafters is None:
        parser.error("average needs --drafters DIR DIR")
    logging.basicConfig(level="INFO", format="%(message)s")
    logging.getLogger("httpx").setLevel("WARNING")
    target = load_target(arguments.target)
    if "synthesize" in arguments.stages:
        write_training_text(target, arguments)
    if "answer" in arguments.stages:
        write_answers(target, arguments)
    if "train" in arguments.stages:
        train(target, arguments)
    if "average" in arguments.stages:
        average(*arguments.drafters, arguments.share, arguments.work / arguments.output)
    if "replay" in arguments.stages:
        replay_sets(target, arguments)


def write_training_text(target: HFTarget, arguments: argparse.Namespace) -> None:
    config = SynthesisConfig(
        max_length=arguments.max_length,
        max_answer_tokens=arguments.max_answer_tokens,
        temperatures=tuple(arguments.temperatures),
        kinds=arguments.kinds,
        keep_cut=not arguments.strict,
        keep_loops=not arguments.strict,
        num_held_out=NUM_HELD_OUT,
    )
    given = [dialog for path in arguments.given for dialog in read_dialogs(path)]
    until = Until(seconds=arguments.seconds, num_tokens=arguments.num_tokens)
    settings = config.described(*arguments.given)
    output = arguments.work / "data"
    drafter = drafter_for(target, arguments.drafter, config.max_length)
    options: dict[str, Any] = {"drafter": drafter, "max_batch": arguments.max_batch}
    counts = write_synthesis(target, output, config, until, given, settings, **options)
    print(f"synthesized {counts}", flush=True)


def write_answers(target: HFTarget, arguments: argparse.Namespace) -> None:
    config = RegenerationConfig(
        max_length=arguments.max_length, max_answer_tokens=NUM_ANSWER_TOKENS, max_turns=1, temperatures=(0.0,)
    )
    for name, path in (pair.split("=", 1) for pair in arguments.prompts):
        dialogs = read_dialogs(path, limit=NUM_REPLAYED)
        settings = config.described(Path(path), limit=NUM_REPLAYED)
        output = arguments.work / f"answers-{name}"
        counts = answer_dialogs(target, dialogs, output, config, settings, max_batch=arguments.max_batch)
        print(f"{name}: {counts['num_rows']} answers of {len(dialogs)} prompts", flush=True)


def train(target: HFTarget, arguments: argparse.Namespace) -> None:
    given = {name: json.loads(value) for name, value in (pair.split("=", 1) for pair in arguments.settings)}
    if "from_drafter" in given:
        given["from_drafter"] = Path(given["from_drafter"])
    config = TrainConfig(
        data=arguments.work / "data",
        held_out=arguments.work / "data" / "held_out",
        output=arguments.work / arguments.output,
        **({"max_length": arguments.max_length} | TRAINING | given),
    )
    train_drafter(target, config, print_metrics)


def average(first: Path, second: Path, share: float, output: Path) -> None:
    """Average the weights of two drafters, the second trained from the first. It may keep what each is good at."""
    before, after = (load_file(directory / WEIGHTS_NAME) for directory in (first, second))
    mixed = {name: torch.lerp(before[name].float(), after[name].float(), share).to(after[name].dtype) for name in after}
    shutil.copytree(second, output, ignore=shutil.ignore_patterns("run", WEIGHTS_NAME, PAIR_HEAD_NAME))
    save_file(mixed, output / WEIGHTS_NAME, metadata={"format": "pt"})


def print_metrics(step: int, metrics: dict[str, Any] | None) -> None:
    if metrics is not None:
        print(json.dumps(metrics), flush=True)


def replay_sets(target: HFTarget, arguments: argparse.Namespace) -> None:
    drafter = load_drafter(arguments.work / arguments.output, target)
    for path in [*sorted(arguments.work.glob("answers-*")), arguments.work / "data" / "held_out"]:
        limits = {"max_length": target.max_length, "vocab_size": target.vocab_size}
        rows = read_conversations(path, target.tokenizer, **limits).conversations
        for num_draft_tokens in drafter.config.depths_within(REPLAYED_DEPTHS):
            result = replay(target, drafter, rows, num_draft_tokens)
            shares = " ".join(f"{share:.3f}" for share in result.per_position)
            name = f"{path.name} K={num_draft_tokens}"
            print(f"{name} AL={result.acceptance_length:.3f} per position {shares}", flush=True)


if __name__ == "__main__":
    main()
