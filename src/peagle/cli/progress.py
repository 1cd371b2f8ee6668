"""Progress of long work on stderr: a bar on a terminal, a line now and then in a log file."""

import time
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

SECONDS_BETWEEN_LINES = 30


class RateColumn(ProgressColumn):
    """Items per second, or seconds per item if slower than one per second."""

    def render(self, task: Task) -> Text:
        if not task.speed:
            return Text("")
        return Text(f"{task.speed:.1f}/s" if task.speed >= 1 else f"{1 / task.speed:.1f} s each")


class LinesProgress(Progress):
    """A bar on a terminal; elsewhere, with `has_lines`, a line every `SECONDS_BETWEEN_LINES`."""

    def __init__(self, *columns: ProgressColumn, console: Console, has_lines: bool) -> None:
        super().__init__(*columns, console=console, disable=not console.is_terminal)
        self._has_lines = has_lines and self.disable
        self._last_line = time.monotonic()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        if self._has_lines and time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            task = self._tasks[task_id]
            left = "" if task.time_remaining is None else f", {timedelta(seconds=task.time_remaining)} left"
            line = f"{task.description}: {task.completed:,.0f} of {task.total or 0:,.0f}{left}"
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def progress_bar(*, has_lines: bool = True) -> Progress:
    """A context manager. Pass `has_lines=False` if the caller prints its own lines."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), RateColumn(), TimeRemainingColumn())
    return LinesProgress(*columns, console=Console(stderr=True), has_lines=has_lines)
