"""Deciding which draft tokens the target keeps, and the one token that comes after them.

    accepted    a draft token that the target keeps
    recovered   the token that takes the place of the first draft token that is not kept
    bonus       the token after a draft that is kept whole

A step emits the accepted tokens and then exactly one more, recovered or bonus, so it emits at least one token. A
request without draft tokens gets its plain next token as the bonus.

Legend: B requests, K draft tokens (columns; request b uses the first num_draft_B[b]), L = K + 1, V vocabulary.
Row j of a target tensor [B, L, V] is the target's opinion after the text and the first j draft tokens: it judges draft
token j, and row num_draft_B[b] yields the bonus. What lies beyond num_draft_B[b] is padding: ids and probabilities
there may be anything. K may be 0.

A worked example with three tokens. The target wants 1, then 2, then 0; the draft (1, 2) is kept whole and earns the
bonus 0, the draft (1, 1) is cut after one token and 2 is recovered, and (2, 2) fails at once although its second token
looks right:

>>> import torch
>>> from peagle.decoding.verify import verify_greedy, verify_sampled
>>> target_logits_LV = torch.tensor([[0.0, 9.0, 1.0], [0.0, 1.0, 9.0], [9.0, 0.0, 1.0]])
>>> draft_tokens_BK = torch.tensor([[1, 2], [1, 1], [2, 2]])
>>> result = verify_greedy(target_logits_LV.expand(3, 3, 3), draft_tokens_BK, torch.tensor([2, 2, 2]))
>>> result.num_accepted_B.tolist(), result.next_token_B.tolist()
([2, 1, 0], [0, 2, 1])

Sampled: the target gives the tokens (0.5, 0.3, 0.2), the drafter gave them (0.2, 0.6, 0.2) and drew token 1. It is kept
with probability 0.3 / 0.6 = 0.5. Otherwise max(target - draft, 0) = (0.3, 0, 0) leaves only token 0 to recover. Over
many seeds half of the drafts are accepted, and what is recovered is always token 0:

>>> seed_B = torch.arange(10_000)
>>> target_probs_BLV = torch.tensor([[0.5, 0.3, 0.2], [0.0, 0.0, 1.0]]).expand(10_000, 2, 3)
>>> draft_probs_BKV = torch.tensor([[0.2, 0.6, 0.2]]).expand(10_000, 1, 3)
>>> ones_B = torch.ones_like(seed_B)
>>> result = verify_sampled(target_probs_BLV, draft_probs_BKV, ones_B.unsqueeze(1), ones_B, seed_B, position_B=ones_B)
>>> round(result.num_accepted_B.double().mean().item(), 2)
0.5
>>> result.next_token_B[result.num_accepted_B == 0].unique().tolist()
[0]
>>> result.next_token_B[result.num_accepted_B == 1].unique().tolist()
[2]

Drafting token 1 six times in ten, the step begins with token 1 in 0.6 * 0.5 = 0.3 of the cases, as the target wants.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.decoding.sampling import STREAM_ACCEPT, STREAM_DRAW, STREAM_RECOVER, draw, uniform


class Verification(NamedTuple):
    """What a step emits for each request: its first `num_accepted_B` draft tokens, then `next_token_B`. Both int64.

    The next token is recovered where fewer draft tokens were accepted than there were, and bonus elsewhere.
    """

    num_accepted_B: Tensor
    next_token_B: Tensor


def verify_greedy(target_logits_BLV: Tensor, draft_tokens_BK: Tensor, num_draft_B: Tensor) -> Verification:
    """Keep draft tokens while they are the target's most likely ones; the lowest id wins among equal logits."""
    return keep_matches(target_logits_BLV.argmax(-1), draft_tokens_BK, num_draft_B)


def verify_deterministic(
    target_probs_BLV: Tensor, draft_tokens_BK: Tensor, num_draft_B: Tensor, seed_B: Tensor, position_B: Tensor
) -> Verification:
    """Exact rejection sampling for drafts that are a function of the text, such as a drafter's most likely tokens.

    `position_B` is the position of the first token to be decided, that of draft token 0. At every position a token is
    drawn from the target, and draft tokens are kept while they equal the draw.

    This is the rejection sampler for a point mass. With draft probability 1 on token x, x must be accepted with
    probability min(1, target(x) / 1) = target(x), which is how often the draw equals x. On rejection the token must
    come from max(target - draft, 0), that is from the target without x, which is how a draw is distributed once it is
    known to differ from x. So the draw decides and recovers in one.

    The emitted tokens are the draws themselves, and the draw at a position depends on the text, the seed and the
    position alone. So a seeded answer depends neither on K, nor on the drafter, nor on the batch: it is the answer of
    plain decoding.
    """
    num_rows = target_probs_BLV.shape[1]
    uniform_BL = uniform(seed_B.unsqueeze(1), _positions(position_B, num_rows), STREAM_DRAW)
    return keep_matches(draw(target_probs_BLV, uniform_BL), draft_tokens_BK, num_draft_B)


