"""Linear layers with few rows on a GPU, fused with the gate or the residual sum, in one launch each.

A decode step of one request is hundreds of small launches; each launch saved is two or three microseconds. Our kernel
runs only the shapes for which it measured faster than torch, alone or because of the fusion.
"""

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from peagle.linears.few_bit import FewBitWeight, dequantize
from peagle.linears.tilings import FEW_ROWS, linear_tiling

MORE_ROWS = 64
"""Limit for small weights."""
MANY_ROWS = 512
"""Limit for small gated weights, which save a launch."""
FEW_BIT_ROWS = 64
"""Up to here our kernel reads the codes once per tile of rows. Beyond, the weight is dequantized before the product."""
ACTIVATIONS = {"silu": functional.silu, "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh")}


def most_rows(num_columns: int, size: int, *, is_gated: bool = False) -> int:
    """The most rows for which our kernel beats torch with a weight of this shape; 0 if it never does."""
    if size <= 2048 and num_columns <= 8192:
        return MANY_ROWS if is_gated else MORE_ROWS
    return FEW_ROWS if is_gated or (num_columns <= 8192 and size <= 16384) else 0


def is_few(x: Tensor, weight: Tensor | FewBitWeight, *, is_gated: bool = False) -> bool:
    """Whether our kernel takes this input. Compiled code has one variant for each answer.

    With a quantized weight it takes any number of rows.
    """
    if isinstance(weight, FewBitWeight):
        return reads_codes(x)
    limit = most_rows(*weight.shape, is_gated=is_gated) * x.shape[-1]
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and x.numel() <= limit


def reads_codes(x: Tensor) -> bool:
    """Whether our kernels read a quantized weight's codes for this input. If not, the weight is dequantized first."""
    return x.is_cuda and x.dtype == torch.bfloat16


class SkinnyLinear(nn.Linear):
    """A linear layer that uses our kernel for few rows. An `nn.Linear` becomes one in place."""

    def forward(self, x: Tensor) -> Tensor:
        return skinny_linear(x, self.weight, self.bias)


def use_skinny_linears(module: nn.Module) -> None:
    """Turn the plain linear layers of a module that gain from it into `SkinnyLinear`. Parameters do not change."""
    for part in module.modules():
        if type(part) is nn.Linear and most_rows(part.out_features, part.in_features):
            part.__class__ = SkinnyLinear


def use_plain_linears(module: nn.Module) -> None:
    """Undo `use_skinny_linears`."""
    for part in module.modules():
        if type(part) is SkinnyLinear:
            part.__class__ = nn.Linear  # type: ignore[assignment]  # its original class


