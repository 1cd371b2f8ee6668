"""The progress of long work where stderr is no terminal: the log of a job."""

import itertools

import pytest

from peagle.cli import progress
from peagle.cli.progress import progress_bar


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = itertools.count(step=progress.SECONDS_BETWEEN_LINES // 2)
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(seconds)))
    with progress_bar() as bar:
        task = bar.add_task("starting", total=4000)
        for completed in (500, 1000, 1500):
            bar.update(task, completed=completed, description=f"answers [{completed}]")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == ["answers [1000]: 1"]


def test_who_prints_lines_of_his_own_gets_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    with progress_bar(has_lines=False) as bar:
        bar.update(bar.add_task("starting", total=4), advance=1)
    assert capsys.readouterr().err == ""
