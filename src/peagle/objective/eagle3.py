"""The EAGLE-3 objective: one pass per depth, each fed the state carried from the previous one (training-time test).

Slots and labels are P-EAGLE's. A slot of depth d > 0 reads the text's token at its position and the drafter's state of
the same anchor at depth d - 1. This matches serving as long as the drafts are right; later drafts do not count.

Shapes: B sequences, T tokens, S slots, K depths, N labels, A aux width, D width.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from peagle.drafter.model import Drafter, DrafterOutput, KeyValues
from peagle.drafter.slots import PADDING, Slots, visible
from peagle.objective.batches import Batch
from peagle.objective.cod import max_num_slots
from peagle.objective.config import TrainConfig
from peagle.objective.losses import LabelLoss
from peagle.objective.objective import Features, compiled

LONGEST_ROW = 1 << 32  # above every anchor
SLOT_MULTIPLE = 16  # fused attention needs aligned mask rows


class UnrolledObjective:
    """Trains the target's next K tokens from every anchor, one depth after another, with gradients through all."""

    def __init__(self, drafter: Drafter, config: TrainConfig) -> None:
        self.device = next(drafter.parameters()).device
        self.drafter, self.config = drafter, config
        self.label_loss = LabelLoss(drafter, config, self.device)
        self._forward = compiled(self._slot_states, config, self.device)

    def accumulate(self, batch: Batch, features: Features, num_labels: float) -> tuple[Tensor, Tensor]:
        """See `ParallelObjective.accumulate`."""
        aux_hidden_BTA, is_half = features.half_as_bfloat16()
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
        """Final normed states [B, S, D] of slots in any order. An anchor that keeps a depth keeps all smaller ones."""
        run_pass: Callable[..., DrafterOutput] = self.drafter
        if self.config.checkpoint_activations:
            run_pass = partial(checkpoint, self.drafter, use_reentrant=False)
        sizes = slots_by_depth(self.config, token_ids_BT.shape[1])
        parts, place_BS = _by_depth(Slots(anchor_BS, depth_BS, start_BS), sizes)
        keys, normed = parts[0], []
        cache: KeyValues | None = None
        state_BSD = _at(self.drafter.fuse(aux_hidden_BTA), parts[0].anchor_BS)
        for depth, part in enumerate(parts):
            token_BS = token_ids_BT.gather(1, (part.anchor_BS + depth + 1).clamp_max(token_ids_BT.shape[1] - 1))
            # Padding attends to everything, so that its softmax is defined.
            seen_BSC = visible(part, keys) | (part.depth_BS == PADDING)[:, :, None]
            normed_BSD, carried_BSD, cache = run_pass(token_BS, state_BSD, part.position_BS, seen_BSC, cache)
            normed.append(normed_BSD)
            for following in parts[depth + 1 : depth + 2]:
                # Anchors are ascending in both depths, padding last.
                ascending_BS = torch.where(part.depth_BS == PADDING, LONGEST_ROW, part.anchor_BS)
                state_BSD = _at(carried_BSD, torch.searchsorted(ascending_BS, following.anchor_BS))
                keys = keys.followed_by(following)
        return _at(torch.cat(normed, dim=1), place_BS)


def slots_by_depth(config: TrainConfig, num_anchors: int) -> list[int]:
    """The most slots per sequence of each depth: the fixed shapes of the passes."""
    shares = config.kept_shares
    most = [0] + [max_num_slots(num_anchors, shares[: depth + 1]) for depth in range(config.num_draft_tokens)]
    return [-(-(after - before) // SLOT_MULTIPLE) * SLOT_MULTIPLE for before, after in pairwise(most)]


def _by_depth(slots: Slots, num_slots_by_depth: list[int]) -> tuple[list[Slots], Tensor]:
    """The slots of each depth by ascending anchor, padding last, and each slot's index in their concatenation."""
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


def _at(states_BTD: Tensor, column_BS: Tensor) -> Tensor:
    return states_BTD.gather(1, column_BS[..., None].expand(-1, -1, states_BTD.shape[-1]))
