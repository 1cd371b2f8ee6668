"""The ways to compute a linear layer on a CPU: how each packs a weight, multiplies with it, and what it lacks.

    stored       as the checkpoint stores it, in 4, 8 or 16 bits (`peagle.native.products`): x86-64 and ARM, float32.
                 Only for weights that bfloat16 holds exactly
    mkl          MKL's packed weight: x86-64, float32
    onednn       oneDNN's blocked weight: x86-64, and ARM through the ARM Compute Library; also bfloat16
    transposed   a contiguous copy of the transposed weight: works everywhere
    plain        nn.Linear

With `stored` and `mkl`, a row's bits do not depend on the number of rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from peagle.native.products import BlockWeight, PackedWeight, missing, pack, product


@dataclass(frozen=True)
class LinearKernel:
    """Computes x @ weight.T + bias: `pack` once, `run` often. `missing` says why it does not support a weight."""

    name: str
    pack: Callable[[Tensor, BlockWeight | None], Any]
    """pack(weight_OI, blocks): the weight in blocks, if the checkpoint has it so."""
    run: Callable[[Tensor, Any, Tensor, Tensor | None], Tensor]
    """run(x, packed, weight_OI, bias_O) -> y; x may have any leading dimensions."""
    missing: Callable[[Tensor, BlockWeight | None], str | None] = lambda weight, blocks: None
    size: float = 1.0
    """Bytes of the packed form per byte of the weight."""
    is_best: bool = False
    """Used for few rows without a contest: it gains more where whole layers are one call."""


def _missing_onednn(weight: Tensor, _: BlockWeight | None) -> str | None:
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return "this build of torch has no oneDNN"
    is_supported = weight.dtype == torch.float32 or (
        (weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
        or (weight.dtype == torch.float16 and torch.ops.mkldnn._is_mkldnn_fp16_supported())
    )
    return None if is_supported else f"oneDNN does not support {weight.dtype} on this CPU"


def _missing_mkl(weight: Tensor, _: BlockWeight | None) -> str | None:
    if not (torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")):
        return "this build of torch has no MKL"
    return None if weight.dtype == torch.float32 else f"MKL packs float32, not {weight.dtype}"


def run_stored(x: Tensor, packed: PackedWeight, _: Tensor, bias: Tensor | None) -> Tensor:
    y_NO = product(x.reshape(-1, packed.num_inputs).contiguous(), packed, bias)
    return y_NO.view(*x.shape[:-1], packed.num_outputs)


def _run_mkl(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # The packed form does not depend on the row count, but another count than the actual one would make the operator
    # fall back to an unpacked product.
    return torch.ops.mkl._mkl_linear(x, packed, weight, bias, x.numel() // x.shape[-1])


KERNELS: dict[str, LinearKernel] = {
    kernel.name: kernel
    for kernel in (
        LinearKernel("plain", lambda weight, _: weight, lambda x, _, weight, bias: functional.linear(x, weight, bias)),
        LinearKernel(
            "transposed",
            lambda weight, _: weight.t().contiguous(),
            lambda x, packed, _, bias: functional.linear(x, packed.t(), bias),
        ),
        LinearKernel(
            "onednn",
            lambda weight, _: torch.ops.mkldnn._reorder_linear_weight(weight),
            lambda x, packed, _, bias: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], ""),
            _missing_onednn,
        ),
        LinearKernel(
            "mkl", lambda weight, _: torch.ops.mkl._mkl_reorder_linear_weight(weight, 8), _run_mkl, _missing_mkl
        ),
        LinearKernel("stored", pack, run_stored, missing, size=0.5, is_best=True),
    )
}
"""By name: plain first, then by ascending preference among equally fast ones."""


def available_kernels(weight: Tensor) -> dict[str, str | None]:
    """By kernel name: None if it supports `weight` on this machine, else the reason."""
    return {name: kernel.missing(weight, blocks_of(weight)) for name, kernel in KERNELS.items()}


def blocks_of(weight: Tensor) -> BlockWeight | None:
    """The weight in blocks, if its checkpoint stores it so: an attribute of the parameter."""
    return getattr(weight, "blocks", None)
