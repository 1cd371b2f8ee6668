"""COD, conditional drop-token sampling: which depths of which anchors a training row keeps.

Depth d keeps a share retention**d of the anchors, nested: an anchor that keeps depth d keeps every depth before it,
because the deeper slot attends to them. Every anchor keeps depth 0, the context the others read.

Shapes: B rows, T anchors.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional


def max_depths(loss_mask_BT: Tensor, num_draft_tokens: int, document_BT: Tensor | None = None) -> Tensor:
    """How many depths of each anchor have a label the drafter will be asked for when it serves.

    Anchor a is drafted from once the target has emitted token a + 1, so that token must be part of an answer, and
    the labels a + 2, a + 3, ... count as long as the same answer goes on. Columns are the anchors 0 .. T - 3, so T
    must be at least 3. Where rows are packed, `document_BT` keeps labels in their anchor's document.
    """
    num_rows, num_tokens = loss_mask_BT.shape
    depths_BT = torch.zeros(num_rows, num_tokens - 2, dtype=torch.long)
    # Whether token t goes on with what token t - 1 is part of.
    goes_on_BT = loss_mask_BT[:, 1:] & loss_mask_BT[:, :-1]
    if document_BT is not None:
        is_same_BT = document_BT[:, 1:] == document_BT[:, :-1]
        goes_on_BT = goes_on_BT & is_same_BT
    is_running_BT = goes_on_BT[:, 1:] if document_BT is None else goes_on_BT[:, 1:] & is_same_BT[:, :-1]
    for depth in range(num_draft_tokens):
        depths_BT += is_running_BT
        is_running_BT = is_running_BT & functional.pad(goes_on_BT[:, depth + 2 :], (0, depth + 1))[:, : num_tokens - 2]
    return depths_BT


def sample_depths(
    max_depths_BT: Tensor, num_draft_tokens: int, retention: float, retention_floor: float, chance_BT: Tensor
) -> Tensor:
    """Draw the depths each anchor keeps: at least 1 (its context), at most `max_depths_BT`.

    Of the n anchors with a label, depth d keeps the first ceil(n * max(retention**d, retention_floor)) in the order
    of `chance_BT`, uniform random numbers in [0, 1). One order for all depths is what nests them.
    """
    is_eligible_BT = max_depths_BT > 0
    order_BT = chance_BT.masked_fill(~is_eligible_BT, 2.0).argsort(1)
    rank_T = torch.arange(order_BT.shape[1]).expand_as(order_BT)
    rank_BT = torch.empty_like(order_BT).scatter_(1, order_BT, rank_T)
    num_eligible_B1 = is_eligible_BT.sum(1, keepdim=True)
    depths_BT = torch.ones_like(max_depths_BT)
    for depth in range(1, num_draft_tokens):
        # In double precision, like `max_num_slots`, whose bound a rounding of this product would break.
        num_kept_B1 = (num_eligible_B1.double() * max(retention**depth, retention_floor)).ceil()
        depths_BT += (rank_BT < num_kept_B1) & (max_depths_BT > depth)
    return depths_BT


def max_num_slots(num_anchors: int, num_draft_tokens: int, retention: float, retention_floor: float) -> int:
    """The most slots a row of `num_anchors` anchors can have, so that all batches share one shape."""
    shares = (max(retention**depth, retention_floor) for depth in range(1, num_draft_tokens))
    return num_anchors + sum(math.ceil(num_anchors * share) for share in shares)
