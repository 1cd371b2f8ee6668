"""`top_k` on GPUs: one warp per row, which holds the row in registers.

Each of the k rounds finds the largest value and then its first column. Both are reductions of 32-bit integers, which a
warp does in one instruction each.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.overlap_triton import can_overlap, take_turn

THREADS_PER_WARP = 32


def top_k_triton(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    num_columns = x.shape[-1]
    values = torch.empty((*x.shape[:-1], k), dtype=x.dtype, device=x.device)
    index = torch.empty(values.shape, dtype=torch.int64, device=x.device)
    if values.numel() == 0:
        return values, index
    rows = x.reshape(-1, num_columns)
    overlaps = can_overlap(x.device)
    # Triton launches on the current device, which may not be the input's device.
    with torch.cuda.device_of(x):
        _find_largest[(len(rows),)](
            values,
            index,
            rows,
            *rows.stride(),
            num_columns=num_columns,
            padded_columns=max(THREADS_PER_WARP, triton.next_power_of_2(num_columns)),
            k=k,
            padded_k=triton.next_power_of_2(k),
            overlaps=overlaps,
            num_warps=1,
            **({"launch_pdl": True} if overlaps else {}),
        )
    return values, index


@triton.jit
def _find_largest(
    values_ptr,
    index_ptr,
    x_ptr,
    row_stride,
    column_stride,
    num_columns: tl.constexpr,
    padded_columns: tl.constexpr,
    k: tl.constexpr,
    padded_k: tl.constexpr,
    overlaps: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = x_ptr + row * row_stride
    column, rank = tl.arange(0, padded_columns), tl.arange(0, padded_k)
    is_column = column < num_columns
    take_turn(overlaps)
    x = tl.load(row_ptr + column * column_stride, mask=is_column, other=0.0).to(tl.float32)
    # A float is a sign and a magnitude. As a two's complement it sorts the same, and -0 equals 0. No float, NaN
    # included, has the lowest integer, which marks columns that are taken or do not exist.
    taken: tl.constexpr = -(1 << 31)
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    keys = tl.where(is_column, tl.where(bits < 0, -magnitude, magnitude), taken)
    found = tl.zeros([padded_k], tl.int32)
    for n in range(k):
        first = tl.min(tl.where(keys == tl.max(keys, 0), column, padded_columns), 0)
        found = tl.where(rank == n, first, found)
        keys = tl.where(column == first, taken, keys)
    values = tl.load(row_ptr + found * column_stride, mask=rank < k, other=0.0)
    tl.store(values_ptr + row * k + rank, values, mask=rank < k)
    tl.store(index_ptr + row * k + rank, found.to(tl.int64), mask=rank < k)
