"""The state of an unfinished run on disk: written whole or not at all, and only continued with the same settings."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torch

from peagle.drafter.model import Drafter
from peagle.errors import ConfigError
from peagle.training.config import TrainConfig

# Settings that may differ when a run goes on: they say where and how often, not what is learned.
FREE_SETTINGS = {"output", "save_every", "log_every", "compile"}


class RunState:
    """Directory `run/` inside the output: settings, metrics.jsonl, and state.pt while the run is unfinished."""

    def __init__(self, config: TrainConfig) -> None:
        self.directory = config.output / "run"
        self._state = self.directory / "state.pt"
        self._metrics = self.directory / "metrics.jsonl"
        self._settings = {
            field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)
        }
        self._check_settings()

    @property
    def can_continue(self) -> bool:
        return self._state.exists()

    def restore(self, drafter: Drafter, optimizer: torch.optim.Optimizer) -> int:
        """Load the saved state into both and return the step to go on from; 0 when there is none."""
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "settings.json").write_text(json.dumps(self._settings, indent=2) + "\n")
        if not self.can_continue:
            self._metrics.unlink(missing_ok=True)
            return 0
        state = torch.load(self._state, map_location=next(drafter.parameters()).device, weights_only=True)
        drafter.load_state_dict(state["drafter"])
        optimizer.load_state_dict(state["optimizer"])
        self._drop_metrics_after(state["step"])
        return int(state["step"])

    def save(self, step: int, drafter: Drafter, optimizer: torch.optim.Optimizer) -> None:
        scratch = self._state.with_suffix(".tmp")
        state = {"step": step, "drafter": drafter.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, scratch)
        os.replace(scratch, self._state)

    def log(self, metrics: dict[str, Any]) -> None:
        with self._metrics.open("a") as file:
            file.write(json.dumps(metrics) + "\n")

    def finish(self) -> None:
        """Drop the optimizer state; settings and metrics stay."""
        self._state.unlink(missing_ok=True)

    def _check_settings(self) -> None:
        path = self.directory / "settings.json"
        if not self.can_continue or not path.exists():
            return
        earlier = json.loads(path.read_text())
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

    def _drop_metrics_after(self, step: int) -> None:
        """Forget lines of steps that will be run again."""
        if self._metrics.exists():
            lines = [line for line in self._metrics.read_text().splitlines() if json.loads(line)["step"] <= step]
            self._metrics.write_text("".join(line + "\n" for line in lines))


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
