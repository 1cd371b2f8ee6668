"""A target and a drafter as directories, and the command line run in this process."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from peagle.cli.main import run
from tiny import tiny_target, write_drafter, write_target


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The document on the last line of stdout."""
        return json.loads(self.out.splitlines()[-1])


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories `target`, its `drafter` (at most 4 draft tokens), and `stranger`, a target of the same sizes."""
    root = tmp_path_factory.mktemp("models")
    target = tiny_target()
    write_target(target, root / "target")
    write_drafter(target, root / "drafter")
    write_target(tiny_target(seed=7), root / "stranger")
    return root


@pytest.fixture
def on_models(models: Path) -> list[str]:
    """The options that name target and drafter."""
    return ["--target", str(models / "target"), "--drafter", str(models / "drafter"), "--dtype", "float32"]


@pytest.fixture
def peagle(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run one command line; what it printed is taken apart into stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*argv: object) -> Result:
        capsys.readouterr()
        status = run([str(word) for word in argv])
        return Result(status, *capsys.readouterr())

    return call
