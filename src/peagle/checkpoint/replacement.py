"""A drafter directory that takes the place of a drafter that is served: the same network with other weights."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from peagle.checkpoint.card import CARD_NAME, DrafterCard, read_card
from peagle.checkpoint.config_json import read_config
from peagle.checkpoint.layouts import CONFIG_NAME, complete_directory, read_tensors
from peagle.checkpoint.native import check_agreement, check_card, checked_state
from peagle.checkpoint.pair_head import read_pair_head
from peagle.checkpoint.pairing import check_complete
from peagle.drafter.config import DrafterConfig
from peagle.drafter.model import Drafter
from peagle.drafter.pair_head import PairHead
from peagle.errors import CheckpointError

if TYPE_CHECKING:
    from peagle.targets.hf import HFTarget

MAY_DIFFER = ("num_draft_tokens", "advised_draft_tokens")
"""Settings that say how a drafter was trained and is best used, not what it computes."""
RESTART = "restart the server with --drafter to serve it"


class DrafterFiles(NamedTuple):
    """Weights and card as stored, in host memory."""

    directory: Path
    card: DrafterCard
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Replacement:
    """Weights that fit a drafter, in host memory; `state` has the names of `Drafter.state_dict`."""

    config: DrafterConfig
    state: dict[str, Tensor]
    pair_head: PairHead | None
    card: DrafterCard


def read_drafter_files(directory: Path) -> DrafterFiles:
    """Read a drafter directory. Touches neither target nor device, so any thread may call it."""
    directory = complete_directory(directory)
    check_complete(directory)
    card = read_card(directory)
    if card is None:
        raise CheckpointError(
            f"{directory} has no {CARD_NAME}, so the target it belongs to is not known",
            hint="if the drafter is known to be good, `peagle doctor DIR --record` writes one",
        )
    return DrafterFiles(directory, card, read_tensors(directory))


def replacement_for(drafter: Drafter, target: "HFTarget", files: DrafterFiles) -> Replacement:
    """Check that the files fit in the place of `drafter`: its target, network, tensors and draft vocabulary."""
    directory, card, tensors = files
    check_card(card, target, directory, allow_mismatch=False)
    repairs: list[str] = []
    config = read_config(directory / CONFIG_NAME, tensors, target, card, repairs)
    check_agreement(card, config, directory)
    ours, theirs = dataclasses.asdict(drafter.config), dataclasses.asdict(config)
    differing = [name for name in ours if ours[name] != theirs[name] and name not in MAY_DIFFER]
    if differing:
        found = "; ".join(f"{name} is {theirs[name]}, served is {ours[name]}" for name in differing)
        raise CheckpointError(f"{directory} is another network than the served drafter: {found}", hint=RESTART)
    served = drafter.without_pair_head()
    state = checked_state(served, tensors, target, directory, repairs)
    if "d2t" in state and not torch.equal(state["d2t"].cpu(), served.d2t.cpu()):
        raise CheckpointError(f"{directory} has another draft vocabulary than the served drafter", hint=RESTART)
    pair_head = read_pair_head(directory, config)
    ranks = [0 if head is None else head.rank for head in (pair_head, drafter.pair_head)]
    if ranks[0] != ranks[1]:
        sizes = [f"a pair head of rank {rank}" if rank else "no pair head" for rank in ranks]
        raise CheckpointError(f"{directory} has {sizes[0]}, the served drafter {sizes[1]}", hint=RESTART)
    return Replacement(config, state, pair_head, card)
