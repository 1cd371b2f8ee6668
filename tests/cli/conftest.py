"""A target and a drafter as directories, and the command line run in this process."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.cli.main import run
from peagle.drafter.card import DrafterCard, TargetIdentity
from peagle.drafter.checkpoint import save_drafter
from peagle.targets.hf import HFTarget
from tiny import tiny_drafter, tiny_target


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The document on the last line of stdout."""
        return json.loads(self.out.splitlines()[-1])


def write_target(target: HFTarget, directory: Path) -> Path:
    target.model.save_pretrained(directory)
    target.tokenizer.save_pretrained(directory)
    return directory


def write_drafter(target: HFTarget, directory: Path) -> Path:
    drafter = tiny_drafter(target)
    config = drafter.config
    card = DrafterCard(
        TargetIdentity.of(target), config.method, config.num_draft_tokens, config.max_length, config.aux_layer_ids
    )
    save_drafter(drafter, directory, card, full=False, dtype=torch.float32)
    return directory


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
