"""COD (conditional drop-token) sampling: which depths of which anchors to train.

Depth d keeps a share of the anchors, `TrainConfig.kept_shares`, nested: an anchor that keeps depth d keeps all smaller
depths, which the deeper slot attends to. Every anchor keeps depth 0, the context of the others.

Shapes: B sequences, T anchors.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


def max_depths(loss_mask_BT: Tensor, num_draft_tokens: int, document_BT: Tensor | None = None) -> Tensor:
    """How many depths of each anchor have a label that serving would draft.

    Serving drafts from anchor a after the target emitted token a + 1, so that token must be part of an answer. Labels
    a + 2, a + 3, ... count until the answer ends. Columns are the anchors 0 .. T - 3, so T must be at least 3. With
    sequence packing, `document_BT` keeps labels in their anchor's document.
    """
    num_rows, num_tokens = loss_mask_BT.shape
    depths_BT = torch.zeros(num_rows, num_tokens - 2, dtype=torch.long)
    # Whether tokens t - 1 and t are in the same answer.
    document_BT = torch.zeros_like(loss_mask_BT) if document_BT is None else document_BT
    is_same_BT = document_BT[:, 1:] == document_BT[:, :-1]
    continues_BT = loss_mask_BT[:, 1:] & loss_mask_BT[:, :-1] & is_same_BT
    is_running_BT = continues_BT[:, 1:] & is_same_BT[:, :-1]
    for depth in range(num_draft_tokens):
        depths_BT += is_running_BT
        is_running_BT = (
            is_running_BT & functional.pad(continues_BT[:, depth + 2 :], (0, depth + 1))[:, : num_tokens - 2]
        )
    return depths_BT


def sample_depths(max_depths_BT: Tensor, shares: Sequence[float], chance_BT: Tensor) -> Tensor:
    """Sample the number of depths of each anchor: at least 1 (the context), at most `max_depths_BT`.

    Of n anchors with a label, depth d keeps the first ceil(n * shares[d]) in the order of `chance_BT`, uniform in
    [0, 1). Using one order for all depths nests them.
    """
    is_eligible_BT = max_depths_BT > 0
    order_BT = chance_BT.masked_fill(~is_eligible_BT, 2.0).argsort(1)
    rank_T = torch.arange(order_BT.shape[1]).expand_as(order_BT)
    rank_BT = torch.empty_like(order_BT).scatter_(1, order_BT, rank_T)
    num_eligible_B1 = is_eligible_BT.sum(1, keepdim=True)
    depths_BT = torch.ones_like(max_depths_BT)
    for depth, share in enumerate(shares[1:], 1):
        # Double precision, as in `max_num_slots`; rounding could exceed its bound.
        num_kept_B1 = (num_eligible_B1.double() * share).ceil()
        depths_BT += (rank_BT < num_kept_B1) & (max_depths_BT > depth)
    return depths_BT


def max_num_slots(num_anchors: int, shares: Sequence[float]) -> int:
    """The most slots a sequence of `num_anchors` anchors can have: the fixed shape of all batches."""
    return num_anchors + sum(math.ceil(num_anchors * share) for share in shares[1:])
