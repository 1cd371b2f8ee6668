"""Training rows on disk: token ids and loss masks as they were generated, in shards that are read in place.

    DIRECTORY/
        manifest.json               the target's identity, all settings, counts for each shard, provenance of every run
        shard-00000.safetensors     sealed: token_ids, loss_mask, row offsets, keys, temperatures
        shard-00001.jsonl           the open shard: a line for each row, whole as soon as the row is finished

A row is appended to the open shard's lines before anything else is done with it, so whatever was finished survives a
killed process. At `SHARD_TOKENS` the lines are packed into a safetensors file, which the manifest then names; files
that it does not name are leftovers. Every row has a key, by which a later run knows what it need not do again.
"""

import json
import mmap
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from peagle.config import from_mapping
from peagle.drafter.card import TargetIdentity
from peagle.errors import CapacityError, ConfigError, DataError

if TYPE_CHECKING:
    from peagle.targets.hf import HFTarget

FORMAT = "peagle-shards-1"
MANIFEST_NAME = "manifest.json"
SHARD_TOKENS = 4_000_000
"""Tokens after which a shard is sealed."""
BYTES_PER_TOKEN = 5
LINE_BYTES_PER_TOKEN = 9
NO_KEY = -1
DTYPES = {"I64": np.int64, "I32": np.int32, "F32": np.float32, "U8": np.uint8, "BOOL": np.bool_}

TokenIds = npt.NDArray[np.int32]
LossMask = npt.NDArray[np.bool_]


class Row(NamedTuple):
    """One conversation as generated. `spans` are the (start, end) of the tokens that the target wrote."""

    key: int
    token_ids: TokenIds
    spans: tuple[tuple[int, int], ...]
    temperature: float


class Drop(NamedTuple):
    """Something that gave no row, and why. With a key it is not tried again; without one it is only counted."""

    reason: str
    key: int = NO_KEY


@dataclass(frozen=True)
class Shard:
    """Arrays of one shard, N rows of T tokens in all; memory-mapped where the shard is sealed, and never written to."""

    token_ids: TokenIds
    """[T]"""
    loss_mask: LossMask
    """[T], True where the target wrote the token"""
    offsets: npt.NDArray[np.int64]
    """[N + 1], where each row begins"""
    keys: npt.NDArray[np.int64]
    """[N]"""
    temperatures: npt.NDArray[np.float32]
    """[N]"""
    dropped_keys: npt.NDArray[np.int64]
    dropped_reasons: npt.NDArray[np.uint8]
    """index into `reasons`, for each of `dropped_keys`"""
    reasons: tuple[str, ...]

    @property
    def num_rows(self) -> int:
        return len(self.keys)

    def dropped(self) -> dict[str, int]:
        counts = np.bincount(self.dropped_reasons, minlength=len(self.reasons)).tolist()
        return dict(zip(self.reasons, counts, strict=True))

    def counts(self) -> dict[str, Any]:
        return {
            "num_rows": self.num_rows,
            "num_tokens": len(self.token_ids),
            "num_answer_tokens": int(np.count_nonzero(self.loss_mask)),
            "dropped": self.dropped(),
        }


@dataclass(frozen=True)
class ShardSet:
    """A directory of shards as it is at the moment, the open one included."""

    directory: Path
    manifest: dict[str, Any]
    shards: tuple[Shard, ...]

    @property
    def target(self) -> TargetIdentity:
        return identity_of(self.directory, self.manifest)

    def counts(self) -> dict[str, Any]:
        return total(shard.counts() for shard in self.shards)


def is_shard_directory(path: Path) -> bool:
    return (path / MANIFEST_NAME).is_file()


def open_shards(directory: Path) -> ShardSet:
    """Map every shard of a directory into memory; takes milliseconds, whatever its size."""
    manifest = read_manifest(directory)
    weights = identity_of(directory, manifest).weights
    shards = [_map_shard(directory, entry, weights) for entry in manifest["shards"]]
    rows, drops, _ = read_lines_of_open_shard(lines_path(directory, len(shards)))
    if rows or drops:
        shards.append(pack(rows, drops))
    return ShardSet(directory, manifest, tuple(shards))


def check_target(directory: Path, target: "HFTarget") -> None:
    """Refuse shards that another target has written: a drafter would learn to say what this one does not."""
    theirs, ours = identity_of(directory, read_manifest(directory)), TargetIdentity.of(target)
    rounding = " (or float16 has rounded them; try bfloat16)" if str(target.dtype) == "torch.float16" else ""
    what = {
        "weights": f"its weights are others{rounding}",
        "tokenizer": "its tokenizer is another one",
        "chat_template": "its chat template is another one",
    }
    differing = [words for name, words in what.items() if getattr(theirs, name) != getattr(ours, name)]
    if differing:
        raise DataError(
            f"{directory} was written by target {theirs.name!r}, not by {ours.name!r}: {', '.join(differing)}",
            hint="a drafter learns what its own target says; write the data with this target (peagle data --help)",
        )


def check_disk(directory: Path, num_tokens: int) -> str:
    """A sentence on the room that so many tokens need; a disk that has less is refused before anything is written.

    An estimate: keys of short rows and of what is dropped come on top. A disk that gets full loses nothing.
    """
    needed = num_tokens * BYTES_PER_TOKEN + min(num_tokens, SHARD_TOKENS) * LINE_BYTES_PER_TOKEN
    place = next(parent for parent in (directory.absolute(), *directory.absolute().parents) if parent.exists())
    free = shutil.disk_usage(place).free
    counted = f"an estimated {_size(needed)} for {num_tokens:,} tokens, counted generously"
    estimate = f"{counted}; {_size(free)} are free at {directory}"
    if needed > free:
        raise CapacityError(
            f"the disk is too small: {estimate}", hint="ask for less, shorten max_length, or give another output"
        )
    return estimate


