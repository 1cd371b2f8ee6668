"""Drafts on random weights: a drafter of the right shape, and the acceptance to assume for it.

A random drafter is never right, but it costs what a trained one costs. With an assumed acceptance the gain of drafting
can be measured on a machine before anybody trains a drafter or downloads the target.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from peagle.errors import ConfigError

if TYPE_CHECKING:
    from peagle.drafter.model import Drafter
    from peagle.targets.hf import HFTarget

NUM_LAYERS = 4
"""Layers of the published P-EAGLE drafters."""
USUAL_DEPTH = 7
WEIGHT_STD = 0.02


def assumed_shares(given: Sequence[float], num_draft_tokens: int) -> tuple[float, ...]:
    """The share of steps in which the draft at each position is accepted.

    `given` has these shares; or one number: up to 1 the probability of each draft given those before it, beyond 1 the
    acceptance length.

    >>> assumed_shares([0.8, 0.5, 0.2], 2)
    (0.8, 0.5)
    >>> assumed_shares([0.5], 3)
    (0.5, 0.25, 0.125)
    >>> 1 + sum(assumed_shares([3.0], 7))
    3.0
    """
    flag = "--assume-acceptance"
    if min(given) < 0 or (len(given) > 1 and (max(given) > 1 or list(given) != sorted(given, reverse=True))):
        shown = ",".join(f"{value:g}" for value in given)
        raise ConfigError(f"{flag} {shown}: must be shares of steps by position, which do not grow")
    if len(given) > 1:
        if len(given) < num_draft_tokens:
            raise ConfigError(
                f"{flag} has {len(given)} shares, but {num_draft_tokens} draft tokens are verified",
                hint="give a share for each position, or lower --num-draft-tokens",
            )
        return tuple(given[:num_draft_tokens])
    (value,) = given
    if value > num_draft_tokens + 1:
        raise ConfigError(
            f"{flag} {value:g} is an acceptance length, but {num_draft_tokens} draft tokens reach at most "
            f"{num_draft_tokens + 1}",
            hint="raise --num-draft-tokens",
        )
    probability = value if value <= 1 else _probability(value, num_draft_tokens)
    return tuple(probability**depth for depth in range(1, num_draft_tokens + 1))


def _probability(length: float, num_draft_tokens: int) -> float:
    """The probability of each draft that gives this acceptance length, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        found = 1 + sum(middle**depth for depth in range(1, num_draft_tokens + 1))
        low, high = (middle, high) if found < length else (low, middle)
    return high


def dummy_drafter(
    target: "HFTarget", num_draft_tokens: int, num_layers: int = NUM_LAYERS, draft_vocab_size: int | None = None
) -> "Drafter":
    """A random P-EAGLE drafter for a target, in its dtype and on its device.

    Its draft vocabulary are the target's first ids; by default all of them.
    """
    import torch

    from peagle.drafter.create import config_for_target
    from peagle.drafter.model import Drafter

    switches = {"num_draft_tokens": num_draft_tokens, "draft_vocab_size": draft_vocab_size}
    config = config_for_target(target, num_layers=num_layers, mask_token_id=0, **switches)
    with torch.device(target.device):
        drafter = Drafter(config, target.embedding_VD, target.head_VD).to(target.dtype)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=WEIGHT_STD)
    return drafter.eval().requires_grad_(False)


def drafter_bytes(drafter: "Drafter") -> int:
    """Bytes of weights that drafting reads, the target's head included where it is shared."""
    skipped = {id(parameter) for parameter in (drafter.embedding_VD, drafter.head_VD)}
    own = sum(each.numel() * each.element_size() for each in drafter.parameters() if id(each) not in skipped)
    return own + drafter.head_VD.numel() * drafter.head_VD.element_size()


def assumption(document: Mapping[str, Any]) -> str | None:
    """The line that says which figures of a document are assumed; None if none are."""
    shares = document.get("assumed_acceptance")
    if not shares:
        return None
    shown = ", ".join(f"{share:.2f}" for share in shares)
    return (
        f"assumed, not measured: drafts are accepted in {shown} of the steps, by position "
        f"(acceptance length {1 + sum(shares):.2f} at {len(shares)} draft tokens). Times are of random weights"
    )
