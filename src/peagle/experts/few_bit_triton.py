"""Products with the chosen experts from weights in 4 or 8 bits: `product_triton` with the tiles of `few_bit_triton`.

Both halves of the first product lie one after the other, also those of GPT-OSS, which come interleaved.

Shapes: N rows, T experts per row, P = N * T pairs, E experts, D model width, I inner width.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.experts.product_triton import GATES, MOST_UNSORTED, own_pairs, pairs_at, sorted_pairs
from peagle.kernels.overlap_triton import can_overlap, take_turn
from peagle.linears.few_bit import FORMS, FewBitWeight
from peagle.linears.few_bit_words_triton import ENDLESS, UNPACKING, halves_of, multiply_words


class FewBitExpertTiling(NamedTuple):
    columns: int
    """Output columns per CTA, of each half."""
    splits: int
    """Blocks of inputs per loop iteration: as many as warps, each with a sum of its own; or 1, whose columns the warps
    share. Any number between would make warps repeat each other's work."""
    num_warps: int
    num_stages: int
    rows: int
    """Rows per tile; an expert with more rows reads its codes again, from the L2 cache."""


def few_bit_expert_tiling(num_pairs: int, num_experts: int, size: int, is_gated: bool) -> FewBitExpertTiling:
    """The tiling for the pairs of a pass: warps split the inputs of up to 8 pairs, and else share columns.

    Microseconds of both products on an H200 with 1, 8 and 64 rows, and the share of the bandwidth limit of the bytes
    read (`benchmarks/few_bit.py --tilings`):

        GPT-OSS-20B, mxfp4      31 40%    143 49%    204 48%
        Qwen3-30B-A3B, fp8      16 54%     72 76%    161 85%
    """
    is_large, rows = size > 2048, 8 if num_pairs <= 4 * num_experts else 16
    if num_pairs <= 8:
        if is_gated:
            return FewBitExpertTiling(16 if is_large else 8, 2, 2, 3 if is_large else 4, 8)
        return FewBitExpertTiling(32, 4, 4, 3, 8) if is_large else FewBitExpertTiling(16, 2, 2, 3, 8)
    if num_pairs <= 2 * num_experts:
        if is_gated:
            return FewBitExpertTiling(32, 1, 4, 5 if is_large else 3, rows)
        return FewBitExpertTiling(64, 1, 4, 4, rows) if is_large else FewBitExpertTiling(32, 1, 2, 4, rows)
    if is_gated:
        return FewBitExpertTiling(16, 1, 2, 3 if is_large else 5, 16)
    return FewBitExpertTiling(32, 1, 2, 4 if is_large else 5, rows)


def few_bit_expert_products_triton(
    x_ND: Tensor,
    index_NT: Tensor,
    weight_NT: Tensor,
    gate_up: FewBitWeight,
    gate_up_bias: Tensor | None,
    down: FewBitWeight,
    down_bias: Tensor | None,
    gate: str,
    alpha: float,
    limit: float,
    tilings: tuple[FewBitExpertTiling, FewBitExpertTiling] | None = None,
) -> Tensor:
    """The output of each chosen expert times its routing weight, [N, T, D].

    gate_up: a stack of [2I, D]; down: of [D, I]. `tilings` are those of gate_up and of down.
    """
    (num_rows, num_chosen), num_experts = index_NT.shape, len(down.words)
    num_pairs, device = num_rows * num_chosen, x_ND.device
    x_ND, index_NT, weight_NT = x_ND.contiguous(), index_NT.contiguous(), weight_NT.contiguous()
    order_P, start_E1 = sorted_pairs(index_NT, num_experts)

    def product(
        x: Tensor, weight: FewBitWeight, bias: Tensor | None, divisor: int, factor: Tensor | None, gate_code: int
    ) -> Tensor:
        form, width = FORMS[weight.form], weight.num_outputs // (2 if gate_code else 1)
        y = torch.empty((num_pairs, width), dtype=x.dtype, device=device)
        usual = few_bit_expert_tiling(num_pairs, num_experts, weight.size, gate_code > 0)
        own = tilings[gate_code == 0] if tilings else usual
        overlaps = can_overlap(device)
        one, two, three, four = UNPACKING[weight.form]
        _multiply[(num_pairs if order_P is None else num_experts, triton.cdiv(width, own.columns))](
            x,
            weight.words,
            weight.scale,
            x if bias is None else bias,
            index_NT,
            index_NT if order_P is None else order_P,
            index_NT if start_E1 is None else start_E1,
            index_NT if factor is None else factor,
            y,
            num_pairs,
            width,
            x.shape[1],
            weight.words.shape[2],
            divisor,
            weight.words.stride(0),
            weight.words.stride(1),
            weight.scale.stride(0),
            weight.scale.stride(1),
            alpha,
            limit,
            gate=gate_code,
            has_bias=bias is not None,
            has_factor=factor is not None,
            is_sorted=order_P is not None,
            pairs=1 if order_P is not None else 16 if num_pairs <= 16 else MOST_UNSORTED,
            rows=own.rows,
            columns=own.columns,
            form=weight.form,
            parts=form.num_parts,
            span=form.span,
            group=weight.group if weight.group < weight.size else ENDLESS,
            is_even=x.shape[1] % (form.block * own.splits) == 0,
            splits=own.splits,
            overlaps=overlaps,
            is_native=x.is_cuda,
            one=one,
            two=two,
            three=three,
            four=four,
            num_warps=own.num_warps,
            num_stages=own.num_stages,
            **({"launch_pdl": True} if overlaps else {}),
        )
        return y

    hidden_PI = product(x_ND, gate_up, gate_up_bias, num_chosen, None, GATES[gate])
    y_PD = product(hidden_PI, down, down_bias, 1, weight_NT, 0)
    return y_PD.view(num_rows, num_chosen, -1)


