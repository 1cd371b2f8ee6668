"""Verify draft tokens: how many the target accepts, and the one token it emits after them.

    accepted    a draft token that the target keeps
    recovered   the target's token in place of the first rejected draft token
    bonus       the target's token after a fully accepted draft

A step emits the accepted tokens plus exactly one more, recovered or bonus. A request without draft tokens gets its
plain next token as the bonus.

Legend: B requests, K draft tokens (request b uses the first num_draft_B[b], the rest is padding), L = K + 1, V
vocabulary. Row j of a target tensor [B, L, V] follows the text and the first j draft tokens: it verifies draft token j,
and row num_draft_B[b] yields the bonus. K may be 0.

Greedy. The target wants tokens 1, 2, 0. The draft (1, 2) is fully accepted and earns the bonus 0. The draft (1, 1) is
rejected at its second token, and 2 is recovered. The draft (2, 2) is rejected at once, though its second token matches:

>>> import torch
>>> from peagle.decoding.verify import draws, keep_matches
>>> wanted_BL, draft_tokens_BK = torch.tensor([[1, 2, 0]] * 3), torch.tensor([[1, 2], [1, 1], [2, 2]])
>>> result = keep_matches(wanted_BL, draft_tokens_BK, torch.tensor([2, 2, 2]))
>>> result.num_accepted_B.tolist(), result.next_token_B.tolist()
([2, 1, 0], [0, 2, 1])

Sampled. The target's distribution is (0.5, 0.3, 0.2) and the draft is token 1. Over many seeds it is accepted with
probability 0.3, and the recovered token is 0 or 2 in the ratio 5 : 2, so the emitted token follows the target exactly:

>>> seed_B = torch.arange(10_000)
>>> target_probs_BLV = torch.tensor([[0.5, 0.3, 0.2], [0.0, 0.0, 1.0]]).expand(10_000, 2, 3)
>>> ones_B = torch.ones_like(seed_B)
>>> result = keep_matches(draws(target_probs_BLV, seed_B, position_B=ones_B), ones_B.unsqueeze(1), ones_B)
>>> is_accepted_B = result.num_accepted_B == 1
>>> round(is_accepted_B.double().mean().item(), 2), result.next_token_B[is_accepted_B].unique().tolist()
(0.3, [2])
>>> [round((result.next_token_B[~is_accepted_B] == token).double().mean().item(), 1) for token in range(3)]
[0.7, 0.0, 0.3]
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.kernels.choose import draw
from peagle.kernels.random_numbers import STREAM_DRAW, uniform


class Verification(NamedTuple):
    """A step emits the first `num_accepted_B` draft tokens of each request, then `next_token_B`. Both are int64."""

    num_accepted_B: Tensor
    next_token_B: Tensor


def draws(target_probs_BLV: Tensor, seed_B: Tensor, position_B: Tensor) -> Tensor:
    """The target's token at each position, drawn from its distribution: int64 [B, L].

    `position_B` is the position of the first one. Accepting drafts while they equal the draws is exact rejection
    sampling for drafts that are a function of the text, such as a drafter's most likely tokens: a draft x, which has
    draft probability 1, must be accepted with probability target(x), which is how often the draw equals x. After a
    rejection the token must come from the target without x, which is the distribution of a draw that differs from x.

    The draw depends only on the text, the seed and the position. So a seeded answer is the same with any K, any
    drafter and any batch: it equals plain decoding.
    """
    position_BL = position_B.unsqueeze(1) + torch.arange(target_probs_BLV.shape[1], device=position_B.device)
    return draw(target_probs_BLV, uniform(seed_B.unsqueeze(1), position_BL, STREAM_DRAW))


def keep_matches(wanted_BL: Tensor, draft_tokens_BK: Tensor, num_draft_B: Tensor) -> Verification:
    """Accept draft tokens while they equal the wanted ones. The next token is the wanted one after them."""
    column_K = torch.arange(draft_tokens_BK.shape[1], device=draft_tokens_BK.device)
    is_match_BK = (wanted_BL[:, : len(column_K)] == draft_tokens_BK) & (column_K < num_draft_B.unsqueeze(1))
    num_accepted_B = is_match_BK.to(torch.int64).cumprod(1).sum(1)
    return Verification(num_accepted_B, wanted_BL.gather(1, num_accepted_B.unsqueeze(1)).squeeze(1))


def tolerate(
    wanted_BL: Tensor,
    logits_NV: Tensor,
    place_BL: Tensor,
    tokens_BL: Tensor,
    parent_BL: Tensor,
    num_nodes_B: Tensor,
    gap_B: Tensor,
) -> Tensor:
    """The wanted tokens, with a draft in place of each that the target finds hardly more likely.

    `place_BL` says which of the N logits follow each node.

    A draft is tolerated if its logit lies at most `gap_B` below the highest one; a negative gap tolerates none. If a
    node has several such children, the one with the highest logit wins, then the older one. A wanted token that is
    among the children stays. The target wants 0 after the root, but its child 2 is within 0.1:

    >>> logits_NV, place_BL = torch.tensor([[1.0, 0.0, 0.95], [3.0, 0.0, 0.0]]), torch.tensor([[0, 1]])
    >>> tree = torch.tensor([[1, 2]]), torch.tensor([[0, 0]]), torch.tensor([1])
    >>> tolerate(logits_NV.argmax(-1)[place_BL], logits_NV, place_BL, *tree, gap_B=torch.tensor([0.1]))
    tensor([[2, 0]])
    """
    node_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
    is_draft_BL = (node_L > 0) & (node_L <= num_nodes_B[:, None])
    is_child_BLL = (parent_BL[:, None] == node_L[:, None]) & is_draft_BL[:, None]
    is_wanted_BL = (is_child_BLL & (tokens_BL[:, None] == wanted_BL[..., None])).any(2)
    above_BL = place_BL.gather(1, parent_BL)
    logit_BL = logits_NV[above_BL, tokens_BL]
    is_near_BL = logits_NV.amax(-1)[above_BL] - logit_BL <= gap_B[:, None]
    score_BLL = logit_BL[:, None].masked_fill(~(is_child_BLL & is_near_BL[:, None]), float("-inf"))
    best_BL1 = score_BLL.amax(2, keepdim=True)
    # argmax of the mask: the oldest of equally good children.
    child_BL = (score_BLL == best_BL1).to(torch.int8).argmax(2)
    is_replaced_BL = ~is_wanted_BL & (best_BL1[..., 0] > float("-inf"))
    return torch.where(is_replaced_BL, tokens_BL.gather(1, child_BL), wanted_BL)


class KeptPath(NamedTuple):
    """The branch of a candidate tree that the target agrees with."""

    num_accepted_B: Tensor
    node_BD: Tensor
    """the nodes from the root down, D = K + 1; 0, the root, beyond the last accepted one"""


def keep_path(
    wanted_BL: Tensor,
    tokens_BL: Tensor,
    parent_BL: Tensor,
    depth_BL: Tensor,
    ancestors_BL: Tensor,
    num_nodes_B: Tensor,
    num_depths: int,
) -> KeptPath:
    """Accept every node whose token, and that of every node above it, is the one wanted after its parent.

    Children of one node differ, so the accepted nodes are one branch. Shapes: L = 1 + nodes, node 0 is the root. Root
    with the children 5 and 7, and 6 below 5; the target wants 7 after the root:

    >>> tree = [torch.tensor([row]) for row in ([0, 0, 0, 1], [0, 1, 1, 2], [0b0001, 0b0011, 0b0101, 0b1011])]
    >>> tokens_BL, wanted_BL = torch.tensor([[3, 5, 7, 6]]), torch.tensor([[7, 6, 9, 2]])
    >>> keep_path(wanted_BL, tokens_BL, *tree, num_nodes_B=torch.tensor([3]), num_depths=2)
    KeptPath(num_accepted_B=tensor([1]), node_BD=tensor([[0, 2, 0]]))
    """
    node_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
    is_match_BL = (tokens_BL == wanted_BL.gather(1, parent_BL)) & (node_L <= num_nodes_B[:, None]) | (node_L == 0)
    matches_B = (is_match_BL.to(torch.int64) << node_L).sum(1)
    is_kept_BL = (ancestors_BL & ~matches_B[:, None]) == 0
    depth_D = torch.arange(num_depths + 1, device=tokens_BL.device)
    is_there_BDL = is_kept_BL[:, None] & (depth_BL[:, None] == depth_D[:, None])
    return KeptPath(is_kept_BL.sum(1) - 1, (is_there_BDL * node_L).sum(2))