def skinny_linear(x: Tensor, weight: Tensor | FewBitWeight, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear`, for inference."""
    if is_few(x, weight):
        return _product(x, weight, bias, None)
    return functional.linear(x, dequantize(weight).to(x.dtype) if isinstance(weight, FewBitWeight) else weight, bias)


def gated_linear(x: Tensor, weight: Tensor | FewBitWeight, bias: Tensor | None, activation: str) -> Tensor:
    """activation(gate) * up for few rows (`is_few`). `weight` is the gate's stacked on the up projection's."""
    return _product(x, weight, bias, activation)


def _product(x: Tensor, weight: Tensor | FewBitWeight, bias: Tensor | None, activation: str | None) -> Tensor:
    if isinstance(weight, FewBitWeight):
        words, scale, zero = weight.words, weight.scale, weight.zero
        return few_bit_product(x, words, bias, None, activation, scale, zero, weight.form, weight.group)
    return _skinny(x, weight, bias, None, activation)


@torch.library.custom_op("peagle::skinny", mutates_args=())
def _skinny(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str | None) -> Tensor:
    from peagle.linears.skinny_linear_triton import skinny_linear_triton

    rows = x.reshape(-1, x.shape[-1])
    residual_rows = None if residual is None else residual.reshape(-1, residual.shape[-1])
    y = skinny_linear_triton(
        rows, weight, bias, residual_rows, activation, linear_tiling(len(weight), weight.shape[1], len(rows))
    )
    return y.view(*x.shape[:-1], y.shape[-1])


@_skinny.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight) if activation is None else len(weight) // 2)


@torch.library.custom_op("peagle::few_bit", mutates_args=())
def few_bit_product(
    x: Tensor,
    words: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    scale: Tensor,
    zero: Tensor | None,
    form: str,
    group: int,
) -> Tensor:
    """residual + linear(x), or activation(gate) * up if `words` are those of a gate stacked on an up projection.

    Arguments up to `activation` are those of `peagle::skinny`.
    """
    from peagle.linears.few_bit_triton import dequantize_triton, few_bit_product_triton

    rows = x.reshape(-1, x.shape[-1])
    residual_rows = None if residual is None else residual.reshape(-1, residual.shape[-1])
    weight = FewBitWeight(form, x.shape[-1], group, words, scale, zero)
    if len(rows) <= FEW_BIT_ROWS:
        y = few_bit_product_triton(rows, weight, bias, residual_rows, activation)
        return y.view(*x.shape[:-1], y.shape[-1])
    y = functional.linear(rows, dequantize_triton(weight, x.dtype), bias)
    if activation is not None:
        gate, up = y.chunk(2, dim=-1)
        y = ACTIVATIONS[activation](gate) * up
    if residual_rows is not None:
        y = y + residual_rows
    return y.view(*x.shape[:-1], y.shape[-1])


@few_bit_product.register_fake
def _(
    x: Tensor,
    words: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    scale: Tensor,
    zero: Tensor | None,
    form: str,
    group: int,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(words) if activation is None else len(words) // 2)


def use_skinny_products(graph: torch.fx.Graph) -> None:
    """In a compiled graph, use our kernel for linear layers that are not an `nn.Linear`, such as routers of experts."""
    for target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        for node in graph.find_nodes(op="call_function", target=target):
            bias, x, transposed = (None, *node.args)[-3:]
            weight = _weight(transposed)
            if weight is None or node.kwargs or not _is_known_few(_value(x), _value(weight), _value(bias)):
                continue
            with graph.inserting_before(node):
                product = graph.call_function(torch.ops.peagle.skinny.default, (x, weight, bias, None, None))
            product.meta.update(node.meta)
            node.replace_all_uses_with(product)
            graph.erase_node(node)
            if not transposed.users:
                graph.erase_node(transposed)


def _value(node: Any) -> Any:
    return node.meta["val"] if isinstance(node, torch.fx.Node) else None


def _weight(transposed: Any) -> torch.fx.Node | None:
    """The weight that a product reads transposed, if it is an input of the graph with rows in one piece."""
    if transposed.target is not torch.ops.aten.permute.default:
        return None
    weight = transposed.args[0]
    is_input = isinstance(weight, torch.fx.Node) and weight.op == "placeholder" and transposed.args[1] == [1, 0]
    return weight if is_input and weight.meta["val"].is_contiguous() else None


def _is_known_few(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """`is_few` for a number of rows that may be a symbol, which other layers of this variant have bounded."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if not all(isinstance(size, int) for size in weight.shape):
        return False
    return (bias is None or bias.shape == weight.shape[:1]) and statically_known_true(is_few(x, weight))


def join_sums(graph: torch.fx.Graph) -> None:
    """In a compiled graph, fuse each sum with the residual stream into the product before it."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        if node.kwargs or len(node.args) != 2:
            continue
        for product, residual in (node.args, node.args[::-1]):
            if _is_open(product) and _looks_like(residual, product):
                assert callable(product.target)
                with graph.inserting_before(node):
                    joined = graph.call_function(product.target, (*product.args[:3], residual, *product.args[4:]))
                joined.meta.update(node.meta)
                node.replace_all_uses_with(joined)
                graph.erase_node(node)
                graph.erase_node(product)
                break


def _is_open(product: object) -> TypeGuard[torch.fx.Node]:
    """Whether this is a product of our kernel without a residual, read only by the sum."""
    products = (torch.ops.peagle.skinny.default, torch.ops.peagle.few_bit.default)
    if not isinstance(product, torch.fx.Node) or product.target not in products:
        return False
    return len(product.users) == 1 and product.args[3] is None


def _looks_like(residual: object, product: torch.fx.Node) -> bool:
    if not isinstance(residual, torch.fx.Node) or residual is product:
        return False
    ours, theirs = product.meta["val"], residual.meta.get("val")
    return isinstance(theirs, Tensor) and theirs.shape == ours.shape and theirs.dtype == ours.dtype
