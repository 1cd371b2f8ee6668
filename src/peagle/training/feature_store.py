"""Cache of the target's hidden states on disk: written once per dataset, read in every epoch and run.

    DIRECTORY/
        manifest.json                   identity of target, data, layers and dtype
        features-00000.safetensors      `aux_hidden` [tokens, A] and `last_hidden` [tokens, D] of consecutive
        features-00001.safetensors      conversations, without attention between conversations

The lengths of the conversations determine which file holds which, so existing files are never rewritten.

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

from peagle.data.config import differences
from peagle.data.conversations import Conversation
from peagle.data.shards import check_room, write_whole
from peagle.errors import CapacityError, CheckpointError
from peagle.objective.batches import pack_sequences
from peagle.objective.packing import Integers, Packing
from peagle.targets.hf import HFTarget
from peagle.training.distributed import World

log = logging.getLogger(__name__)

FORMAT = "peagle-features-1"
SHARD_BYTES = 2**30
GIB = 2**30
SECONDS_BETWEEN_LINES = 30


class States(NamedTuple):
    """Hidden states of tokens."""

    aux_hidden: Tensor
    last_hidden: Tensor


class Text(NamedTuple):
    """Packed sequences, the target's input."""

    token_ids_BT: Tensor
    document_BT: Tensor
    position_BT: Tensor


class FeatureStore:
    """Hidden states of `conversations`, truncated at `max_length`. Call `complete` before `read`."""

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
        # Consecutive numbers, even if one conversation exceeds the size of a file.
        self._shard_of = np.unique(starts // tokens_per_shard, return_inverse=True)[1]
        first = np.searchsorted(self._shard_of, np.arange(self.num_shards))
        self._firsts, self._ends = first, np.append(first[1:], len(conversations))
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
        """Numbers of the files not yet written."""
        return [number for number in range(self.num_shards) if not self._path(number).exists()]

    def complete(self, states_of: Callable[[Text], States], rows_at_once: int, world: World) -> None:
        """Write the missing files, each process its share. Checks the manifest and the disk space first."""
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
        """States of packed sequences, [B, T, A] and [B, T, D] on the host, zero at padding."""
        shape = (len(documents), self.max_length)
        states = States(*(torch.zeros(*shape, width, dtype=self._dtype) for width in self.widths))
        for row, numbers in enumerate(documents):
            start = 0
            for number in numbers:
                length, offset = int(self.lengths[number]), int(self._offset[number])
                file = self._file(int(self._shard_of[number]))
                for name, whole in zip(States._fields, states, strict=True):
                    whole[row, start : start + length] = file.get_slice(name)[offset : offset + length]
                start += length
        return states

    def _write(self, number: int, states_of: Callable[[Text], States], rows_at_once: int) -> None:
        """Run the conversations of one file through the target, packed, and store the states in document order."""
        own = range(int(self._firsts[number]), int(self._ends[number]))
        lengths = self.lengths[own.start : own.stop]
        packing = Packing(lengths, self.max_length, seed=0)
        starts = np.cumsum(lengths) - lengths
        flat: States | None = None
        logged = time.monotonic()
        for first in range(0, packing.num_rows, rows_at_once):
            if time.monotonic() - logged > SECONDS_BETWEEN_LINES:
                logged = time.monotonic()
                log.info("features: file %d of %d, row %d of %d", number + 1, self.num_shards, first, packing.num_rows)
            # The last batch repeats its last row, so that all batches have one shape.
            rows = [packing.documents(0, min(row, packing.num_rows - 1)) for row in range(first, first + rows_at_once)]
            packed = [[self.conversations[own.start + document] for document in row] for row in rows]
            token_ids, _, document, position = pack_sequences(packed, self.max_length)
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
        assert flat is not None, "a file holds at least one conversation"
        path = self._path(number)
        try:
            write_whole(path, save(flat._asdict()))
        except OSError as error:
            free = shutil.disk_usage(self.directory).free / GIB
            raise CapacityError(
                f"cannot write {path} ({free:.1f} GiB free): {error}; the {number} files before it are intact",
                hint="free disk space and rerun the command to resume, or use --features online",
            ) from error

    def _check_identity(self) -> None:
        path = self.directory / "manifest.json"
        if not path.exists():
            if any(self._path(number).exists() for number in range(self.num_shards)):
                raise CheckpointError(
                    f"{self.directory} has features but no manifest.json", hint="set another features_directory"
                )
            return
        try:
            earlier = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {path}: {error}", hint="set another features_directory") from error
        if differing := differences(earlier, self._identity):
            raise CheckpointError(
                f"{self.directory} caches features of another run: {'; '.join(differing)}",
                hint="set another features_directory, or delete this one",
            )

    def _check_room(self, missing: Sequence[int]) -> None:
        """Log the size of the missing files, and fail if the disk is too small."""
        if not missing:
            log.info("features: %.2f GiB in %s, complete", self.num_bytes / GIB, self.directory)
            return
        num_tokens = int(self.lengths[np.isin(self._shard_of, missing)].sum())
        hint = "set another features_directory, train on fewer conversations, or use --features online"
        check_room(self.directory, num_tokens * self._bytes_per_token, f"the features of {num_tokens:,} tokens", hint)

    def _path(self, number: int) -> Path:
        return self.directory / f"features-{number:05d}.safetensors"

    def _file(self, number: int) -> Any:
        if number not in self._open:
            try:
                self._open[number] = safe_open(self._path(number), framework="pt")
            except Exception as error:  # rewriting the file fixes any damage
                raise CheckpointError(
                    f"cannot read {self._path(number)}: {error}", hint="delete it; the next run writes it again"
                ) from error
        return self._open[number]


def contents_digest(conversations: Sequence[Conversation], lengths: Sequence[int] | Integers) -> str:
    """A hash of all token ids and of the lengths they are truncated to."""
    digest = hashlib.sha256(np.asarray(lengths, dtype=np.int64).tobytes())
    for row, length in zip(conversations, lengths, strict=True):
        digest.update(np.ascontiguousarray(row.token_ids[:length]).tobytes())
    return digest.hexdigest()[:32]
