"""Which labels a draft would be judged by when it serves.

A draft at depth d is looked at only where the d drafts before it were accepted: where the text after its anchor went
on as the target finds likeliest. In an answer that was sampled it often did not. There the label depends on tokens
that the slot cannot see, and all it can teach is to guess between them.

Shapes: B rows, T tokens, N labels.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peagle.training.labels import Labels

if TYPE_CHECKING:
    from peagle.training.features import Features


@torch.no_grad()
def num_departures(token_ids_BT: Tensor, features: "Features", columns_at_a_time: int) -> Tensor:
    """For each column, how many columns of its row before it are followed by another token than the likeliest.

    The logits of at most `columns_at_a_time` exist at a time. All parts have one shape: the last column fills up.
    """
    num_rows, num_columns = token_ids_BT.shape
    last = num_rows * num_columns - 1
    num_parts = last // columns_at_a_time + 1
    size = last // num_parts + 1
    column_N = torch.arange(num_parts * size, device=token_ids_BT.device).clamp_max(last)
    likeliest_N = torch.cat(
        [features.judge_logits(part // num_columns, part % num_columns).argmax(-1) for part in column_N.split(size)]
    )
    likeliest_BT = likeliest_N[: last + 1].view(num_rows, num_columns)
    departs_BT = torch.zeros_like(token_ids_BT, dtype=torch.long)
    departs_BT[:, 1:] = likeliest_BT[:, :-1] != token_ids_BT[:, 1:]
    return departs_BT.cumsum(1)


def reached(labels: Labels, num_departures_BT: Tensor) -> Labels:
    """The labels, with no weight for those beyond a departure: one in the columns between anchor and judge."""
    at_judge_N = num_departures_BT[labels.row_N, labels.judge_N]
    at_anchor_N = num_departures_BT[labels.row_N, labels.judge_N - labels.depth_N]
    return labels._replace(weight_N=labels.weight_N * (at_judge_N == at_anchor_N))