def verify_sampled(
    target_probs_BLV: Tensor,
    draft_probs_BKV: Tensor,
    draft_tokens_BK: Tensor,
    num_draft_B: Tensor,
    seed_B: Tensor,
    position_B: Tensor,
) -> Verification:
    """Exact rejection sampling for draft tokens that were drawn from `draft_probs_BKV` (stream `STREAM_DRAFT`).

    A draft token is accepted with probability min(1, target / draft). A recovered token is drawn from
    max(target - draft, 0), a bonus token from the target with the number plain decoding would use at that position.
    `position_B` is the position of the first token to be decided.

    The distribution of the text is the target's, but unlike with `verify_deterministic` a seeded answer changes with K
    and the drafter. Numbers are used again when a position is drafted a second time, after a cut before it; that is
    sound because what was emitted until then depends on the numbers of earlier positions only.

    Impossible draft tokens are judged by the same rule: draft probability 0 is accepted if the target allows the token
    at all. Where nothing remains to recover from, the target itself is used.
    """
    num_columns = draft_tokens_BK.shape[1]
    is_draft_BK = _is_draft(draft_tokens_BK, num_draft_B)
    token_BK1 = draft_tokens_BK.masked_fill(~is_draft_BK, 0).unsqueeze(2)
    target_prob_BK = target_probs_BLV[:, :num_columns].gather(2, token_BK1).squeeze(2)
    draft_prob_BK = draft_probs_BKV.gather(2, token_BK1).squeeze(2)
    accept_BK = uniform(seed_B.unsqueeze(1), _positions(position_B, num_columns), STREAM_ACCEPT)
    # The product form of accept < target / draft needs no division by zero, and rejects 0 / 0.
    num_accepted_B = _num_leading((accept_BK * draft_prob_BK < target_prob_BK) & is_draft_BK)

    is_bonus_B = num_accepted_B >= num_draft_B
    next_position_B = position_B + num_accepted_B
    next_uniform_B = torch.where(
        is_bonus_B, uniform(seed_B, next_position_B, STREAM_DRAW), uniform(seed_B, next_position_B, STREAM_RECOVER)
    )
    target_BV = _row(target_probs_BLV, num_accepted_B)
    if num_columns == 0:
        return Verification(num_accepted_B, draw(target_BV, next_uniform_B))
    residual_BV = (target_BV - _row(draft_probs_BKV, num_accepted_B.clamp(max=num_columns - 1))).clamp(min=0)
    use_target_B = is_bonus_B | (residual_BV.amax(-1) <= 0)
    next_token_B = draw(torch.where(use_target_B.unsqueeze(1), target_BV, residual_BV), next_uniform_B)
    return Verification(num_accepted_B, next_token_B)


def _positions(position_B: Tensor, num_columns: int) -> Tensor:
    return position_B.unsqueeze(1) + torch.arange(num_columns, device=position_B.device)


def _is_draft(draft_tokens_BK: Tensor, num_draft_B: Tensor) -> Tensor:
    columns_K = torch.arange(draft_tokens_BK.shape[1], device=draft_tokens_BK.device)
    return columns_K < num_draft_B.unsqueeze(1)


def _num_leading(is_kept_BK: Tensor) -> Tensor:
    """How many columns are True before the first False, int64."""
    return is_kept_BK.to(torch.int64).cumprod(1).sum(1)


def _row(rows_BNV: Tensor, row_B: Tensor) -> Tensor:
    """Row row_B[b] of each request, [B, V]."""
    index_B1V = row_B.view(-1, 1, 1).expand(-1, 1, rows_BNV.shape[2])
    return rows_BNV.gather(1, index_B1V).squeeze(1)


def keep_matches(wanted_BL: Tensor, draft_tokens_BK: Tensor, num_draft_B: Tensor) -> Verification:
    """Keep draft tokens while they equal the wanted ones; the next token is the wanted one after the kept ones."""
    is_match_BK = wanted_BL[:, : draft_tokens_BK.shape[1]] == draft_tokens_BK
    num_accepted_B = _num_leading(is_match_BK & _is_draft(draft_tokens_BK, num_draft_B))
    return Verification(num_accepted_B, wanted_BL.gather(1, num_accepted_B.unsqueeze(1)).squeeze(1))
