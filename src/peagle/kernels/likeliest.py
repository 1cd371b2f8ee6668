"""The most likely token of each row of logits and its log-probability: a drafter's drafts with their confidence.

On a GPU one launch reads the logits once. PyTorch would read them three times: for the token, its logit and the sum.

Legend: N rows, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def likeliest_torch(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely token [N], int64, the lowest id among equals, and its log-probability [N], float32.

    `likeliest` on a CPU, and the reference for the kernel.
    """
    float_NV = logits_NV.float()
    return logits_NV.argmax(-1), float_NV.amax(-1) - float_NV.logsumexp(-1)


def likeliest_tokens(logits_NV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` most likely tokens [N, width] of each row, the likeliest first, and their log-probabilities."""
    float_NV = logits_NV.float()
    values_NW, tokens_NW = float_NV.topk(width, dim=-1)
    return tokens_NW, values_NW - float_NV.logsumexp(-1, keepdim=True)


def _likeliest_on_gpu(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    # Imported lazily: triton may not be installed.
    from peagle.kernels.likeliest_triton import likeliest_triton

    return likeliest_triton(logits_NV)


# A custom op, so that torch.compile does not trace into the kernel.
_op = torch.library.custom_op("peagle::likeliest", likeliest_torch, mutates_args=(), device_types="cpu")
_op.register_kernel("cuda", _likeliest_on_gpu)
_op.register_fake(
    lambda logits_NV: tuple(logits_NV.new_empty(len(logits_NV), dtype=kind) for kind in (torch.int64, torch.float32))
)
likeliest: Callable[[Tensor], tuple[Tensor, Tensor]] = _op
"""On a GPU it does not synchronize, and can be captured in a CUDA graph and compiled with `fullgraph`. A row without a
finite logit, or with a NaN, gives an arbitrary id of the vocabulary and NaN."""
