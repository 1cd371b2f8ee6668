"""`likeliest` on GPUs: one launch, one CTA per row.

A CTA reads its row one block at a time. Every lane keeps its own online softmax: its largest logit, that logit's id,
and the sum of weights relative to it. The lanes are reduced once, at the end.

Legend: N rows, V vocabulary.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.overlap_triton import can_overlap, take_turn

LARGEST_BLOCK = 4096
SMALLEST_BLOCK = 128
THREADS_PER_WARP = 32
# Twice as many need more than 64 registers, so one CTA instead of three fits on an SM.
LOGITS_PER_THREAD = 8


def likeliest_triton(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, vocab_size = logits_NV.shape
    token_N = torch.empty(num_rows, dtype=torch.int64, device=logits_NV.device)
    logprob_N = torch.empty(num_rows, dtype=torch.float32, device=logits_NV.device)
    if num_rows == 0:
        return token_N, logprob_N
    if logits_NV.stride(1) != 1:
        logits_NV = logits_NV.contiguous()
    block = min(LARGEST_BLOCK, max(SMALLEST_BLOCK, triton.next_power_of_2(vocab_size)))
    overlaps = can_overlap(logits_NV.device)
    # Triton launches on the current device, which may not be the logits' device.
    with torch.cuda.device_of(logits_NV):
        _find_likeliest[(num_rows,)](
            token_N,
            logprob_N,
            logits_NV,
            logits_NV.stride(0),
            vocab_size=vocab_size,
            block=block,
            overlaps=overlaps,
            num_warps=max(4, block // (THREADS_PER_WARP * LOGITS_PER_THREAD)),
            **({"launch_pdl": True} if overlaps else {}),
        )
    return token_N, logprob_N


@triton.jit
def _find_likeliest(
    token_ptr,
    logprob_ptr,
    logits_ptr,
    row_stride,
    vocab_size: tl.constexpr,
    block: tl.constexpr,
    overlaps: tl.constexpr,
):
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    lane = tl.arange(0, block)
    high = tl.full([block], float("-inf"), tl.float32)
    high_start = tl.zeros([block], tl.int32)
    mass = tl.zeros([block], tl.float32)
    take_turn(overlaps)
    for start in range(0, vocab_size, block):
        logits = tl.load(row_ptr + start + lane, mask=start + lane < vocab_size, other=float("-inf")).to(tl.float32)
        is_higher = logits > high
        # The larger of the old high and the new logit has weight 1, the other this: one exponential for both cases.
        # A lane without a logit yet has high = -inf; use 0 to avoid exp(-inf - -inf).
        lesser = tl.exp(-tl.abs(logits - tl.where(high == float("-inf"), 0.0, high)))
        mass = tl.where(is_higher, mass * lesser + 1.0, mass + lesser)
        high = tl.where(is_higher, logits, high)
        high_start = tl.where(is_higher, start, high_start)
    highest = tl.max(high, 0)
    token = tl.min(tl.where(high == highest, high_start + lane, vocab_size), 0)
    total = tl.sum(mass * tl.exp(high - highest), 0)
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(logprob_ptr + row, -tl.log(total))
