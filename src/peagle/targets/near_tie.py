"""How close two tokens must be for rounding to decide between them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peagle.targets.hf import HFTarget

NEAR_TIE = 1e-3
"""Logit gap below which two correct computations may pick different tokens, in float32."""
NEAR_TIE_IN_STEPS = 32
"""The same for low precision, in units of the dtype's eps: 0.25 in bfloat16, two steps of a logit of 16."""


def near_tie(target: "HFTarget") -> float:
    """Largest gap that counts as a near tie in the target's dtype."""
    import torch

    return max(NEAR_TIE, NEAR_TIE_IN_STEPS * torch.finfo(target.dtype).eps)
