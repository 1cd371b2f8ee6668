"""How products of few rows split their work into CTAs, by shape. Measured inside whole steps on an H200 (docs/log.md).

`benchmarks/products.py` tries other tilings, for other GPUs and shapes.
"""

from typing import NamedTuple

FEW_ROWS = 16
"""The smallest tile of the GPU's matrix units; weights of any size use our kernel up to here."""


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
