"""Products with the chosen experts, for GPUs, as fast as their weights can be read.

Each CTA takes one expert and some of its output columns, gathers the rows that chose the expert, and streams its part
of the weight once. An expert that nobody chose is not read, and nothing waits for the host.

A pair is one row and one of its experts. Up to `MOST_UNSORTED` pairs, a CTA finds the rows of its expert itself;
beyond, a small kernel sorts the pairs by expert first.

Shapes: N rows, T experts per row, P = N * T pairs, E experts, D model width, I inner width.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.overlap_triton import can_overlap, take_turn

MOST_UNSORTED = 128
GATES = {"silu": 1, "gelu_tanh": 2, "clamped": 3}
"""What joins the two halves of the first product. "clamped" is GPT-OSS's, whose halves are interleaved."""


class ExpertTiling(NamedTuple):
    columns: int
    """Output columns per CTA."""
    step: int
    """Input columns per loop iteration."""
    rows: int
    """Rows per tile; an expert with more rows reads its weight again, from the L2 cache."""
    num_warps: int
    num_stages: int


def expert_tiling(num_pairs: int, num_experts: int, dtype: torch.dtype, is_transposed: bool) -> ExpertTiling:
    """The fastest of those that were tried on an H200, alone in a CUDA graph (docs/decisions/0034-experts.md)."""
    if dtype == torch.float32:
        return ExpertTiling(16, 32, 16, 4, 2)
    if num_pairs > 8 * num_experts:
        return ExpertTiling(64, 64, 32 if num_pairs <= 24 * num_experts else 64, 4, 4)
    return ExpertTiling(64, 64, 16, 4, 4) if is_transposed else ExpertTiling(32, 128, 16, 4, 4)


def expert_products_triton(
    x_ND: Tensor,
    index_NT: Tensor,
    weight_NT: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    is_transposed: bool,
    gate: str,
    alpha: float,
    limit: float,
) -> Tensor:
    """The output of each chosen expert times its routing weight, [N, T, D].

    gate_up: [E, 2I, D], or [E, D, 2I] if `is_transposed`; down: [E, D, I] or [E, I, D].
    """
    (num_rows, num_chosen), num_experts = index_NT.shape, len(down)
    num_pairs, device = num_rows * num_chosen, x_ND.device
    x_ND, index_NT, weight_NT = x_ND.contiguous(), index_NT.contiguous(), weight_NT.contiguous()
    order_P, start_E1 = sorted_pairs(index_NT, num_experts)
    tiling = expert_tiling(num_pairs, num_experts, x_ND.dtype, is_transposed)

    def product(
        x: Tensor, weight: Tensor, bias: Tensor | None, width: int, divisor: int, factor: Tensor | None, gate_code: int
    ) -> Tensor:
        y = torch.empty((num_pairs, width), dtype=x.dtype, device=device)
        columns, inner = (2, 1) if is_transposed else (1, 2)
        overlaps = can_overlap(device)
        _multiply[(num_pairs if order_P is None else num_experts, triton.cdiv(width, tiling.columns))](
            x,
            weight,
            x if bias is None else bias,
            index_NT,
            index_NT if order_P is None else order_P,
            index_NT if start_E1 is None else start_E1,
            index_NT if factor is None else factor,
            y,
            num_pairs,
            width,
            x.shape[1],
            divisor,
            weight.stride(0),
            weight.stride(columns),
            weight.stride(inner),
            alpha,
            limit,
            gate=gate_code,
            has_bias=bias is not None,
            has_factor=factor is not None,
            is_sorted=order_P is not None,
            pairs=1 if order_P is not None else 16 if num_pairs <= 16 else MOST_UNSORTED,
            rows=tiling.rows,
            columns=tiling.columns,
            step=tiling.step,
            is_even=x.shape[1] % tiling.step == 0,
            precision="ieee" if x.dtype == torch.float32 else "tf32",
            overlaps=overlaps,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
            **({"launch_pdl": True} if overlaps else {}),
        )
        return y

    inner_width = down.shape[1] if is_transposed else down.shape[2]
    hidden_PI = product(x_ND, gate_up, gate_up_bias, inner_width, num_chosen, None, GATES[gate])
    y_PD = product(hidden_PI, down, down_bias, x_ND.shape[1], 1, weight_NT, 0)
    return y_PD.view(num_rows, num_chosen, -1)


