"""`likeliest` and `likeliest_tokens` on GPUs.

`likeliest` is one launch, one CTA per row. A CTA reads its row one block at a time. Every lane keeps its own online
softmax: its largest logit, that logit's id, and the sum of weights relative to it. The lanes are reduced once, at the
end.

`likeliest_tokens` is two launches. The first reads the logits once, 4,096 per CTA, without a loop, and writes the
largest logit and the weight of each chunk. It issues 10 instructions per logit: by that count, 448 rows of 49,152 take
an H200 7 us, and reading them in bfloat16 takes 9. The second has one CTA per row. It takes the W chunks with the
largest maxima, then the W largest of their logits. Each of the 2 * W rounds reduces about 8 keys per thread, an
estimated 200 cycles: 3 us for W = 16, for any vocabulary, and for as many rows as fit on the GPU at once.

Legend: N rows, V vocabulary, C chunks, W tokens per row.
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
CHUNK = 64  # 16-bit logits fill a cache line
CHUNKS_PER_CTA = 64
KEYS_PER_THREAD = 8

LOG2_E = tl.constexpr(1.4426950408889634)


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


def likeliest_tokens_triton(logits_NV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    num_rows, vocab_size = logits_NV.shape
    tokens_NW = torch.empty(num_rows, width, dtype=torch.int64, device=logits_NV.device)
    logprob_NW = torch.empty(num_rows, width, dtype=torch.float32, device=logits_NV.device)
    if num_rows == 0:
        return tokens_NW, logprob_NW
    if logits_NV.stride(1) != 1:
        logits_NV = logits_NV.contiguous()
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    num_tiles = triton.cdiv(num_chunks, CHUNKS_PER_CTA)
    high_NC = logits_NV.new_empty(num_rows, num_chunks)
    mass_NC = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits_NV.device)
    padded_chunks = triton.next_power_of_2(num_chunks)
    overlaps = can_overlap(logits_NV.device)
    early = {"launch_pdl": True} if overlaps else {}
    # Triton launches on the current device, which may not be the logits' device.
    with torch.cuda.device_of(logits_NV):
        _reduce_chunks[(num_rows * num_tiles,)](
            high_NC,
            mass_NC,
            logits_NV,
            logits_NV.stride(0),
            vocab_size=vocab_size,
            chunk=CHUNK,
            num_chunks=num_chunks,
            num_tiles=num_tiles,
            chunks_per_cta=CHUNKS_PER_CTA,
            overlaps=overlaps,
            num_warps=4,
            **early,
        )
        _find_tokens[(num_rows,)](
            tokens_NW,
            logprob_NW,
            high_NC,
            mass_NC,
            logits_NV,
            logits_NV.stride(0),
            vocab_size=vocab_size,
            chunk=CHUNK,
            num_chunks=num_chunks,
            padded_chunks=padded_chunks,
            width=width,
            # At least 2: a sort needs more than one element.
            padded_width=max(2, triton.next_power_of_2(width)),
            overlaps=overlaps,
            num_warps=min(32, max(4, padded_chunks // (THREADS_PER_WARP * KEYS_PER_THREAD))),
            **early,
        )
    return tokens_NW, logprob_NW


@triton.jit
def _reduce_chunks(
    high_ptr,
    mass_ptr,
    logits_ptr,
    row_stride,
    vocab_size: tl.constexpr,
    chunk: tl.constexpr,
    num_chunks: tl.constexpr,
    num_tiles: tl.constexpr,
    chunks_per_cta: tl.constexpr,
    overlaps: tl.constexpr,
):
    """The largest logit of each chunk, and the sum of weights relative to it."""
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    chunks = tl.program_id(0) % num_tiles * chunks_per_cta + tl.arange(0, chunks_per_cta)
    ids = chunks[:, None] * chunk + tl.arange(0, chunk)[None, :]
    take_turn(overlaps)
    logits = tl.load(logits_ptr + row * row_stride + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    high = tl.max(logits, 1)
    # A chunk of impossible tokens has high = -inf; use 0 to avoid exp(-inf - -inf).
    below = logits - tl.where(high == float("-inf"), 0.0, high)[:, None]
    # exp would spend a quarter of the instructions on denormal weights.
    mass = tl.sum(tl.exp2(below * LOG2_E), 1)
    place = row * num_chunks + chunks
    tl.store(high_ptr + place, high, mask=chunks < num_chunks)
    tl.store(mass_ptr + place, mass, mask=chunks < num_chunks)


@triton.jit
def _find_tokens(
    tokens_ptr,
    logprob_ptr,
    high_ptr,
    mass_ptr,
    logits_ptr,
    row_stride,
    vocab_size: tl.constexpr,
    chunk: tl.constexpr,
    num_chunks: tl.constexpr,
    padded_chunks: tl.constexpr,
    width: tl.constexpr,
    padded_width: tl.constexpr,
    overlaps: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    chunks, column = tl.arange(0, padded_chunks), tl.arange(0, padded_width)
    take_turn(overlaps)
    high = tl.load(high_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf"))
    mass = tl.load(mass_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=0.0)
    highest = tl.max(high.to(tl.float32), 0)
    total = tl.sum(mass * tl.exp(high.to(tl.float32) - highest), 0)
    # In the order of their ids, so that the places of their logits are too. A chunk that does not exist is last.
    best_chunks = tl.sort(_largest(_keys(high, chunks, chunks < num_chunks), width, padded_width))
    ids = best_chunks[:, None] * chunk + tl.arange(0, chunk)[None, :]
    logits = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
    places = column[:, None] * chunk + tl.arange(0, chunk)[None, :]
    best = _largest(_keys(logits, places, ids < vocab_size), width, padded_width)
    is_token = column < width
    best = tl.where(is_token, best, 0)
    tokens = tl.gather(best_chunks, best // chunk, 0) * chunk + best % chunk
    logit = tl.load(row_ptr + tokens, mask=is_token, other=0.0).to(tl.float32)
    tl.store(tokens_ptr + row * width + column, tokens.to(tl.int64), mask=is_token)
    tl.store(logprob_ptr + row * width + column, logit - highest - tl.log(total), mask=is_token)


@triton.jit
def _keys(values, places, exists):
    """Integers that sort like the values, all different: the lowest place has the largest key among equal values.

    A float is a sign and a magnitude. As a two's complement it sorts the same, and -0 equals 0. The place takes as many
    bits as the float: 16 are enough for 4 million tokens. What does not exist has the lowest key.
    """
    if values.dtype == tl.float32:
        bits = values.to(tl.int32, bitcast=True).to(tl.int64)
    else:
        bits = values.to(tl.int16, bitcast=True).to(tl.int32)
    size: tl.constexpr = values.dtype.primitive_bitwidth
    magnitude = bits & ((1 << (size - 1)) - 1)
    ordered = tl.where(bits < 0, -magnitude, magnitude)
    return tl.where(exists, (ordered << size) | ((1 << size) - 1 - places.to(bits.dtype)), -1 << (2 * size - 1))


@triton.jit
def _largest(keys, width: tl.constexpr, padded_width: tl.constexpr):
    """The places of the `width` largest keys, the largest first; a place beyond all others where there is no key."""
    size: tl.constexpr = keys.dtype.primitive_bitwidth // 2
    lowest: tl.constexpr = -1 << (2 * size - 1)
    column = tl.arange(0, padded_width)
    found = tl.full([padded_width], lowest, keys.dtype)
    for n in range(width):
        best = tl.max(keys)
        found = tl.where(column == n, best, found)
        keys = tl.where(keys == best, lowest, keys)
    return ~found & ((1 << size) - 1)
