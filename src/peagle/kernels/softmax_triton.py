"""The online softmax of the attention kernels, and how several CTAs split the keys of one sequence.

Shapes: M rows of a tile, T keys of an iteration, E width.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import triton
import triton.language as tl


@triton.jit
def fold(scores, values, high, mass, attended, precision: tl.constexpr):
    """One iteration of the online softmax, with `scores` [M, T] and `values` [T, E]."""
    new_high = tl.maximum(high, tl.max(scores, 1))
    # A row without keys yet has high = -inf; use 0 to avoid exp(-inf - -inf).
    safe_high = tl.where(new_high == float("-inf"), 0.0, new_high)
    weights = tl.exp(scores - safe_high[:, None])
    fade = tl.exp(high - safe_high)
    mass = mass * fade + tl.sum(weights, 1)
    attended = attended * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=precision)
    return new_high, mass, attended


@triton.jit
def score(query, keys, scale, softcap, has_softcap: tl.constexpr, precision: tl.constexpr):
    scores = tl.dot(query, keys, input_precision=precision) * scale
    if has_softcap:
        scores = softcap * (2 / (1 + tl.exp(-2 * scores / softcap)) - 1)  # softcap * tanh(scores / softcap)
    return scores


@triton.jit
def combine(
    partial_ptr,
    counter_ptr,
    team,
    split,
    num_active,
    high,
    mass,
    attended,
    num_splits,
    tile: tl.constexpr,
    padded_width: tl.constexpr,
):
    """Write this split's partial result. The last split to finish returns the combined result and True."""
    lane, column = tl.arange(0, tile), tl.arange(0, padded_width)
    slice_size: tl.constexpr = tile * (padded_width + 2)
    mine = partial_ptr + (team * num_splits + split) * slice_size
    tl.store(mine + lane[:, None] * padded_width + column[None, :], attended)
    tl.store(mine + tile * padded_width + lane, high)
    tl.store(mine + tile * padded_width + tile + lane, mass)
    tl.debug_barrier()  # all stores of this CTA precede its arrival
    is_last = tl.atomic_add(counter_ptr + team, 1, sem="acq_rel") == num_active - 1
    if is_last:
        tl.debug_barrier()
        high = tl.full([tile], float("-inf"), tl.float32)
        mass = tl.zeros([tile], tl.float32)
        attended = tl.zeros([tile, padded_width], tl.float32)
        for other in range(num_active):
            theirs = partial_ptr + (team * num_splits + other) * slice_size
            their_attended = tl.load(theirs + lane[:, None] * padded_width + column[None, :])
            their_high = tl.load(theirs + tile * padded_width + lane)
            their_mass = tl.load(theirs + tile * padded_width + tile + lane)
            new_high = tl.maximum(high, their_high)
            safe_high = tl.where(new_high == float("-inf"), 0.0, new_high)
            fade, their_fade = tl.exp(high - safe_high), tl.exp(their_high - safe_high)
            mass = mass * fade + their_mass * their_fade
            attended = attended * fade[:, None] + their_attended * their_fade[:, None]
            high = new_high
        tl.store(counter_ptr + team, 0)
    return high, mass, attended, is_last


@triton.jit
def share(lowest, context, split, num_splits, step: tl.constexpr):
    """This split's cached indexes begin .. end - 1, and the number of splits with work (the first always has)."""
    start = tl.minimum(lowest, context) // step * step
    num_steps = tl.maximum(tl.cdiv(context - start, step), 1)
    steps_per_split = tl.cdiv(num_steps, num_splits)
    begin = start + split * steps_per_split * step
    return begin, tl.minimum(begin + steps_per_split * step, context), tl.cdiv(num_steps, steps_per_split)


@triton.jit
def add_sinks(sinks, high, mass, attended):
    new_high = tl.maximum(high, sinks.to(tl.float32))
    fade = tl.exp(high - new_high)
    return mass * fade + tl.exp(sinks.to(tl.float32) - new_high), attended * fade[:, None]
