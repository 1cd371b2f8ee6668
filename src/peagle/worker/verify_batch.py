"""The tokens of a verification pass: the newest token of each request, and drafts behind it.

The drafts of a request are a tree, or a chain, which is a tree without branches. A draft is stored behind the one
before it, but has the position of its depth and attends to the drafts above it alone.

A small batch verifies all drafts. In a large batch that would be hundreds of tokens, each of which costs time, and most
deep drafts are rejected. So the host chooses how many tokens pay (`draft_budget`). The pass then verifies the first
draft of each request, and the drafts most likely to be accepted, whichever request they belong to: all seven if the
drafter is sure, one if it is not. The output does not change, because the target decides every token.

The likelihood is the drafter's: the product of its probabilities of that draft and of those above it. Drafts are sorted
by it, so the drafts chosen from a request are always its first ones.

Two requests with three drafts each, and room for three of them:

>>> confidence_BK = torch.tensor([[0.9, 0.8, 0.5], [0.6, 0.2, 0.1]]).log()
>>> likeliest_counts(confidence_BK, 3).tolist()
[2, 1]

Shapes: B requests of the batch, K depths, M drafts per request, L = M + 1, N tokens of the pass, P pages per request,
D = K + 1, E = D + 3, R rows, T thresholds.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.kernels.attention import PagedRows, RowTree
from peagle.kernels.random_numbers import uniform
from peagle.worker.row_state import RowState

NUM_THRESHOLDS, THRESHOLD_STEP = 24, 0.35
"""Thresholds of a `DraftCurve`, as log-probabilities: 0, -0.35, -0.7, ... Every other one halves the probability."""

STREAM_ASSUME, SEEDS_PER_ROW = 1, 1 << 32
"""Random numbers of `assume_acceptance`: of the row, its newest token and its length."""


class VerifyBatch(NamedTuple):
    """Input of the target in a verification pass."""

    token_ids_N: Tensor
    position_N: Tensor
    """position of each token in its sequence, clamped to the target's last position"""
    row_N: Tensor
    """the row that each token belongs to"""
    node_N: Tensor
    """which node of its row each token is; 0 is the newest token"""
    paged_rows: PagedRows
    place_BL: Tensor
    """places, among the N, of each request's newest token and drafts; a draft left out has the place of the last one"""
    num_drafts_B: Tensor
    """drafts of each request to verify"""


class Accepted(NamedTuple):
    """Outcome of a verification pass. Columns beyond a request's last accepted draft are meaningless."""

    emitted_BE: Tensor
    """as in `PassResult`"""
    known_BD1: Tensor
    """the old newest token, then the target's tokens"""
    next_B1: Tensor
    """the new newest token"""
    num_accepted_B: Tensor
    place_BD: Tensor
    """places, among the N, of the old newest token and the accepted drafts"""
    node_BD: Tensor
    """the same as nodes of the tree"""


def draft_curve(confidence: Tensor, rows_B: Tensor) -> Tensor:
    """How many drafts of these rows are more likely than each threshold, and the sum of their probabilities, [2, T].

    >>> confidence_RM = torch.tensor([[0.9, 0.5], [0.4, 0.1], [0.8, 0.7]]).log()
    >>> counts_T, sums_T = draft_curve(confidence_RM, torch.tensor([0, 1]))
    >>> counts_T[[0, 1, 2, 3, -1]].tolist(), round(float(sums_T[-1]), 2)
    ([0.0, 1.0, 2.0, 3.0, 4.0], 1.9)
    """
    confidence_1N = confidence[rows_B].reshape(1, -1)
    step_T1 = torch.arange(NUM_THRESHOLDS, device=confidence.device)[:, None]
    is_above_TN = confidence_1N > -THRESHOLD_STEP * step_T1
    return torch.stack([is_above_TN.sum(1, dtype=torch.float32), (is_above_TN * confidence_1N.exp()).sum(1)])


def all_drafts(state: RowState, rows_B: Tensor, page_size: int, max_position: int) -> VerifyBatch:
    """A pass with every draft of every request."""
    num_requests, num_places = len(rows_B), state.tokens.shape[1]
    node_L = torch.arange(num_places, device=rows_B.device)
    first_B1 = torch.arange(num_requests + 1, device=rows_B.device) * num_places
    length_B, table_BP, depth_BL = state.length[rows_B], state.page_table[rows_B], state.depth[rows_B]
    tree = RowTree(state.ancestors[rows_B].flatten(), depth_BL.flatten()) if state.is_tree else None
    cell_BL = cells(table_BP, length_B[:, None] + node_L, page_size)
    return VerifyBatch(
        state.tokens[rows_B].flatten(),
        (length_B[:, None] + depth_BL).flatten().clamp_max(max_position),
        rows_B[:, None].expand(-1, num_places).flatten(),
        node_L.expand(num_requests, -1).flatten(),
        PagedRows(table_BP, first_B1, length_B, cell_BL.flatten(), node_L.new_empty(num_places, 0), tree),
        first_B1[:-1, None] + node_L,
        num_drafts(state.confidence[rows_B]),
    )