def sorted_pairs(index_NT: Tensor, num_experts: int) -> tuple[Tensor | None, Tensor | None]:
    """The pairs by expert, and the place where each expert's begin; None while they are few."""
    num_pairs, device = index_NT.numel(), index_NT.device
    if num_pairs <= MOST_UNSORTED:
        return None, None
    order_P = torch.empty(num_pairs, dtype=torch.int32, device=device)
    start_E1 = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    overlaps = can_overlap(device)
    _sort_pairs[(num_experts,)](
        index_NT,
        order_P,
        start_E1,
        num_pairs,
        chunk=min(1024, triton.next_power_of_2(num_pairs)),
        overlaps=overlaps,
        num_warps=4,
        **({"launch_pdl": True} if overlaps else {}),
    )
    return order_P, start_E1


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_pairs(index_ptr, order_ptr, start_ptr, num_pairs, chunk: tl.constexpr, overlaps: tl.constexpr):
    """One CTA per expert: its pairs in order, behind those of lower experts."""
    take_turn(overlaps)
    expert = tl.program_id(0)
    num_lower = 0
    for first in range(0, num_pairs, chunk):
        pair = first + tl.arange(0, chunk)
        chosen = tl.load(index_ptr + pair, mask=pair < num_pairs, other=1 << 30)
        num_lower += tl.sum((chosen < expert).to(tl.int32), 0)
    num_own = 0
    for first in range(0, num_pairs, chunk):
        pair = first + tl.arange(0, chunk)
        chosen = tl.load(index_ptr + pair, mask=pair < num_pairs, other=1 << 30)
        is_own = (chosen == expert).to(tl.int32)
        tl.store(order_ptr + num_lower + num_own + tl.cumsum(is_own, 0) - 1, pair, mask=is_own > 0)
        num_own += tl.sum(is_own, 0)
    tl.store(start_ptr + expert, num_lower)
    tl.store(start_ptr + expert + 1, num_lower + num_own)


@triton.jit
def own_pairs(index_ptr, start_ptr, num_pairs, is_sorted: tl.constexpr, pairs: tl.constexpr):
    """The expert of this CTA; where its pairs begin and how many there are; of unsorted pairs, their ranks."""
    slot = tl.program_id(0)
    place = tl.arange(0, pairs)
    begin = 0
    if is_sorted:
        expert = slot
        begin = tl.load(start_ptr + slot)
        count = tl.load(start_ptr + slot + 1) - begin
        rank = place
    else:
        expert = tl.load(index_ptr + slot).to(tl.int32)
        chosen = tl.load(index_ptr + place, mask=place < num_pairs, other=-1).to(tl.int32)
        is_own = (chosen == expert).to(tl.int32)
        num_earlier = tl.sum(is_own * (place < slot).to(tl.int32), 0)
        count = tl.where(num_earlier == 0, tl.sum(is_own, 0), 0)  # else an earlier CTA has this expert
        rank = tl.where(is_own > 0, tl.cumsum(is_own, 0) - 1, -1)
    return expert, begin, count, rank


@triton.jit
def pairs_at(wanted, is_row, order_ptr, begin, rank, is_sorted: tl.constexpr, pairs: tl.constexpr):
    """The pairs of these ranks among the expert's own."""
    if is_sorted:
        return tl.load(order_ptr + begin + wanted, mask=is_row, other=0)
    else:
        return tl.sum(tl.where(rank[None, :] == wanted[:, None], tl.arange(0, pairs)[None, :], 0), 1)


