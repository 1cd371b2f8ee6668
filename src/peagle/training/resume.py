"""The state of an unfinished run on disk: written whole or not at all, and only continued with the same settings."""

import dataclasses
import json
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.drafter.model import Drafter
from peagle.errors import CheckpointError, ConfigError
from peagle.training.config import TrainConfig
from peagle.training.distributed import World, load_state_by_name, state_by_name

# Settings that may differ when a run goes on: they say where and how often, not what is learned.
FREE_SETTINGS = {"output", "save_every", "log_every", "compile", "features", "features_directory"}
FREE_SETTINGS |= {"micro_batch_size", "num_partitions", "checkpoint_activations", "parallel"}


@dataclass
class Progress:
    """How far a run is; changed in place by the trainer."""

    step: int
    """optimizer steps done"""
    depth_sums: Tensor
    """since the last line of metrics, by depth: loss, correct guesses, slots; float [3, num_draft_tokens]"""

    @classmethod
    def begin(cls, num_draft_tokens: int, device: torch.device) -> "Progress":
        return cls(0, torch.zeros(3, num_draft_tokens, device=device))


ALONE = World()


class RunState:
    """Directory `run/` inside the output: settings, metrics.jsonl, and until the run is finished state.pt and drafter/.

    `inputs` are facts about what the settings only name, like the target's weights; they must not change either.
    Of several processes all read, and the first one writes.
    """

    def __init__(self, config: TrainConfig, inputs: Mapping[str, Any] | None = None, world: World = ALONE) -> None:
        self.world = world
        self.directory = config.output / "run"
        self.drafter = self.directory / "drafter"
        """directory of the drafter as it was at the last save; the finished one takes its place"""
        self._state = self.directory / "state.pt"
        self._metrics = self.directory / "metrics.jsonl"
        self._settings = {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}
        self._settings |= inputs or {}
        self.listeners: list[Callable[[Mapping[str, Any]], None]] = []
        """told of every line of metrics, in the process that writes"""
        self._check_settings()
        world.barrier()  # nobody may write before all have looked

    @property
    def can_continue(self) -> bool:
        return self._state.exists()

    def restore(self, drafter: Drafter, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        """Load the saved state into all three; without one, begin a new run and leave them as they are."""
        can_continue = self.can_continue
        if self.world.is_main:
            self.directory.mkdir(parents=True, exist_ok=True)
            _write_whole(self.directory / "settings.json", json.dumps(self._settings, indent=2) + "\n")
            if not can_continue:
                self._metrics.unlink(missing_ok=True)
        if not can_continue:
            return
        try:
            state = torch.load(self._state, map_location=progress.depth_sums.device, weights_only=True)
            load_state_by_name(drafter, optimizer, state)
            progress.step, progress.depth_sums = int(state["step"]), state["depth_sums"]
        except (RuntimeError, ValueError, KeyError, TypeError, EOFError, OSError, pickle.UnpicklingError) as error:
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError(
                f"the state of the unfinished run, {self._state}, cannot be read: {first_line}",
                hint="the file is corrupt, cut short or of another version; remove it to train from the start",
            ) from error
        if self.world.is_main:
            self._keep_metrics_up_to(progress.step)

    def save(self, drafter: Drafter, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        """Replace the saved state. Where that fails, a full disk for one, the earlier state stands."""
        state = {
            "step": progress.step,
            "depth_sums": progress.depth_sums,
            **state_by_name(drafter, optimizer),
        }
        if not self.world.is_main:
            return
        scratch = self._state.with_suffix(".tmp")
        try:
            with scratch.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, self._state)
        except (OSError, RuntimeError) as error:  # torch wraps some failures to write in RuntimeError
            scratch.unlink(missing_ok=True)
            raise self._cannot_write(f"the state after step {progress.step}", error) from error

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl. Lines without a loss are measurements (see `is_measured`)."""
        if not self.world.is_main:
            return
        try:
            with self._metrics.open("a") as file:
                file.write(json.dumps(metrics) + "\n")
        except OSError as error:
            raise self._cannot_write("the metrics", error) from error
        for listener in self.listeners:
            listener(metrics)

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; one that was cut off while being written is left out."""
        lines = []
        for text in self._metrics.read_text().splitlines() if self._metrics.exists() else []:
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                continue
        return lines

    def is_measured(self, step: int) -> bool:
        return any(line["step"] == step and "loss" not in line for line in self.metrics())

    def finish(self) -> None:
        """Drop what an unfinished run needs; settings and metrics stay."""
        self.world.barrier()
        if not self.world.is_main:
            return
        self._state.unlink(missing_ok=True)
        self._state.with_suffix(".tmp").unlink(missing_ok=True)
        shutil.rmtree(self.drafter, ignore_errors=True)

    def _cannot_write(self, what: str, error: Exception) -> CheckpointError:
        free = shutil.disk_usage(self.directory).free / 2**30
        earlier = "the state saved before stands" if self.can_continue else "no state was saved before"
        return CheckpointError(
            f"{what} cannot be written to {self.directory} ({free:.1f} GiB free): {error}; {earlier}",
            hint="make room, then give the same command again: the run goes on from the state saved last",
        )

    def _check_settings(self) -> None:
        if not self.can_continue:
            return
        path = self.directory / "settings.json"
        try:
            earlier = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise CheckpointError(
                f"{self.directory.parent} holds an unfinished run whose settings, {path}, cannot be read: {error}",
                hint=f"remove {self._state} to train from the start",
            ) from error
        differing = [
            f"{name} was {earlier.get(name)!r}, is {value!r}"
            for name, value in self._settings.items()
            if name not in FREE_SETTINGS and earlier.get(name) != value
        ]
        if differing:
            raise ConfigError(
                f"{self.directory.parent} holds an unfinished run with other settings: {'; '.join(differing)}",
                hint="give the earlier settings to go on with it, or another output to start anew",
            )

    def _keep_metrics_up_to(self, step: int) -> None:
        """Forget lines of steps that will be run again."""
        kept = [json.dumps(line) + "\n" for line in self.metrics() if line["step"] <= step]
        _write_whole(self._metrics, "".join(kept))


def _write_whole(path: Path, text: str) -> None:
    scratch = path.with_suffix(".tmp")
    scratch.write_text(text)
    os.replace(scratch, path)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
