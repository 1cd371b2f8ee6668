"""Products of a few rows with a large weight, for GPUs: as fast as the weight can be read.

Each program takes some output columns, streams their part of the weight once and multiplies it with all rows. What
surrounds such products in a decoder layer joins in: the norm before it, and the gate of two products after it. The
norm's root mean square is summed up on the way and divided by at the end, so the rows too are read once.

Shapes: M rows (at most 16), N output columns, K input columns.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.skinny_linear import MOST_ROWS, Tiling


def skinny_linear_triton(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    tiling: Tiling,
    scale_K: Tensor | None = None,
    eps: float = 0.0,
    activation: str | None = None,
) -> Tensor:
    """linear(x), of rms_norm(x) * scale where a scale is given; gated where an activation is, as for `gated_linear`."""
    num_rows, size = x_MK.shape
    num_columns = len(weight_NK) if activation is None else len(weight_NK) // 2
    y_MN = torch.empty((num_rows, num_columns), dtype=x_MK.dtype, device=x_MK.device)
    _multiply[(triton.cdiv(num_columns, tiling.columns),)](
        x_MK,
        weight_NK,
        weight_NK if bias_N is None else bias_N,
        weight_NK if scale_K is None else scale_K,
        y_MN,
        num_rows,
        num_columns,
        size,
        eps,
        x_MK.stride(0),
        weight_NK.stride(0),
        has_bias=bias_N is not None,
        has_norm=scale_K is not None,
        activation=activation,
        is_even=size % tiling.step == 0,
        rows=MOST_ROWS,
        columns=tiling.columns,
        step=tiling.step,
        precision="ieee" if x_MK.dtype == torch.float32 else "tf32",
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    return y_MN


@triton.jit
def _multiply(
    x_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    y_ptr,
    num_rows,
    num_columns,
    size,
    eps,
    x_stride,
    weight_stride,
    has_bias: tl.constexpr,
    has_norm: tl.constexpr,
    activation: tl.constexpr,
    is_even: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    step: tl.constexpr,
    precision: tl.constexpr,
):
    row = tl.arange(0, rows)
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    inner = tl.arange(0, step)
    is_row, is_column = row < num_rows, column < num_columns
    weights = weight_ptr + column.to(tl.int64)[None, :] * weight_stride + inner[:, None]
    inputs = x_ptr + row[:, None] * x_stride + inner[None, :]
    second_half = num_columns.to(tl.int64) * weight_stride
    total = tl.zeros([rows, columns], tl.float32)
    second_total = tl.zeros([rows, columns], tl.float32)
    squares = tl.zeros([rows], tl.float32)
    for first in range(0, size, step):
        is_inner = (first + inner < size) | is_even
        x = tl.load(inputs + first, mask=is_row[:, None] & is_inner[None, :], other=0.0)
        if has_norm:
            x_float = x.to(tl.float32)
            squares += tl.sum(x_float * x_float, 1)
            scale = tl.load(scale_ptr + first + inner, mask=is_inner, other=0.0).to(tl.float32)
            x = (x_float * scale[None, :]).to(x.dtype)
        is_weight = is_column[None, :] & is_inner[:, None]
        weight = tl.load(weights + first, mask=is_weight, other=0.0)
        total += tl.dot(x, weight, input_precision=precision)
        if activation is not None:
            weight = tl.load(weights + second_half + first, mask=is_weight, other=0.0)
            second_total += tl.dot(x, weight, input_precision=precision)
    if has_norm:
        factor = tl.rsqrt(squares / size + eps)[:, None]
        total, second_total = total * factor, second_total * factor
    if has_bias:
        total += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if activation is not None:
        if has_bias:
            second = tl.load(bias_ptr + num_columns + column, mask=is_column, other=0.0)
            second_total += second.to(tl.float32)[None, :]
        if activation == "silu":
            total = total * tl.sigmoid(total) * second_total
        else:  # gelu, by its hyperbolic tangent: 0.5 * (1 + tanh(u)) is sigmoid(2 * u)
            total = total * tl.sigmoid(1.5957691216 * (total + 0.044715 * total * total * total)) * second_total
    tl.store(
        y_ptr + row[:, None] * num_columns + column[None, :],
        total.to(y_ptr.dtype.element_ty),
        mask=is_row[:, None] & is_column[None, :],
    )
