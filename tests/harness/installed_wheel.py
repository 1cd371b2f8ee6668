"""Commands of a wheel that is installed in an environment of its own."""

import os
import shlex
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

TIMEOUT_S = 600


@dataclass
class Installed:
    """One environment: the wheel, and the layers added to it."""

    python: Path
    """the interpreter of the environment with the wheel"""
    work: Path
    """an empty working directory, with a home directory in it"""
    layers: list[Path] = field(default_factory=list)

    @property
    def command(self) -> str:
        return str(self.python.with_name("peagle"))

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": f"{self.python.parent}:/usr/bin:/bin",
            "HOME": str(self.work / "home"),
            "PEAGLE_CACHE": str(self.python.parents[2] / "cache"),
            "PYTHONPATH": ":".join(map(str, self.layers)),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "OMP_WAIT_POLICY": "passive",
        }

    def run(self, line: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        """Run `peagle LINE` and check its exit status."""
        result = subprocess.run(
            [self.command, *shlex.split(line)],
            cwd=self.work,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert result.returncode == status, f"peagle {line}: exit status {result.returncode}\n{result.stderr[-4000:]}"
        assert "Traceback" not in result.stderr, result.stderr
        return result


def site_packages(environment: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(environment)}))


def install(python: Path, *arguments: str | Path) -> None:
    """Run this environment's pip for another one. Without compiling, which commands do for what they import."""
    words = ["--python", python, "install", "--quiet", "--no-compile", "--disable-pip-version-check", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "pip", *map(str, words)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
