"""The pair head against its definition, computed pair by pair. Shapes: K depths, W tokens per depth, R rank."""

import math

import torch

from harness.tiny_models import tiny_drafter, tiny_target
from peagle.drafter.pair_head import PairHead
from peagle.kernels.candidate_tree import grow_tree


def random_case(num_depths: int, width: int, seed: int = 0) -> tuple[PairHead, torch.Tensor, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    head = PairHead(*(torch.randn(40, 5, generator=noise) for _ in range(2)))
    tokens_KW = torch.stack([torch.randperm(40, generator=noise)[:width] for _ in range(num_depths)])
    logprob_KW = torch.randn(num_depths, 40, generator=noise).log_softmax(-1).topk(width).values
    return head, tokens_KW, logprob_KW


def test_pairs_share_the_probability_of_their_depth_by_odds_times_score() -> None:
    head, tokens_KW, logprob_KW = random_case(4, 6)
    pairs_KWW = head.conditionals(tokens_KW, logprob_KW)
    for row in range(6):
        torch.testing.assert_close(pairs_KWW[0, row], logprob_KW[0])
    for depth in range(1, 4):
        mass = sum(math.exp(value) for value in logprob_KW[depth].tolist())
        for row, before in enumerate(tokens_KW[depth - 1].tolist()):
            odds = [
                math.exp(float(logprob) + sum((head.left[before] * head.right[after]).tolist()))
                for after, logprob in zip(tokens_KW[depth].tolist(), logprob_KW[depth], strict=True)
            ]
            expected = [mass * each / sum(odds) for each in odds]
            torch.testing.assert_close(pairs_KWW[depth, row].exp(), torch.tensor(expected))


def test_a_chain_is_greedy_along_the_pairs_of_each_request() -> None:
    cases = [random_case(5, 6, seed) for seed in range(3)]
    head = cases[0][0]
    tokens_BKW, logprob_BKW = (torch.stack([case[part] for case in cases]) for part in (1, 2))
    tokens_BK, logprob_BK = head.chain(tokens_BKW, logprob_BKW)
    for request, (_, tokens_KW, logprob_KW) in enumerate(cases):
        pairs_KWW, place = head.conditionals(tokens_KW, logprob_KW), 0
        for depth in range(5):
            row_W = pairs_KWW[depth, place]
            place = int(row_W.argmax())
            assert tokens_BK[request, depth] == tokens_KW[depth, place]
            torch.testing.assert_close(logprob_BK[request, depth], row_W[place])


def test_a_head_of_zeros_grows_the_tree_of_the_marginals() -> None:
    _, tokens_KW, logprob_KW = random_case(6, 16)
    pairs_KWW = PairHead(torch.zeros(40, 5), torch.zeros(40, 5)).conditionals(tokens_KW, logprob_KW)
    limit = torch.tensor([6])
    for ours, expected in zip(
        grow_tree(pairs_KWW[None], limit, 24), grow_tree(logprob_KW[None], limit, 24), strict=True
    ):
        torch.testing.assert_close(ours, expected)


def test_without_its_head_a_drafter_shares_the_weights_and_keeps_the_head() -> None:
    drafter = tiny_drafter(tiny_target(num_layers=4))
    assert drafter.without_pair_head() is drafter
    drafter.pair_head = PairHead(torch.zeros(288, 2), torch.ones(288, 2))
    plain = drafter.without_pair_head()
    assert plain.pair_head is None and drafter.pair_head is not None
    assert plain.fc.weight is drafter.fc.weight
    assert drafter.state_dict().keys() - plain.state_dict().keys() == {"pair_head.left", "pair_head.right"}
