"""Conversations on disk as token ids and loss masks, in memory-mapped shards.

    DIRECTORY/
        manifest.json               the target's identity, all settings, counts per shard, provenance of every run
        shard-00000.safetensors     sealed: token_ids, loss_mask, row offsets, keys, temperatures, kinds
        shard-00001.jsonl           the open shard: one line per finished row

A finished row is appended to the open shard at once, so it survives a killed process. At `SHARD_TOKENS` the lines
become a safetensors file, which is then listed in the manifest; unlisted files are leftovers. Rows have keys, so that
a resumed run skips finished ones.
"""

import json
import logging
import mmap
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from peagle.checkpoint.card import TargetIdentity
from peagle.config import from_mapping
from peagle.errors import CapacityError, ConfigError, DataError

if TYPE_CHECKING:
    from peagle.targets.hf import HFTarget

log = logging.getLogger(__name__)

FORMAT = "peagle-shards-1"
MANIFEST_NAME = "manifest.json"
HELD_OUT_NAME = "held_out"
SHARD_TOKENS = 4_000_000
"""Tokens after which a shard is sealed."""
BYTES_PER_TOKEN = 5
LINE_BYTES_PER_TOKEN = 9
NO_KEY = -1
DTYPES = {"I64": np.int64, "I32": np.int32, "F32": np.float32, "U8": np.uint8, "BOOL": np.bool_}

TokenIds = npt.NDArray[np.int32]
LossMask = npt.NDArray[np.bool_]


class Row(NamedTuple):
    """One conversation. `spans` are the (start, end) of the tokens that the target wrote."""

    key: int
    token_ids: TokenIds
    spans: tuple[tuple[int, int], ...]
    temperature: float
    kind: str = ""
    """what users ask for in it: a kind of `kinds.py`, or the category of a prompt file; empty if unknown"""


class Drop(NamedTuple):
    """A dropped prompt, question or answer. With a key it is not retried; without one it is only counted."""

    reason: str
    key: int = NO_KEY


@dataclass(frozen=True)
class Shard:
    """Read-only arrays of one shard: N rows, T tokens in total. Memory-mapped if the shard is sealed."""

    token_ids: TokenIds
    """[T]"""
    loss_mask: LossMask
    """[T], True where the target wrote the token"""
    offsets: npt.NDArray[np.int64]
    """[N + 1], start of each row"""
    keys: npt.NDArray[np.int64]
    """[N]"""
    temperatures: npt.NDArray[np.float32]
    """[N]"""
    dropped_keys: npt.NDArray[np.int64]
    dropped_reasons: npt.NDArray[np.uint8]
    """index into `reasons`, for each of `dropped_keys`"""
    reasons: tuple[str, ...]
    row_kinds: npt.NDArray[np.int32]
    """[N], index into `kinds`"""
    kinds: tuple[str, ...]

    @property
    def num_rows(self) -> int:
        return len(self.keys)

    def counts(self) -> dict[str, Any]:
        dropped = np.bincount(self.dropped_reasons, minlength=len(self.reasons)).tolist()
        return {
            "num_rows": self.num_rows,
            "num_tokens": len(self.token_ids),
            "num_answer_tokens": int(np.count_nonzero(self.loss_mask)),
            "dropped": dict(zip(self.reasons, dropped, strict=True)),
            "kinds": dict(
                zip(self.kinds, np.bincount(self.row_kinds, minlength=len(self.kinds)).tolist(), strict=True)
            ),
        }


@dataclass(frozen=True)
class ShardSet:
    """All shards of a directory, including the open one."""

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
    """Memory-map every shard of a directory."""
    manifest = read_manifest(directory)
    weights = identity_of(directory, manifest).weights
    shards = [_map_shard(directory, entry, weights) for entry in manifest["shards"]]
    rows, drops, _ = read_lines_of_open_shard(lines_path(directory, len(shards)))
    if rows or drops:
        shards.append(pack(rows, drops))
    return ShardSet(directory, manifest, tuple(shards))


