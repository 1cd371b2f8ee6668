"""The directory of what peagle keeps between runs: converted targets, compiled kernels."""

import os
import tempfile
from pathlib import Path


def cache_directory() -> Path:
    """`PEAGLE_CACHE`, else ~/.cache/peagle."""
    return Path(os.environ.get("PEAGLE_CACHE") or "~/.cache/peagle").expanduser()


def write_atomically(file: Path, content: bytes) -> None:
    """Write a file that other processes may be reading, or writing too."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}-", delete=False) as scratch:
        scratch.write(content)
    Path(scratch.name).replace(file)
