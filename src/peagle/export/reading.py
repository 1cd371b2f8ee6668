"""A drafter directory as an engine reads it: what its config comes to mean, and which tensors end up where.

Two engines that read one directory differently run two drafters. So the gate first writes down the reading, compares
that with the card, and only then computes with it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from peagle.drafter.checkpoint import drafter_directory
from peagle.drafter.config import DrafterConfig
from peagle.drafter.layouts import CONFIG_NAME, WEIGHTS_NAME, load_tensors, weights_files
from peagle.drafter.model import Drafter
from peagle.errors import CheckpointError

if TYPE_CHECKING:
    from peagle.targets.hf import HFTarget

COMPACT_TENSOR = "mask_embedding"
"""Only our compact form has it; no other engine knows the name."""
INCOMPLETE = "the copy is incomplete, or this is not a drafter directory"


class Difference(Exception):  # noqa: N818  a finding about files, not a fault of this program
    """Something is not as it should be: what was found, and what probably made it so."""

    def __init__(self, found: str, cause: str) -> None:
        super().__init__(found)
        self.found, self.cause = found, cause


@dataclass(frozen=True)
class Files:
    """A directory's two files as they lie on the disk, names and spellings untouched."""

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
    """A drafter as one engine understands it; `state` is named as in `Drafter.state_dict`."""

    config: DrafterConfig
    state: dict[str, Tensor]

    def build(self, target: "HFTarget") -> Drafter:
        """The network of this reading in the target's precision, with the target tapped at its layers."""
        drafter = Drafter(self.config, target.embedding_VD, target.head_VD)
        drafter.load_state_dict(self.state)
        target.tap(self.config.aux_layer_ids)
        return drafter.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)


def find_directory(given: Path | str, target: "HFTarget") -> Path:
    """The directory that is meant, by path or by the name of a shipped drafter; what it holds is not looked at."""
    directory = Path(given).expanduser()
    return directory if directory.is_dir() else drafter_directory(given, target)


def read_files(directory: Path) -> Files:
    """Read the config and the weights; a file that is absent, cut short or damaged is told by an error."""
    if not (directory / CONFIG_NAME).is_file():
        raise Difference(f"{CONFIG_NAME} is missing", INCOMPLETE)
    try:
        config = json.loads((directory / CONFIG_NAME).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise Difference(f"{CONFIG_NAME} is not valid JSON: {error}", "the file is damaged or cut short") from error
    if not isinstance(config, dict):
        raise Difference(f"{CONFIG_NAME} holds no JSON object", "it is not a drafter's config")
    try:
        paths = weights_files(directory)
    except CheckpointError as error:
        raise Difference(error.message, INCOMPLETE) from error
    if not paths:
        raise Difference(f"{WEIGHTS_NAME} is missing", INCOMPLETE)
    tensors: dict[str, Tensor] = {}
    for path in paths:
        if path.suffix == ".safetensors":
            check_size(path)
        tensors |= load_tensors(path)
    return Files(directory, config, tensors)


def check_size(path: Path) -> None:
    """Compare a safetensors file's size with what its own header announces."""
    size = path.stat().st_size
    cause = "the copy was cut short (a full disk, a broken transfer, a Git LFS pointer in its place); copy it again"
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or 8 + length > size:
            raise Difference(f"{path.name} has {size:,} bytes, too few for its own header", cause)
        try:
            header = json.loads(stream.read(length))
            announced = (
                8
                + length
                + max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Difference(f"{path.name} has no readable header", "the file is damaged; copy it again") from error
    if size < announced:
        raise Difference(f"{path.name} is truncated: {size:,} of {announced:,} bytes are there", cause)
    if size > announced:
        raise Difference(
            f"{path.name} has {size - announced:,} bytes more than its header announces",
            "something was appended to it; copy it again",
        )


def state_of(config: DrafterConfig, tensors: Mapping[str, Tensor], target: "HFTarget") -> dict[str, Tensor]:
    """Tensors under their names in our network; without an own mask row, the one an engine would fall back to."""
    state = {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in tensors.items()}
    state.pop("t2d", None)
    if config.parallel:
        table = state.get("embed_tokens.weight")
        source = target.embedding_VD.cpu() if table is None else table
        if source.dim() != 2 or not 0 <= (config.mask_token_id or 0) < len(source):
            raise Difference(
                f"the embeddings of shape {list(source.shape)} have no row for the mask token {config.mask_token_id}",
                "config.json and the weights are of two drafters, or the table was cut",
            )
        state.setdefault(COMPACT_TENSOR, source[config.mask_token_id].clone())
        if "mask_hidden" in state:
            state["mask_hidden"] = state["mask_hidden"].flatten()
    if config.embeddings == "shared":
        state.pop("embed_tokens.weight", None)
    if config.head == "shared":
        state.pop("lm_head.weight", None)
    if config.draft_vocab_size == config.vocab_size:
        state.pop("d2t", None)
    return state
