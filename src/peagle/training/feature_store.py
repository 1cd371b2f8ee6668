"""The target's states on disk: written once for a set of conversations, then read for any number of epochs and runs.

    DIRECTORY/
        manifest.json                   target, data, layers, dtype and shapes: what the states are states of
        features-00000.safetensors      `aux_hidden` [tokens, A] and `last_hidden` [tokens, D] of consecutive
        features-00001.safetensors      conversations, each as if it had run alone

Which conversations a file holds follows from their lengths, so a file that exists is one that need not be made again.

Shapes: B rows, T tokens, A concatenated aux width, D target width.
"""

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from peagle.errors import CapacityError, CheckpointError
from peagle.targets.hf import HFTarget
from peagle.training.batches import pack_rows
from peagle.training.conversations import Conversation
from peagle.training.distributed import World
from peagle.training.packing import Integers, Packing
from peagle.training.shards import write_whole

log = logging.getLogger(__name__)

FORMAT = "peagle-features-1"
SHARD_BYTES = 2**30
GIB = 2**30
SECONDS_BETWEEN_LINES = 30


class States(NamedTuple):
    """Of tokens or of rows of them."""

    aux_hidden: Tensor
    last_hidden: Tensor


class Text(NamedTuple):
    """Packed rows without slots: what the target reads."""

    token_ids_BT: Tensor
    document_BT: Tensor
    position_BT: Tensor


