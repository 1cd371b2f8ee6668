"""The progress of long work where stderr is no terminal: the log of a job."""

import itertools
import threading
import time
from collections.abc import Callable

import pytest

from peagle.console import progress
from peagle.console.progress import progress_bar, working


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = itertools.count(step=progress.SECONDS_BETWEEN_LINES // 2)
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(seconds)))
    with progress_bar() as bar:
        task = bar.add_task("starting", total=4000)
        for completed in (500, 1000, 1500):
            bar.update(task, completed=completed, description=f"answers [{completed}]")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == ["answers [1000]: 1"]


def appears(text: Callable[[], str], words: str) -> bool:
    """Wait until a thread has written the words."""
    written = ""
    for _ in range(1000):
        written += text()
        if words in written:
            return True
        time.sleep(0.01)
    return False


def test_work_without_updates_is_heard_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.01)
    caplog.set_level("INFO")
    with working("loading the target tiny"):
        assert appears(lambda: caplog.text, "loading the target tiny, for 0 s")
    with progress_bar() as bar:
        bar.add_task("comparing", total=None)
        assert appears(lambda: capsys.readouterr().err, "comparing\n")
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"], "it ends with the work"


def test_a_line_of_the_caller_counts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = itertools.count(step=progress.SECONDS_BETWEEN_LINES // 2)
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(seconds)))
    bar = progress_bar()
    task = bar.add_task("training", total=4)
    bar.print_line("step 1/4")
    bar.update(task, completed=1)
    assert capsys.readouterr().err == "step 1/4\n"
