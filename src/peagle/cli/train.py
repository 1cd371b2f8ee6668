"""Train a drafter for a target, from prompts, conversations or shards to a directory that was loaded and checked again.

Runs on one GPU, on several (`torchrun -m peagle train ...`), or, for small targets and tests, on a CPU. An interrupted
run goes on where it was when the same command is given again.
"""

import contextlib
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from peagle.cli.arguments import TargetArguments, TargetOptions, parse
from peagle.cli.data import answer_prompts
from peagle.cli.progress import progress_bar
from peagle.config import from_toml
from peagle.json_rows import read_lines
from peagle.training.config import TrainConfig

if TYPE_CHECKING:
    from rich.progress import Progress

SHORT_NAMES = {"--from": "--from-drafter"}  # what no field of a dataclass can be called


@dataclass(frozen=True)
class Arguments:
    train: Annotated[TrainConfig, tyro.conf.OmitArgPrefixes]
    recipe: Path | None = None
    """TOML file with any of these settings; the command line has the last word"""
    target: TargetOptions = field(default_factory=TargetArguments)


def main(argv: list[str]) -> int:
    argv = [_long_name(word) for word in argv]
    arguments = parse(Arguments, "train", argv, **_defaults(argv))
    config = arguments.train
    for path in (config.data, config.held_out):
        if path is not None and not path.is_dir():
            next(read_lines(path), None)  # a wrong path is said at once, not after the target was loaded

    from peagle.training.distributed import joined_world

    with joined_world() as world:
        target = arguments.target.load()

        from peagle.training.run import train_drafter

        answer = partial(answer_prompts, target) if world.size == 1 else None
        with contextlib.closing(Steps(config.num_steps, is_shown=world.is_main)) as steps:
            train_drafter(target, config, steps.show, answer)
    if world.is_main:
        print(config.output)
    return 0


class Steps:
    """The progress of the steps: a bar on a terminal, which appears with the first one, else a line now and then."""

    def __init__(self, num_steps: int, *, is_shown: bool) -> None:
        self._num_steps, self._is_shown = num_steps, is_shown
        self._progress: Progress = progress_bar(has_lines=False)
        self._task = self._progress.add_task("training", total=num_steps)

    def show(self, step: int, metrics: dict[str, Any] | None) -> None:
        if not self._is_shown:
            return
        if not self._progress.disable and not self._progress.live.is_started:
            self._progress.start()
        self._progress.update(self._task, completed=step)
        if metrics is not None:
            accuracy = " ".join(f"{share:.2f}" for share in metrics["accuracy_by_depth"])
            line = f"loss {metrics['loss']:.3f}, accuracy by depth {accuracy}"
            self._progress.update(self._task, description=line)
            if not self._progress.console.is_terminal:
                rate = metrics["steps_per_second"]
                left = timedelta(seconds=round((self._num_steps - step) / rate)) if rate else "unknown time"
                print(f"step {step} of {self._num_steps}: {line}, {rate:.2f} steps/s, {left} left", file=sys.stderr)

    def close(self) -> None:
        self._progress.stop()


def _long_name(word: str) -> str:
    name, equals, value = word.partition("=")
    return SHORT_NAMES.get(name, name) + equals + value


def _defaults(argv: list[str]) -> dict[str, Any]:
    """The recipe's settings as defaults, so that flags given beside it win and may supply what it leaves out."""
    given = [following for word, following in pairwise(argv) if word == "--recipe"]
    given += [word.removeprefix("--recipe=") for word in argv if word.startswith("--recipe=")]
    if not given:
        return {}
    path = Path(given[-1])
    config = from_toml(TrainConfig, path, absent={"data": tyro.MISSING, "output": tyro.MISSING})
    return {"default": Arguments(train=config, recipe=path)}