class FeatureStore:
    """States of `conversations`, each cut at `max_length`. They must be complete before they are read."""

    def __init__(
        self, directory: Path, target: HFTarget, conversations: Sequence[Conversation], max_length: int
    ) -> None:
        self.directory, self.conversations, self.max_length = directory, conversations, max_length
        self.lengths = np.array([min(len(row), max_length) for row in conversations], dtype=np.int64)
        self.widths = (len(target.aux_layer_ids) * target.hidden_size, target.hidden_size)
        self._dtype = target.dtype
        self._bytes_per_token = sum(self.widths) * target.dtype.itemsize
        tokens_per_shard = max(1, SHARD_BYTES // self._bytes_per_token)
        starts = np.cumsum(self.lengths) - self.lengths
        # Numbered without gaps, also where one conversation fills several files' worth.
        self._shard_of = np.unique(starts // tokens_per_shard, return_inverse=True)[1]
        first = np.searchsorted(self._shard_of, np.arange(self.num_shards))
        self._ends = np.append(first[1:], len(conversations))
        self._firsts = first
        self._offset = starts - starts[first[self._shard_of]]
        self._open: dict[int, Any] = {}
        self._identity = {
            "format": FORMAT,
            "target": target.fingerprint(),
            "aux_layer_ids": list(target.aux_layer_ids),
            "dtype": str(target.dtype).removeprefix("torch."),
            "data": contents_digest(conversations, self.lengths),
            "num_tokens": int(self.lengths.sum()),
        }

    @property
    def num_bytes(self) -> int:
        return int(self.lengths.sum()) * self._bytes_per_token

    @property
    def num_shards(self) -> int:
        return int(self._shard_of[-1]) + 1

    def missing(self) -> list[int]:
        """Numbers of the files that are still to be written."""
        return [number for number in range(self.num_shards) if not self._path(number).exists()]

    def complete(self, states_of: Callable[[Text], States], rows_at_once: int, world: World) -> None:
        """Write what is missing, each process its share, after checking that it is ours and fits on the disk."""
        self._check_identity()
        missing = self.missing()
        self._check_room(missing)
        world.barrier()
        if world.is_main and missing:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_whole(self.directory / "manifest.json", json.dumps(self._identity, indent=2).encode())
        world.barrier()
        for number in missing[world.rank :: world.size]:
            self._write(number, states_of, rows_at_once)
            log.info("features: %d of %d files written", number + 1, self.num_shards)
        world.barrier()

    def read(self, documents: Sequence[Sequence[int]]) -> States:
        """States of packed rows, [B, T, A] and [B, T, D] on the host; zeros at padding."""
        shape = (len(documents), self.max_length)
        states = States(*(torch.zeros(*shape, width, dtype=self._dtype) for width in self.widths))
        for row, numbers in enumerate(documents):
            start = 0
            for number in numbers:
                length = int(self.lengths[number])
                offset = int(self._offset[number])
                file = self._file(int(self._shard_of[number]))
                for name, whole in zip(States._fields, states, strict=True):
                    whole[row, start : start + length] = file.get_slice(name)[offset : offset + length]
                start += length
        return states

    def _write(self, number: int, states_of: Callable[[Text], States], rows_at_once: int) -> None:
        """Run one file's conversations through the target, packed, and put each token's states in its place."""
        own = range(int(self._firsts[number]), int(self._ends[number]))
        lengths = self.lengths[own.start : own.stop]
        packing = Packing(lengths, self.max_length, seed=0)
        starts = np.cumsum(lengths) - lengths
        flat: States | None = None
        said = time.monotonic()
        for first in range(0, packing.num_rows, rows_at_once):
            if time.monotonic() - said > SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                log.info("features: file %d of %d, row %d of %d", number + 1, self.num_shards, first, packing.num_rows)
            # The last group repeats its last row, so that all groups have one shape.
            rows = [packing.documents(0, min(row, packing.num_rows - 1)) for row in range(first, first + rows_at_once)]
            packed = [[self.conversations[own.start + document] for document in row] for row in rows]
            token_ids, _, document, position = pack_rows(packed, self.max_length)
            states = states_of(Text(token_ids, document, position))
            if flat is None:
                flat = States(*(torch.empty(int(lengths.sum()), s.shape[-1], dtype=s.dtype) for s in states))
            for row, numbers in enumerate(rows):
                start = 0
                for one in numbers:
                    place = slice(int(starts[one]), int(starts[one] + lengths[one]))
                    for whole, part in zip(flat, states, strict=True):
                        whole[place] = part[row, start : start + int(lengths[one])].cpu()
                    start += int(lengths[one])
        assert flat is not None, "every file has a conversation"
        self._save(number, flat)

    def _save(self, number: int, states: States) -> None:
        path = self._path(number)
        try:
            write_whole(path, save(states._asdict()))
        except OSError as error:
            free = shutil.disk_usage(self.directory).free / GIB
            raise CapacityError(
                f"{path} cannot be written ({free:.1f} GiB free): {error}; the {number} files before it stand",
                hint='make room and give the same command again, or set features to "online"',
            ) from error

    def _check_identity(self) -> None:
        path = self.directory / "manifest.json"
        if not path.exists():
            if any(self._path(number).exists() for number in range(self.num_shards)):
                raise CheckpointError(
                    f"{self.directory} has features but no manifest.json", hint="give another features_directory"
                )
            return
        try:
            earlier = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}", hint="give another features_directory") from error
        differing = [
            f"{name} was {earlier.get(name)!r}, is {value!r}"
            for name, value in self._identity.items()
            if earlier.get(name) != value
        ]
        if differing:
            raise CheckpointError(
                f"{self.directory} has features of something else: {'; '.join(differing)}",
                hint="give another features_directory, or remove this one",
            )

    def _check_room(self, missing: Sequence[int]) -> None:
        """Say how large the rest is, and refuse it where the disk has no room."""
        if not missing:
            log.info("features: %.2f GiB in %s are complete", self.num_bytes / GIB, self.directory)
            return
        needed = sum(
            int(self.lengths[self._firsts[number] : self._ends[number]].sum()) * self._bytes_per_token
            for number in missing
        )
        existing = next(path for path in (self.directory, *self.directory.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free
        log.info(
            "features: %d tokens of %d bytes, %.2f GiB to write to %s (%.1f GiB free)",
            self.lengths.sum(),
            self._bytes_per_token,
            needed / GIB,
            self.directory,
            free / GIB,
        )
        if needed > free:
            raise CapacityError(
                f"the features of {int(self.lengths.sum())} tokens take {needed / GIB:.1f} GiB more, but "
                f"{self.directory} has {free / GIB:.1f} GiB",
                hint='give another features_directory, use fewer conversations, or set features to "online"',
            )

    def _path(self, number: int) -> Path:
        return self.directory / f"features-{number:05d}.safetensors"

    def _file(self, number: int) -> Any:
        if number not in self._open:
            try:
                self._open[number] = safe_open(self._path(number), framework="pt")
            except Exception as error:  # whatever is wrong with the file, making it again mends it
                raise CheckpointError(
                    f"{self._path(number)} cannot be read: {error}", hint="remove it; the next run writes it again"
                ) from error
        return self._open[number]


def contents_digest(conversations: Sequence[Conversation], lengths: Sequence[int] | Integers) -> str:
    """A hash of all token ids and of where they are cut."""
    digest = hashlib.sha256(np.asarray(lengths, dtype=np.int64).tobytes())
    for row, length in zip(conversations, lengths, strict=True):
        digest.update(np.ascontiguousarray(row.token_ids[:length]).tobytes())
    return digest.hexdigest()[:32]
