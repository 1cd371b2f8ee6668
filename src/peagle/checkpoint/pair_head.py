"""pair_head.safetensors: the pair head of a drafter, in a file of its own. Only we read it; exports leave it out.

Shapes: U draft vocabulary, R rank.
"""

from pathlib import Path

from torch import Tensor

from peagle.checkpoint.layouts import PAIR_HEAD_NAME, load_tensors
from peagle.drafter.config import DrafterConfig
from peagle.drafter.pair_head import PairHead
from peagle.errors import CheckpointError

TABLES = ("left", "right")


def read_pair_head(directory: Path, config: DrafterConfig) -> PairHead | None:
    """The pair head of a drafter directory; None if there is none. One that does not fit the drafter is refused."""
    path = directory / PAIR_HEAD_NAME
    if not path.is_file():
        return None
    hint = "it belongs to another drafter, or was damaged; delete it to serve the drafter without"
    if not config.parallel:
        message = f"{path}: a pair head needs a parallel drafter, but this one drafts token by token (EAGLE-3)"
        raise CheckpointError(message, hint=hint)
    tensors = load_tensors(path)
    if sorted(tensors) != sorted(TABLES):
        found = ", ".join(sorted(tensors)) or "none"
        raise CheckpointError(f"{path} must hold the tensors left and right, found {found}", hint=hint)
    rank = tensors["left"].shape[-1] if tensors["left"].dim() else 0
    for name in TABLES:
        _check_table(path, name, tensors[name], (config.draft_vocab_size, max(1, rank)), hint)
    return PairHead(tensors["left"], tensors["right"])


def _check_table(path: Path, name: str, table_UR: Tensor, shape: tuple[int, int], hint: str) -> None:
    if table_UR.shape != shape:
        raise CheckpointError(
            f"{path}: tensor {name!r} has shape {list(table_UR.shape)}, but the drafter's {shape[0]} tokens and rank "
            f"{shape[1]} ask for {list(shape)}",
            hint=hint,
        )
    if not table_UR.is_floating_point() or not bool(table_UR.isfinite().all()):
        raise CheckpointError(f"{path}: tensor {name!r} holds NaN, infinite values or integers", hint=hint)
