"""The rows of a verification pass: for each request its newest token, and drafts behind it.

While requests are few, all their drafts are verified. Of a full batch that would be hundreds of rows, each of which
costs something, and most of the deep drafts fail. So a pass has a limit of rows (`num_verify_rows`). Where a batch has
more, the first draft of each request is verified, and beyond those the ones that are likeliest to be kept, whichever
requests they belong to: all seven where the drafter is sure of itself, and one where it is not. Answers do not change:
they are what the target says, however many drafts it is asked about.

How likely a draft is to be kept is told by the drafter: the product of the probabilities it gave to that draft and to
those before it. This falls with every draft, so what is chosen of a request is always its first few.

Two requests with three drafts each, and room for three of them:

>>> confidence_BK = torch.tensor([[0.9, 0.8, 0.5], [0.6, 0.2, 0.1]]).log()
>>> likeliest_counts(confidence_BK, 3).tolist()
[2, 1]

Shapes: R rows of `RowState`, B requests of a batch, K draft tokens, L = K + 1, N rows of the pass, P pages a request.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.engine.row_state import RowState
from peagle.kernels.attention import PagedRows


class VerifyRows(NamedTuple):
    """What the target runs, and whose it is."""

    token_ids_N: Tensor
    position_N: Tensor
    """where each token stands in its text; beyond the text's limit, where nothing is kept, at the limit"""
    row_N: Tensor
    """the row of `RowState` that each token belongs to"""
    paged_rows: PagedRows
    place_BL: Tensor
    """the place among N of each request's newest token and of its drafts; for drafts left out that of its last one"""
    num_drafts_B: Tensor
    """drafts of each request that count"""


def num_verify_rows(num_requests: int, num_draft_tokens: int, limit: int | None) -> int:
    """All rows up to the limit, but room for a first draft of each request in any case.

    >>> [num_verify_rows(num_requests, 7, 320) for num_requests in (1, 32, 48, 64, 256)]
    [8, 256, 320, 320, 512]
    """
    num_all = num_requests * (num_draft_tokens + 1)
    return num_all if limit is None else min(num_all, max(limit, 2 * num_requests))


def all_rows(state: RowState, rows_B: Tensor, page_size: int, max_position: int) -> VerifyRows:
    """With every draft of every request."""
    num_requests, num_rows = len(rows_B), state.tokens.shape[1]
    offset_L = torch.arange(num_rows, device=rows_B.device)
    first_row_B1 = torch.arange(num_requests + 1, device=rows_B.device) * num_rows
    length_B, table_BP = state.length[rows_B], state.page_table[rows_B]
    index_BL = length_B[:, None] + offset_L
    return VerifyRows(
        state.tokens[rows_B].flatten(),
        index_BL.flatten().clamp_max(max_position),
        rows_B[:, None].expand(-1, num_rows).flatten(),
        PagedRows(
            table_BP,
            first_row_B1,
            length_B,
            cells(table_BP, index_BL, page_size).flatten(),
            index_BL.new_empty(num_rows, 0),
        ),
        first_row_B1[:-1, None] + offset_L,
        state.max_draft[rows_B],
    )


def likeliest_rows(state: RowState, rows_B: Tensor, num_rows: int, page_size: int, max_position: int) -> VerifyRows:
    """With the drafts that are likeliest to be kept, so many that there are `num_rows` rows in all."""
    num_requests, most_rows = len(rows_B), state.tokens.shape[1]
    offset_L = torch.arange(most_rows, device=rows_B.device)
    max_draft_B = state.max_draft[rows_B]  # none of a row that is nobody's
    confidence_BK = state.confidence[rows_B].masked_fill(offset_L[:-1] == 0, float("inf"))
    confidence_BK = confidence_BK.masked_fill(offset_L[:-1] >= max_draft_B[:, None], float("-inf"))
    num_chosen_B = likeliest_counts(confidence_BK, num_rows - num_requests)
    end_B = (num_chosen_B + 1).cumsum(0)
    first_B = end_B - num_chosen_B - 1
    place_N = torch.arange(num_rows, device=rows_B.device)
    request_N = (place_N[:, None] >= end_B).sum(1)
    offset_N = place_N - first_B[request_N]
    length_B, table_BP, row_N = state.length[rows_B], state.page_table[rows_B], rows_B[request_N]
    index_N = length_B[request_N] + offset_N
    return VerifyRows(
        state.tokens[row_N, offset_N],
        index_N.clamp_max(max_position),
        row_N,
        PagedRows(
            table_BP,
            torch.cat([first_B, end_B[-1:]]),
            length_B,
            cells(table_BP[request_N], index_N[:, None], page_size).flatten(),
            index_N.new_empty(most_rows, 0),
        ),
        first_B[:, None] + torch.minimum(offset_L, num_chosen_B[:, None]),
        torch.minimum(num_chosen_B, max_draft_B),
    )


def likeliest_counts(confidence_BK: Tensor, num_drafts: int) -> Tensor:
    """How many drafts each request has among the likeliest of all, int64 [B]; they sum up to `num_drafts`."""
    confidence_M = confidence_BK.masked_fill(confidence_BK.isnan(), float("-inf")).flatten()
    index_M = torch.arange(len(confidence_M), device=confidence_M.device)
    # Among equals the first counts as likelier: then there are never more, and never a draft without the one before it.
    is_before_MM = (confidence_M > confidence_M[:, None]) | (
        (confidence_M == confidence_M[:, None]) & (index_M < index_M[:, None])
    )
    return (is_before_MM.sum(1) < num_drafts).view(confidence_BK.shape).sum(1)


def cells(table_BP: Tensor, index_BS: Tensor, page_size: int) -> Tensor:
    """Where index i of each request is kept: in its page, or in the waste page where it has none."""
    column_BS = (index_BS // page_size).clamp_max(table_BP.shape[1] - 1)
    return table_BP.gather(1, column_BS).to(torch.int64) * page_size + index_BS % page_size
