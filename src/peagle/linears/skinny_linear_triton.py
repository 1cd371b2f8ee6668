"""Products of few rows with a large weight, for GPUs, at the speed of reading the weight.

Each CTA takes some output columns, streams their part of the weight once and multiplies it with a tile of rows, or all
rows if they are few. The gate of two products and the sum with the residual stream are fused.

Shapes: M rows, N output columns, K input columns.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.overlap_triton import can_overlap, prefetch, take_turn
from peagle.linears.tilings import LinearTiling


def skinny_linear_triton(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    residual_MN: Tensor | None,
    activation: str | None,
    tiling: LinearTiling,
) -> Tensor:
    """residual + linear(x); gated as in `gated_linear` if there is an activation."""
    num_rows, size = x_MK.shape
    num_columns = len(weight_NK) if activation is None else len(weight_NK) // 2
    y_MN = torch.empty((num_rows, num_columns), dtype=x_MK.dtype, device=x_MK.device)
    overlaps = can_overlap(x_MK.device)
    _multiply[(triton.cdiv(num_columns, tiling.columns), triton.cdiv(num_rows, tiling.rows))](
        x_MK,
        weight_NK,
        weight_NK if bias_N is None else bias_N,
        x_MK if residual_MN is None else residual_MN,
        y_MN,
        num_rows,
        num_columns,
        size,
        x_MK.stride(0),
        weight_NK.stride(0),
        0 if residual_MN is None else residual_MN.stride(0),
        has_bias=bias_N is not None,
        has_residual=residual_MN is not None,
        activation=activation,
        is_even=size % tiling.step == 0,
        rows=tiling.rows,
        columns=tiling.columns,
        step=tiling.step,
        ahead=tiling.ahead if overlaps else 0,
        precision="ieee" if x_MK.dtype == torch.float32 else "tf32",
        overlaps=overlaps,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **({"launch_pdl": True} if overlaps else {}),
    )
    return y_MN


# Specialized for one row, not for multiples of 16: that would be one more kernel without gain.
@triton.jit(do_not_specialize_on_alignment=["num_rows"])
def _multiply(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    num_rows,
    num_columns,
    size,
    x_stride,
    weight_stride,
    residual_stride,
    has_bias: tl.constexpr,
    has_residual: tl.constexpr,
    activation: tl.constexpr,
    is_even: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    step: tl.constexpr,
    ahead: tl.constexpr,
    precision: tl.constexpr,
    overlaps: tl.constexpr,
):
    row = tl.program_id(1) * rows + tl.arange(0, rows)
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    inner = tl.arange(0, step)
    is_row, is_column = row < num_rows, column < num_columns
    weight_row = weight_ptr + column.to(tl.int64) * weight_stride
    second_half = num_columns.to(tl.int64) * weight_stride
    if ahead > 0:
        # No kernel writes the weight, so its first part can load while the previous kernel ends.
        prefetch(weight_ptr, weight_row, is_column, size, ahead)
        if activation is not None:
            prefetch(weight_ptr, weight_row + second_half, is_column, size, ahead)
    take_turn(overlaps)
    weights = weight_row[None, :] + inner[:, None]
    inputs = x_ptr + row[:, None] * x_stride + inner[None, :]
    total = tl.zeros([rows, columns], tl.float32)
    second_total = tl.zeros([rows, columns], tl.float32)
    for first in range(0, size, step):
        is_inner = (first + inner < size) | is_even
        x = tl.load(inputs + first, mask=is_row[:, None] & is_inner[None, :], other=0.0)
        is_weight = is_column[None, :] & is_inner[:, None]
        weight = tl.load(weights + first, mask=is_weight, other=0.0)
        total += tl.dot(x, weight, input_precision=precision)
        if activation is not None:
            weight = tl.load(weights + second_half + first, mask=is_weight, other=0.0)
            second_total += tl.dot(x, weight, input_precision=precision)
    if has_bias:
        total += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if activation is not None:
        if has_bias:
            second = tl.load(bias_ptr + num_columns + column, mask=is_column, other=0.0)
            second_total += second.to(tl.float32)[None, :]
        if activation == "silu":
            total = total * tl.sigmoid(total) * second_total
        else:  # gelu, tanh form: 0.5 * (1 + tanh(u)) is sigmoid(2 * u)
            total = total * tl.sigmoid(1.5957691216 * (total + 0.044715 * total * total * total)) * second_total
    is_output = is_row[:, None] & is_column[None, :]
    if has_residual:
        # Round before the sum, as a separate kernel would.
        residual = tl.load(residual_ptr + row[:, None] * residual_stride + column[None, :], mask=is_output, other=0.0)
        total = total.to(y_ptr.dtype.element_ty).to(tl.float32) + residual.to(tl.float32)
    tl.store(y_ptr + row[:, None] * num_columns + column[None, :], total.to(y_ptr.dtype.element_ty), mask=is_output)