@triton.jit(do_not_specialize=["num_pairs"])
def _multiply(
    x_ptr,
    words_ptr,
    scale_ptr,
    bias_ptr,
    index_ptr,
    order_ptr,
    start_ptr,
    factor_ptr,
    y_ptr,
    num_pairs,
    num_columns,
    size,
    num_words,
    divisor,
    words_expert_stride,
    words_stride,
    scale_expert_stride,
    scale_stride,
    alpha,
    limit,
    gate: tl.constexpr,
    has_bias: tl.constexpr,
    has_factor: tl.constexpr,
    is_sorted: tl.constexpr,
    pairs: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    form: tl.constexpr,
    parts: tl.constexpr,
    span: tl.constexpr,
    group: tl.constexpr,
    is_even: tl.constexpr,
    splits: tl.constexpr,
    overlaps: tl.constexpr,
    is_native: tl.constexpr,
    one: tl.constexpr,
    two: tl.constexpr,
    three: tl.constexpr,
    four: tl.constexpr,
):
    """Rows of y are pairs; pair p reads row p // divisor of x."""
    take_turn(overlaps)
    expert, begin, count, rank = own_pairs(index_ptr, start_ptr, num_pairs, is_sorted, pairs)
    halves: tl.constexpr = 2 if gate > 0 else 1
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    is_column = column < num_columns
    place = tl.arange(0, halves * columns)
    wide = tl.program_id(1) * columns + place % columns
    is_wide = wide < num_columns
    wide += place // columns * num_columns
    words_row = words_ptr + expert.to(tl.int64) * words_expert_stride + wide.to(tl.int64) * words_stride
    scales = scale_ptr + expert.to(tl.int64) * scale_expert_stride + wide * scale_stride
    biases = bias_ptr + expert.to(tl.int64) * num_columns * halves + wide
    for begin_row in range(0, count, rows):
        wanted = begin_row + tl.arange(0, rows)
        is_row = wanted < count
        pair = pairs_at(wanted, is_row, order_ptr, begin, rank, is_sorted, pairs)
        inputs = x_ptr + (pair // divisor).to(tl.int64) * size
        total = multiply_words(
            words_row, inputs, scales, scales, is_wide, is_row, num_words, size,
            form, parts, span, group, False, is_even, splits, is_native, one, two, three, four,
        )  # fmt: skip
        if has_bias:
            total += tl.load(biases, mask=is_wide, other=0.0).to(tl.float32)[:, None]
        if gate == 0:
            y = total
        else:
            first, second = halves_of(total, columns)
            if gate == 1:
                y = first * tl.sigmoid(first) * second
            elif gate == 2:  # gelu, tanh form: 0.5 * (1 + tanh(u)) is sigmoid(2 * u)
                y = first * tl.sigmoid(1.5957691216 * (first + 0.044715 * first * first * first)) * second
            else:
                first = tl.minimum(first, limit)
                y = (tl.minimum(tl.maximum(second, -limit), limit) + 1.0) * first * tl.sigmoid(first * alpha)
        if has_factor:
            y = y * tl.load(factor_ptr + pair, mask=is_row, other=0.0).to(tl.float32)[None, :]
        outputs = y_ptr + pair[None, :].to(tl.int64) * num_columns + column[:, None]
        tl.store(outputs, y.to(y_ptr.dtype.element_ty), mask=is_row[None, :] & is_column[:, None])
