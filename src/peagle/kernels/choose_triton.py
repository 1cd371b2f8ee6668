"""`choose_tokens` on GPUs: one launch, one CTA per row.

A CTA reads its row one tile at a time. It makes only the passes that the row's settings need:

    every row          one pass for the largest logit; the only one at temperature 0
    top-k              passes that count tokens, to find the k-th largest logit
    top-p              passes that sum weights, to find the smallest logit of the nucleus
    sampling           one pass for the mass of each tile, then the tile that holds the draw

top-k and top-p search by bisection instead of sorting. The bits of a float, with negative values mirrored, are an
integer key that sorts like the float. Bisecting over keys takes 16 passes for bfloat16, 19 for float16 and 32 for
float32; top-p starts from a narrower interval. The threshold is scaled like the logits before tokens are compared with
it, so logits that become equal by scaling are kept or dropped together.

NaN compares false with everything, so it has no weight. Every loop is bounded for any logits.

Legend: B requests, L rows per request, N = B * L rows, V vocabulary.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.random_numbers import SPLITMIX_MULTIPLIER_1, SPLITMIX_MULTIPLIER_2, SPLITMIX_STEP

LARGEST_TILE = 8192
THREADS_PER_WARP = 32
LOGITS_PER_THREAD = 8

# Low bits that are zero when a value of this dtype is widened to float32.
SPARE_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}

PASSES_BY_VALUE = tl.constexpr(5)
_STEP = tl.constexpr(SPLITMIX_STEP)
_MULTIPLIER_1 = tl.constexpr(SPLITMIX_MULTIPLIER_1)
_MULTIPLIER_2 = tl.constexpr(SPLITMIX_MULTIPLIER_2)


def launch(
    rows_per_request: int,
    logits_NV: Tensor,
    temperature_B: Tensor,
    top_k_B: Tensor,
    top_p_B: Tensor,
    min_p_B: Tensor,
    seed_B: Tensor,
    position_B: Tensor,
    stream: int,
) -> Tensor:
    num_rows, vocab_size = logits_NV.shape
    tokens_N = torch.empty(num_rows, dtype=torch.int64, device=logits_NV.device)
    if num_rows == 0:
        return tokens_N
    if logits_NV.dtype not in SPARE_BITS:
        logits_NV = logits_NV.to(torch.float32)
    if logits_NV.stride(1) != 1:
        logits_NV = logits_NV.contiguous()
    tile = min(LARGEST_TILE, max(256, triton.next_power_of_2(vocab_size)))
    settings = (temperature_B, top_k_B, top_p_B, min_p_B, seed_B, position_B)
    # Triton launches on the current device, which may not be the logits' device.
    with torch.cuda.device_of(logits_NV):
        _choose_token[(num_rows,)](
            tokens_N,
            logits_NV,
            logits_NV.stride(0),
            *(setting_B.contiguous() for setting_B in settings),
            rows_per_request,
            VOCAB=vocab_size,
            STREAM=stream,
            SPARE=SPARE_BITS[logits_NV.dtype],
            TILE=tile,
            # At least 2: a scan needs more than one element.
            TILES=max(2, triton.next_power_of_2(triton.cdiv(vocab_size, tile))),
            num_warps=max(4, tile // (THREADS_PER_WARP * LOGITS_PER_THREAD)),
        )
    return tokens_N


@triton.jit
def _choose_token(
    tokens_ptr,
    logits_ptr,
    row_stride,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    position_ptr,
    rows_per_request,
    VOCAB: tl.constexpr,
    STREAM: tl.constexpr,
    SPARE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0)
    request = row // rows_per_request
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    largest, token = _first_largest(row_ptr, VOCAB, TILE)
    temperature = tl.load(temperature_ptr + request).to(tl.float32)
    if temperature != 0:
        top_k = tl.load(top_k_ptr + request).to(tl.int64)
        top_p = tl.load(top_p_ptr + request).to(tl.float32)
        floor = tl.full((), float("-inf"), tl.float32)
        floor_key = _key(floor, SPARE)
        if (top_k > 0) & (top_k < VOCAB):
            floor_key = _key_of_kth(row_ptr, VOCAB, largest, top_k, SPARE, TILE)
            floor = _scaled(_value(floor_key, SPARE), largest, temperature)
        if top_p < 1:
            key = _key_of_nucleus(row_ptr, VOCAB, largest, temperature, floor, floor_key, top_p, SPARE, TILE)
            floor = tl.maximum(floor, _scaled(_value(key, SPARE), largest, temperature))
        min_p = tl.load(min_p_ptr + request).to(tl.float32)
        position = tl.load(position_ptr + request).to(tl.int64) + row % rows_per_request
        uniform = _uniform(tl.load(seed_ptr + request).to(tl.int64), position, STREAM)
        token = _draw(row_ptr, VOCAB, largest, temperature, floor, min_p, uniform, TILE, TILES)
    tl.store(tokens_ptr + row, token.to(tl.int64))


@triton.jit
def _load(row_ptr, start, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """A tile of logits as float32; -inf beyond the vocabulary."""
    ids = start + tl.arange(0, TILE)
    return tl.load(row_ptr + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)


@triton.jit
def _scaled(logits, largest, temperature):
    # Exact division, as in PyTorch: the fast one can swap the order of two logits.
    return tl.div_rn(logits - largest, temperature)


@triton.jit
def _weights(logits, largest, temperature, floor):
    """Weights relative to the most likely token, which has 1; 0 for tokens below the floor."""
    scaled = _scaled(logits, largest, temperature)
    return tl.where(scaled >= floor, tl.exp(scaled), 0.0)


@triton.jit
def _first_largest(row_ptr, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """The largest logit and the lowest id that has it."""
    best = tl.full((TILE,), float("-inf"), tl.float32)
    best_id = tl.arange(0, TILE)
    for start in range(0, VOCAB, TILE):
        logits = _load(row_ptr, start, VOCAB, TILE)
        is_better = logits > best
        best = tl.where(is_better, logits, best)
        best_id = tl.where(is_better, start + tl.arange(0, TILE), best_id)
    largest = tl.max(best, 0)
    return largest, tl.min(tl.where(best == largest, best_id, VOCAB), 0)


@triton.jit
def _key(value, SPARE: tl.constexpr):
    """The int64 key of a float32 whose low `SPARE` bits are zero. Keys sort like the values."""
    bits = value.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SPARE).to(tl.int64)


@triton.jit
def _value(key, SPARE: tl.constexpr):
    """The float32 with this key."""
    mirrored = (key << SPARE).to(tl.int32)
    # Mirroring a negative float set its spare bits to one before the shift dropped them.
    mirrored = tl.where(key < 0, mirrored | ((1 << SPARE) - 1), mirrored)
    return (mirrored ^ ((mirrored >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _key_of_kth(row_ptr, VOCAB: tl.constexpr, largest, top_k, SPARE: tl.constexpr, TILE: tl.constexpr):
    """The key of the k-th largest logit: the largest key that at least `top_k` tokens reach."""
    reached = _key(tl.full((), float("-inf"), tl.float32), SPARE)
    missed = _key(largest, SPARE) + 1
    while missed - reached > 1:
        middle = reached + ((missed - reached) >> 1)
        value = _value(middle, SPARE)
        counts = tl.zeros((TILE,), tl.int32)
        for start in range(0, VOCAB, TILE):
            counts += (_load(row_ptr, start, VOCAB, TILE) >= value).to(tl.int32)
        is_reached = tl.sum(counts, 0) >= top_k
        reached = tl.where(is_reached, middle, reached)
        missed = tl.where(is_reached, missed, middle)
    return reached


@triton.jit
def _mass_above(row_ptr, VOCAB: tl.constexpr, largest, temperature, floor, value, TILE: tl.constexpr):
    """The float64 weight of the tokens whose logit is larger than `value`."""
    masses = tl.zeros((TILE,), tl.float64)
    for start in range(0, VOCAB, TILE):
        logits = _load(row_ptr, start, VOCAB, TILE)
        masses += tl.where(logits > value, _weights(logits, largest, temperature, floor), 0.0).to(tl.float64)
    return tl.sum(masses, 0)


@triton.jit
def _key_of_nucleus(
    row_ptr, VOCAB: tl.constexpr, largest, temperature, floor, floor_key, top_p, SPARE: tl.constexpr, TILE: tl.constexpr
):
    """The key of the nucleus's smallest logit: the smallest key above which less than `top_p` of the weight lies."""
    everything = _mass_above(row_ptr, VOCAB, largest, temperature, floor, float("-inf"), TILE)
    enough = top_p.to(tl.float64) * everything
    # Tokens below an even share of the weight to drop cannot exceed it together, so the threshold is not among them.
    # The 1 leaves room for rounding.
    share = (1.0 - top_p) * everything.to(tl.float32) / VOCAB
    lowest = largest + temperature * (tl.log(share) - 1.0)
    inside = _key(largest, SPARE)
    outside = tl.maximum(floor_key, _key(lowest, SPARE)) - 1
    num_passes = tl.zeros((), tl.int32)
    while inside - outside > 1:
        middle = outside + ((inside - outside) >> 1)
        # Keys are dense around zero, so the first passes bisect by value.
        by_value = _key(0.5 * _value(outside, SPARE) + 0.5 * _value(inside, SPARE), SPARE)
        by_value = tl.minimum(tl.maximum(by_value, outside + 1), inside - 1)
        middle = tl.where(num_passes < PASSES_BY_VALUE, by_value, middle)
        is_inside = _mass_above(row_ptr, VOCAB, largest, temperature, floor, _value(middle, SPARE), TILE) < enough
        inside = tl.where(is_inside, middle, inside)
        outside = tl.where(is_inside, outside, middle)
        num_passes += 1
    return inside


