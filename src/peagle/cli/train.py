"""Train a drafter for a target from prompts, conversations or shards.

Runs on one GPU, on several (`torchrun -m peagle train ...`), or on a CPU for small targets. Rerun an interrupted
command and it resumes. More settings: recipe file (docs/guides/train.md).
"""

import contextlib
import logging
import shlex
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from peagle.console.arguments import DrafterArguments, TargetArguments, check_directory
from peagle.console.progress import progress_bar
from peagle.console.recipe import parse_with_recipe
from peagle.objective.config import DataSettings, DrafterSettings, HardwareSettings, TrainConfig, TrainingSettings
from peagle.rows import read_lines

log = logging.getLogger(__name__)

SHORT_NAMES = {"--from": "--from-drafter"}  # `from` is a Python keyword


@dataclass(frozen=True)
class Arguments:
    data: DataSettings
    drafter: DrafterSettings
    training: TrainingSettings
    hardware: HardwareSettings
    recipe: Path | None = None
    """name of a recipe that ships (dense-8b, embedded, embedded-32, embedded-long, gpt-oss-20b, long-context,
    moe-30b), or a TOML file; options override it"""
    target: TargetArguments = field(default_factory=TargetArguments)


def main(argv: list[str]) -> int:
    argv = [_long_name(word) for word in argv]
    arguments, config = parse_with_recipe(Arguments, "train", argv, TrainConfig)
    for path in (config.data, config.held_out):
        if path is not None and not path.is_dir():
            next(read_lines(path), None)  # fail on a wrong path before loading the target
    check_directory(config.output)
    target_options = arguments.target
    if config.from_drafter is not None:
        target_options = DrafterArguments(str(config.from_drafter)).pair(target_options)
    target_options.check()

    from peagle.training.distributed import joined_world

    with joined_world() as world:
        target = target_options.load()

        from peagle.training.run import train_drafter

        with contextlib.closing(Steps(config, is_shown=world.is_main)) as steps:
            train_drafter(target, config, steps.show if world.is_main else lambda *_: None)
    if world.is_main:
        for line in conclusion(config.output):
            log.info("%s", line)
        print(config.output)
    return 0


def conclusion(output: Path) -> list[str]:
    """What was trained, where it is, and what to do with it."""
    from peagle.checkpoint.card import read_card, trusted_acceptance

    card = read_card(output)
    measured = trusted_acceptance({} if card is None else card.acceptance)
    lines = []
    for name, entry in measured.items():
        rates = " ".join(f"{share:.2f}" for share in entry["per_position"])
        prompts = entry.get("prompts", name)
        lines.append(f"acceptance length {entry['acceptance_length']:.2f} on {prompts}; by position {rates}")
    place = shlex.quote(str(output))
    return [
        *lines,
        f"the drafter is in {output}. Next:",
        f"  peagle eval --drafter {place}",
        f"  peagle serve --drafter {place}",
    ]


class Steps:
    """Training progress: a bar on a terminal, else one line per logged step."""

    def __init__(self, config: TrainConfig, *, is_shown: bool) -> None:
        self._num_steps, self._tokens_per_step = config.num_steps, config.batch_size * config.max_length
        self._progress = progress_bar()
        self._task = self._progress.add_task("preparing data and drafter", total=config.num_steps)
        if is_shown:
            self._progress.start()

    def show(self, step: int, metrics: dict[str, Any] | None) -> None:
        self._progress.update(self._task, completed=step)
        if metrics is not None:
            rate = metrics["steps_per_second"]
            accuracy = " ".join(f"{share:.2f}" for share in metrics["accuracy_by_depth"])
            tokens_per_second = rate * self._tokens_per_step
            line = f"loss {metrics['loss']:.3f}, acc@depth {accuracy}, {tokens_per_second:,.0f} tokens/s"
            self._progress.update(self._task, description=line)
            if not self._progress.console.is_terminal:
                eta = timedelta(seconds=round((self._num_steps - step) / rate)) if rate else "unknown"
                self._progress.print_line(f"step {step}/{self._num_steps}: {line}, {rate:.2f} steps/s, ETA {eta}")
        if step == self._num_steps:
            self._progress.update(self._task, description="measuring and checking the drafter")

    def close(self) -> None:
        self._progress.stop()


def _long_name(word: str) -> str:
    name, equals, value = word.partition("=")
    return SHORT_NAMES.get(name, name) + equals + value
