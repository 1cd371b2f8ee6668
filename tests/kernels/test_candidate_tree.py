"""Candidate trees: the search by PyTorch against a heap of paths, and the Triton kernel against PyTorch.

Without a GPU the kernel runs in Triton's interpreter. Legend: B requests, K depths, W tokens per depth, X = W or W x W
(pairs), M nodes.
"""

import heapq

import pytest
import torch
from torch import Tensor

from peagle.kernels.candidate_tree import MAX_NODES, CandidateTree, grow_tree, grow_tree_on_cpu

pytest.importorskip("triton")

from peagle.kernels.candidate_tree_triton import grow_tree_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INFINITY = float("inf")


def random_logprobs(num_requests: int, num_depths: int, width: int, seed: int = 0, *, paired: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_requests, num_depths, width, 2 * width) if paired else (num_requests, num_depths, 2 * width)
    logprobs = (3 * torch.randn(shape, generator=generator)).log_softmax(-1)
    return logprobs[..., :width] if paired else logprobs.topk(width).values


def step_score(logprob_KX: Tensor, path: tuple[int, ...]) -> float:
    """Log-probability of the last choice of a path."""
    row = logprob_KX[len(path) - 1]
    return float(row[path[-1]] if row.dim() == 1 else row[path[-2] if len(path) > 1 else 0, path[-1]])


def best_paths(logprob_KX: Tensor, num_nodes: int) -> list[tuple[int, ...]]:
    """The best paths, as the choice at each depth, by a heap of all extensions."""
    num_depths, width = len(logprob_KX), logprob_KX.shape[-1]
    found: list[tuple[int, ...]] = []
    heap: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    while heap and len(found) <= num_nodes:
        score, path = heapq.heappop(heap)
        found.append(path)
        if len(path) < num_depths:
            for longer in ((*path, choice) for choice in range(width)):
                heapq.heappush(heap, (score - step_score(logprob_KX, longer), longer))
    return found[1:]


def paths_of(tree: CandidateTree, request: int) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for node, choice in enumerate(tree.choice_BM[request].tolist(), start=1):
        parent = int(tree.parent_BL[request, node])
        paths.append((*paths[parent], choice))
        bits = int(tree.ancestors_BL[request, node])
        assert bits == int(tree.ancestors_BL[request, parent]) | 1 << node
        assert int(tree.depth_BL[request, node]) == len(paths[node]) == bits.bit_count() - 1
    return paths[1:]


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(("num_depths", "width", "num_nodes"), [(1, 4, 3), (7, 16, 16), (8, 4, 32), (32, 2, MAX_NODES)])
def test_the_nodes_are_the_best_paths_in_order(num_depths: int, width: int, num_nodes: int, paired: bool) -> None:
    logprob_BKX = random_logprobs(3, num_depths, width, paired=paired)
    tree = grow_tree_on_cpu(logprob_BKX, num_nodes)
    for request in range(3):
        paths = paths_of(tree, request)
        assert paths == best_paths(logprob_BKX[request], num_nodes)
        path_scores = [
            sum(step_score(logprob_BKX[request], path[:depth]) for depth in range(1, len(path) + 1)) for path in paths
        ]
        assert tree.score_BM[request].tolist() == pytest.approx(path_scores, abs=1e-4)
    assert (tree.score_BM.diff(dim=1) <= 0).all()


def test_a_chain_is_a_tree_of_width_one() -> None:
    logprob_BK1 = random_logprobs(2, 5, 1)
    limits_B = torch.tensor([5, 3])
    tree = grow_tree(logprob_BK1, limits_B, 5)
    masked_BK1 = logprob_BK1.clone()
    masked_BK1[1, 3:] = -INFINITY
    expected = grow_tree_on_cpu(masked_BK1, 5)
    for found, wanted in zip(tree, expected, strict=True):
        torch.testing.assert_close(found[0], wanted[0])
    torch.testing.assert_close(tree.score_BM, expected.score_BM)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("limit", [0, 1, 2])
def test_no_node_is_deeper_than_its_request_allows(limit: int, paired: bool) -> None:
    tree = grow_tree(random_logprobs(1, 4, 3, paired=paired), torch.tensor([limit]), 20)
    is_node_M = tree.score_BM[0] > -INFINITY
    assert int(is_node_M.sum()) == sum(3**depth for depth in range(1, limit + 1))
    assert is_node_M.tolist() == sorted(is_node_M.tolist(), reverse=True), "nodes come before empty places"
    assert not is_node_M.any() or int(tree.depth_BL[0, 1:][is_node_M].max()) == limit


def test_a_drafter_without_an_answer_gives_an_empty_tree() -> None:
    tree = grow_tree(torch.full((1, 4, 3), float("nan")), torch.tensor([4]), 6)
    assert (tree.score_BM == -INFINITY).all()


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(
    ("num_depths", "width", "num_nodes"),
    [
        (1, 4, 3),
        (5, 3, 8),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((7, 16, 32), (32, 2, MAX_NODES))),
    ],
)
def test_triton_grows_the_tree_that_pytorch_grows(num_depths: int, width: int, num_nodes: int, paired: bool) -> None:
    logprob_BKX = random_logprobs(4, num_depths, width, seed=1, paired=paired)
    logprob_BKX[1, 1:] = -INFINITY  # a request that allows one token
    logprob_BKX[2] = logprob_BKX[2].round()  # ties
    found = grow_tree_triton(logprob_BKX.to(DEVICE), num_nodes)
    for ours, expected in zip(found, grow_tree_on_cpu(logprob_BKX, num_nodes), strict=True):
        assert ours.dtype == expected.dtype
        torch.testing.assert_close(ours.cpu(), expected)
