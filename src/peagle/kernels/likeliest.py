"""The most likely token of each row of logits and its log-probability.

These are a drafter's drafts and how sure it is of each. A GPU finds both in one launch that reads the logits once;
PyTorch would read them three times: for the token, for its logit and for the sum that the logit is held against.

Legend: N rows, V vocabulary.
"""

import torch
from torch import Tensor


def likeliest(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely token [N], int64, the lowest id among equals, and its log-probability [N], float32.

    A logit of -inf is a token that cannot be. On a GPU the call does not wait, can be recorded in a CUDA graph and
    compiled with `fullgraph`. A row without any finite logit, or with a NaN, has no right answer: it gives some id of
    the vocabulary, with NaN.
    """
    token_N, logprob_N = _likeliest(logits_NV)
    return token_N, logprob_N


def likeliest_torch(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """The oracle, and what runs on a CPU."""
    float_NV = logits_NV.float()
    return logits_NV.argmax(-1), float_NV.amax(-1) - float_NV.logsumexp(-1)


def _likeliest_on_gpu(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    # Imported where it is needed: the package must work where triton is not installed.
    from peagle.kernels.likeliest_triton import likeliest_triton

    return likeliest_triton(logits_NV)


def _one_of_each_a_row(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    num_rows = logits_NV.shape[0]
    return logits_NV.new_empty(num_rows, dtype=torch.int64), logits_NV.new_empty(num_rows, dtype=torch.float32)


# An operator of its own, so that a compiler takes the call as it stands and does not look into the kernel.
_likeliest = torch.library.custom_op("peagle::likeliest", likeliest_torch, mutates_args=(), device_types="cpu")
_likeliest.register_kernel("cuda", _likeliest_on_gpu)
_likeliest.register_fake(_one_of_each_a_row)
