"""Provenance of an artifact: command, commit, versions, hardware. Every file set we write includes it."""

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("peagle", "torch", "transformers", "safetensors", "numpy")


def provenance(accelerator: str | None = None) -> dict[str, Any]:
    """A JSON-ready record of this process. `accelerator` names the GPU, if any."""
    program = Path(sys.argv[0]).name
    return {
        "command": shlex.join(["peagle" if program == "__main__.py" else program, *sys.argv[1:]]),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "python": platform.python_version(),
        "versions": {name: package_version(name) for name in PACKAGES},
        "hardware": {
            "machine": platform.machine(),
            "processor": processor_name(),
            "num_cores": os.cpu_count(),
            "accelerator": accelerator,
        },
    }


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def processor_name() -> str:
    """The CPU model if the system reports it, else the platform's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """The checkout's commit, with "+changes" if files differ; None for an installed package."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+changes"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
