"""How the drafter that ships for the embedded target was made: the target writes, answers, and is imitated.

    python recipes/embedded_drafter.py synthesize --work runs/embedded --seconds 200 --given gsm8k_train.jsonl
    python recipes/embedded_drafter.py answer     --work runs/embedded --prompts mt_bench=question.jsonl ...
    python recipes/embedded_drafter.py train      --work runs/embedded --num-steps 4000
    python recipes/embedded_drafter.py replay     --work runs/embedded

Wants one GPU. Needs only peagle's core, so that it runs on machines where nothing can be installed.
"""

import argparse
import json
import logging
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from peagle.bench.workloads import read_prompts
from peagle.drafter.checkpoint import load_drafter
from peagle.targets.hf import HFTarget
from peagle.targets.load import load_target
from peagle.tokenizer import render_chat
from peagle.training.config import TrainConfig
from peagle.training.conversations import read_conversations
from peagle.training.replay import replay
from peagle.training.run import train_drafter
from peagle.training.synthesis import (
    SeatedGenerator,
    SynthesisConfig,
    SynthesisCounts,
    answer_greedily,
    synthesize,
)

NUM_HELD_OUT = 96  # greedy answers of the synthesis kept aside to watch the training by
NUM_ANSWER_TOKENS = 256  # of the greedy answers to the sets that are replayed
SECONDS_BETWEEN_REPORTS = 20


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", choices=["synthesize", "answer", "train", "replay"])
    parser.add_argument("--work", type=Path, required=True, help="directory of the run's files")
    parser.add_argument("--target", default=None, help="a directory or GGUF file; by default the embedded target")
    parser.add_argument("--given", type=Path, nargs="*", default=[], help="prompt files the target also answers")
    parser.add_argument("--prompts", nargs="*", default=[], metavar="NAME=FILE", help="sets to replay, 80 of each")
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--num-seats", type=int, default=1024)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--num-steps", type=int, default=4000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--retention", type=float, default=0.8)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--init", default="target", choices=["target", "random"])
    parser.add_argument("--output", default="drafter", help="name of the drafter's directory inside --work")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level="INFO", format="%(message)s")
    logging.getLogger("httpx").setLevel("WARNING")
    arguments.work.mkdir(parents=True, exist_ok=True)
    target = load_target(arguments.target)
    if {"synthesize", "answer"} & set(arguments.stages):
        with SeatedGenerator(target, arguments.num_seats, arguments.max_length) as generator:
            if "synthesize" in arguments.stages:
                write_training_text(generator, arguments)
            if "answer" in arguments.stages:
                write_answers(generator, arguments)
    if "train" in arguments.stages:
        train(target, arguments)
    if "replay" in arguments.stages:
        replay_sets(target, arguments)


def write_training_text(generator: SeatedGenerator, arguments: argparse.Namespace) -> None:
    prompts = [prompt for path in arguments.given for prompt in read_prompts(path)]
    given = [str(message["content"]) for prompt in prompts for message in prompt.messages if message["role"] == "user"]
    counts, started, reported = SynthesisCounts(), time.monotonic(), 0.0
    num_held_out = 0
    with (arguments.work / "train.jsonl").open("w") as kept, (arguments.work / "held_out.jsonl").open("w") as aside:
        for row in synthesize(generator, SynthesisConfig(), given, arguments.seconds, counts):
            is_aside = row["temperature"] == 0 and num_held_out < NUM_HELD_OUT and counts.answers % 16 == 0
            num_held_out += is_aside
            (aside if is_aside else kept).write(json.dumps(row) + "\n")
            elapsed = time.monotonic() - started
            if elapsed - reported > SECONDS_BETWEEN_REPORTS:
                reported = elapsed
                print(f"{elapsed:.0f} s: {counts}, {counts.answer_tokens / elapsed:.0f} answer tokens/s", flush=True)
    print(f"synthesized {counts}", flush=True)


def write_answers(generator: SeatedGenerator, arguments: argparse.Namespace) -> None:
    tokenizer = generator.target.tokenizer
    for name, path in (pair.split("=", 1) for pair in arguments.prompts):
        prompts = [render_chat(tokenizer, prompt.messages) for prompt in read_prompts(path, limit=80)]
        fitting = [prompt_ids for prompt_ids in prompts if len(prompt_ids) + NUM_ANSWER_TOKENS <= generator.max_length]
        rows = list(answer_greedily(generator, fitting, max_tokens=NUM_ANSWER_TOKENS))
        write_rows(arguments.work / f"answers-{name}.jsonl", rows)
        print(f"{name}: {len(rows)} answers of {len(prompts)} prompts", flush=True)


def train(target: HFTarget, arguments: argparse.Namespace) -> None:
    config = TrainConfig(
        data=arguments.work / "train.jsonl",
        held_out=arguments.work / "held_out.jsonl",
        output=arguments.work / arguments.output,
        num_layers=arguments.num_layers,
        num_draft_tokens=8,
        init=arguments.init,
        retention=arguments.retention,
        max_length=arguments.max_length,
        batch_size=arguments.batch_size,
        num_steps=arguments.num_steps,
        learning_rate=arguments.learning_rate,
        log_every=50,
        save_every=1000,
    )
    train_drafter(target, config, print_metrics)


def print_metrics(step: int, metrics: dict[str, Any] | None) -> None:
    if metrics is not None:
        print(json.dumps(metrics), flush=True)


def replay_sets(target: HFTarget, arguments: argparse.Namespace) -> None:
    drafter = load_drafter(arguments.work / arguments.output, target)
    for path in [*sorted(arguments.work.glob("answers-*.jsonl")), arguments.work / "held_out.jsonl"]:
        limits = {"max_length": target.max_length, "vocab_size": target.vocab_size}
        rows = read_conversations(path, target.tokenizer, **limits).conversations
        for num_draft_tokens in (3, 5, 7):
            result = replay(target, drafter, rows, num_draft_tokens)
            shares = " ".join(f"{share:.3f}" for share in result.per_position)
            name = f"{path.stem} K={num_draft_tokens}"
            print(f"{name} AL={result.acceptance_length:.3f} per position {shares}", flush=True)


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
