"""How attention splits its work into CTAs, by shape. Measured inside whole steps on an H200 (docs/log.md).

`benchmarks/attention.py` tries other tilings, for other GPUs and shapes.
"""

from typing import NamedTuple

import torch

MAX_SPLITS = 32
DEEP_PIPELINE_BYTES = 228 << 10
"""Shared memory per SM from which two CTAs with several loads in flight fit on one SM: H100 and later."""
NUM_COUNTERS = 1 << 16

MOST_DECODE_ROWS = 64
"""Rows per request up to which a pass verifies drafts. Beyond, it is a prefill pass, whose rows fill the GPU."""


class Gpu(NamedTuple):
    num_sms: int
    shared_bytes: int
    """Shared memory per SM."""


class AttentionTiling(NamedTuple):
    tile: int
    """Entries (rows x query heads) per CTA."""
    step: int
    """Keys per loop iteration."""
    num_splits: int
    """CTAs that share the keys of one sequence."""
    num_warps: int = 4
    num_stages: int = 2
    """Pipeline depth. Looking up a page takes as many stages as loading its keys: 2 to 4 keep one iteration in flight,
    5 and 6 two, 7 three."""


def attention_tiling(
    num_rows: int,
    max_rows: int,
    num_requests: int,
    num_groups: int,
    group_size: int,
    padded_width: int,
    dtype: torch.dtype,
    gpu: Gpu,
) -> AttentionTiling:
    """The tiling for `num_rows` new rows of all requests, at most `max_rows` of one.

    In a decode step the latency of the first keys dominates, so the tiling maximizes loads in flight: by splitting each
    sequence over CTAs when requests are few, by a deeper pipeline when they are many. More CTAs than SMs pay off only
    with one split per sequence; otherwise they delay the next kernel. Trees have few rows in most requests and many in
    some, so their tiles are small.
    """
    most_entries = max_rows * group_size
    num_pairs, num_slots = num_requests * num_groups, 2 * gpu.num_sms
    row_bytes = padded_width * dtype.itemsize
    is_decode, is_wide = max_rows <= MOST_DECODE_ROWS, padded_width > 256  # Gemma-4 has 512: larger tiles do not fit
    if is_decode and row_bytes <= 128 and gpu.shared_bytes >= DEEP_PIPELINE_BYTES:
        has_prompts = max_rows == MOST_DECODE_ROWS
        return _narrow_tiling(num_rows * group_size, most_entries, num_requests, num_groups, gpu.num_sms, has_prompts)
    # A tile for most requests, not for the largest tree.
    num_entries = min(most_entries, -(-num_rows * group_size // num_requests)) if is_decode else most_entries
    tile = min(max(16, 1 << (num_entries - 1).bit_length()), 16 if is_wide else 64)
    num_splits = _num_splits(num_pairs * -(-num_entries // tile), num_slots) if is_decode else 1
    if num_entries > tile or row_bytes > 256:  # prefill, large trees, and wide heads
        step = 64 if padded_width <= 128 else 16 if is_wide else 32
        return AttentionTiling(tile, step, num_splits, num_stages=1 if is_wide and dtype == torch.float32 else 2)
    num_small = -(-num_entries // 16) * num_pairs
    if num_small * MAX_SPLITS <= num_slots:  # SMs stay idle even at the most splits
        return AttentionTiling(16, 64, MAX_SPLITS)
    if 2 * num_pairs < gpu.num_sms:
        return AttentionTiling(tile, 64, num_splits)
    num_warps = 2 if tile == 32 and padded_width > 64 else 4
    if num_pairs > num_slots or gpu.shared_bytes < DEEP_PIPELINE_BYTES:
        return AttentionTiling(tile, 64, num_splits, num_warps)
    if num_small <= num_slots:
        return AttentionTiling(16, 64, 1, num_stages=7)
    return AttentionTiling(tile, 64, 1, num_warps, num_stages=5)


def _narrow_tiling(
    num_entries: int, most_entries: int, num_requests: int, num_groups: int, num_sms: int, has_prompts: bool
) -> AttentionTiling:
    """For heads of up to 64 numbers in 16 bits. `num_entries` are those of all requests and one group.

    `has_prompts`: most tiles are of a few prompts, so they count less, and deep pipelines do not pay.

    Microseconds per layer over 300 keys, 3 groups of 3 heads, trees of up to 32 rows, in tiles of 16, 32 and 64:

        1 request, 33 rows      7.9   8.7  12.4        64 requests, 448 rows   15.0  14.8  18.3
        8 requests, 64 rows     8.6  10.6  11.3       128 requests, 320 rows   17.7  19.7  20.9
       32 requests, 128 rows   11.3  10.8  15.9       256 requests, 640 rows   31.5  37.5  39.4

    With one product per layer between, keys per iteration and splits or stages (`benchmarks/attention.py --batches`):

        256x4t       tile 16: 64 keys 41.1, 128 keys 38.0
        8x8t+128     tile 16, 128 keys: 1 split 15.4, 3 splits 13.7, 4 splits 13.7
        64x8t+128    tile 32, 128 keys: 5 stages 25.9, 2 stages 23.8; without the prompt 21.0 and 22.8
    """
    num_pairs = num_requests * num_groups
    num_small = -(-most_entries // 16) * num_pairs
    if num_small * MAX_SPLITS <= 2 * num_sms:  # SMs stay idle even at the most splits
        return AttentionTiling(16, 64, MAX_SPLITS)
    if 2 * num_pairs < num_sms:
        if most_entries <= 32:
            tile = 16 if most_entries <= 16 else 32
            return AttentionTiling(tile, 128, _num_splits(num_pairs, num_sms), num_stages=5)
        num_tiles = (num_entries // 16 + num_requests) * num_groups
        return AttentionTiling(16, 128, _num_splits(num_tiles, (4 if has_prompts else 1.5) * num_sms))
    if num_pairs > 2 * num_sms:
        is_wide = most_entries > 64 or (most_entries > 16 and num_pairs <= 4 * num_sms)
        return AttentionTiling(16, 128 if is_wide else 64, 1)
    if most_entries > 16:
        return AttentionTiling(32, 128, 1, num_stages=2 if has_prompts else 5)
    if num_small <= num_sms:
        return AttentionTiling(16, 128, 1, num_stages=5)
    return AttentionTiling(16, 64, 1, num_warps=2, num_stages=5)


def _num_splits(num_ctas: int, num_slots: float) -> int:
    return max(1, min(MAX_SPLITS, int(num_slots // num_ctas)))
