"""pair_head.safetensors: the pair head of a drafter, in a file of its own. Only we read it; exports leave it out.

Rows are stored as int8 with a scale each, so that a head of rank 64 for 49,152 tokens takes 6.5 MB. Scales are powers
of two. So bfloat16 represents the scaled rows exactly, and saving a loaded head changes nothing.

Shapes: U draft vocabulary, R rank.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from peagle.checkpoint.layouts import PAIR_HEAD_NAME, load_tensors
from peagle.drafter.config import DrafterConfig
from peagle.drafter.pair_head import PairHead
from peagle.errors import CheckpointError

TABLES = ("left", "right")
SCALE = "_scale"
LARGEST, SMALLEST = 127, 1e-30


def stored_tables(head: PairHead) -> dict[str, Tensor]:
    """The tensors of the file.

    >>> head = PairHead(torch.tensor([[0.5, -0.76], [0.0, 0.0]]), torch.ones(2, 2))
    >>> stored_tables(head)["left"].tolist()
    [[64, -97], [0, 0]]
    >>> as_stored(head).left[0].tolist()
    [0.5, -0.7578125]
    """
    tensors = {}
    for name in TABLES:
        table_UR = getattr(head, name).detach().float()
        largest_U1 = table_UR.abs().amax(1, keepdim=True).clamp_min(SMALLEST)
        scale_U1 = (largest_U1 / LARGEST).log2().ceil().exp2()
        tensors[name] = (table_UR / scale_U1).round().to(torch.int8)
        tensors[name + SCALE] = scale_U1
    return tensors


def as_stored(head: PairHead) -> PairHead:
    """The head as it is read back."""
    return _head(stored_tables(head))


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
    wanted = sorted(name + end for name in TABLES for end in ("", SCALE))
    if sorted(tensors) != wanted:
        found = ", ".join(sorted(tensors)) or "none"
        raise CheckpointError(f"{path} must hold the tensors {', '.join(wanted)}, found {found}", hint=hint)
    rank = tensors["left"].shape[-1] if tensors["left"].dim() else 0
    for name in TABLES:
        _check(path, name, tensors[name], (config.draft_vocab_size, max(1, rank)), torch.int8, hint)
        _check(path, name + SCALE, tensors[name + SCALE], (config.draft_vocab_size, 1), None, hint)
    return _head(tensors)


def _head(tensors: Mapping[str, Tensor]) -> PairHead:
    return PairHead(*(tensors[name].float() * tensors[name + SCALE].float() for name in TABLES))


def _check(path: Path, name: str, tensor: Tensor, shape: tuple[int, int], dtype: torch.dtype | None, hint: str) -> None:
    """Reject a tensor of another shape or type; None stands for any floating-point type with finite values."""
    if tensor.shape != shape:
        raise CheckpointError(
            f"{path}: tensor {name!r} has shape {list(tensor.shape)}, but the drafter's {shape[0]} tokens and the "
            f"head's rank require {list(shape)}",
            hint=hint,
        )
    if dtype is not None and tensor.dtype != dtype:
        raise CheckpointError(f"{path}: tensor {name!r} must be {dtype}, found {tensor.dtype}", hint=hint)
    if dtype is None and not (tensor.is_floating_point() and bool(tensor.isfinite().all())):
        raise CheckpointError(f"{path}: tensor {name!r} holds NaN, infinite values or integers", hint=hint)
