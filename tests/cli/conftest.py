"""A target and a drafter as directories, and the command line run in this process."""

from pathlib import Path

import pytest

from harness.command_line import peagle as peagle
from harness.tiny_models import tiny_target, write_drafter, write_target


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories `target`, its `drafter` (at most 4 draft tokens), and `stranger`, a target of the same sizes."""
    root = tmp_path_factory.mktemp("models")
    target = tiny_target(num_layers=3, seed=3)  # some drafts are accepted
    write_target(target, root / "target")
    write_drafter(target, root / "drafter")
    write_target(tiny_target(num_layers=3, seed=7), root / "stranger")
    return root


@pytest.fixture
def on_models(models: Path) -> list[str]:
    """The options that name target and drafter."""
    return ["--target", str(models / "target"), "--drafter", str(models / "drafter"), "--dtype", "float32"]
