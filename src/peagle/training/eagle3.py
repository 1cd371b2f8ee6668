"""EAGLE-3: one pass a depth, each fed the state that the pass before carried on (training-time test).

The slots are P-EAGLE's: the same anchors keep the same depths and have the same labels. Only what a slot of depth
d > 0 reads differs: the text's own token at its place, and the drafter's state of the same anchor at depth d - 1. So a
chain runs as it does in serving for as long as its drafts are right, and beyond the first wrong one nothing is asked.

Shapes: B rows, T tokens, S slots, K depths, N slots with a label, A aux width, D width.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from peagle.drafter.model import Drafter, DrafterOutput, KeyValues
from peagle.drafter.slots import PADDING, Slots, visible
from peagle.training.batches import Batch
from peagle.training.cod import max_num_slots
from peagle.training.config import TrainConfig
from peagle.training.losses import LabelLoss
from peagle.training.objective import compiled

if TYPE_CHECKING:
    from peagle.training.features import Features


LONGEST_ROW = 1 << 32  # above every anchor
SLOT_MULTIPLE = 16  # fused attention wants masks whose rows are aligned


class UnrolledObjective:
    """Imitate the target's next K distributions from every anchor, a depth after the other, with gradients through."""

    def __init__(self, drafter: Drafter, config: TrainConfig) -> None:
        self.device = next(drafter.parameters()).device
        self.drafter, self.config = drafter, config
        self.label_loss = LabelLoss(drafter, config, self.device)
        self._forward = compiled(self._slot_states, config, self.device)

    def accumulate(self, batch: Batch, features: "Features", num_labels: float) -> tuple[Tensor, Tensor]:
        # bfloat16 wherever the target is in half precision, because float16 gradients would need scaling.
        aux_hidden_BTA = features.aux_hidden_BTA
        is_half = aux_hidden_BTA.dtype in (torch.bfloat16, torch.float16)
        aux_hidden_BTA = aux_hidden_BTA.to(torch.bfloat16) if is_half else aux_hidden_BTA
        with torch.autocast(self.device.type, torch.bfloat16, enabled=is_half):
            states_BSD = self._forward(batch.token_ids_BT, aux_hidden_BTA, *batch.slots)
        states_ND = states_BSD[batch.labels.row_N, batch.labels.slot_N]
        gradient_ND, loss, sums = self.label_loss.accumulate(states_ND, batch.labels, features, num_labels)
        states_ND.backward(gradient_ND)
        return loss, sums

    def _slot_states(
        self,
        token_ids_BT: Tensor,
        aux_hidden_BTA: Tensor,
        anchor_BS: Tensor,
        depth_BS: Tensor,
        start_BS: Tensor | None = None,
    ) -> Tensor:
        """Final normed states of the slots."""
        sizes = slots_by_depth(self.config, token_ids_BT.shape[1])
        slots = Slots(anchor_BS, depth_BS, start_BS)
        fused_BTD = self.drafter.fuse(aux_hidden_BTA)
        return unrolled_states(
            self.drafter, token_ids_BT, fused_BTD, slots, sizes, checkpoints=self.config.checkpoint_activations
        )


def slots_by_depth(config: TrainConfig, num_anchors: int) -> list[int]:
    """Slots of each depth's pass, which are as many in every batch; rows have at most so many."""
    cod = (config.retention, config.retention_floor)
    most = [0] + [max_num_slots(num_anchors, depth + 1, *cod) for depth in range(config.num_draft_tokens)]
    return [-(-(after - before) // SLOT_MULTIPLE) * SLOT_MULTIPLE for before, after in pairwise(most)]


def unrolled_states(
    drafter: Drafter,
    token_ids_BT: Tensor,
    fused_BTD: Tensor,
    slots: Slots,
    num_slots_by_depth: list[int],
    *,
    checkpoints: bool = False,
) -> Tensor:
    """Final normed states [B, S, D] of `slots`, in any order; an anchor that keeps a depth must keep all before it.

    No row may have more slots of a depth than `num_slots_by_depth` says: these numbers are the shapes of the passes.
    With `checkpoints` a depth's activations are computed once more for the backward pass instead of being kept.
    """
    run_pass: Callable[..., DrafterOutput] = (
        partial(checkpoint, drafter, use_reentrant=False) if checkpoints else drafter
    )
    parts, place_BS = _by_depth(slots, num_slots_by_depth)
    keys, normed = parts[0], []
    cache: KeyValues | None = None
    state_BSD = _at(fused_BTD, parts[0].anchor_BS)
    for depth, part in enumerate(parts):
        token_BS = token_ids_BT.gather(1, (part.anchor_BS + depth + 1).clamp_max(token_ids_BT.shape[1] - 1))
        # Padding sees everything, because a row of nothing would have no softmax.
        seen_BSC = visible(part, keys) | (part.depth_BS == PADDING)[:, :, None]
        normed_BSD, carried_BSD, cache = run_pass(token_BS, state_BSD, part.position_BS, seen_BSC, cache)
        normed.append(normed_BSD)
        for following in parts[depth + 1 : depth + 2]:
            # Anchors of both depths are ascending, with the padding at the end.
            state_BSD = _at(carried_BSD, torch.searchsorted(_ascending(part), following.anchor_BS))
            keys = keys.followed_by(following)
    return _at(torch.cat(normed, dim=1), place_BS)


def _by_depth(slots: Slots, num_slots_by_depth: list[int]) -> tuple[list[Slots], Tensor]:
    """The slots of each depth by ascending anchor, padded at the end, and each slot's place in their concatenation."""
    device, num_slots = slots.depth_BS.device, slots.depth_BS.shape[1]
    is_padding_BS = slots.depth_BS == PADDING
    last = torch.iinfo(torch.long).max
    order_BS = torch.where(is_padding_BS, last, slots.depth_BS * LONGEST_ROW + slots.anchor_BS).argsort(1)
    rank_BS = torch.empty_like(order_BS).scatter(
        1, order_BS, torch.arange(num_slots, device=device).expand_as(order_BS)
    )
    depth_K1 = torch.arange(len(num_slots_by_depth), device=device)[:, None]
    count_BK = (slots.depth_BS[:, None] == depth_K1).sum(-1)
    first_BK = count_BK.cumsum(1) - count_BK
    parts = []
    for depth, size in enumerate(num_slots_by_depth):
        column_S = torch.arange(size, device=device)
        is_kept_BS = column_S < count_BK[:, depth, None]
        slot_BS = order_BS.gather(1, (first_BK[:, depth, None] + column_S).clamp_max(num_slots - 1))
        anchor_BS = torch.where(is_kept_BS, slots.anchor_BS.gather(1, slot_BS), 0)
        start_BS = None if slots.start_BS is None else torch.where(is_kept_BS, slots.start_BS.gather(1, slot_BS), 0)
        parts.append(Slots(anchor_BS, torch.where(is_kept_BS, depth, PADDING), start_BS))
    start_K = torch.tensor([0, *num_slots_by_depth[:-1]], device=device).cumsum(0)
    depth_BS = slots.depth_BS.clamp_min(0)
    place_BS = start_K[depth_BS] + rank_BS - first_BK.gather(1, depth_BS)
    return parts, torch.where(is_padding_BS, 0, place_BS)


def _ascending(slots: Slots) -> Tensor:
    """Anchors, with those of the padding above all others."""
    return torch.where(slots.depth_BS == PADDING, LONGEST_ROW, slots.anchor_BS)


def _at(states_BTD: Tensor, column_BS: Tensor) -> Tensor:
    return states_BTD.gather(1, column_BS[..., None].expand(-1, -1, states_BTD.shape[-1]))
