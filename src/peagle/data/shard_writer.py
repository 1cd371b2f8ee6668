"""Writes shards: finished rows are never lost, and an interrupted run resumes."""

import contextlib
import errno
import fcntl
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.numpy import save

from peagle.checkpoint.card import TargetIdentity
from peagle.data.config import differences, with_limit_of
from peagle.data.shards import (
    FORMAT,
    MANIFEST_NAME,
    NO_KEY,
    SHARD_TOKENS,
    Drop,
    Row,
    identity_of,
    is_shard_directory,
    line_of,
    lines_path,
    open_shards,
    pack,
    read_lines_of_open_shard,
    read_manifest,
    total,
    write_whole,
)
from peagle.errors import CapacityError, ConfigError
from peagle.provenance import provenance
from peagle.targets.hf import HFTarget

log = logging.getLogger(__name__)

FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class ShardWriter(contextlib.AbstractContextManager["ShardWriter"]):
    """Appends rows to a locked directory. `keys` holds everything that is done.

    Resumes an existing directory if target and settings match, and raises otherwise. Leaving the `with` block early
    keeps the open shard.
    """

    def __init__(
        self,
        directory: Path,
        kind: str,
        target: TargetIdentity,
        settings: Mapping[str, Any],
        *,
        accelerator: str | None = None,
        shard_tokens: int = SHARD_TOKENS,
    ) -> None:
        self.directory, self._shard_tokens = directory, shard_tokens
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = locked(directory, f"another process is writing to {directory}")
        try:
            identity = {"format": FORMAT, "kind": kind, "target": vars(target), "settings": _plain(settings)}
            self._manifest: dict[str, Any] = identity | {"is_complete": False, "shards": [], "runs": []}
            self.keys: set[int] = set()
            if is_shard_directory(directory):
                self._resume(kind, target, settings)
            self._manifest["runs"].append(provenance(accelerator))
            self._write_manifest()
            self._open_lines()
        except BaseException:
            os.close(self._lock)
            raise

    @property
    def num_runs(self) -> int:
        """Runs that wrote to the directory, including this one."""
        return len(self._manifest["runs"])

    @property
    def counts(self) -> dict[str, Any]:
        """num_rows, num_tokens, num_answer_tokens, dropped (by reason) and kinds (rows of each), over all runs."""
        return total([self._sealed_counts, self._open_counts])

    def __exit__(self, *_: object) -> None:
        self._file.close()
        os.close(self._lock)

    def append(self, rows: Sequence[Row], drops: Sequence[Drop] = ()) -> None:
        """Add finished rows. They survive a crash once this returns. If the disk is full, none is added."""
        if not rows and not drops:
            return
        content = "".join([*map(line_of, rows), *map(line_of, drops)]).encode()
        with self._explaining_a_full_disk():
            self._write_lines(content)
        self._count(rows, drops)
        if self._open_counts["num_tokens"] >= self._shard_tokens:
            self.seal()

    def seal(self) -> None:
        """Convert the open shard to a safetensors file and begin the next one."""
        if not self._rows and not self._drops:
            return
        shard = pack(self._rows, self._drops)
        arrays = {name: value for name, value in vars(shard).items() if name not in ("reasons", "kinds")}
        names = {"reasons": json.dumps(shard.reasons), "kinds": json.dumps(shard.kinds)}
        metadata = {"target": self._manifest["target"]["weights"]} | names
        content = save(arrays, metadata)
        path = Path(self._file.name).with_suffix(".safetensors")
        with self._explaining_a_full_disk():
            write_whole(path, content)
            self._manifest["shards"].append({"name": path.name, "num_bytes": len(content), **shard.counts()})
            try:
                self._write_manifest()
            except OSError:
                self._manifest["shards"].pop()
                raise
        self._file.close()
        Path(self._file.name).unlink()
        self._open_lines()

    def finish(self) -> None:
        """Seal the open shard and mark the directory complete."""
        self.seal()
        self._manifest["is_complete"] = True
        with self._explaining_a_full_disk():
            self._write_manifest()
        self._file.close()
        Path(self._file.name).unlink()

    def _resume(self, kind: str, target: TargetIdentity, settings: Mapping[str, Any]) -> None:
        earlier = read_manifest(self.directory)
        check_made_by(self.directory, kind, target, with_limit_of(earlier["settings"], settings))
        self._manifest |= {"shards": earlier["shards"], "runs": earlier["runs"]}
        for shard in open_shards(self.directory).shards:
            self.keys.update(shard.keys.tolist(), shard.dropped_keys.tolist())

    def _open_lines(self) -> None:
        """Resume the open shard of an earlier run, without a truncated last line."""
        number = len(self._manifest["shards"])
        for leftover in self.directory.glob("shard-*.jsonl"):
            if leftover < lines_path(self.directory, number):
                leftover.unlink()  # sealed, but the process ended before this line
        path = lines_path(self.directory, number)
        rows, drops, num_bytes = read_lines_of_open_shard(path)
        self._sealed_counts = total(self._manifest["shards"])
        self._rows: list[Row] = []
        self._drops: list[Drop] = []
        self._open_counts = total([])
        self._file, self._num_bytes = path.open("ab", buffering=0), num_bytes
        self._file.truncate(num_bytes)
        self._count(rows, drops)

    def _count(self, rows: Sequence[Row], drops: Sequence[Drop]) -> None:
        self._rows += rows
        self._drops += drops
        self.keys.update((row.key for row in rows), (drop.key for drop in drops))
        self.keys.discard(NO_KEY)
        counts = {
            "num_rows": len(rows),
            "num_tokens": sum(len(row.token_ids) for row in rows),
            "num_answer_tokens": sum(end - start for row in rows for start, end in row.spans),
            "dropped": Counter(drop.reason for drop in drops),
            "kinds": Counter(row.kind for row in rows),
        }
        self._open_counts = total([self._open_counts, counts])

    def _write_lines(self, content: bytes) -> None:
        try:
            num_written = 0
            while num_written < len(content):
                num_written += self._file.write(content[num_written:])
        except BaseException:
            # Remove partial or uncounted lines.
            self._file.truncate(self._num_bytes)
            raise
        self._num_bytes += len(content)

    def _write_manifest(self) -> None:
        content = json.dumps(self._manifest | total(self._manifest["shards"]), indent=2) + "\n"
        write_whole(self.directory / MANIFEST_NAME, content.encode())

    @contextlib.contextmanager
    def _explaining_a_full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            counts = self.counts
            raise CapacityError(
                f"cannot write to {self.directory}: {error.strerror}; the {counts['num_rows']} finished rows "
                f"({counts['num_answer_tokens']:,} answer tokens) are saved",
                hint="free disk space, then rerun the command to resume",
            ) from error


