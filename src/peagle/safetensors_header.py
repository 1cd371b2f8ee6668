"""Read what a safetensors checkpoint holds from its headers and its index, without loading a tensor.

A file is an 8-byte length, a JSON header of that length, then the tensors' bytes. A checkpoint split over several files
has a `*.index.json` whose `weight_map` gives the file of each tensor.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
COPY_AGAIN = "the file is truncated or corrupt, or a Git LFS pointer; copy or download it again"


@dataclass(frozen=True)
class TensorInfo:
    """One entry of a header."""

    dtype: str
    """As the format spells it: "BF16", "F32", "U8"."""
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte in the file."""
    end: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors that a safetensors file announces, by name. The file may still be shorter than the header says."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(MAX_HEADER_BYTES, path.stat().st_size - 8):
                raise ValueError(f"its header length, {length}, exceeds the file")
            header = json.loads(file.read(length))
        return {
            name: _tensor_info(entry, 8 + length) for name, entry in _object(header).items() if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {_reason(error)}", hint=COPY_AGAIN) from error


def check_whole(path: Path) -> None:
    """Refuse a safetensors file that is shorter than its header says."""
    size = path.stat().st_size
    if size < (expected := max((info.end for info in read_header(path).values()), default=0)):
        raise CheckpointError(f"{path} is truncated: it has {size:,} of {expected:,} bytes", hint=COPY_AGAIN)


def read_index(path: Path) -> list[Path]:
    """The weight files that an index names, sorted. Each must exist beside the index."""
    try:
        names: list[Any] = list(_object(json.loads(path.read_text(encoding="utf-8"))["weight_map"]).values())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not an index of weight files: {_reason(error)}", hint=COPY_AGAIN) from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{path} names the file {name!r}, which is not in its directory", hint=COPY_AGAIN)
        if not (path.parent / name).is_file():
            raise CheckpointError(f"{path} names {name}, which is missing", hint="copy or download the directory again")
    return [path.parent / name for name in sorted(set(names))]


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model: those of its index if it has one, since a second copy may lie beside them."""
    if (directory / INDEX_NAME).is_file():
        return read_index(directory / INDEX_NAME)
    whole = directory / "model.safetensors"
    return [whole] if whole.is_file() else sorted(directory.glob("*.safetensors"))


def _tensor_info(entry: Any, data_start: int) -> TensorInfo:
    shape = tuple(entry["shape"])
    start, end = entry["data_offsets"]
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, start, end)):
        raise ValueError(f"a shape or an offset is not a whole number: {entry}")
    return TensorInfo(str(entry["dtype"]), shape, data_start + start, data_start + end)


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    return value


def _reason(error: Exception) -> str:
    return f"it has no key {error}" if isinstance(error, KeyError) else str(error)
