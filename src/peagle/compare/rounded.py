"""What quantizing a target's weights does to the acceptance of a drafter that was trained on plain ones."""

from typing import TYPE_CHECKING

from peagle.decoding.acceptance import Acceptance
from peagle.quantized.formats import quantization_config

if TYPE_CHECKING:
    from peagle.targets.hf import HFTarget

LEAST_KEPT = 0.25
"""Share of the accepted drafts that rounding leaves at least. A drafter of another target keeps almost none."""


def rounding_of(target: "HFTarget") -> str | None:
    """How the target's weights were rounded: by --quantize, or in its directory; None if they are plain."""
    if target.rounded_to is not None or target.directory is None:
        return target.rounded_to
    method = quantization_config(target.directory).get("quant_method")
    return None if method is None else str(method)


def effect_on(expected: Acceptance, measured: Acceptance) -> str:
    """The acceptance lengths on the plain target's card and here.

    >>> effect_on(Acceptance(100, (80, 40)), Acceptance(100, (70, 35)))
    'acceptance length 2.050 here, 2.200 on the card, which is for the plain weights (-7%)'
    """
    plain, rounded = expected.acceptance_length, measured.acceptance_length
    return (
        f"acceptance length {rounded:.3f} here, {plain:.3f} on the card, which is for the plain weights "
        f"({rounded / plain - 1:+.0%})"
    )


def is_implausible(expected: Acceptance, measured: Acceptance) -> bool:
    """Whether rounding alone cannot explain how few drafts are accepted."""
    return measured.acceptance_length - 1 < LEAST_KEPT * (expected.acceptance_length - 1)