@triton.jit
def _draw(
    row_ptr, VOCAB: tl.constexpr, largest, temperature, floor, min_p, uniform, TILE: tl.constexpr, TILES: tl.constexpr
):
    """The first token whose cumulative weight exceeds `uniform` times the total; 0 if there is no weight."""
    tile_ids = tl.arange(0, TILES)
    masses = tl.zeros((TILES,), tl.float64)
    for tile in range(tl.cdiv(VOCAB, TILE)):
        weights = _weights(_load(row_ptr, tile * TILE, VOCAB, TILE), largest, temperature, floor)
        mass = tl.sum(tl.where(weights >= min_p, weights, 0.0).to(tl.float64), 0)
        masses = tl.where(tile_ids == tile, mass, masses)
    # A parallel scan may round each entry differently: ignore tiles without weight, for the draw and for the total.
    ends = tl.where(masses > 0, tl.cumsum(masses, 0), 0.0)
    threshold = uniform * tl.max(ends, 0)
    tile = tl.min(tl.where(ends > threshold, tile_ids, TILES), 0)
    before = tl.max(tl.where(tile_ids < tile, ends, 0.0), 0)

    token = tl.zeros((), tl.int32)
    if tile < TILES:
        ids = tile * TILE + tl.arange(0, TILE)
        weights = _weights(_load(row_ptr, tile * TILE, VOCAB, TILE), largest, temperature, floor)
        has_weight = (weights >= min_p) & (weights > 0)
        reached = before + tl.cumsum(tl.where(has_weight, weights, 0.0).to(tl.float64), 0)
        token = tl.min(tl.where(has_weight & (reached > threshold), ids, VOCAB), 0)
        if token == VOCAB:
            # Rounding left the scan below the tile's sum.
            token = tl.max(tl.where(has_weight, ids, 0), 0)
    return token


@triton.jit
def _mix(bits):
    """One step of splitmix64; the masks clear the sign bits that an arithmetic shift copies."""
    bits = bits + _STEP
    bits = (bits ^ ((bits >> 30) & ((1 << 34) - 1))) * _MULTIPLIER_1
    bits = (bits ^ ((bits >> 27) & ((1 << 37) - 1))) * _MULTIPLIER_2
    return bits ^ ((bits >> 31) & ((1 << 33) - 1))


@triton.jit
def _uniform(seed, position, STREAM: tl.constexpr):
    """Same bits as `random_numbers.uniform`."""
    bits = _mix(_mix(_mix(seed) ^ position) ^ STREAM)
    return ((bits >> 11) & ((1 << 53) - 1)).to(tl.float64) * (2.0**-53)
