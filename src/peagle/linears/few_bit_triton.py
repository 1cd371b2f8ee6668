"""Products of few rows with weights in 4 or 8 bits, for GPUs, at the speed of reading the codes.

As in `skinny_linear_triton`, each CTA takes some output columns and streams their words once.

A product over few words is a chain of waits: for a word, for its number, for the sum so far. Where CTAs are few, each
warp takes every S-th block of inputs and sums on its own; the sums are added at the end. Where CTAs or rows are many,
the warps share the columns instead, and the inputs. Scales are loaded one iteration ahead.

Shapes: M rows, N output columns, K inputs, S splits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.overlap_triton import can_overlap, prefetch, take_turn
from peagle.linears.few_bit import FORMS, FewBitWeight
from peagle.linears.few_bit_words_triton import ENDLESS, UNPACKING, halves_of, multiply_words, part_values, scale_of
from peagle.linears.tilings import FEW_ROWS


class FewBitTiling(NamedTuple):
    columns: int
    """Output columns per CTA, of each half."""
    splits: int
    """Blocks of inputs per loop iteration: as many as warps, each with a sum of its own; or 1, whose columns the warps
    share. Any number between would make warps repeat each other's work."""
    num_warps: int
    num_stages: int
    rows: int = FEW_ROWS
    """Rows per CTA."""
    ahead: int = 0
    """Words of each column to prefetch while the previous kernel ends; a power of two."""


LARGE = 16384
"""Outputs, gate and up projection together, that make CTAs for all SMs several times over."""
RESERVED_BYTES = 2 << 10
"""Shared memory per CTA that is not for iterations in flight: 1 KiB of CUDA's, 1 KiB of the kernel's."""


