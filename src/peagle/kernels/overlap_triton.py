"""Programmatic dependent launch: start a kernel while the previous one ends.

A step is hundreds of kernels of a few microseconds, with gaps of about one. A kernel launched this way is scheduled
early. It may prefetch data that no kernel writes (weights), and waits in `take_turn` until all earlier work is done.
Kernels launched the usual way keep their order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from functools import cache

import torch
import triton
import triton.language as tl


@cache
def can_overlap(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device)[0] >= 9


@triton.jit
def take_turn(overlaps: tl.constexpr):
    """Let the next kernel be scheduled, and wait for the previous one. Read nothing that it writes before this."""
    if overlaps:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(first_ptr, row_ptr, is_row, size, num_columns: tl.constexpr):
    """Prefetch the first `num_columns` 16-bit values of each row into the L2 cache.

    `first_ptr` is any readable address, used for masked rows.
    """
    line = tl.arange(0, num_columns // 64) * 64  # 128 bytes
    pointers = row_ptr[:, None] + tl.minimum(line, size - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [tl.where(is_row[:, None], pointers, first_ptr).to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
