"""Directories to upload to S3, and their keys there.

A directory's prefix contains a digest of its contents. So an interrupted upload resumes with the missing files, and two
versions never mix.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from peagle.errors import ConfigError

ROOT = "peagle"
DIGEST_LENGTH = 8


@dataclass(frozen=True)
class Upload:
    """A directory to upload. `channel` is "target" or "drafter"."""

    channel: str
    directory: Path
    files: tuple[tuple[str, int], ...]
    """relative path and size in bytes, sorted"""
    digest: str

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.files)

    def prefix(self, deployment: str) -> str:
        return f"{prefix_of(deployment)}{self.channel}-{self.digest}/"


def prefix_of(deployment: str) -> str:
    """Prefix of a deployment's objects; ends with a slash, so no deployment's prefix contains another's."""
    return f"{ROOT}/{deployment}/"


def read_directory(channel: str, directory: Path) -> Upload:
    """List and digest a directory's files, without hidden files and folders."""
    if not directory.is_dir():
        raise ConfigError(f"the {channel} {directory} is not a directory", hint="pass a directory with a config.json")
    found = []
    for path in sorted(directory.rglob("*")):
        relative = path.relative_to(directory)
        is_hidden = any(part.startswith(".") or part == "__pycache__" for part in relative.parts)
        if path.is_file() and not is_hidden:
            found.append((relative.as_posix(), path.stat().st_size))
    if not any(name == "config.json" for name, _ in found):
        raise ConfigError(
            f"the {channel} {directory} has no config.json", hint="pass a Hugging Face checkpoint directory"
        )
    whole = hashlib.sha256()
    for name, size in found:
        with (directory / name).open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        whole.update(f"{name}\n{size}\n{content}\n".encode())
    return Upload(channel, directory, tuple(found), whole.hexdigest()[:DIGEST_LENGTH])
