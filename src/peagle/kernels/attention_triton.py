"""Paged attention for GPUs in one launch: write the new keys and values, attend, and combine the splits.

A CTA handles one key-value head of one request, a tile of its rows times the query heads of that group, and one split
of the cached keys. It reads the new rows' keys from the projections, not from the pages, so no CTA waits for another's
write. If several splits have work, each writes its partial result to scratch memory, and the last one to finish (by an
atomic counter) combines them: a second launch would cost more.

The number of splits is fixed when a CUDA graph is captured. The device derives each split's share from the sequence
length, so one graph serves all lengths. Likewise a graph launches CTAs for as many tiles as its rows can fill, and the
device finds the request of each tile.

Shapes as in `attention.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels import tilings
from peagle.kernels.overlap_triton import can_overlap, take_turn
from peagle.kernels.softmax_triton import add_sinks, combine, fold, score, share
from peagle.kernels.tilings import DEEP_PIPELINE_BYTES, NUM_COUNTERS, Gpu


@torch.library.custom_op("peagle::paged_attention", mutates_args=("key_pages", "value_pages"))
def launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    first_row: Tensor,
    context: Tensor,
    cell: Tensor,
    span: Tensor,
    ancestors: Tensor | None,
    depth: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    first_key: int,
) -> Tensor:
    num_rows, num_heads, width = query.shape
    num_groups = key.shape[1]
    num_requests, max_rows = len(context), len(span)
    attended = torch.empty((num_rows, num_heads, width), dtype=query.dtype, device=query.device)
    if num_rows == 0:
        return attended
    padded_width = max(16, triton.next_power_of_2(width))
    group_size = num_heads // num_groups
    tile, step, num_splits, num_warps, num_stages = tilings.attention_tiling(
        num_rows, max_rows, num_requests, num_groups, group_size, padded_width, query.dtype, gpu_of(query.device)
    )
    # A request may need several tiles; only the device knows how many (`_tile_of`). Prompts that are `joined` to decode
    # steps have more rows than the span says.
    is_tiled = max_rows * group_size > tile or max_rows == tilings.MOST_DECODE_ROWS
    num_places = num_rows * group_size // tile + num_requests if is_tiled else num_requests
    partial = torch.empty(
        (num_places * num_groups * num_splits, tile, padded_width + 2) if num_splits > 1 else (0,),
        dtype=torch.float32,
        device=query.device,
    )
    overlaps = can_overlap(query.device)
    _attend[(num_places * num_groups, num_splits)](
        query,
        key,
        value,
        key_pages,
        value_pages,
        page_table,
        first_row,
        context,
        cell,
        ancestors if ancestors is not None else context,
        depth if depth is not None else context,
        sinks if sinks is not None else context,
        attended,
        partial,
        _counters(query.device),
        scale,
        softcap,
        window,
        first_key,
        page_table.stride(0),
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        key_pages.stride(1),
        key_pages.stride(2),
        num_requests,
        num_splits,
        padded_requests=_padded(num_requests) if is_tiled else 0,
        num_groups=num_groups,
        group_size=group_size,
        width=width,
        padded_width=padded_width,
        page_size=key_pages.shape[1],
        tile=tile,
        step=step,
        new_step=max(16, min(triton.next_power_of_2(max_rows), step)),
        is_split=num_splits > 1,
        has_tree=ancestors is not None,
        has_sinks=sinks is not None,
        has_softcap=softcap != 0,
        precision="ieee" if query.dtype == torch.float32 else "tf32",
        overlaps=overlaps,
        num_warps=num_warps,
        num_stages=num_stages,
        **({"launch_pdl": True} if overlaps else {}),
    )
    return attended


@launch.register_fake
def _(query: Tensor, *args: object, **kwargs: object) -> Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


def _padded(num_requests: int) -> int:
    """A power of four from `num_requests` up: few, since each is a kernel of its own.

    >>> [_padded(size) for size in (1, 4, 5, 64, 65)]
    [4, 4, 16, 64, 256]
    """
    return 4 ** max(1, ((num_requests - 1).bit_length() + 1) // 2)


@cache
def gpu_of(device: torch.device) -> Gpu:
    if device.type != "cuda":
        return Gpu(8, DEEP_PIPELINE_BYTES)
    properties = torch.cuda.get_device_properties(device)
    return Gpu(properties.multi_processor_count, properties.shared_memory_per_multiprocessor)


@cache
def _counters(device: torch.device) -> Tensor:
    """Zeros. Each call resets them to zero, so all calls on a stream share them."""
    return torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)


@triton.jit
def _attend_cached(
    query,
    key_pages_ptr,
    value_pages_ptr,
    table_ptr,
    begin,
    end,
    lowest,
    scale,
    softcap,
    cell_stride,
    tile: tl.constexpr,
    width: tl.constexpr,
    padded_width: tl.constexpr,
    page_size: tl.constexpr,
    step: tl.constexpr,
    has_softcap: tl.constexpr,
    precision: tl.constexpr,
):
    """The online softmax over cached indexes begin .. end - 1, all of which precede every row."""
    high = tl.full([tile], float("-inf"), tl.float32)
    mass = tl.zeros([tile], tl.float32)
    attended = tl.zeros([tile, padded_width], tl.float32)
    column = tl.arange(0, padded_width)
    is_column = column < width
    for position in range(begin, end, step):
        index = position + tl.arange(0, step)
        is_key = index < end
        page = tl.load(table_ptr + index // page_size, mask=is_key, other=0).to(tl.int64)
        place = (page * page_size + index % page_size) * cell_stride
        keys = tl.load(
            key_pages_ptr + place[None, :] + column[:, None], mask=is_key[None, :] & is_column[:, None], other=0.0
        )
        values = tl.load(
            value_pages_ptr + place[:, None] + column[None, :], mask=is_key[:, None] & is_column[None, :], other=0.0
        )
        scores = score(query, keys, scale, softcap, has_softcap, precision)
        scores = tl.where(is_key[None, :] & (index[None, :] >= lowest[:, None]), scores, float("-inf"))
        high, mass, attended = fold(scores, values, high, mass, attended, precision)
    return high, mass, attended


@triton.jit
def _attend_new(
    query,
    key_ptr,
    value_ptr,
    key_pages_ptr,
    value_pages_ptr,
    cell_ptr,
    depth_ptr,
    first_kept,
    end_kept,
    end,
    context,
    row,
    ancestors,
    lowest,
    num_rows,
    scale,
    softcap,
    key_row_stride,
    value_row_stride,
    cell_stride,
    high,
    mass,
    attended,
    width: tl.constexpr,
    padded_width: tl.constexpr,
    step: tl.constexpr,
    has_tree: tl.constexpr,
    has_softcap: tl.constexpr,
    precision: tl.constexpr,
):
    """Continue with new rows 0 .. end - 1 of the request; write keys and values of first_kept .. end_kept - 1."""
    column = tl.arange(0, padded_width)
    is_column = column < width
    for position in range(0, end, step):
        index = position + tl.arange(0, step)
        is_key = index < num_rows
        keys = tl.load(
            key_ptr + index[None, :] * key_row_stride + column[:, None],
            mask=is_key[None, :] & is_column[:, None],
            other=0.0,
        )
        values = tl.load(
            value_ptr + index[:, None] * value_row_stride + column[None, :],
            mask=is_key[:, None] & is_column[None, :],
            other=0.0,
        )
        is_kept = is_key & (index >= first_kept) & (index < end_kept)
        place = tl.load(cell_ptr + index, mask=is_kept, other=0).to(tl.int64) * cell_stride
        tl.store(key_pages_ptr + place[None, :] + column[:, None], keys, mask=is_kept[None, :] & is_column[:, None])
        tl.store(value_pages_ptr + place[:, None] + column[None, :], values, mask=is_kept[:, None] & is_column[None, :])
        scores = score(query, keys, scale, softcap, has_softcap, precision)
        if has_tree:
            depth = tl.load(depth_ptr + index, mask=is_key, other=0).to(tl.int32)
            is_before = (ancestors == 0)[:, None] & (index[None, :] <= row[:, None])
            is_above = is_before | (((ancestors[:, None] >> index[None, :]) & 1) != 0)
        else:
            depth = index
            is_above = index[None, :] <= row[:, None]
        is_seen = is_key[None, :] & is_above & ((context + depth)[None, :] >= lowest[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        high, mass, attended = fold(scores, values, high, mass, attended, precision)
    return high, mass, attended


@triton.jit
def _tile_of(
    place, first_row_ptr, num_requests, padded_requests: tl.constexpr, group_size: tl.constexpr, tile: tl.constexpr
):
    """The request and tile index of a place in the grid.

    Request r starts at place r + (entries before its first) // tile. That leaves it as many places as it has tiles, or
    one more, which stays empty.
    """
    index = tl.arange(0, padded_requests)
    is_request = index < num_requests
    first_place = tl.load(first_row_ptr + index, mask=is_request, other=0).to(tl.int32) * group_size // tile + index
    request = tl.sum((is_request & (first_place <= place)).to(tl.int32)) - 1
    return request, place - (tl.load(first_row_ptr + request).to(tl.int32) * group_size // tile + request)


@triton.jit
def _branch_of(row, num_rows, depth_ptr, ancestors_ptr, has_tree: tl.constexpr):
    """The depth of each row and the bits of the rows above it; the second is not used without a tree."""
    depth, ancestors = row, row
    if has_tree:
        depth = tl.load(depth_ptr + row, mask=row < num_rows, other=0).to(tl.int32)
        ancestors = tl.load(ancestors_ptr + row, mask=row < num_rows, other=0)
    return depth, ancestors


# A kernel that is specialized for these numbers gains nothing, and would be compiled for each batch size.
@triton.jit(do_not_specialize=["first_key", "num_requests", "num_splits"])
def _attend(
    query_ptr,
    key_ptr,
    value_ptr,
    key_pages_ptr,
    value_pages_ptr,
    page_table_ptr,
    first_row_ptr,
    context_ptr,
    cell_ptr,
    ancestors_ptr,
    depth_ptr,
    sinks_ptr,
    attended_ptr,
    partial_ptr,
    counter_ptr,
    scale,
    softcap,
    window,
    first_key,
    table_stride,
    query_row_stride,
    query_head_stride,
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    cell_stride,
    page_head_stride,
    num_requests,
    num_splits,
    padded_requests: tl.constexpr,
    num_groups: tl.constexpr,
    group_size: tl.constexpr,
    width: tl.constexpr,
    padded_width: tl.constexpr,
    page_size: tl.constexpr,
    tile: tl.constexpr,
    step: tl.constexpr,
    new_step: tl.constexpr,
    is_split: tl.constexpr,
    has_tree: tl.constexpr,
    has_sinks: tl.constexpr,
    has_softcap: tl.constexpr,
    precision: tl.constexpr,
    overlaps: tl.constexpr,
):
    take_turn(overlaps)
    request, group, split = tl.program_id(0) // num_groups, tl.program_id(0) % num_groups, tl.program_id(1)
    tile_index = 0
    if padded_requests > 0:
        request, tile_index = _tile_of(request, first_row_ptr, num_requests, padded_requests, group_size, tile)
    first = tl.load(first_row_ptr + request).to(tl.int64)
    num_rows = (tl.load(first_row_ptr + request + 1) - first).to(tl.int32)
    context = tl.load(context_ptr + request).to(tl.int32)
    first_of_tile = tile_index * tile // group_size
    if first_of_tile >= num_rows:
        return
    first_depth = 0 if has_tree else first_of_tile  # the rows of a tree are of any depth
    lowest_of_tile = tl.where(window > 0, tl.maximum(first_key, context + first_depth - window + 1), first_key)
    begin, end, num_active = share(lowest_of_tile, context, split, num_splits, step)
    if split >= num_active:
        return
    entry = tile_index * tile + tl.arange(0, tile)
    row, head = entry // group_size, group * group_size + entry % group_size
    column = tl.arange(0, padded_width)
    is_entry = (row < num_rows)[:, None] & (column < width)[None, :]
    queries = query_ptr + (first + row)[:, None] * query_row_stride + head[:, None] * query_head_stride
    query = tl.load(queries + column[None, :], mask=is_entry, other=0.0)
    depth, ancestors = _branch_of(row, num_rows, depth_ptr + first, ancestors_ptr + first, has_tree)
    lowest = tl.where(window > 0, tl.maximum(first_key, context + depth - window + 1), first_key)
    page_head = group * page_head_stride
    high, mass, attended = _attend_cached(
        query, key_pages_ptr + page_head, value_pages_ptr + page_head, page_table_ptr + request * table_stride, begin,
        end, lowest, scale, softcap, cell_stride, tile, width, padded_width, page_size, step, has_softcap, precision,
    )  # fmt: skip
    if split == 0:
        # This CTA writes the rows whose first head lies in its tile.
        first_kept, end_kept = tl.cdiv(tile_index * tile, group_size), tl.cdiv((tile_index + 1) * tile, group_size)
        high, mass, attended = _attend_new(
            query, key_ptr + first * key_row_stride + group * key_head_stride,
            value_ptr + first * value_row_stride + group * value_head_stride, key_pages_ptr + page_head,
            value_pages_ptr + page_head, cell_ptr + first, depth_ptr + first, first_kept, end_kept,
            tl.minimum(end_kept, num_rows), context, row, ancestors, lowest, num_rows, scale, softcap, key_row_stride,
            value_row_stride, cell_stride, high, mass, attended, width, padded_width, new_step, has_tree, has_softcap,
            precision,
        )  # fmt: skip
    if is_split:  # noqa: SIM102  # a compile-time condition; the next is not
        if num_active > 1:
            team = tl.program_id(0).to(tl.int64)
            high, mass, attended, is_last = combine(
                partial_ptr, counter_ptr, team, split, num_active, high, mass, attended, num_splits, tile, padded_width
            )
            if not is_last:
                return
    if has_sinks:
        mass, attended = add_sinks(tl.load(sinks_ptr + head, mask=row < num_rows, other=0.0), high, mass, attended)
    attended = attended / tl.where(mass > 0, mass, 1.0)[:, None]
    results = attended_ptr + ((first + row)[:, None] * num_groups * group_size + head[:, None]) * width
    tl.store(results + column[None, :], attended.to(attended_ptr.dtype.element_ty), mask=is_entry)