def few_bit_tiling(form: str, num_outputs: int, size: int, num_rows: int, is_gated: bool) -> FewBitTiling:
    """The tiling for a weight [num_outputs, size] and a number of rows: the fastest that `benchmarks/few_bit.py
    --tilings` found on an H200 for 1, 8 and 64 rows of the weights of Llama 8B (docs/log.md)."""
    if num_rows <= FEW_ROWS:
        both = _few_rows(form, num_outputs, size, num_rows)
    else:
        both = _many_rows(form, num_outputs, num_rows)
    return both._replace(columns=both.columns // 2) if is_gated else both


def _few_rows(form: str, num_outputs: int, size: int, num_rows: int) -> FewBitTiling:
    """Columns are those of both halves."""
    rows, has_4_bits = 8 if num_rows <= 8 else FEW_ROWS, FORMS[form].bits == 4
    if num_outputs >= LARGE:
        return FewBitTiling(64, 1, 4, 3, rows) if has_4_bits else FewBitTiling(32, 4, 4, 3, rows)
    if has_4_bits and num_outputs <= 4096:
        return FewBitTiling(32, 8, 8, 3, rows, ahead=256)
    if has_4_bits or size > 8192:
        return FewBitTiling(16, 4, 4, 4, rows, ahead=256 if has_4_bits else 0)
    return FewBitTiling(16, 4, 4, 5, rows, ahead=256)


def _many_rows(form: str, num_outputs: int, num_rows: int) -> FewBitTiling:
    has_4_bits = FORMS[form].bits == 4
    if num_outputs >= LARGE:
        rows, num_stages = 32 if num_rows <= 32 else 64, 4 if form == "fp8" else 3
        return FewBitTiling(64, 1, 4, 3, rows) if has_4_bits else FewBitTiling(128, 1, 8, num_stages, rows)
    if num_outputs <= 4096:
        return FewBitTiling(32, 2, 2, 3, 32) if has_4_bits else FewBitTiling(32, 4, 4, 3, 32, ahead=256)
    if form == "fp8":
        return FewBitTiling(32, 4, 4, 2, 32)
    return FewBitTiling(64, 1, 4, 4, 32, ahead=256) if has_4_bits else FewBitTiling(32, 2, 2, 4, 32, ahead=256)


def most_stages(tiling: FewBitTiling, form: str, is_gated: bool, shared_bytes: int) -> int:
    """Stages that fit into the shared memory of an SM. All but one hold the words and inputs of an iteration."""
    columns, (_, span) = tiling.columns * (2 if is_gated else 1), FORMS[form]
    per_stage = 2 * tiling.splits * (columns * span + tiling.rows * FORMS[form].block)
    return 1 + (shared_bytes - RESERVED_BYTES) // per_stage


def few_bit_product_triton(
    x_MK: Tensor,
    weight: FewBitWeight,
    bias_N: Tensor | None,
    residual_MN: Tensor | None,
    activation: str | None,
    tiling: FewBitTiling | None = None,
) -> Tensor:
    """residual + linear(x), or activation(gate) * up."""
    (num_rows, size), num_wide = x_MK.shape, weight.num_outputs
    num_columns = num_wide if activation is None else num_wide // 2
    if tiling is None:
        tiling = few_bit_tiling(weight.form, num_wide, size, num_rows, activation is not None)
        if x_MK.is_cuda:
            shared_bytes = torch.cuda.get_device_properties(x_MK.device).shared_memory_per_multiprocessor
            most = most_stages(tiling, weight.form, activation is not None, shared_bytes)
            tiling = tiling._replace(num_stages=min(tiling.num_stages, most))
    y_MN = torch.empty((num_rows, num_columns), dtype=x_MK.dtype, device=x_MK.device)
    overlaps = can_overlap(x_MK.device)
    form, num_words = FORMS[weight.form], weight.words.shape[1]
    one, two, three, four = UNPACKING[weight.form]
    _multiply[(triton.cdiv(num_columns, tiling.columns), triton.cdiv(num_rows, tiling.rows))](
        x_MK,
        weight.words,
        weight.scale,
        weight.scale if weight.zero is None else weight.zero,
        weight.scale if bias_N is None else bias_N,
        x_MK if residual_MN is None else residual_MN,
        y_MN,
        num_rows,
        num_columns,
        size,
        num_words,
        x_MK.stride(0),
        weight.words.stride(0),
        weight.scale.stride(0),
        0 if residual_MN is None else residual_MN.stride(0),
        form=weight.form,
        parts=form.num_parts,
        span=form.span,
        group=weight.group if weight.group < size else ENDLESS,
        has_zero=weight.zero is not None,
        has_bias=bias_N is not None,
        has_residual=residual_MN is not None,
        activation=activation,
        is_even=size % (form.block * tiling.splits) == 0,
        rows=tiling.rows,
        columns=tiling.columns,
        splits=tiling.splits,
        ahead=tiling.ahead if overlaps else 0,
        overlaps=overlaps,
        is_native=x_MK.is_cuda,
        one=one,
        two=two,
        three=three,
        four=four,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **({"launch_pdl": True} if overlaps else {}),
    )
    return y_MN


def dequantize_triton(weight: FewBitWeight, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`, [N, K]."""
    form, num_columns = FORMS[weight.form], weight.num_outputs
    y_NK = torch.empty((num_columns, weight.size), dtype=dtype, device=weight.words.device)
    num_blocks = triton.cdiv(weight.size, form.block)
    _dequantize[(triton.cdiv(num_columns, 16), num_blocks)](
        weight.words,
        weight.scale,
        weight.scale if weight.zero is None else weight.zero,
        y_NK,
        num_columns,
        weight.size,
        weight.words.stride(0),
        weight.scale.stride(0),
        weight.group,
        form=weight.form,
        parts=form.num_parts,
        span=form.span,
        has_zero=weight.zero is not None,
        columns=16,
        num_warps=4,
    )
    return y_NK


# Specialized for one row, not for multiples of 16: that would be one more kernel without gain.
@triton.jit(do_not_specialize_on_alignment=["num_rows"])
def _multiply(
    x_ptr,
    words_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    num_rows,
    num_columns,
    size,
    num_words,
    x_stride,
    words_stride,
    scale_stride,
    residual_stride,
    form: tl.constexpr,
    parts: tl.constexpr,
    span: tl.constexpr,
    group: tl.constexpr,
    has_zero: tl.constexpr,
    has_bias: tl.constexpr,
    has_residual: tl.constexpr,
    activation: tl.constexpr,
    is_even: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    splits: tl.constexpr,
    ahead: tl.constexpr,
    overlaps: tl.constexpr,
    is_native: tl.constexpr,
    one: tl.constexpr,
    two: tl.constexpr,
    three: tl.constexpr,
    four: tl.constexpr,
):
    halves: tl.constexpr = 1 if activation is None else 2
    row = tl.program_id(1) * rows + tl.arange(0, rows)
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    is_row, is_column = row < num_rows, column < num_columns
    # The columns of the gate, then those of the up projection.
    place = tl.arange(0, halves * columns)
    wide = tl.program_id(0) * columns + place % columns
    is_wide = wide < num_columns
    wide += place // columns * num_columns
    words_row = words_ptr + wide.to(tl.int64) * words_stride
    if ahead > 0:
        # No kernel writes the words, so the first of them can load while the previous kernel ends.
        prefetch(words_ptr, words_row, is_wide, num_words, ahead)
    take_turn(overlaps)
    scales, zeros = scale_ptr + wide * scale_stride, zero_ptr + wide * scale_stride
    total = multiply_words(
        words_row, x_ptr + row * x_stride, scales, zeros, is_wide, is_row, num_words, size,
        form, parts, span, group, has_zero, is_even, splits, is_native, one, two, three, four,
    )  # fmt: skip
    if has_bias:
        total += tl.load(bias_ptr + wide, mask=is_wide, other=0.0).to(tl.float32)[:, None]
    if activation is not None:
        gate, up = halves_of(total, columns)
        if activation == "silu":
            total = gate * tl.sigmoid(gate) * up
        else:  # gelu, tanh form: 0.5 * (1 + tanh(u)) is sigmoid(2 * u)
            total = gate * tl.sigmoid(1.5957691216 * (gate + 0.044715 * gate * gate * gate)) * up
    is_output = is_column[:, None] & is_row[None, :]
    if has_residual:
        # Round before the sum, as a separate kernel would.
        residual = tl.load(residual_ptr + row[None, :] * residual_stride + column[:, None], mask=is_output, other=0.0)
        total = total.to(y_ptr.dtype.element_ty).to(tl.float32) + residual.to(tl.float32)
    tl.store(y_ptr + row[None, :] * num_columns + column[:, None], total.to(y_ptr.dtype.element_ty), mask=is_output)


@triton.jit
def _dequantize(
    words_ptr,
    scale_ptr,
    zero_ptr,
    y_ptr,
    num_columns,
    size,
    words_stride,
    scale_stride,
    group,
    form: tl.constexpr,
    parts: tl.constexpr,
    span: tl.constexpr,
    has_zero: tl.constexpr,
    columns: tl.constexpr,
):
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    word = tl.arange(0, span)
    is_column = column < num_columns
    first = tl.program_id(1) * span
    all_words = words_ptr + column[:, None].to(tl.int64) * words_stride + word[None, :]
    words = tl.load(all_words + first, mask=is_column[:, None], other=0)
    for part in tl.static_range(parts):
        place = first * parts + part * span
        at = column * scale_stride + tl.minimum(place, size - 1) // group  # the padding of the last block has no group
        values = part_values(words, form, part)
        if has_zero:
            values -= tl.load(zero_ptr + at, mask=is_column, other=0).to(tl.float32)[:, None]
        values *= scale_of(tl.load(scale_ptr + at, mask=is_column, other=0), form)[:, None]
        is_output = is_column[:, None] & (place + word < size)[None, :]
        outputs = y_ptr + column[:, None].to(tl.int64) * size + place + word[None, :]
        tl.store(outputs, values.to(y_ptr.dtype.element_ty), mask=is_output)
