"""The command line run in this process, as a fixture for the tests of commands."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from peagle.cli.main import run


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The document on the last line of stdout."""
        return json.loads(self.out.splitlines()[-1])


@pytest.fixture
def peagle(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run one command line; what it printed is taken apart into stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*argv: object) -> Result:
        capsys.readouterr()
        status = run([str(word) for word in argv])
        return Result(status, *capsys.readouterr())

    return call
