"""Linear layers of a few rows on a GPU, and what surrounds them in a decoder layer, each in one launch.

A decode step of one request is hundreds of small launches; each one saved is two or three microseconds. These are the
products that our kernel was measured to do faster than torch, alone or because it does its neighbors' work too.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

MOST_ROWS = 16
ACTIVATIONS = {"silu": functional.silu, "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh")}


class Tiling(NamedTuple):
    """How the kernel is cut: output columns of a program, input columns of a step, warps, steps in flight."""

    columns: int
    step: int
    num_warps: int
    num_stages: int


def tiling(num_columns: int, size: int) -> Tiling:
    """The cut for a weight, by its shape.

    Measured on an H200 in bfloat16 with 1 and 8 rows, in microseconds, torch's product against ours, weights read from
    memory:

        960 x 576    3.8  2.8        6144 x 4096     16.5  15.4
        576 x 576    3.4  3.0        4096 x 4096     12.7  11.9
        3072 x 576   4.3  3.9        28672 x 4096    56.5  57.3
        576 x 1536   5.0  4.2        4096 x 14336    31.3  32.7
    """
    if size <= 2048 and num_columns <= 8192:
        return Tiling(16, 128, 4, 4)
    if num_columns <= 8192:
        return Tiling(16, 256, 2, 4)
    return Tiling(32, 256, 4, 3)


def is_faster(num_columns: int, size: int) -> bool:
    """Whether our kernel alone beats torch's product."""
    return num_columns <= 8192 and size <= 8192


def is_few(x: Tensor) -> bool:
    """Whether these are rows for our kernel. In compiled code this tells two variants apart."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and x.numel() <= MOST_ROWS * x.shape[-1]


class SkinnyLinear(nn.Linear):
    """A linear layer whose products of a few rows go through our kernel. `nn.Linear` becomes one in place."""

    def forward(self, x: Tensor) -> Tensor:
        return skinny_linear(x, self.weight, self.bias)


def use_skinny_linears(module: nn.Module) -> None:
    """Turn the plain linear layers of a module that gain by it into `SkinnyLinear`; parameters stay what they are."""
    for part in module.modules():
        if type(part) is nn.Linear and is_faster(part.out_features, part.in_features):
            part.__class__ = SkinnyLinear


def use_plain_linears(module: nn.Module) -> None:
    """Undo `use_skinny_linears`."""
    for part in module.modules():
        if type(part) is SkinnyLinear:
            part.__class__ = nn.Linear  # type: ignore[assignment]  # what it was


def skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear`, for inference."""
    if is_few(x) and is_faster(*weight.shape):
        return _skinny(x, weight, bias, None, 0.0, None)
    return functional.linear(x, weight, bias)


def normed_linear(x: Tensor, scale: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """linear(rms_norm(x) * scale) of a few rows (`is_few`)."""
    return _skinny(x, weight, bias, scale, eps, None)


def gated_linear(
    x: Tensor, scale: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    """activation(gate) * up of a few rows (`is_few`), where `weight` is that of gate over that of up.

    With a scale, `x` goes through rms_norm(x) * scale first.
    """
    return _skinny(x, weight, bias, scale, eps, activation)


@torch.library.custom_op("peagle::skinny", mutates_args=())
def _skinny(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, eps: float, activation: str | None
) -> Tensor:
    from peagle.kernels.skinny_linear_triton import skinny_linear_triton

    rows = x.reshape(-1, x.shape[-1])
    y = skinny_linear_triton(rows, weight, bias, tiling(*weight.shape), scale, eps, activation)
    return y.view(*x.shape[:-1], y.shape[-1])


@_skinny.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, eps: float, activation: str | None
) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight) if activation is None else len(weight) // 2)
