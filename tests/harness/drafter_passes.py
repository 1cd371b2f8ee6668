"""Drafter passes written out for tests, and the card that goes with a tiny drafter.

Shapes as in `peagle.drafter.slots`, and A concatenated aux width, K draft tokens, V draft vocabulary.
"""

import torch
from torch import Tensor

from peagle.checkpoint.card import DrafterCard, TargetIdentity
from peagle.drafter.model import Drafter, KeyValues
from peagle.drafter.slots import Slots, context_slots, serving_slots, slot_inputs, training_slots, visible
from peagle.targets.hf import HFTarget

TEXT = [1, 117, 115, 200, 17, 9, 33, 260, 41, 77, 8, 150, 2, 64]


def aux_of(target: HFTarget, text: list[int] | None = None) -> tuple[Tensor, Tensor]:
    """Token ids [1, T] of a text and the target's aux states of it."""
    token_ids_BT = torch.tensor([TEXT if text is None else text], device=target.device)
    return token_ids_BT, target.forward(token_ids_BT).aux_hidden_BTA


def inputs_of(
    drafter: Drafter, slots: Slots, token_ids_BT: Tensor, aux_BTA: Tensor, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """What each slot reads, placeholders included where the drafter has them."""
    fused_mask_D = (
        drafter.fuse(drafter.mask_hidden) if drafter.config.parallel else torch.zeros(drafter.config.hidden_size)
    )
    return slot_inputs(
        slots, token_ids_BT, drafter.fuse(aux_BTA), drafter.config.mask_token_id or 0, fused_mask_D, offset
    )


def training_logits(
    drafter: Drafter, num_depths_BT: Tensor, token_ids_BT: Tensor, aux_BTA: Tensor
) -> tuple[Slots, Tensor]:
    """One flat pass over all the slots of all anchors: the slots and their logits [B, S, V]."""
    slots = training_slots(num_depths_BT)
    inputs = inputs_of(drafter, slots, token_ids_BT, aux_BTA)
    return slots, drafter.logits(drafter(*inputs, slots.position_BS, visible(slots, slots)).normed_BSD)


def serving_logits(
    drafter: Drafter, num_draft_tokens: int, token_ids_BT: Tensor, aux_BTA: Tensor, step: int
) -> dict[int, Tensor]:
    """Walk over a text `step` anchors at a time, with a cache: the logits [K, V] at each last anchor."""
    cache: KeyValues | None = None
    found = {}
    for first in range(0, token_ids_BT.shape[1] - 1, step):
        num_new = min(step, token_ids_BT.shape[1] - 1 - first)
        slots = serving_slots(first, num_new, num_draft_tokens)
        known = slice(first, first + num_new + 1)
        inputs = inputs_of(drafter, slots, token_ids_BT[:, known], aux_BTA[:, known], offset=first)
        keys = context_slots(first).followed_by(slots)
        output = drafter(*inputs, slots.position_BS, visible(slots, keys), cache)
        cache = [(key[:, :, : first + num_new], value[:, :, : first + num_new]) for key, value in output.cache]
        found[first + num_new - 1] = drafter.logits(output.normed_BSD)[0, -num_draft_tokens:]
    return found


def draft_logits(target: HFTarget, drafter: Drafter) -> Tensor:
    """Logits of every slot that serves `TEXT` in one pass: the drafter as a function, for comparing two of them."""
    num_draft_tokens = 4 if drafter.config.parallel else 1
    token_ids_BT, aux_BTA = aux_of(target)
    found = serving_logits(drafter, num_draft_tokens, token_ids_BT, aux_BTA, step=len(TEXT) - 1)
    return found[len(TEXT) - 2]


def card_for(target: HFTarget, drafter: Drafter) -> DrafterCard:
    config = drafter.config
    return DrafterCard(
        TargetIdentity.of(target), config.method, config.num_draft_tokens or 1, 128, config.aux_layer_ids
    )
