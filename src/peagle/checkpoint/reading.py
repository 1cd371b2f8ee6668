"""A drafter directory as one engine reads it: the resulting config and state.

Two engines that read one directory differently run two different drafters. So the gate first compares each engine's
reading with the card, and only then computes with it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from peagle.checkpoint.config_json import read_object
from peagle.checkpoint.layouts import CONFIG_NAME, WEIGHTS_NAME, complete_directory, load_tensors, weights_files
from peagle.checkpoint.native import COMPACT_TENSOR, drafter_directory
from peagle.drafter.config import DrafterConfig
from peagle.drafter.model import Drafter
from peagle.errors import CheckpointError
from peagle.safetensors_header import read_header

if TYPE_CHECKING:
    from peagle.targets.hf import HFTarget


class Difference(CheckpointError):  # noqa: N818  a finding about the files, not an error of this program
    """A directory is not what it should be: what was found, and the likely cause."""


@dataclass(frozen=True)
class Files:
    """Config and weights as stored, keys and names unchanged."""

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def is_compact(self) -> bool:
        return COMPACT_TENSOR in self.tensors

    @property
    def dtypes(self) -> list[str]:
        found = {tensor.dtype for tensor in self.tensors.values() if tensor.is_floating_point()}
        return sorted(str(dtype).removeprefix("torch.") for dtype in found)


@dataclass(frozen=True)
class Reading:
    """A drafter as one engine reads it; `state` has the names of `Drafter.state_dict`."""

    config: DrafterConfig
    state: dict[str, Tensor]

    def build(self, target: "HFTarget") -> Drafter:
        """Build the network in the target's dtype, and tap the target's layers."""
        drafter = Drafter(self.config, target.embedding_VD, target.head_VD)
        drafter.load_state_dict(self.state)
        target.tap(self.config.aux_layer_ids)
        return drafter.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)


def find_directory(given: Path | str, target: "HFTarget") -> Path:
    """The directory of a path or of a shipped drafter's name. Its contents are not checked."""
    directory = Path(given).expanduser()
    return complete_directory(directory) if directory.is_dir() else drafter_directory(given, target)


def read_files(directory: Path) -> Files:
    """Read config and weights. A missing, truncated or damaged file is a CheckpointError."""
    config = read_object(directory / CONFIG_NAME)
    paths = weights_files(directory)
    if not paths:
        raise Difference(f"{WEIGHTS_NAME} is missing", "the copy is incomplete, or this is not a drafter directory")
    tensors: dict[str, Tensor] = {}
    for path in paths:
        if path.suffix == ".safetensors":
            check_size(path)
        tensors |= load_tensors(path)
    return Files(directory, config, tensors)


def check_size(path: Path) -> None:
    """Compare a safetensors file's size with its header."""
    size = path.stat().st_size
    expected = max((info.end for info in read_header(path).values()), default=size)
    if size < expected:
        raise Difference(
            f"{path.name} is truncated: it has {size:,} of {expected:,} bytes",
            "the copy was interrupted (full disk, broken transfer); copy it again",
        )
    if size > expected:
        raise Difference(f"{path.name} has {size - expected:,} bytes too many", "data was appended; copy it again")
