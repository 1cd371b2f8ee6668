"""Linear layers of a few rows on a GPU, and what surrounds them in a decoder layer, each in one launch.

A decode step of one request is hundreds of small launches; each one saved is two or three microseconds. These are the
products that our kernel was measured to do faster than torch, alone or because it does its neighbors' work too.
"""

from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

FEW_ROWS = 16
"""The fewest that the GPU's matrix units multiply at once, and as many as weights of any size are taken for."""
MORE_ROWS = 64
"""As many as small weights are taken for."""
MANY_ROWS = 512
"""As many as small gated ones are taken for: what they save is a launch."""
ACTIVATIONS = {"silu": functional.silu, "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh")}


class Tiling(NamedTuple):
    """How the kernel is cut."""

    columns: int
    """output columns of a program"""
    step: int
    """input columns of a step"""
    num_warps: int
    num_stages: int
    """steps in flight"""
    ahead: int = 0
    """input columns of the weight that are fetched while the kernel before this one ends; a power of two"""
    rows: int = FEW_ROWS
    """rows of a program"""


def tiling(num_columns: int, size: int, num_rows: int) -> Tiling:
    """The cut for a weight's shape and a number of rows, by what was measured on an H200, bfloat16.

    Up to 16 rows it is the fastest inside whole steps; beyond, one that is fast alone for several weights.

    Microseconds a product of 1 and of 8 rows with weights read from memory, torch's and ours; ours does the gate or
    the sum with the residual on the way:

        960 x 576             3.8  3.8    2.6  2.5        6144 x 4096            15.4  15.7   15.4  15.2
        576 x 576, sum        3.2  3.1    2.3  2.3        4096 x 4096, sum       13.2  13.3   11.2  11.6
        3072 x 576, gate      4.1  4.1    3.8  3.5        28672 x 4096, gate     60.5  61.3   56.4  57.1
        576 x 1536, sum       5.0  4.9    4.2  4.1        4096 x 14336, sum      31.9  32.4   29.5  30.0

    benchmarks/products.py tries cuts for other GPUs, weights and numbers of rows.
    """
    if size <= 2048 and num_columns <= 8192:
        if num_rows > FEW_ROWS:
            if num_columns >= 2048:
                return Tiling(32, 64, 4, 4, ahead=256, rows=32 if num_rows <= 32 else 64)
            return Tiling(16, 64 if size <= 768 else 128, 4, 4, ahead=256, rows=64 if num_columns > 768 else 32)
        if num_columns >= 2048:
            return Tiling(32, 128, 4, 4, ahead=256)
        return Tiling(16, 64, 4, 6, ahead=512) if size <= 768 else Tiling(8, 128, 4, 6, ahead=512)
    # With more programs than fit on the GPU at once, the last ones would run alone; so fewer steps in flight for more.
    if num_columns <= 4096:
        return Tiling(16, 512, 2, 4)
    return Tiling(16, 256, 2, 4, ahead=256) if num_columns <= 8192 else Tiling(32, 256, 4, 3, ahead=256)


def most_rows(num_columns: int, size: int, *, is_gated: bool = False) -> int:
    """Rows up to which our kernel beats torch's product with a weight of this shape; 0 where it never does."""
    if size <= 2048 and num_columns <= 8192:
        return MANY_ROWS if is_gated else MORE_ROWS
    return FEW_ROWS if is_gated or (num_columns <= 8192 and size <= 16384) else 0


def is_few(x: Tensor, weight: Tensor, *, is_gated: bool = False) -> bool:
    """Whether these are rows for our kernel. In compiled code this tells two variants apart."""
    limit = most_rows(*weight.shape, is_gated=is_gated) * x.shape[-1]
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and x.numel() <= limit


class SkinnyLinear(nn.Linear):
    """A linear layer whose products of a few rows go through our kernel. `nn.Linear` becomes one in place."""

    def forward(self, x: Tensor) -> Tensor:
        return skinny_linear(x, self.weight, self.bias)


def use_skinny_linears(module: nn.Module) -> None:
    """Turn the plain linear layers of a module that gain by it into `SkinnyLinear`; parameters stay what they are."""
    for part in module.modules():
        if type(part) is nn.Linear and most_rows(part.out_features, part.in_features):
            part.__class__ = SkinnyLinear


def use_plain_linears(module: nn.Module) -> None:
    """Undo `use_skinny_linears`."""
    for part in module.modules():
        if type(part) is SkinnyLinear:
            part.__class__ = nn.Linear  # type: ignore[assignment]  # what it was


def skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear`, for inference."""
    if is_few(x, weight):
        return _skinny(x, weight, bias, None, None)
    return functional.linear(x, weight, bias)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """activation(gate) * up of a few rows (`is_few`), where `weight` is that of gate over that of up."""
    return _skinny(x, weight, bias, None, activation)


@torch.library.custom_op("peagle::skinny", mutates_args=())
def _skinny(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str | None) -> Tensor:
    from peagle.kernels.skinny_linear_triton import skinny_linear_triton

    rows = x.reshape(-1, x.shape[-1])
    residual_rows = None if residual is None else residual.reshape(-1, residual.shape[-1])
    y = skinny_linear_triton(
        rows, weight, bias, residual_rows, activation, tiling(len(weight), weight.shape[1], len(rows))
    )
    return y.view(*x.shape[:-1], y.shape[-1])


@_skinny.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight) if activation is None else len(weight) // 2)


def join_sums(graph: torch.fx.Graph) -> None:
    """In a compiled graph, let the sum with the residual stream be done by the product before it."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        if node.kwargs or len(node.args) != 2:
            continue
        for product, residual in (node.args, node.args[::-1]):
            if _is_open(product) and _looks_like(residual, product):
                x, weight, bias, _, activation = product.args
                with graph.inserting_before(node):
                    joined = graph.call_function(
                        torch.ops.peagle.skinny.default, (x, weight, bias, residual, activation)
                    )
                joined.meta.update(node.meta)
                node.replace_all_uses_with(joined)
                graph.erase_node(node)
                graph.erase_node(product)
                break


def _is_open(product: object) -> TypeGuard[torch.fx.Node]:
    """Whether this is a product of our kernel that nobody reads but the sum, and that adds nothing yet."""
    if not isinstance(product, torch.fx.Node) or product.target is not torch.ops.peagle.skinny.default:
        return False
    return len(product.users) == 1 and product.args[3] is None


def _looks_like(residual: object, product: torch.fx.Node) -> bool:
    if not isinstance(residual, torch.fx.Node) or residual is product:
        return False
    ours, theirs = product.meta["val"], residual.meta.get("val")
    return isinstance(theirs, Tensor) and theirs.shape == ours.shape and theirs.dtype == ours.dtype
