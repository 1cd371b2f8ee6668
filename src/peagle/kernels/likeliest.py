"""The most likely tokens of each row of logits and their log-probabilities: a drafter's drafts with their confidence.

On a GPU the logits are read once. PyTorch would read them three times: for the token, its logit and the sum.

The W likeliest tokens are in the W chunks of the row with the largest maxima: a token of any other chunk has W better
ones, those maxima. So only the maxima of all chunks, and then the logits of W chunks, are compared with each other.
Among equal logits the lowest id is better, and so is the first chunk among equal maxima.

Legend: N rows, V vocabulary, C chunks, W tokens per row, U = W * CHUNK.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 64
"""Logits per chunk. Near sqrt(V / W), so that there are about as many maxima as logits in W chunks."""


def likeliest_torch(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely token [N], int64, the lowest id among equals, and its log-probability [N], float32.

    `likeliest` on a CPU, and the reference for the kernel.
    """
    float_NV = logits_NV.float()
    return logits_NV.argmax(-1), float_NV.amax(-1) - float_NV.logsumexp(-1)


def likeliest_tokens_torch(logits_NV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """`likeliest_tokens` on a CPU."""
    vocab_size = logits_NV.shape[1]
    num_chunks = -(-vocab_size // CHUNK)
    padded_NV = logits_NV.float()
    if vocab_size % CHUNK:
        padded_NV = functional.pad(padded_NV, (0, num_chunks * CHUNK - vocab_size), value=float("-inf"))
    high_NC = padded_NV.unflatten(1, (num_chunks, CHUNK)).amax(-1)
    chunk_NW = _largest(high_NC, min(width, num_chunks)).sort(-1).values
    id_NU = (chunk_NW[..., None] * CHUNK + torch.arange(CHUNK, device=logits_NV.device)).flatten(1)
    # The clamp is for rows with NaN, where the padding may win.
    tokens_NW = id_NU.gather(1, _largest(padded_NV.gather(1, id_NU), width)).clamp_max(vocab_size - 1)
    return tokens_NW, padded_NV.gather(1, tokens_NW) - padded_NV.logsumexp(-1, keepdim=True)


def _largest(values_NC: Tensor, width: int) -> Tensor:
    """The places of the largest values [N, width], the largest first, and the lowest place first among equals.

    A float is a sign and a magnitude. As a two's complement it sorts the same, and -0 equals 0. `topk` does not say
    which of equal keys it takes, so the place makes all keys different.
    """
    bits_NC = values_NC.view(torch.int32).long()
    ordered_NC = torch.where(bits_NC < 0, -(bits_NC & 0x7FFFFFFF), bits_NC)
    return ((ordered_NC << 32) - torch.arange(values_NC.shape[1], device=values_NC.device)).topk(width).indices


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
