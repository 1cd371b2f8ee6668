"""Train a drafter for a target from prompts, conversations or shards.

Runs on one GPU, on several (`torchrun -m peagle train ...`), or on a CPU for small targets. Rerun an interrupted
command and it resumes. More settings: recipe file (docs/guides/train.md).
"""

import contextlib
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.cli.arguments import TargetArguments
from peagle.cli.progress import progress_bar
from peagle.cli.recipe import parse_with_recipe
from peagle.data.json_rows import read_lines
from peagle.objective.config import DataSettings, DrafterSettings, HardwareSettings, TrainConfig, TrainingSettings

if TYPE_CHECKING:
    from rich.progress import Progress

SHORT_NAMES = {"--from": "--from-drafter"}  # `from` is a Python keyword


@dataclass(frozen=True)
class Arguments:
    data: DataSettings
    drafter: DrafterSettings
    training: TrainingSettings
    hardware: HardwareSettings
    recipe: Path | None = None
    """TOML file with training settings; options override it"""
    target: TargetArguments = field(default_factory=TargetArguments)


def main(argv: list[str]) -> int:
    argv = [_long_name(word) for word in argv]
    arguments, config = parse_with_recipe(Arguments, "train", argv, TrainConfig)
    for path in (config.data, config.held_out):
        if path is not None and not path.is_dir():
            next(read_lines(path), None)  # fail on a wrong path before loading the target

    from peagle.training.distributed import joined_world

    with joined_world() as world:
        target = arguments.target.load()

        from peagle.training.run import train_drafter

        with contextlib.closing(Steps(config)) as steps:
            train_drafter(target, config, steps.show if world.is_main else lambda *_: None)
    if world.is_main:
        print(config.output)
    return 0


class Steps:
    """Training progress: a bar on a terminal, else one line per logged step."""

    def __init__(self, config: TrainConfig) -> None:
        self._num_steps, self._tokens_per_step = config.num_steps, config.batch_size * config.max_length
        self._progress: Progress = progress_bar(has_lines=False)
        self._task = self._progress.add_task("training", total=config.num_steps)

    def show(self, step: int, metrics: dict[str, Any] | None) -> None:
        self._progress.start()
        self._progress.update(self._task, completed=step)
        if metrics is not None:
            rate = metrics["steps_per_second"]
            accuracy = " ".join(f"{share:.2f}" for share in metrics["accuracy_by_depth"])
            tokens_per_second = rate * self._tokens_per_step
            line = f"loss {metrics['loss']:.3f}, acc@depth {accuracy}, {tokens_per_second:,.0f} tokens/s"
            self._progress.update(self._task, description=line)
            if not self._progress.console.is_terminal:
                eta = timedelta(seconds=round((self._num_steps - step) / rate)) if rate else "unknown"
                print(f"step {step}/{self._num_steps}: {line}, {rate:.2f} steps/s, ETA {eta}", file=sys.stderr)

    def close(self) -> None:
        self._progress.stop()


def _long_name(word: str) -> str:
    name, equals, value = word.partition("=")
    return SHORT_NAMES.get(name, name) + equals + value