@triton.jit(do_not_specialize=["num_pairs"])
def _multiply(
    x_ptr,
    weight_ptr,
    bias_ptr,
    index_ptr,
    order_ptr,
    start_ptr,
    factor_ptr,
    y_ptr,
    num_pairs,
    num_columns,
    size,
    divisor,
    expert_stride,
    column_stride,
    inner_stride,
    alpha,
    limit,
    gate: tl.constexpr,
    has_bias: tl.constexpr,
    has_factor: tl.constexpr,
    is_sorted: tl.constexpr,
    pairs: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    step: tl.constexpr,
    is_even: tl.constexpr,
    precision: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Rows of y are pairs; pair p reads row p // divisor of x."""
    take_turn(overlaps)
    expert, begin, count, rank = own_pairs(index_ptr, start_ptr, num_pairs, is_sorted, pairs)
    is_interleaved: tl.constexpr = gate == 3
    wide: tl.constexpr = columns * 2 if is_interleaved else columns
    num_wide = num_columns * 2 if is_interleaved else num_columns
    column = tl.program_id(1) * wide + tl.arange(0, wide)
    is_column = column < num_wide
    inner = tl.arange(0, step)
    weights = weight_ptr + expert.to(tl.int64) * expert_stride
    weights = weights + column[None, :].to(tl.int64) * column_stride + inner[:, None] * inner_stride
    second_half = num_columns.to(tl.int64) * column_stride
    biases = bias_ptr + expert.to(tl.int64) * (num_columns * 2 if gate > 0 else num_columns)
    output = tl.program_id(1) * columns + tl.arange(0, columns)
    for first in range(0, count, rows):
        wanted = first + tl.arange(0, rows)
        is_row = wanted < count
        pair = pairs_at(wanted, is_row, order_ptr, begin, rank, is_sorted, pairs)
        inputs = x_ptr + (pair // divisor)[:, None].to(tl.int64) * size + inner[None, :]
        total = tl.zeros([rows, wide], tl.float32)
        second_total = tl.zeros([rows, wide], tl.float32)
        for k in range(0, size, step):
            is_inner = (k + inner < size) | is_even
            x = tl.load(inputs + k, mask=is_row[:, None] & is_inner[None, :], other=0.0)
            is_weight = is_column[None, :] & is_inner[:, None]
            weight = tl.load(weights + k * inner_stride, mask=is_weight, other=0.0)
            total += tl.dot(x, weight, input_precision=precision)
            if gate == 1 or gate == 2:
                weight = tl.load(weights + second_half + k * inner_stride, mask=is_weight, other=0.0)
                second_total += tl.dot(x, weight, input_precision=precision)
        if has_bias:
            total += tl.load(biases + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
            if gate == 1 or gate == 2:
                second = tl.load(biases + num_columns + column, mask=is_column, other=0.0)
                second_total += second.to(tl.float32)[None, :]
        if gate == 1:
            y = total * tl.sigmoid(total) * second_total
        elif gate == 2:  # gelu, tanh form: 0.5 * (1 + tanh(u)) is sigmoid(2 * u)
            y = total * tl.sigmoid(1.5957691216 * (total + 0.044715 * total * total * total)) * second_total
        elif gate == 3:
            gates, ups = tl.split(tl.reshape(total, (rows, columns, 2)))
            gates = tl.minimum(gates, limit)
            ups = tl.minimum(tl.maximum(ups, -limit), limit)
            y = (ups + 1.0) * gates * tl.sigmoid(gates * alpha)
        else:
            y = total
        if has_factor:
            y = y * tl.load(factor_ptr + pair, mask=is_row, other=0.0).to(tl.float32)[:, None]
        is_output = is_row[:, None] & (output < num_columns)[None, :]
        outputs = y_ptr + pair[:, None].to(tl.int64) * num_columns + output[None, :]
        tl.store(outputs, y.to(y_ptr.dtype.element_ty), mask=is_output)
