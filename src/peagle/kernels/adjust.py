"""Adjust logits before a token is chosen: biases, banned end tokens, penalties, grammars.

Settings and texts are tables by row of the batch (`RowState`). The logits of a pass belong to any of these rows, in any
number, so that a pass may leave out drafts.

Shapes: R rows, N tokens of a pass, M draft tokens per row, L = M + 1, V vocabulary, E edits, W = ceil(V / 32) words of
bits.

Nothing reads a value on the host, so a CUDA graph can capture it. A request with neutral settings (no edits, penalties
1, 0 and 0, every bit set) keeps its logits bit for bit.
"""

from typing import NamedTuple

import torch
from torch import Tensor

BITS = 32


class Edits(NamedTuple):
    """Numbers to add to single logits, for tokens up to some index of the sequence."""

    token_ids_RE: Tensor
    """int64; unused entries add 0 to token 0."""
    value_RE: Tensor
    """float32; -inf bans the token."""
    end_RE: Tensor
    """int64: the edit applies to tokens whose index in the sequence is lower."""


class Penalties(NamedTuple):
    """Penalties for tokens that a request has seen."""

    repetition_R: Tensor
    frequency_R: Tensor
    presence_R: Tensor
    counts_RV: Tensor
    """int32: how often each token occurs in the answer so far."""
    is_in_prompt_RV: Tensor


class Places(NamedTuple):
    """What each token of a pass decides."""

    row_N: Tensor
    index_N: Tensor
    """index in the sequence of the token that it decides"""
    drafts_NM: Tensor
    """the drafts of its row; M may be 0"""
    ancestors_N: Tensor
    """bit j is set if draft token j (1, 2, ...) comes before it, as in `CandidateTree`"""


def adjust_logits(logits_NV: Tensor, places: Places, edits: Edits, penalties: Penalties, allowed_NW: Tensor) -> Tensor:
    """New float32 logits [N, V]: edits, then repetition, frequency and presence penalties, then the grammar's mask.

    Bit v % 32 of word v // 32 of `allowed_NW` (int32) is set if token v is allowed.
    """
    # The logits are the largest tensor of a step: copy them once, then work in place.
    adjusted_NV = logits_NV.to(torch.float32, copy=True)
    _edit(adjusted_NV, places, edits)
    adjusted_NV = _penalize_all(adjusted_NV, places, penalties)
    shift_32 = torch.arange(BITS, device=logits_NV.device, dtype=torch.int32)
    is_allowed_NV = ((allowed_NW[..., None] >> shift_32) & 1).flatten(1)[:, : logits_NV.shape[1]] != 0
    return adjusted_NV.masked_fill_(~is_allowed_NV, float("-inf"))


def _edit(logits_NV: Tensor, places: Places, edits: Edits) -> None:
    token_ids_NE, value_NE, end_NE = (table_RE[places.row_N] for table_RE in edits)
    # Several edits of one token are zeros and one number, or include -inf: their order does not matter.
    logits_NV.scatter_add_(1, token_ids_NE, value_NE.masked_fill(places.index_N[:, None] >= end_NE, 0))


def _penalize_all(logits_NV: Tensor, places: Places, penalties: Penalties) -> Tensor:
    """Penalize all tokens by the counts of the text, then recompute the drafted tokens with the drafts above counted.

    This avoids a table of counts per token of the pass.
    """
    row_N, row_N1, drafts_NM = places.row_N, places.row_N[:, None], places.drafts_NM
    *settings_R, counts_RV, is_in_prompt_RV = penalties
    settings = tuple(setting_R[row_N1] for setting_R in settings_R)
    penalized_NV = _penalize(logits_NV, counts_RV[row_N], is_in_prompt_RV[row_N], *settings)
    num_drafts = drafts_NM.shape[1]
    if num_drafts == 0:
        return penalized_NV
    node_M = torch.arange(1, num_drafts + 1, device=drafts_NM.device)
    is_above_NM = ((places.ancestors_N[:, None] >> node_M) & 1) != 0
    is_same_NMM = drafts_NM[:, :, None] == drafts_NM[:, None]
    num_above_NM = (is_same_NMM & is_above_NM[:, None]).sum(2, dtype=torch.int32)
    # A draft token that is not above has the count of the text, so its value does not change.
    counts_NM = counts_RV[row_N1, drafts_NM] + num_above_NM
    values_NM = _penalize(logits_NV.gather(1, drafts_NM), counts_NM, is_in_prompt_RV[row_N1, drafts_NM], *settings)
    return penalized_NV.scatter_(1, drafts_NM, values_NM)


def _penalize(
    logits: Tensor, counts: Tensor, is_in_prompt: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    is_seen = is_in_prompt | (counts > 0)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(is_seen, repeated, logits)
    return logits - frequency * counts - presence * (counts > 0)