def check_target(directory: Path, target: "HFTarget") -> None:
    """Reject shards that another target wrote."""
    theirs, ours = identity_of(directory, read_manifest(directory)), TargetIdentity.of(target)
    rounding = " (or float16 rounded them; try bfloat16)" if str(target.dtype) == "torch.float16" else ""
    what = {
        "weights": f"the weights differ{rounding}",
        "tokenizer": "the tokenizer differs",
        "chat_template": "the chat template differs",
    }
    differing = [words for name, words in what.items() if getattr(theirs, name) != getattr(ours, name)]
    if differing:
        raise DataError(
            f"{directory} was written by target {theirs.name!r}, not by {ours.name!r}: {', '.join(differing)}",
            hint="a drafter must learn from its own target; generate the data with this target (peagle data --help)",
        )


def written_counts(output: Path) -> dict[str, Any]:
    """The counts of earlier runs in an output directory, including held-out rows."""
    directories = filter(is_shard_directory, (output, output / HELD_OUT_NAME))
    return total(open_shards(directory).counts() for directory in directories)


def check_disk(directory: Path, num_tokens: int) -> None:
    """Check that the disk has room for shards of `num_tokens`."""
    needed = num_tokens * BYTES_PER_TOKEN + min(num_tokens, SHARD_TOKENS) * LINE_BYTES_PER_TOKEN
    hint = "generate less, lower --max-length, or pass another --output"
    check_room(directory, needed, f"{num_tokens:,} tokens", hint)


def check_room(directory: Path, num_bytes: int, what: str, hint: str) -> None:
    """Log the estimated size of `what`, and fail if the disk has less room."""
    place = next(parent for parent in (directory.absolute(), *directory.absolute().parents) if parent.exists())
    free = shutil.disk_usage(place).free
    estimate = f"at most about {_size(num_bytes)} for {what}, {_size(free)} free at {directory}"
    if num_bytes > free:
        raise CapacityError(f"the disk is too small: {estimate}", hint=hint)
    log.info("disk: %s", estimate)


def read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST_NAME
    hint = "pass a directory written by `peagle data`, or a file of conversations"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{directory} is not a shard directory: no {MANIFEST_NAME}", hint=hint) from error
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}", hint=hint) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise DataError(f"{path} has format {found!r}; this version reads {FORMAT!r}", hint="generate the data again")
    return manifest


def identity_of(directory: Path, manifest: dict[str, Any]) -> TargetIdentity:
    try:
        return from_mapping(TargetIdentity, manifest["target"], "target")
    except (ConfigError, KeyError, AttributeError) as error:
        raise DataError(
            f"{directory / MANIFEST_NAME} does not identify the target: {error}",
            hint="the file was edited; generate the data again",
        ) from error


