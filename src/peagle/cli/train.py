"""Train a P-EAGLE drafter for a target from conversations, on one GPU or (for small targets and tests) on a CPU.

An interrupted run goes on where it was when the same command is given again.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from peagle.cli.arguments import ModelArguments, Models, parse
from peagle.config import from_toml
from peagle.errors import ConfigError
from peagle.training.config import TrainConfig


@dataclass(frozen=True)
class Arguments:
    train: Annotated[TrainConfig, tyro.conf.OmitArgPrefixes]
    recipe: Path | None = None
    """TOML file with any of these settings; the command line has the last word"""
    models: Models = field(default_factory=ModelArguments)


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, "train", argv, **_defaults(argv))
    if arguments.models.drafter is not None:
        raise ConfigError("train makes a new drafter, so --drafter has no meaning here", hint="use --output")
    talk = Console(stderr=True)
    target = arguments.models.load_target()

    from peagle.training.run import train_drafter

    config = arguments.train
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=talk, disable=not talk.is_terminal) as progress:
        task = progress.add_task("training", total=config.num_steps)

        def on_step(step: int, metrics: dict[str, Any] | None) -> None:
            progress.update(task, completed=step)
            if metrics is not None:
                accuracy = " ".join(f"{share:.2f}" for share in metrics["accuracy_by_depth"])
                line = f"loss {metrics['loss']:.3f}, accuracy by depth {accuracy}"
                progress.update(task, description=line)
                if not talk.is_terminal:
                    print(f"step {step} of {config.num_steps}: {line}", file=sys.stderr)

        train_drafter(target, config, on_step)
    print(config.output)
    return 0


def _defaults(argv: list[str]) -> dict[str, Any]:
    """The recipe's settings as defaults, so that flags given beside it win."""
    path = next((b for a, b in zip(argv, argv[1:], strict=False) if a == "--recipe"), None)
    path = path or next((a.split("=", 1)[1] for a in argv if a.startswith("--recipe=")), None)
    if path is None:
        return {}
    return {"default": Arguments(train=from_toml(TrainConfig, Path(path)), recipe=Path(path))}
