"""Adjust logits before a token is chosen: biases, banned end tokens, penalties, grammars.

Legend: B requests, M draft tokens, L = M + 1 rows per request (row 0, then a row behind each draft token), N = B * L,
V vocabulary, E edits, W = ceil(V / 32) words of bits.

Nothing reads a value on the host, so a CUDA graph can capture it. A request with neutral settings (no edits, penalties
1, 0 and 0, every bit set) keeps its logits bit for bit.
"""

from typing import NamedTuple

import torch
from torch import Tensor

BITS = 32


class Edits(NamedTuple):
    """Numbers to add to single logits, for tokens up to some index of the sequence."""

    token_ids_BE: Tensor
    """int64; unused entries add 0 to token 0."""
    value_BE: Tensor
    """float32; -inf bans the token."""
    end_BE: Tensor
    """int64: the edit applies to tokens whose index in the sequence is lower."""


class Penalties(NamedTuple):
    """Penalties for tokens that a request has seen."""

    repetition_B: Tensor
    frequency_B: Tensor
    presence_B: Tensor
    counts_BV: Tensor
    """int32: how often each token occurs in the answer so far."""
    is_in_prompt_BV: Tensor


def adjust_logits(
    logits_NV: Tensor,
    edits: Edits,
    penalties: Penalties,
    allowed_BLW: Tensor,
    drafts_BM: Tensor,
    position_BL: Tensor,
    ancestors_BL: Tensor,
) -> Tensor:
    """New float32 logits [N, V]: edits, then repetition, frequency and presence penalties, then the grammar's mask.

    Row j of a request decides the token at index `position_BL` of its sequence, after the draft tokens of rows 1 .. j
    whose bits are set in `ancestors_BL` (see `CandidateTree`). Bit v % 32 of word v // 32 of `allowed_BLW` (int32) is
    set if token v is allowed.
    """
    num_requests, num_rows, _ = allowed_BLW.shape
    vocab_size = logits_NV.shape[1]
    # The logits are the largest tensor of a step: copy them once, then work in place.
    logits_BLV = logits_NV.view(num_requests, num_rows, vocab_size).to(torch.float32, copy=True)
    _edit(logits_BLV, edits, position_BL)
    logits_BLV = _penalize_all(logits_BLV, penalties, drafts_BM, ancestors_BL)
    shift_32 = torch.arange(BITS, device=logits_NV.device, dtype=torch.int32)
    is_allowed_BLV = ((allowed_BLW[..., None] >> shift_32) & 1).flatten(2)[..., :vocab_size] != 0
    return logits_BLV.masked_fill_(~is_allowed_BLV, float("-inf")).flatten(0, 1)


def _edit(logits_BLV: Tensor, edits: Edits, position_BL: Tensor) -> None:
    num_rows = logits_BLV.shape[1]
    is_over_BLE = position_BL[..., None] >= edits.end_BE[:, None]
    value_BLE = edits.value_BE[:, None].expand(-1, num_rows, -1).masked_fill(is_over_BLE, 0)
    # Several edits of one token are zeros and one number, or include -inf: their order does not matter.
    logits_BLV.scatter_add_(2, edits.token_ids_BE[:, None].expand(-1, num_rows, -1), value_BLE)


def _penalize_all(logits_BLV: Tensor, penalties: Penalties, drafts_BM: Tensor, ancestors_BL: Tensor) -> Tensor:
    """Penalize all tokens by the counts of the text, then recompute the drafted tokens with the drafts above counted.

    This avoids a table of counts per row.
    """
    repetition_B, frequency_B, presence_B, counts_BV, is_in_prompt_BV = penalties
    settings = tuple(setting_B[:, None, None] for setting_B in (repetition_B, frequency_B, presence_B))
    num_drafts = drafts_BM.shape[1]
    if num_drafts == 0:
        return _penalize(logits_BLV, counts_BV[:, None], is_in_prompt_BV[:, None], *settings)
    # Entry (j, i): draft token i at the row behind draft token j.
    node_M = torch.arange(1, num_drafts + 1, device=drafts_BM.device)
    is_above_BMM = (ancestors_BL[:, 1:, None] >> node_M) & 1
    is_same_BMM = drafts_BM[:, :, None] == drafts_BM[:, None]
    num_above_BMM = (is_above_BMM.float() @ is_same_BMM.float()).to(torch.int32)
    token_ids_BMM = drafts_BM[:, None].expand(-1, num_drafts, -1)
    counts_BMM = counts_BV.gather(1, drafts_BM)[:, None] + num_above_BMM
    is_in_prompt_BMM = is_in_prompt_BV.gather(1, drafts_BM)[:, None]
    # A draft token that is not above the row has the count of the text, so its value does not change.
    values_BMM = _penalize(logits_BLV[:, 1:].gather(2, token_ids_BMM), counts_BMM, is_in_prompt_BMM, *settings)
    logits_BLV = _penalize(logits_BLV, counts_BV[:, None], is_in_prompt_BV[:, None], *settings)
    logits_BLV[:, 1:].scatter_(2, token_ids_BMM, values_BMM)
    return logits_BLV


def _penalize(
    logits: Tensor, counts: Tensor, is_in_prompt: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    is_seen = is_in_prompt | (counts > 0)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(is_seen, repeated, logits)
    return logits - frequency * counts - presence * (counts > 0)
