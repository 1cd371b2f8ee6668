"""The most likely tokens of each row of logits and their log-probabilities: a drafter's drafts with their confidence.

On a GPU the logits are read once. PyTorch would read them three times: for the token, its logit and the sum.

The W likeliest tokens are in the W chunks of the row with the largest maxima: a token of any other chunk has W better
ones, those maxima. So only the maxima of all chunks, and then a few logits, are compared with each other. Among equal
logits the lowest id is better, and so is the first chunk among equal maxima.

Legend: N rows, V vocabulary, C chunks, W tokens per row.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

CHUNK = 64
"""logits per chunk: near sqrt(V / W), so that there are about as many maxima as logits in W chunks"""


def likeliest_torch(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely token [N], int64, the lowest id among equals, and its log-probability [N], float32.

    `likeliest` on a CPU, and the reference for the kernel.
    """
    float_NV = logits_NV.float()
    return logits_NV.argmax(-1), float_NV.amax(-1) - float_NV.logsumexp(-1)


def likeliest_tokens_torch(logits_NV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """`likeliest_tokens` on a CPU: sort the few logits that are at least the W-th largest maximum of a chunk."""
    num_rows, vocab_size = logits_NV.shape
    num_chunks = max(vocab_size // CHUNK, width)
    float_NV = logits_NV.float()
    size = vocab_size // num_chunks
    high_NC = float_NV[:, : num_chunks * size].unflatten(1, (num_chunks, size)).amax(-1)
    least_N = np.partition(high_NC.numpy(force=True), num_chunks - width, axis=1)[:, -width]
    values_NV, tokens_NW = float_NV.numpy(force=True), np.zeros((num_rows, width), np.int64)
    for values_V, least, tokens_W in zip(values_NV, least_N, tokens_NW, strict=True):
        found = np.flatnonzero(values_V >= least)
        best = found[np.argsort(-values_V[found], kind="stable")[:width]]
        tokens_W[: len(best)] = best  # fewer in a row with NaN
    tokens = torch.from_numpy(tokens_NW).to(logits_NV.device)
    return tokens, float_NV.gather(1, tokens) - float_NV.logsumexp(-1, keepdim=True)


def _likeliest_on_gpu(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    # Imported lazily: triton may not be installed.
    from peagle.kernels.likeliest_triton import likeliest_triton

    return likeliest_triton(logits_NV)


def _likeliest_tokens_on_gpu(logits_NV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    from peagle.kernels.likeliest_triton import likeliest_tokens_triton

    return likeliest_tokens_triton(logits_NV, width)


def _fake(logits_NV: Tensor, *width: int) -> tuple[Tensor, Tensor]:
    shape = (logits_NV.shape[0], *width)  # len() would fix it to one number
    return logits_NV.new_empty(shape, dtype=torch.int64), logits_NV.new_empty(shape, dtype=torch.float32)


# Custom ops, so that torch.compile does not trace into the kernels.
_op = torch.library.custom_op("peagle::likeliest", likeliest_torch, mutates_args=(), device_types="cpu")
_op.register_kernel("cuda", _likeliest_on_gpu)
_op.register_fake(_fake)
likeliest: Callable[[Tensor], tuple[Tensor, Tensor]] = _op
"""On a GPU it does not synchronize, and can be captured in a CUDA graph and compiled with `fullgraph`. A row without a
finite logit, or with a NaN, gives an arbitrary id of the vocabulary and NaN."""

_tokens_op = torch.library.custom_op(
    "peagle::likeliest_tokens", likeliest_tokens_torch, mutates_args=(), device_types="cpu"
)
_tokens_op.register_kernel("cuda", _likeliest_tokens_on_gpu)
_tokens_op.register_fake(_fake)


def likeliest_tokens(logits_NV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` most likely tokens [N, width], int64, and their log-probabilities [N, width], float32.

    The likeliest is first, and the lowest id is first among equals. On a GPU as `likeliest`. A row without a finite
    logit, or with a NaN, gives arbitrary ids of the vocabulary, and NaN or -inf.
    """
    if width > logits_NV.shape[1]:
        raise ValueError(f"width={width} exceeds the vocabulary of {logits_NV.shape[1]} tokens")
    return _tokens_op(logits_NV, width)
