"""Selects the labels that a draft reaches when serving.

A draft at depth d counts only if the d drafts before it were accepted, that is if the text after its anchor is the
target's argmax. In sampled answers it often is not. There the label depends on tokens that the slot cannot see, so it
is mostly noise.

Shapes: B sequences, T tokens, N labels.
"""

import torch
from torch import Tensor

from peagle.objective.labels import Labels
from peagle.objective.objective import Features

REJECTED_WEIGHT = 2.0


@torch.no_grad()
def likeliest_tokens(token_ids_BT: Tensor, features: Features, columns_at_a_time: int) -> Tensor:
    """The target's argmax after each column. Computes the logits of at most `columns_at_a_time`, in equal parts."""
    num_rows, num_columns = token_ids_BT.shape
    last = num_rows * num_columns - 1
    num_parts = last // columns_at_a_time + 1
    size = last // num_parts + 1
    column_N = torch.arange(num_parts * size, device=token_ids_BT.device).clamp_max(last)
    likeliest_N = torch.cat(
        [features.judge_logits(part // num_columns, part % num_columns).argmax(-1) for part in column_N.split(size)]
    )
    return likeliest_N[: last + 1].view(num_rows, num_columns)


def num_departures(token_ids_BT: Tensor, likeliest_BT: Tensor) -> Tensor:
    """For each column, how many earlier columns of its sequence are followed by a token other than the argmax."""
    departs_BT = torch.zeros_like(token_ids_BT, dtype=torch.long)
    departs_BT[:, 1:] = likeliest_BT[:, :-1] != token_ids_BT[:, 1:]
    return departs_BT.cumsum(1)


def reached(labels: Labels, num_departures_BT: Tensor) -> Labels:
    """The labels, with weight 0 if the text departs from the argmax between anchor and judge."""
    at_judge_N = num_departures_BT[labels.row_N, labels.judge_N]
    at_anchor_N = num_departures_BT[labels.row_N, labels.judge_N - labels.depth_N]
    return labels._replace(weight_N=labels.weight_N * (at_judge_N == at_anchor_N))


def until_failure(labels: Labels, guess_N: Tensor, likeliest_BT: Tensor) -> Labels:
    """The labels, with weight 0 behind the drafter's first wrong guess (target ids) from the same anchor.

    Slots of an anchor are nested and never split between segments, so the guesses before a label are among these.
    """
    first_wrong_N, _ = _first_wrong(labels, guess_N, likeliest_BT)
    return labels._replace(weight_N=labels.weight_N * (labels.depth_N <= first_wrong_N))


def on_policy(labels: Labels, guess_N: Tensor, likeliest_BT: Tensor) -> Labels:
    """The labels, with `REJECTED_WEIGHT` times the weight where serving would begin a draft after a rejection.

    There the newest token is the one that the drafter's first wrong guess from an earlier anchor missed. Only guesses
    of the same segment count.
    """
    first_wrong_N, begin_N = _first_wrong(labels, guess_N, likeliest_BT)
    missed_N = torch.where((labels.depth_N == first_wrong_N) & (labels.weight_N > 0), begin_N + labels.depth_N + 1, 0)
    is_missed_C = torch.zeros(likeliest_BT.numel() + 1, dtype=torch.bool, device=guess_N.device)
    # No draft begins with the first column of a sequence, which stands for "none".
    is_missed_C.index_fill_(0, missed_N, True)
    return labels._replace(weight_N=labels.weight_N * torch.where(is_missed_C[begin_N], REJECTED_WEIGHT, 1.0))


def _first_wrong(labels: Labels, guess_N: Tensor, likeliest_BT: Tensor) -> tuple[Tensor, Tensor]:
    """For each label, the depth of the first wrong guess from its anchor, and the flat column of the newest token."""
    is_wrong_N = (guess_N != likeliest_BT[labels.row_N, labels.judge_N]) & (labels.weight_N > 0)
    begin_N = labels.row_N * likeliest_BT.shape[1] + labels.judge_N - labels.depth_N
    never = torch.iinfo(torch.long).max
    first_wrong_C = torch.full((likeliest_BT.numel(),), never, device=guess_N.device)
    first_wrong_C.scatter_reduce_(0, begin_N, torch.where(is_wrong_N, labels.depth_N, never), "amin")
    return first_wrong_C[begin_N], begin_N
