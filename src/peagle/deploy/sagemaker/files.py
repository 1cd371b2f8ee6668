"""Directories that go to S3: what is in them, and under which names it lies there.

A directory's prefix carries a digest of its contents, so an object that is there is the right one: an upload that was
interrupted goes on with what is missing, and two versions never mix.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from peagle.errors import ConfigError

ROOT = "peagle"
DIGEST_LENGTH = 8


@dataclass(frozen=True)
class Upload:
    """A directory on its way to S3. `channel` is what it is for: target or drafter."""

    channel: str
    directory: Path
    files: tuple[tuple[str, int], ...]
    """path under the directory and size in bytes, in order"""
    digest: str

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.files)

    def prefix(self, deployment: str) -> str:
        return f"{prefix_of(deployment)}{self.channel}-{self.digest}/"


def prefix_of(deployment: str) -> str:
    """Where everything of a deployment lies; it ends with a slash, so that one name is no prefix of another."""
    return f"{ROOT}/{deployment}/"


def read_directory(channel: str, directory: Path) -> Upload:
    """List and digest a directory's files; hidden ones, and those in hidden folders, stay behind."""
    if not directory.is_dir():
        raise ConfigError(f"the {channel} {directory} is not a directory", hint="give one with a config.json")
    found = []
    for path in sorted(directory.rglob("*")):
        relative = path.relative_to(directory)
        is_hidden = any(part.startswith(".") or part == "__pycache__" for part in relative.parts)
        if path.is_file() and not is_hidden:
            found.append((relative.as_posix(), path.stat().st_size))
    if not any(name == "config.json" for name, _ in found):
        raise ConfigError(
            f"the {channel} {directory} has no config.json", hint="give the directory of a Hugging Face checkpoint"
        )
    whole = hashlib.sha256()
    for name, size in found:
        with (directory / name).open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        whole.update(f"{name}\n{size}\n{content}\n".encode())
    return Upload(channel, directory, tuple(found), whole.hexdigest()[:DIGEST_LENGTH])
