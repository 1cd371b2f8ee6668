"""Train a P-EAGLE drafter for a target from conversations, on one GPU or (for small targets and tests) on a CPU.

An interrupted run goes on where it was when the same command is given again.
"""

import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import tyro

from peagle.cli.arguments import TargetArguments, TargetOptions, parse
from peagle.cli.progress import progress_bar
from peagle.config import from_toml
from peagle.json_rows import read_lines
from peagle.training.config import TrainConfig


@dataclass(frozen=True)
class Arguments:
    train: Annotated[TrainConfig, tyro.conf.OmitArgPrefixes]
    recipe: Path | None = None
    """TOML file with any of these settings; the command line has the last word"""
    target: TargetOptions = field(default_factory=TargetArguments)


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, "train", argv, **_defaults(argv))
    config = arguments.train
    for path in (config.data, config.held_out):
        if path is not None:
            next(read_lines(path), None)  # a wrong path is said at once, not after the target was loaded
    target = arguments.target.load()

    from peagle.training.run import train_drafter

    with progress_bar() as progress:
        task = progress.add_task("training", total=config.num_steps)

        def on_step(step: int, metrics: dict[str, Any] | None) -> None:
            progress.update(task, completed=step)
            if metrics is not None:
                accuracy = " ".join(f"{share:.2f}" for share in metrics["accuracy_by_depth"])
                line = f"loss {metrics['loss']:.3f}, accuracy by depth {accuracy}"
                progress.update(task, description=line)
                if not progress.console.is_terminal:
                    print(f"step {step} of {config.num_steps}: {line}", file=sys.stderr)

        train_drafter(target, config, on_step)
    print(config.output)
    return 0


def _defaults(argv: list[str]) -> dict[str, Any]:
    """The recipe's settings as defaults, so that flags given beside it win and may supply what it leaves out."""
    given = [following for word, following in pairwise(argv) if word == "--recipe"]
    given += [word.removeprefix("--recipe=") for word in argv if word.startswith("--recipe=")]
    if not given:
        return {}
    path = Path(given[-1])
    config = from_toml(TrainConfig, path, absent={"data": tyro.MISSING, "output": tyro.MISSING})
    return {"default": Arguments(train=config, recipe=path)}
