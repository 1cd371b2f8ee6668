"""Shared by the tests of verification: a vocabulary of five tokens, random distributions, and readable results.

Legend: B requests, K draft tokens, L = K + 1, V vocabulary.
"""

import torch
from torch import Tensor

from peagle.decoding.verify import Verification, draws, keep_matches

V = 5
K = 3
L = K + 1


def random_probs(*shape: int, seed: int, sharpness: float) -> Tensor:
    return (sharpness * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).softmax(dim=-1)


def as_lists(result: Verification) -> tuple[list[int], list[int]]:
    assert result.num_accepted_B.dtype == result.next_token_B.dtype == torch.int64
    return result.num_accepted_B.tolist(), result.next_token_B.tolist()


def verify_sampled(
    probs_BLV: Tensor, draft_tokens_BK: Tensor, num_draft_B: Tensor, seed_B: Tensor, position_B: Tensor
) -> Verification:
    return keep_matches(draws(probs_BLV, seed_B, position_B), draft_tokens_BK, num_draft_B)
