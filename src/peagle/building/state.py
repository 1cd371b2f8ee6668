"""The state of a build: OUTPUT/build.json, replaced atomically after every change.

Each stage has a record: its command, the time it took over all attempts, and its outcome. An attempt that was killed
could not write how long it ran; the newest file in its directory tells.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from peagle.building.config import FIRST_STAGE, STAGES, Stage
from peagle.config import from_mapping
from peagle.data.config import differences
from peagle.data.shard_writer import locked
from peagle.data.shards import write_whole
from peagle.errors import ConfigError

NAME = "build.json"
FORMAT = "peagle-build-1"


@dataclass
class Record:
    """One stage."""

    status: Literal["running", "failed", "finished"]
    command: list[str]
    seconds: float = 0.0
    """of all attempts"""
    began: float = 0.0
    """when the last attempt began, in seconds since 1970; 0 if none is under way"""
    finished: str | None = None
    outcome: dict[str, Any] = field(default_factory=dict)


@dataclass
class BuildState:
    """What a build was asked for, and how far it is."""

    settings: dict[str, Any]
    stages: dict[str, Record] = field(default_factory=dict)
    restarted: Stage | None = None
    """the stage of a --from-stage whose command has not ended"""
    format: str = FORMAT

    @classmethod
    def read(cls, directory: Path) -> "BuildState | None":
        """The state in a directory; None if there is none."""
        path = directory / NAME
        if not path.exists():
            return None
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values.get("format") != FORMAT:
                raise ValueError(f"its format is {values.get('format')!r}, not {FORMAT!r}")
            records = {name: from_mapping(Record, record, name) for name, record in values.pop("stages").items()}
            state = cls(**values, stages=records)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}", hint="pass a new --output") from error
        for record in state.stages.values():
            state._count_killed(record, directory)
        return state

    def write(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(directory / NAME, (json.dumps(asdict(self), indent=2) + "\n").encode())

    def is_finished(self, stage: Stage) -> bool:
        return stage in self.stages and self.stages[stage].status == "finished"

    @property
    def seconds(self) -> float:
        """Time spent so far, over all runs."""
        return sum(record.seconds for record in self.stages.values())

    def begin(self, stage: Stage, command: list[str]) -> Record:
        record = self.stages.get(stage) or Record("running", command)
        record.status, record.command, record.began = "running", command, time.time()
        self.stages[stage] = record
        return record

    def end(self, stage: Stage, status: Literal["failed", "finished"], outcome: dict[str, Any]) -> None:
        record = self.stages[stage]
        record.status, record.outcome = status, outcome
        record.seconds, record.began = round(record.seconds + time.time() - record.began, 1), 0.0
        record.finished = datetime.now(UTC).isoformat(timespec="seconds") if status == "finished" else None

    def pause(self) -> None:
        """Count the time of an attempt that is interrupted."""
        for record in self.stages.values():
            if record.began:
                record.seconds, record.began = round(record.seconds + time.time() - record.began, 1), 0.0

    def restart(self, first: Stage, *, adds_text: bool) -> None:
        """Forget the stages from the first on, but not what was measured, nor text that more is added to."""
        for stage in STAGES[STAGES.index(first) :]:
            if stage == "data" and adds_text:
                self.stages[stage].status = "running"
            elif stage != "check":
                self.stages.pop(stage, None)
        self.restarted = first

    def changed(self, now: dict[str, Any]) -> list[str]:
        """The names of the settings that differ."""
        return [name for name, value in now.items() if self.settings.get(name) != value]

    def stale(self, now: dict[str, Any], first: Stage | None = None) -> list[Stage]:
        """The stages before the first to be run again that were begun with other settings."""
        start = min((STAGES.index(FIRST_STAGE[name]) for name in self.changed(now)), default=len(STAGES))
        return [stage for stage in STAGES[start : first and STAGES.index(first)] if stage in self.stages]

    def check_settings(self, now: dict[str, Any], first: Stage | None, directory: Path) -> None:
        """Refuse changed settings if a stage that is kept was begun with the earlier ones."""
        if kept := self.stale(now, first):
            start = min((FIRST_STAGE[name] for name in self.changed(now)), key=STAGES.index)
            raise ConfigError(
                f"{directory} was built with other settings: {'; '.join(differences(self.settings, now))}. "
                f"{'These stages' if len(kept) > 1 else 'This stage'} would be stale: {', '.join(kept)}",
                hint=f"add --from-stage {start} to run them again with the new settings, repeat the earlier "
                "settings, or pass a new --output",
            )

    @staticmethod
    def _count_killed(record: Record, directory: Path) -> None:
        if record.began:
            newest = max((path.stat().st_mtime for path in directory.rglob("*") if path.is_file()), default=0.0)
            record.seconds = round(record.seconds + max(0.0, newest - record.began), 1)
            record.began = 0.0


@contextlib.contextmanager
def only_build(directory: Path) -> Iterator[None]:
    """Refuse a second build in the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = locked(directory, f"another build runs in {directory}")
    try:
        yield
    finally:
        os.close(descriptor)
