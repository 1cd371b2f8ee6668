"""Pair heads for tests. Shapes: U draft vocabulary, R rank."""

from collections.abc import Sequence
from itertools import pairwise

import torch

from peagle.drafter.model import Drafter
from peagle.drafter.pair_head import PairHead

BONUS = 8.0
"""what a known pair scores: more than most differences of logits"""


def random_head(drafter: Drafter, *, rank: int = 6, scale: float = 1.5, seed: int = 0) -> PairHead:
    """A head that changes most drafts."""
    noise = torch.Generator().manual_seed(seed)
    tables = (torch.randn(drafter.config.draft_vocab_size, rank, generator=noise) * scale for _ in range(2))
    return PairHead(*tables)


def knowing_head(drafter: Drafter, texts: Sequence[Sequence[int]]) -> PairHead:
    """A head of full rank that knows which tokens follow each other in `texts`, so that it improves drafts."""
    size = drafter.config.draft_vocab_size
    target_ids = drafter.to_target_ids(torch.arange(size)).tolist()
    draft_ids = {target_id: draft_id for draft_id, target_id in enumerate(target_ids)}
    right_UR = torch.zeros(size, size)
    for text in texts:
        for before, after in pairwise(text):
            if before in draft_ids and after in draft_ids:
                right_UR[draft_ids[after], draft_ids[before]] = BONUS
    return PairHead(torch.eye(size), right_UR)
