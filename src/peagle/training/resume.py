"""The state of an unfinished run on disk. Writes are atomic, and a run resumes only with the same settings."""

import dataclasses
import json
import pickle
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.data.config import differences
from peagle.data.shards import write_whole
from peagle.drafter.model import Drafter
from peagle.errors import CheckpointError, ConfigError, first_line
from peagle.objective.config import TrainConfig
from peagle.training.distributed import ALONE, World, load_state_by_name, state_by_name

# Settings that may change on resume: they do not affect what is learned.
FREE_SETTINGS = {"output", "save_every", "log_every", "compile", "features", "features_directory"}
FREE_SETTINGS |= {"micro_batch_size", "num_partitions", "checkpoint_activations", "parallel"}
FREE_SETTINGS |= {"from_facts", "drafter_config"}  # recorded, so that resuming does not need the `--from` drafter


@dataclass
class Progress:
    """Position in the run, updated in place by the trainer."""

    step: int
    """optimizer steps done"""
    depth_sums: Tensor
    """sums of loss, correct guesses and slots by depth since the last log line; float [3, num_draft_tokens]"""


class RunState:
    """The directory OUTPUT/run: settings.json, metrics.jsonl and, until the run is finished, state.pt and drafter/.

    `inputs` identify what the settings only name (target weights, data contents); a resumed run must match them.
    All processes read; only the main process writes.
    """

    def __init__(self, config: TrainConfig, inputs: Mapping[str, Any] | None = None, world: World = ALONE) -> None:
        self.world = world
        self.directory = config.output / "run"
        self.drafter = self.directory / "drafter"
        """the drafter of the last save; removed when the run finishes"""
        self.best = self.directory / "best"
        """likewise of the save with the best replayed acceptance, if the settings keep it"""
        self._state = self.directory / "state.pt"
        self._metrics = self.directory / "metrics.jsonl"
        settings = dataclasses.asdict(config) | dict(inputs or {})
        self._settings: dict[str, Any] = json.loads(json.dumps(settings, default=str))
        self.listeners: list[Callable[[Mapping[str, Any]], None]] = []
        """called with every metrics line, in the main process"""
        earlier = saved_settings(config.output)
        fixed = {name: value for name, value in self._settings.items() if name not in FREE_SETTINGS}
        if earlier and (differing := differences(earlier, fixed)):
            raise ConfigError(
                f"{config.output} holds an unfinished run with other settings: {'; '.join(differing)}",
                hint="pass the earlier settings to resume it, or a new --output to start over",
            )
        world.barrier()  # all processes read before any writes

    @property
    def can_continue(self) -> bool:
        return self._state.exists()

    def restore(self, drafter: Drafter, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        """Load the saved state into all three. Without one, start a new run and leave them unchanged."""
        can_continue = self.can_continue
        if self.world.is_main:
            self.directory.mkdir(parents=True, exist_ok=True)
            settings = self._settings | {"drafter_config": dataclasses.asdict(drafter.config)}
            write_whole(self.directory / "settings.json", (json.dumps(settings, indent=2) + "\n").encode())
            if not can_continue:
                self._metrics.unlink(missing_ok=True)
        if not can_continue:
            return
        try:
            state = torch.load(self._state, map_location=progress.depth_sums.device, weights_only=True)
            load_state_by_name(drafter, optimizer, state)
            progress.step, progress.depth_sums = int(state["step"]), state["depth_sums"]
        except (RuntimeError, ValueError, KeyError, TypeError, EOFError, OSError, pickle.UnpicklingError) as error:
            raise CheckpointError(
                f"cannot read the training state {self._state}: {first_line(error)}",
                hint="the file is corrupt, truncated or from another version; delete it to train from the start",
            ) from error
        if self.world.is_main:
            kept = [json.dumps(line) + "\n" for line in self.metrics() if line["step"] <= progress.step]
            write_whole(self._metrics, "".join(kept).encode())

    def save(self, drafter: Drafter, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        """Replace the saved state atomically. If writing fails, the previous state remains."""
        state = vars(progress) | state_by_name(drafter, optimizer)
        if not self.world.is_main:
            return
        try:
            write_whole(self._state, lambda file: torch.save(state, file))
        except (OSError, RuntimeError) as error:
            raise self._cannot_write(f"the state of step {progress.step}", error) from error

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl. Lines without a loss are measurements (see `is_measured`)."""
        if not self.world.is_main:
            return
        try:
            with self._metrics.open("a") as file:
                file.write(json.dumps(metrics) + "\n")
        except OSError as error:
            raise self._cannot_write("metrics.jsonl", error) from error
        for listener in self.listeners:
            listener(metrics)

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, without a truncated last line."""
        lines = []
        for text in self._metrics.read_text().splitlines() if self._metrics.exists() else []:
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                continue
        return lines

    def is_measured(self, step: int) -> bool:
        return any(line["step"] == step and "loss" not in line for line in self.metrics())

    def best_replay(self) -> tuple[float, int]:
        """The best replayed acceptance length of all saves, and its first step; zeros before the first one."""
        found = [(line["replay"]["acceptance_length"], -line["step"]) for line in self.metrics() if "replay" in line]
        length, step = max(found, default=(0.0, 0))
        return length, -step

    def finish(self) -> None:
        """Delete what only an unfinished run needs. Settings and metrics stay."""
        self.world.barrier()
        if not self.world.is_main:
            return
        self._state.unlink(missing_ok=True)
        self._state.with_name("state.pt.tmp").unlink(missing_ok=True)
        for directory in (self.drafter, self.best):
            shutil.rmtree(directory, ignore_errors=True)

    def _cannot_write(self, what: str, error: Exception) -> CheckpointError:
        free = shutil.disk_usage(self.directory).free / 2**30
        earlier = "the previous state is intact" if self.can_continue else "no state was saved before"
        return CheckpointError(
            f"cannot write {what} to {self.directory} ({free:.1f} GiB free): {error}; {earlier}",
            hint="free disk space, then rerun the command to resume from the last saved state",
        )


def saved_settings(output: Path) -> dict[str, Any]:
    """The settings.json of the unfinished run in `output`; empty if there is none."""
    path, state = output / "run" / "settings.json", output / "run" / "state.pt"
    try:
        return dict(json.loads(path.read_text())) if state.exists() else {}
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot read {path}, the settings of the unfinished run: {error}",
            hint=f"delete {state} to train from the start",
        ) from error
