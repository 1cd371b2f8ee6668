"""Copy KV cache entries from cell to cell in all layers, for GPUs: one launch for all layers of one shape.

A CTA handles one request, one layer and some columns. It reads all its entries before it writes the first.

Shapes: Y layers, C cells, W numbers per entry, B requests, K moves per request.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.overlap_triton import can_overlap, take_turn

MAX_COLUMNS = 256


def move_entries_triton(keys_YCW: Tensor, values_YCW: Tensor, source_BK: Tensor, destination_BK: Tensor) -> None:
    """Copy the keys and values of each request's sources to its destinations. Skips destinations below 0."""
    num_layers, _, width = keys_YCW.shape
    num_requests, num_moves = source_BK.shape
    columns = min(triton.next_power_of_2(width), MAX_COLUMNS)
    overlaps = can_overlap(keys_YCW.device)
    with torch.cuda.device_of(keys_YCW):
        _move[(num_requests, num_layers, triton.cdiv(width, columns))](
            keys_YCW,
            values_YCW,
            source_BK,
            destination_BK,
            num_moves,
            keys_YCW.stride(0),
            width=width,
            padded_moves=triton.next_power_of_2(num_moves),
            columns=columns,
            overlaps=overlaps,
            **({"launch_pdl": True} if overlaps else {}),
        )


@triton.jit(do_not_specialize=["num_moves"])
def _move(
    keys_ptr,
    values_ptr,
    source_ptr,
    destination_ptr,
    num_moves,
    layer_stride,
    width: tl.constexpr,
    padded_moves: tl.constexpr,
    columns: tl.constexpr,
    overlaps: tl.constexpr,
):
    take_turn(overlaps)
    request, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    move = tl.arange(0, padded_moves)
    column = tl.program_id(2) * columns + tl.arange(0, columns)
    source = tl.load(source_ptr + request * num_moves + move, mask=move < num_moves, other=0)
    destination = tl.load(destination_ptr + request * num_moves + move, mask=move < num_moves, other=-1)
    is_moved = (destination >= 0) & (destination != source)
    if tl.sum(is_moved.to(tl.int32)) == 0:
        return
    mask = is_moved[:, None] & (column < width)[None, :]
    read = layer * layer_stride + source[:, None] * width + column[None, :]
    keys, values = tl.load(keys_ptr + read, mask=mask), tl.load(values_ptr + read, mask=mask)
    tl.debug_barrier()  # a destination may be another's source
    write = layer * layer_stride + destination[:, None] * width + column[None, :]
    tl.store(keys_ptr + write, keys, mask=mask)
    tl.store(values_ptr + write, values, mask=mask)