def likeliest_drafts(
    state: RowState, rows_B: Tensor, num_tokens: int, page_size: int, max_position: int
) -> VerifyBatch:
    """A pass of `num_tokens` tokens, with the drafts most likely to be accepted."""
    num_requests, num_places = len(rows_B), state.tokens.shape[1]
    node_L = torch.arange(num_places, device=rows_B.device)
    confidence_BM = state.confidence[rows_B]
    is_first_BM = (node_L[:-1] == 0) & (confidence_BM > float("-inf"))
    num_chosen_B = likeliest_counts(confidence_BM.masked_fill(is_first_BM, float("inf")), num_tokens - num_requests)
    end_B = (num_chosen_B + 1).cumsum(0)
    first_B = end_B - num_chosen_B - 1
    place_N = torch.arange(num_tokens, device=rows_B.device)
    request_N = (place_N[:, None] >= end_B).sum(1)
    node_N = place_N - first_B[request_N]
    length_B, table_BP, row_N = state.length[rows_B], state.page_table[rows_B], rows_B[request_N]
    depth_N = state.depth[row_N, node_N]
    tree = RowTree(state.ancestors[row_N, node_N], depth_N) if state.is_tree else None
    cell_N = cells(table_BP[request_N], (length_B[request_N] + node_N)[:, None], page_size).flatten()
    span_L0 = node_L.new_empty(num_places, 0)
    return VerifyBatch(
        state.tokens[row_N, node_N],
        (length_B[request_N] + depth_N).clamp_max(max_position),
        row_N,
        node_N,
        PagedRows(table_BP, torch.cat([first_B, end_B[-1:]]), length_B, cell_N, span_L0, tree),
        first_B[:, None] + torch.minimum(node_L, num_chosen_B[:, None]),
        torch.minimum(num_chosen_B, num_drafts(confidence_BM)),
    )


def assume_acceptance(
    wanted_BL: Tensor, tokens_BL: Tensor, share_K: Tensor, rows_B: Tensor, length_B: Tensor
) -> Tensor:
    """The wanted tokens of a target that accepts the draft at depth d of a chain in a share `share_K[d]` of the steps.

    For measurements with random weights, whose drafts are never right. Shares do not grow with depth, so one number per
    request and step decides.
    """
    most = min(len(share_K), tokens_BL.shape[1] - 1)
    seed_B = rows_B * SEEDS_PER_ROW + tokens_BL[:, 0]
    is_kept_BK = uniform(seed_B, length_B, STREAM_ASSUME)[:, None] < share_K[:most]
    draft_BK, own_BK = tokens_BL[:, 1 : most + 1], wanted_BL[:, :most]
    other_BK = torch.where(own_BK == draft_BK, (draft_BK == 0).to(draft_BK.dtype), own_BK)
    return torch.cat([torch.where(is_kept_BK, draft_BK, other_BK), wanted_BL[:, most:]], dim=1)


def num_drafts(confidence_BM: Tensor) -> Tensor:
    """The number of drafts that each request has."""
    return (confidence_BM > float("-inf")).sum(1)


def likeliest_counts(confidence_BK: Tensor, num_drafts: int) -> Tensor:
    """How many of the `num_drafts` likeliest drafts of the batch belong to each request, int64 [B]."""
    confidence_M = confidence_BK.masked_fill(confidence_BK.isnan(), float("-inf")).flatten()
    index_M = torch.arange(len(confidence_M), device=confidence_M.device)
    # Ties go to the lower index. So the counts sum up to num_drafts, and no draft is chosen without the one before it.
    is_before_MM = (confidence_M > confidence_M[:, None]) | (
        (confidence_M == confidence_M[:, None]) & (index_M < index_M[:, None])
    )
    return (is_before_MM.sum(1) < num_drafts).view(confidence_BK.shape).sum(1)


def cells(table_BP: Tensor, index_BS: Tensor, page_size: int) -> Tensor:
    """Cell of the KV cache that stores each index of each request; in the waste page beyond the request's pages."""
    column_BS = (index_BS // page_size).clamp_max(table_BP.shape[1] - 1)
    return table_BP.gather(1, column_BS).to(torch.int64) * page_size + index_BS % page_size
