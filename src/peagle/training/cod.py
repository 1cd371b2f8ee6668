"""COD, conditional drop-token sampling: which depths of which anchors a training row keeps.

Depth d keeps a share retention**d of the anchors, nested: an anchor that keeps depth d keeps every depth before it,
because the deeper slot attends to them. Every anchor keeps depth 0, the context the others read.

Shapes: B rows, T anchors.
"""

import math

import torch
from torch import Tensor


def max_depths(loss_mask_BT: Tensor, num_draft_tokens: int) -> Tensor:
    """How many depths of each anchor have a label the drafter will be asked for when it serves.

    Anchor a is drafted from once the target has emitted token a + 1, so that token must be part of an answer, and
    the labels a + 2, a + 3, ... count as long as the same answer goes on. Columns are the anchors 0 .. T - 3, so T
    must be at least 3.
    """
    num_rows, num_tokens = loss_mask_BT.shape
    depths_BT = torch.zeros(num_rows, num_tokens - 2, dtype=torch.long)
    is_running_BT = loss_mask_BT[:, 1:-1].bool()
    for depth in range(num_draft_tokens):
        label_mask_BT = torch.zeros_like(is_running_BT)
        label_mask_BT[:, : max(0, num_tokens - 2 - depth)] = loss_mask_BT[:, 2 + depth :].bool()
        is_running_BT = is_running_BT & label_mask_BT
        depths_BT += is_running_BT
    return depths_BT


def sample_depths(
    max_depths_BT: Tensor,
    num_draft_tokens: int,
    retention: float,
    retention_floor: float,
    generator: torch.Generator,
) -> Tensor:
    """Draw the depths each anchor keeps: at least 1 (its context), at most `max_depths_BT`.

    Of the n anchors with a label, depth d keeps the first ceil(n * max(retention**d, retention_floor)) in an order
    shuffled anew for each row. One order for all depths is what nests them.
    """
    is_eligible_BT = max_depths_BT > 0
    shuffled = torch.rand(max_depths_BT.shape, generator=generator).masked_fill(~is_eligible_BT, 2.0)
    rank_BT = shuffled.argsort(1).argsort(1)
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
