"""The ways to compute a linear layer of a few rows on a CPU, which `linear.py` chooses from; its head describes them.

Shapes: O output width, I input width.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Run = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""run(x, packed, weight_OI, bias_O) -> y; x has any leading dimensions"""


@dataclass(frozen=True)
class LinearKernel:
    """One way to compute x @ weight.T + bias: `pack` once, `run` often; `missing` says why a weight cannot use it."""

    name: str
    pack: Callable[[Tensor], Tensor]
    run: Run
    missing: Callable[[Tensor], str | None]


def available_kernels(weight: Tensor) -> dict[str, str | None]:
    """Every kernel's name with None where it can compute products with `weight` here, else with the reason."""
    return {name: kernel.missing(weight) for name, kernel in KERNELS.items()}


def _run_plain(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x, weight, bias)


def _run_transposed(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x, packed.t(), bias)


def _run_onednn(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _run_mkl(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # The packed form does not depend on the row count; naming the actual one keeps the operator from falling back
    # to an unpacked product.
    return torch.ops.mkl._mkl_linear(x, packed, weight, bias, x.numel() // x.shape[-1])


def _pack_mkl(weight: Tensor) -> Tensor:
    return torch.ops.mkl._mkl_reorder_linear_weight(weight, 8)


def _missing_onednn(weight: Tensor) -> str | None:
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return "this build of torch has no oneDNN"
    if weight.dtype == torch.float32:
        return None
    if weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    if weight.dtype == torch.float16 and torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return None
    return f"oneDNN has no {weight.dtype} on this processor"


def _missing_mkl(weight: Tensor) -> str | None:
    if not (torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")):
        return "this build of torch has no MKL"
    return None if weight.dtype == torch.float32 else f"MKL packs float32, not {weight.dtype}"


def _always(weight: Tensor) -> str | None:
    return None


KERNELS: dict[str, LinearKernel] = {
    kernel.name: kernel
    for kernel in (
        LinearKernel("plain", lambda weight: weight, _run_plain, _always),
        LinearKernel("transposed", lambda weight: weight.t().contiguous(), _run_transposed, _always),
        LinearKernel(
            "onednn", lambda weight: torch.ops.mkldnn._reorder_linear_weight(weight), _run_onednn, _missing_onednn
        ),
        LinearKernel("mkl", _pack_mkl, _run_mkl, _missing_mkl),
    )
}
"""by name, plain first, then in ascending order of preference among the equally fast"""
