"""Stateless random numbers: a hash of (seed, position, stream), with the same bits on CPU and GPU.

A request therefore draws the same numbers whatever its neighbors in the batch, however many draft tokens were tried,
and after a preemption. `position` is the index in the sequence of the token to decide.
"""

import torch
from torch import Tensor

STREAM_DRAW = 0
"""The stream that draws tokens from the target's distribution. Other uses at the same position need other streams."""


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit constant."""
    return value - 2**64 if value >= 2**63 else value


# splitmix64: the increment of its counter and the two multipliers of its finalizer.
SPLITMIX_STEP = _signed(0x9E3779B97F4A7C15)
SPLITMIX_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
SPLITMIX_MULTIPLIER_2 = _signed(0x94D049BB133111EB)


def uniform(seed_B: Tensor, position_B: Tensor, stream: int) -> Tensor:
    """Float64 numbers in [0, 1), multiples of 2**-53.

    Integer tensors of any shapes that broadcast. For one seed and stream no two positions share a hash, because each
    mixing step is a bijection of 64 bits.
    """
    bits = _mix(seed_B.to(torch.int64))
    bits = _mix(bits ^ position_B.to(torch.int64))
    bits = _mix(bits ^ stream)
    return _shift_right(bits, 11).to(torch.float64) * 2.0**-53


def _mix(bits: Tensor) -> Tensor:
    """One step of splitmix64 from the state `bits`. int64 sums and products wrap around, on CPU and GPU."""
    bits = bits + SPLITMIX_STEP
    bits = (bits ^ _shift_right(bits, 30)) * SPLITMIX_MULTIPLIER_1
    bits = (bits ^ _shift_right(bits, 27)) * SPLITMIX_MULTIPLIER_2
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift. torch shifts int64 arithmetically, so mask out the copies of the sign bit."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
