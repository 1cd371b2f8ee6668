"""How the GPU kernels split their work into CTAs, by shape. Measured inside whole steps on an H200 (docs/log.md).

`benchmarks/attention.py` and `benchmarks/products.py` try other tilings, for other GPUs and shapes.
"""

from typing import NamedTuple

import torch

MAX_SPLITS = 32
DEEP_PIPELINE_BYTES = 228 << 10
"""Shared memory per SM from which two CTAs with several loads in flight fit on one SM: H100 and later."""
NUM_COUNTERS = 1 << 16

MOST_DECODE_ROWS = 64
"""Rows per request up to which a pass verifies drafts. Beyond, it is a prefill pass, whose rows fill the GPU."""

FEW_ROWS = 16
"""The smallest tile of the GPU's matrix units; weights of any size use our kernel up to here."""


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
    num_rows: int, group_size: int, num_pairs: int, padded_width: int, dtype: torch.dtype, gpu: Gpu
) -> AttentionTiling:
    """The tiling for `num_pairs` (request, key-value head) pairs with up to `num_rows` rows x `group_size` query heads.

    In a decode step the latency of the first keys dominates, so the tiling maximizes loads in flight: by splitting each
    sequence over CTAs when requests are few, by a deeper pipeline when they are many. More CTAs than SMs pay off only
    with one split per sequence; otherwise they delay the next kernel.
    """
    num_entries = num_rows * group_size
    is_wide = padded_width > 256  # Gemma-4 has 512: larger tiles would not fit next to each other
    tile = min(max(16, 1 << (num_entries - 1).bit_length()), 16 if is_wide else 64)
    num_slots = 2 * gpu.num_sms
    num_tiles = -(-num_entries // tile)
    num_splits = _num_splits(num_pairs * num_tiles, num_slots) if num_rows <= MOST_DECODE_ROWS else 1
    row_bytes = padded_width * dtype.itemsize
    if num_entries > tile or row_bytes > 256:  # prefill, large trees, and wide heads
        step = 64 if padded_width <= 128 else 16 if is_wide else 32
        return AttentionTiling(tile, step, num_splits, num_stages=1 if is_wide and dtype == torch.float32 else 2)
    is_narrow, is_deep = row_bytes <= 128, gpu.shared_bytes >= DEEP_PIPELINE_BYTES
    num_small = -(-num_entries // 16) * num_pairs
    if num_small * MAX_SPLITS <= num_slots:  # SMs stay idle even at the most splits
        return AttentionTiling(16, 64, MAX_SPLITS)
    if 2 * num_pairs < gpu.num_sms:
        if not is_narrow or num_entries > 32:
            return AttentionTiling(tile, 64, num_splits)
        return AttentionTiling(tile, 128, _num_splits(num_pairs, gpu.num_sms), num_stages=5 if is_deep else 2)
    num_warps = 2 if tile == 32 and padded_width > 64 else 4
    if num_pairs > num_slots or not is_deep:
        return AttentionTiling(tile, 64, num_splits, num_warps)
    if is_narrow and num_entries <= 32:
        if num_small <= gpu.num_sms:
            return AttentionTiling(16, 128, 1, num_stages=5)
        return AttentionTiling(16, 64, 1, num_warps=2, num_stages=5)
    if num_small <= num_slots:
        return AttentionTiling(16, 128 if is_narrow else 64, 1, num_stages=7)
    return AttentionTiling(tile, 128 if is_narrow else 64, 1, num_warps, num_stages=5)


def _num_splits(num_pairs: int, num_slots: int) -> int:
    return max(1, min(MAX_SPLITS, num_slots // num_pairs))


class LinearTiling(NamedTuple):
    columns: int
    """Output columns per CTA."""
    step: int
    """Input columns per loop iteration."""
    num_warps: int
    num_stages: int
    """Iterations in flight."""
    ahead: int = 0
    """Input columns of the weight to prefetch while the previous kernel ends; a power of two."""
    rows: int = FEW_ROWS
    """Rows per CTA."""


def linear_tiling(num_columns: int, size: int, num_rows: int) -> LinearTiling:
    """The tiling for a weight [num_columns, size] and a number of rows, in bfloat16.

    Up to 16 rows it is the fastest inside whole steps; beyond, one that is fast alone for several weights.

    Microseconds per product with 1 and 8 rows, weights read from device memory, torch | ours. Ours also computes the
    gate or adds the residual:

        960 x 576             3.8  3.8    2.6  2.5        6144 x 4096            15.4  15.7   15.4  15.2
        576 x 576, sum        3.2  3.1    2.3  2.3        4096 x 4096, sum       13.2  13.3   11.2  11.6
        3072 x 576, gate      4.1  4.1    3.8  3.5        28672 x 4096, gate     60.5  61.3   56.4  57.1
        576 x 1536, sum       5.0  4.9    4.2  4.1        4096 x 14336, sum      31.9  32.4   29.5  30.0
    """
    if size <= 2048 and num_columns <= 8192:
        if num_rows > FEW_ROWS:
            if num_columns >= 2048:
                return LinearTiling(32, 64, 4, 4, ahead=256, rows=32 if num_rows <= 32 else 64)
            return LinearTiling(16, 64 if size <= 768 else 128, 4, 4, ahead=256, rows=64 if num_columns > 768 else 32)
        if num_columns >= 2048:
            return LinearTiling(32, 128, 4, 4, ahead=256)
        return LinearTiling(16, 64, 4, 6, ahead=512) if size <= 768 else LinearTiling(8, 128, 4, 6, ahead=512)
    # If the CTAs do not all fit on the GPU, the last wave runs alone: fewer stages fit more of them.
    if num_columns <= 4096:
        return LinearTiling(16, 512, 2, 4)
    return LinearTiling(16, 256, 2, 4, ahead=256) if num_columns <= 8192 else LinearTiling(32, 256, 4, 3, ahead=256)
