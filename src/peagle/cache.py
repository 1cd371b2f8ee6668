"""The directory of what peagle keeps between runs: converted targets, compiled kernels."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """`PEAGLE_CACHE`, else ~/.cache/peagle."""
    return Path(os.environ.get("PEAGLE_CACHE") or "~/.cache/peagle").expanduser()


def write_atomically(file: Path, content: bytes) -> None:
    """Write a file that other processes may be reading, or writing too."""
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_name(f"{file.name}.{os.getpid()}")
    scratch.write_bytes(content)
    scratch.replace(file)