def total(counts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The sum of counts, with drop reasons and kinds in descending order."""
    listed, dropped, kinds = list(counts), Counter[str](), Counter[str]()
    for one in listed:
        dropped.update(one["dropped"])
        kinds.update(one.get("kinds", {}))  # shards of older versions have none
    sums = {name: sum(one[name] for one in listed) for name in ("num_rows", "num_tokens", "num_answer_tokens")}
    return sums | {"dropped": dict(dropped.most_common()), "kinds": dict(kinds.most_common())}


def lines_path(directory: Path, number: int) -> Path:
    """The open shard, numbered after the sealed ones, which have the suffix .safetensors."""
    return directory / f"shard-{number:05d}.jsonl"


def pack(rows: Sequence[Row], drops: Sequence[Drop]) -> Shard:
    """Concatenate rows into the arrays of one shard."""
    lengths = np.array([len(row.token_ids) for row in rows], dtype=np.int64)
    offsets = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths)))
    loss_mask = np.zeros(int(offsets[-1]), dtype=np.bool_)
    for row, offset in zip(rows, offsets.tolist(), strict=False):
        for start, end in row.spans:
            loss_mask[offset + start : offset + end] = True
    reasons = tuple(sorted({drop.reason for drop in drops}))
    index = {reason: number for number, reason in enumerate(reasons)}
    kinds = tuple(sorted({row.kind for row in rows}))
    return Shard(
        token_ids=np.concatenate([np.zeros(0, dtype=np.int32), *(row.token_ids for row in rows)]),
        loss_mask=loss_mask,
        offsets=offsets,
        keys=np.array([row.key for row in rows], dtype=np.int64),
        temperatures=np.array([row.temperature for row in rows], dtype=np.float32),
        dropped_keys=np.array([drop.key for drop in drops], dtype=np.int64),
        dropped_reasons=np.array([index[drop.reason] for drop in drops], dtype=np.uint8),
        reasons=reasons,
        row_kinds=np.array([kinds.index(row.kind) for row in rows], dtype=np.int32),
        kinds=kinds,
    )


def line_of(item: Row | Drop) -> str:
    """A row or drop as a line of the open shard. Ids are hexadecimal, much faster to parse than a list."""
    if isinstance(item, Drop):
        return json.dumps({"key": item.key, "dropped": item.reason}) + "\n"
    words = {"key": item.key, "temperature": item.temperature, "spans": item.spans, "kind": item.kind}
    return json.dumps(words | {"ids": item.token_ids.tobytes().hex()}) + "\n"


def read_lines_of_open_shard(path: Path) -> tuple[list[Row], list[Drop], int]:
    """Rows and drops, and the bytes that hold them, without a truncated last line."""
    rows: list[Row] = []
    drops: list[Drop] = []
    num_bytes = 0
    content = path.read_bytes() if path.exists() else b""
    for line in content.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        try:
            words = json.loads(line)
            if "dropped" in words:
                drops.append(Drop(words["dropped"], words["key"]))
            else:
                token_ids = np.frombuffer(bytes.fromhex(words["ids"]), dtype=np.int32)
                spans = tuple((start, end) for start, end in words["spans"])
                rows.append(Row(words["key"], token_ids, spans, words["temperature"], words.get("kind", "")))
        except (ValueError, KeyError, TypeError):
            break
        num_bytes += len(line)
    return rows, drops, num_bytes


def _map_shard(directory: Path, entry: dict[str, Any], weights: str) -> Shard:
    path = directory / entry["name"]
    try:
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(content) != entry["num_bytes"]:
            raise ValueError(f"{len(content)} bytes, but the manifest says {entry['num_bytes']}")
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        metadata = header.pop("__metadata__")
        arrays = {
            name: np.ndarray(tuple(about["shape"]), DTYPES[about["dtype"]], content, start + about["data_offsets"][0])
            for name, about in header.items()
        }
        arrays.setdefault("row_kinds", np.zeros(len(arrays["keys"]), np.int32))  # an older version wrote none
        kinds = tuple(json.loads(metadata.get("kinds", '[""]')))
        shard = Shard(**arrays, reasons=tuple(json.loads(metadata["reasons"])), kinds=kinds)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing, but listed in {MANIFEST_NAME}", hint="copy the whole directory") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"cannot read {path}: {error}", hint="it is truncated or changed; copy it again, or generate the data again"
        ) from error
    if metadata["target"] != weights:
        raise DataError(
            f"{path} was written by another target than the one in {MANIFEST_NAME}",
            hint="keep shards of different targets in separate directories",
        )
    return shard


def write_whole(path: Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    """Replace a file atomically. `content` is its bytes, or a function that writes them."""
    scratch = path.with_name(path.name + ".tmp")
    try:
        with scratch.open("wb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                content(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except (OSError, RuntimeError):  # torch wraps some write failures in RuntimeError
        scratch.unlink(missing_ok=True)
        raise


def _size(num_bytes: int) -> str:
    """
    >>> _size(14_000), _size(3 * 2**20), _size(2**40)
    ('13.7 KiB', '3.0 MiB', '1024.0 GiB')
    """
    unit, name = next((pair for pair in ((2**30, "GiB"), (2**20, "MiB")) if num_bytes >= pair[0]), (2**10, "KiB"))
    return f"{num_bytes / unit:.1f} {name}"