def open_writer(target: HFTarget, directory: Path, kind: str, settings: Mapping[str, Any]) -> ShardWriter:
    """A writer for a target. Open it before an engine, which changes the model."""
    accelerator = None
    if target.device.type == "cuda":
        import torch

        accelerator = torch.cuda.get_device_name(target.device)
    return ShardWriter(directory, kind, TargetIdentity.of(target), settings, accelerator=accelerator)


def check_made_by(directory: Path, kind: str, target: TargetIdentity, settings: Mapping[str, Any]) -> None:
    """Reject shards of another kind, target or settings."""
    earlier, settings = read_manifest(directory), _plain(settings)
    differing = [] if earlier["kind"] == kind else [f"it was written by {earlier['kind']}, not {kind}"]
    theirs = identity_of(directory, earlier)
    for name in ("weights", "tokenizer", "chat_template"):
        if getattr(theirs, name) != getattr(target, name):
            differing.append(f"the target's {name}: was {theirs.name!r}, is {target.name!r}")
    differing += differences(earlier["settings"], dict.fromkeys(earlier["settings"]) | settings)
    if differing:
        raise ConfigError(
            f"{directory} holds shards of another run: {'; '.join(differing)}",
            hint="pass the earlier settings to resume it, or a new --output to start over",
        )


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as JSON values."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(settings), default=str))
    return plain


def locked(directory: Path, refusal: str) -> int:
    """The descriptor of a directory, locked against other processes until it is closed."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ConfigError(refusal, hint="wait for it, or pass another --output") from error
    except OSError as error:  # some network file systems have no locks
        log.info("cannot lock %s (%s); make sure that no other process writes to it", directory, error.strerror)
    return descriptor
