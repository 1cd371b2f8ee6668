"""Drafts on random weights: a drafter of the right shape, and the acceptance to assume for it.

A random drafter is never right, but it costs what a trained one costs. With an assumed acceptance the gain of drafting
can be measured on a machine before anybody trains a drafter or downloads the target.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from peagle.errors import ConfigError
from peagle.targets.catalog import CatalogDrafter, entries

if TYPE_CHECKING:
    from peagle.drafter.config import DrafterConfig
    from peagle.drafter.model import Drafter
    from peagle.targets.hf import HFTarget

NUM_LAYERS = 4
"""Layers of the published P-EAGLE drafters."""
USUAL_DEPTH = 7
WEIGHT_STD = 0.02
WIDTH_STEP = 256
"""Published numbers of parameters are rounded; widths are multiples of this."""


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


def published_drafter(shape: str) -> CatalogDrafter | None:
    """The catalog's drafter for the target that has this shape."""
    return next((entry.drafter() for entry in entries() if entry.shape == shape), None)


def published_shares(shape: str, num_draft_tokens: int) -> tuple[float, ...]:
    """`assumed_shares` that give the published acceptance length at the published number of draft tokens."""
    known = {entry.shape: entry.drafter() for entry in entries() if entry.drafter().acceptance_length}
    if (drafter := known.get(shape)) is None:
        raise ConfigError(
            f"no acceptance length is published for the shape {shape}",
            hint=f"use one of {', '.join(filter(None, known))}, or give shares: --assume-acceptance 0.7,0.5,0.4",
        )
    assert drafter.acceptance_length is not None and drafter.num_draft_tokens is not None, "checked by the catalog"
    probability = _probability(drafter.acceptance_length, drafter.num_draft_tokens)
    return assumed_shares([probability], num_draft_tokens)


def dummy_drafter(
    target: "HFTarget",
    num_draft_tokens: int,
    num_layers: int | None = None,
    draft_vocab_size: int | None = None,
    published: CatalogDrafter | None = None,
) -> "Drafter":
    """A random P-EAGLE drafter for a target, in its dtype and on its device, as wide as a published one.

    Its draft vocabulary are the target's first ids; by default all of them.
    """
    import torch

    from peagle.drafter.create import config_for_target
    from peagle.drafter.model import Drafter

    switches = {"num_draft_tokens": num_draft_tokens, "draft_vocab_size": draft_vocab_size}
    config = config_for_target(target, num_layers=NUM_LAYERS, mask_token_id=0, **switches)
    if published is not None and published.num_parameters is not None:
        config = replace(config, intermediate_size=_published_width(config, published.num_parameters))
    config = replace(config, num_layers=num_layers or NUM_LAYERS)
    with torch.device(target.device):
        drafter = Drafter(config, target.embedding_VD, target.head_VD).to(target.dtype)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=WEIGHT_STD)
    return drafter.eval().requires_grad_(False)


def _published_width(config: "DrafterConfig", num_parameters: int) -> int:
    """The width of the MLPs that gives a drafter, with an embedding and a head of its own, this many parameters."""
    import torch

    from peagle.drafter.model import Drafter

    table = torch.empty(config.vocab_size, config.hidden_size, device="meta")
    with table.device:
        narrow = Drafter(replace(config, intermediate_size=1), table, table)
    per_width = 3 * config.hidden_size * config.num_layers
    others = sum(parameter.numel() for parameter in narrow.parameters()) - per_width + 2 * table.numel()
    return max(1, round((num_parameters - others) / per_width / WIDTH_STEP)) * WIDTH_STEP


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
