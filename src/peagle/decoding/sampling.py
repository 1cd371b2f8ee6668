"""What a decoder samples with: the mathematics of `peagle.kernels.choose`, and the streams of random numbers it uses.

The number for (seed, position, stream) is a hash of the three. Different uses at one position take different streams,
the constants below.
"""

from peagle.kernels.choose import choose_tokens, draw, target_probs, uniform

__all__ = [
    "STREAM_ACCEPT",
    "STREAM_DRAFT",
    "STREAM_DRAW",
    "STREAM_RECOVER",
    "choose_tokens",
    "draw",
    "target_probs",
    "uniform",
]

STREAM_DRAW = 0
"""a token drawn from the target's distribution"""
STREAM_ACCEPT = 1
"""the accept-or-reject decision on a sampled draft token"""
STREAM_RECOVER = 2
"""the token that replaces a rejected sampled draft token"""
STREAM_DRAFT = 3
"""a draft token drawn from the drafter's distribution"""
