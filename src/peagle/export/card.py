"""The card that goes with an exported drafter: its own, or what is known of one that came without."""

import dataclasses
from typing import Any

from peagle.drafter.card import DrafterCard, TargetIdentity
from peagle.drafter.model import Drafter
from peagle.targets.hf import HFTarget


def card_of(drafter: Drafter, target: HFTarget, provenance: dict[str, Any] | None = None) -> DrafterCard:
    """The drafter's card, with the provenance of this export where it is given."""
    config = drafter.config
    card = drafter.card or DrafterCard(
        TargetIdentity.of(target), config.method, config.num_draft_tokens, config.max_length, config.aux_layer_ids
    )
    return card if provenance is None else dataclasses.replace(card, provenance=provenance)
