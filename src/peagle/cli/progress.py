"""The progress of long work, on stderr: a bar with rate and time left, or, in the log of a job, a line now and then."""

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
    """Pieces of work a second; the seconds for one piece where it takes longer than that."""

    def render(self, task: Task) -> Text:
        if not task.speed:
            return Text("")
        return Text(f"{task.speed:.1f}/s" if task.speed >= 1 else f"{1 / task.speed:.1f} s each")


class LinesProgress(Progress):
    """A bar on a terminal; in the log of a job a line every `SECONDS_BETWEEN_LINES`, or none of them."""

    def __init__(self, *columns: ProgressColumn, console: Console, has_lines: bool) -> None:
        super().__init__(*columns, console=console, disable=not console.is_terminal)
        self._has_lines = has_lines and self.disable
        self._said = time.monotonic()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        if self._has_lines and time.monotonic() - self._said >= SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            self.console.print(_line(self._tasks[task_id]), highlight=False, markup=False, soft_wrap=True)


def _line(task: Task) -> str:
    so_far = f"{task.description}: {task.completed:,.0f} of {task.total or 0:,.0f}"
    return so_far if task.time_remaining is None else f"{so_far}, {timedelta(seconds=task.time_remaining)} left"


def progress_bar(*, has_lines: bool = True) -> Progress:
    """A bar to be used as a context manager; its `console` is stderr. Without lines for those who print their own."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        RateColumn(),
        TimeRemainingColumn(),
    )
    return LinesProgress(*columns, console=Console(stderr=True), has_lines=has_lines)