def read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST_NAME
    hint = "give a directory that `peagle data` has written, or a file of conversations"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{directory} holds no {MANIFEST_NAME}, so it is no directory of shards", hint=hint) from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}", hint=hint) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise DataError(f"{path} is of format {found!r}; this version reads {FORMAT!r}", hint="write the data again")
    return manifest


def identity_of(directory: Path, manifest: dict[str, Any]) -> TargetIdentity:
    try:
        return from_mapping(TargetIdentity, manifest["target"], "target")
    except (ConfigError, KeyError, AttributeError) as error:
        raise DataError(
            f"{directory / MANIFEST_NAME} does not say which target wrote the shards: {error}",
            hint="the file was changed; write the data again",
        ) from error


def total(counts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The sum of the counts of shards; the reasons with the most drops first."""
    sums: dict[str, Any] = {"num_rows": 0, "num_tokens": 0, "num_answer_tokens": 0, "dropped": {}}
    for one in counts:
        for name in ("num_rows", "num_tokens", "num_answer_tokens"):
            sums[name] += one[name]
        for reason, number in one["dropped"].items():
            sums["dropped"][reason] = sums["dropped"].get(reason, 0) + number
    sums["dropped"] = dict(sorted(sums["dropped"].items(), key=lambda pair: -pair[1]))
    return sums


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def lines_path(directory: Path, number: int) -> Path:
    """The lines of the open shard, which is the one after the sealed ones."""
    return directory / f"shard-{number:05d}.jsonl"


def pack(rows: Sequence[Row], drops: Sequence[Drop]) -> Shard:
    """Join rows into one shard's arrays."""
    lengths = np.array([len(row.token_ids) for row in rows], dtype=np.int64)
    offsets = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths)))
    loss_mask = np.zeros(int(offsets[-1]), dtype=np.bool_)
    for row, offset in zip(rows, offsets.tolist(), strict=False):
        for start, end in row.spans:
            loss_mask[offset + start : offset + end] = True
    reasons = tuple(sorted({drop.reason for drop in drops}))
    index = {reason: number for number, reason in enumerate(reasons)}
    return Shard(
        token_ids=np.concatenate([np.zeros(0, dtype=np.int32), *(row.token_ids for row in rows)]),
        loss_mask=loss_mask,
        offsets=offsets,
        keys=np.array([row.key for row in rows], dtype=np.int64),
        temperatures=np.array([row.temperature for row in rows], dtype=np.float32),
        dropped_keys=np.array([drop.key for drop in drops], dtype=np.int64),
        dropped_reasons=np.array([index[drop.reason] for drop in drops], dtype=np.uint8),
        reasons=reasons,
    )


def row_line(row: Row) -> str:
    """A row as one line of the open shard. Ids are written in hexadecimal: a fraction of the time of a list."""
    words = {"key": row.key, "temperature": row.temperature, "spans": row.spans, "ids": row.token_ids.tobytes().hex()}
    return json.dumps(words) + "\n"


def drop_line(drop: Drop) -> str:
    return json.dumps({"key": drop.key, "dropped": drop.reason}) + "\n"


def read_lines_of_open_shard(path: Path) -> tuple[list[Row], list[Drop], int]:
    """Rows and drops, and the bytes of the file that hold them: less than all where a write was cut off."""
    rows: list[Row] = []
    drops: list[Drop] = []
    num_bytes = 0
    content = path.read_bytes() if path.exists() else b""
    for line in content.splitlines(keepends=True):
        try:
            words = json.loads(line)
            if "dropped" in words:
                drops.append(Drop(words["dropped"], words["key"]))
            else:
                token_ids = np.frombuffer(bytes.fromhex(words["ids"]), dtype=np.int32)
                spans = tuple((start, end) for start, end in words["spans"])
                rows.append(Row(words["key"], token_ids, spans, words["temperature"]))
        except (ValueError, KeyError, TypeError):
            break
        if not line.endswith(b"\n"):
            (drops if "dropped" in words else rows).pop()
            break
        num_bytes += len(line)
    return rows, drops, num_bytes


def _map_shard(directory: Path, entry: dict[str, Any], weights: str) -> Shard:
    path = directory / entry["name"]
    try:
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(content) != entry["num_bytes"]:
            raise ValueError(f"it has {len(content)} bytes, the manifest says {entry['num_bytes']}")
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        metadata = header.pop("__metadata__")
        arrays = {
            name: np.ndarray(tuple(about["shape"]), DTYPES[about["dtype"]], content, start + about["data_offsets"][0])
            for name, about in header.items()
        }
        shard = Shard(**arrays, reasons=tuple(json.loads(metadata["reasons"])))
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing, but {MANIFEST_NAME} names it", hint="copy the whole directory") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} cannot be read: {error}", hint="it was cut off or changed; copy it again, or write the data again"
        ) from error
    if metadata["target"] != weights:
        raise DataError(
            f"{path} was written by another target than {MANIFEST_NAME} says",
            hint="shards of different targets cannot be put into one directory",
        )
    return shard


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file at once: after a crash it has the old content or the new one."""
    scratch = path.with_name(path.name + ".tmp")
    try:
        with scratch.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def _size(num_bytes: int) -> str:
    """
    >>> _size(14_000), _size(3 * 2**20), _size(2**40)
    ('13.7 KiB', '3.0 MiB', '1024.0 GiB')
    """
    unit, name = next((pair for pair in ((2**30, "GiB"), (2**20, "MiB")) if num_bytes >= pair[0]), (2**10, "KiB"))
    return f"{num_bytes / unit:.1f} {name}"
