"""Adding evidence to the card of a drafter directory that is known to be good."""

import dataclasses
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from peagle.decoding.reference import decode
from peagle.drafter.card import CARD_NAME, DrafterCard, TargetIdentity, read_card
from peagle.drafter.checkpoint import load_drafter
from peagle.drafter.evidence import fingerprints, own_tensors, record
from peagle.errors import CheckpointError

if TYPE_CHECKING:
    from peagle.targets.hf import HFTarget


def record_evidence(directory: Path, target: "HFTarget") -> DrafterCard:
    """Record a drafter's evidence on its card, which is made where there is none; nothing else is written.

    Evidence of other weights is not replaced: a damaged copy would vouch for itself.
    """
    drafter = load_drafter(directory, target)
    config, card = drafter.config, read_card(directory)
    if card is None:
        identity = TargetIdentity.of(target)
        card = DrafterCard(identity, config.method, config.num_draft_tokens, config.max_length, config.aux_layer_ids)
    earlier = card.evidence
    if earlier is not None:
        found = fingerprints(own_tensors(target, drafter))
        changed = [name for name, recorded in earlier.tensors.items() if found.get(name) != recorded]
        if changed:
            raise CheckpointError(
                f"{directory / CARD_NAME} has evidence of other weights: {changed[0]!r} and "
                f"{len(changed) - 1} more of {len(earlier.tensors)} tensors differ",
                hint="check the directory first; if the new weights are meant, remove `evidence` from the card",
            )
    card = dataclasses.replace(card, evidence=record(target, drafter, decode))
    _replace(directory / CARD_NAME, card.to_json())
    return card


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".card-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(name, 0o644)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)
