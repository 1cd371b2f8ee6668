"""Progress of long work on stderr: a bar on a terminal, a line now and then in a log file."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

log = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 30


class RateColumn(ProgressColumn):
    """Items per second, or seconds per item if slower than one per second."""

    def render(self, task: Task) -> Text:
        if not task.speed:
            return Text("")
        return Text(f"{task.speed:.1f}/s" if task.speed >= 1 else f"{1 / task.speed:.1f} s each")


class LinesProgress(Progress):
    """A bar on a terminal; elsewhere a line every `SECONDS_BETWEEN_LINES`, also while no update comes."""

    def __init__(self, *columns: ProgressColumn, console: Console) -> None:
        super().__init__(*columns, console=console, disable=not console.is_terminal)
        self._last_line = time.monotonic()
        self._task: TaskID | None = None
        self._beat: Heartbeat | None = None

    def start(self) -> None:
        super().start()
        if self.disable and self._beat is None:
            self._beat = Heartbeat(self._write_if_due)

    def stop(self) -> None:
        if self._beat is not None:
            self._beat.stop()
            self._beat = None
        super().stop()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._task = task_id
        self._write_if_due()

    def print_line(self, line: str) -> None:
        """Print a line of the caller's own."""
        self._last_line = time.monotonic()
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _write_if_due(self) -> None:
        if not self.disable or time.monotonic() - self._last_line < SECONDS_BETWEEN_LINES:
            return
        for task_id in list(self._tasks)[:1] if self._task is None else [self._task]:
            task = self._tasks[task_id]
            left = "" if task.time_remaining is None else f", {timedelta(seconds=task.time_remaining)} left"
            count = "" if task.total is None else f": {task.completed:,.0f} of {task.total:,.0f}{left}"
            self.print_line(f"{task.description}{count}")


class Heartbeat:
    """Calls a function every `SECONDS_BETWEEN_LINES` from a thread, until it is stopped."""

    def __init__(self, beat: Callable[[], None]) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(beat,), name="heartbeat", daemon=True)
        self._thread.start()

    def _run(self, beat: Callable[[], None]) -> None:
        while not self._ended.wait(SECONDS_BETWEEN_LINES):
            beat()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()


@contextmanager
def working(what: str) -> Iterator[None]:
    """Say every `SECONDS_BETWEEN_LINES` that `what` is still going on."""
    started = time.monotonic()
    beat = Heartbeat(lambda: log.info("%s, for %.0f s", what, time.monotonic() - started))
    try:
        yield
    finally:
        beat.stop()


def progress_bar() -> LinesProgress:
    """A context manager: a progress bar on stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), RateColumn(), TimeRemainingColumn())
    return LinesProgress(*columns, console=Console(stderr=True))
