"""Candidate trees: the continuations that a drafter finds most likely, for the target to verify in one pass.

A parallel drafter gives the W likeliest tokens of each of K depths. A path takes one token per depth, from the first
depth on; its score is the sum of its log-probabilities. The tree holds the M best paths, each as the node at its end.
A path scores no more than its beginning, so the parent of a node is in the tree, and before it: the first m nodes are
the best tree of m nodes. With W = 1 the tree is a chain.

Two depths with probabilities 0.6, 0.31 and 0.5, 0.4. The four best paths are 0.6, 0.31, 0.6 * 0.5 and 0.6 * 0.4:

>>> logprob_BKW = torch.tensor([[[0.6, 0.31], [0.5, 0.4]]]).log()
>>> tree = grow_tree(logprob_BKW, torch.tensor([2]), num_nodes=4)
>>> tree.parent_BL.tolist(), tree.depth_BL.tolist(), tree.choice_BM.tolist()
([[0, 0, 0, 1, 1]], [[0, 1, 1, 2, 2]], [[0, 1, 0, 1]])
>>> [[round(score, 2) for score in scores] for scores in tree.score_BM.exp().tolist()]
[[0.6, 0.31, 0.3, 0.24]]
>>> [f"{bits:05b}" for bits in tree.ancestors_BL[0].tolist()]
['00001', '00011', '00101', '01011', '10011']

Node 0 is the root: the newest token of the sequence. Among equal scores the older parent wins, then the lower choice.

With a pair head (`drafter/pair_head.py`), the log-probability of a token depends on the token before it: [B, K, W, W],
where the first W is the choice at the depth before, and row 0 serves the first depth. Here the second depth is 0.5,
0.4 behind the first token, and 0.1, 0.8 behind the second, whose child 0.31 * 0.8 comes before 0.6 * 0.4:

>>> pairs_BKWW = torch.tensor([[[[0.6, 0.31]] * 2, [[0.5, 0.4], [0.1, 0.8]]]]).log()
>>> tree = grow_tree(pairs_BKWW, torch.tensor([2]), num_nodes=4)
>>> tree.parent_BL.tolist(), tree.choice_BM.tolist()
([[0, 0, 0, 1, 2]], [[0, 1, 0, 1]])

Shapes: B requests, K depths, W tokens per depth, X = W or W x W (pairs), M nodes, L = M + 1.
"""

import heapq
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

MAX_NODES = 62
"""The ancestors of a node, and the node itself, are bits of an int64, the root is bit 0."""
TREE_WIDTH = 16
"""Tokens per depth that a tree is grown from."""


class CandidateTree(NamedTuple):
    """The nodes of each request's tree, best first. All but the scores are int64."""

    parent_BL: Tensor
    """the root is its own parent"""
    depth_BL: Tensor
    ancestors_BL: Tensor
    """bit j is set for the node itself, and for every node j above it"""
    choice_BM: Tensor
    """which of the W tokens of its depth each node has; the root has none"""
    score_BM: Tensor
    """log-probability of each path, falling; -inf for nodes that the tree does not have"""


def grow_tree(logprob_BKX: Tensor, max_depth_B: Tensor, num_nodes: int) -> CandidateTree:
    """The best `num_nodes` paths of at most `max_depth_B` tokens."""
    depth_K = torch.arange(logprob_BKX.shape[1], device=logprob_BKX.device)
    is_over_BK = depth_K >= max_depth_B[:, None]
    is_over_BKX = is_over_BK.view(*is_over_BK.shape, *[1] * (logprob_BKX.dim() - 2))
    logprob_BKX = logprob_BKX.masked_fill(is_over_BKX | logprob_BKX.isnan(), float("-inf"))
    if logprob_BKX.shape[-1] == 1:
        return _chain(logprob_BKX.flatten(1), num_nodes)
    if logprob_BKX.is_cuda:
        return CandidateTree(*grow_tree_on_gpu(logprob_BKX, num_nodes))
    return grow_tree_on_cpu(logprob_BKX, num_nodes)


def chain(num_nodes: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Parent, depth and ancestors of the nodes of a chain, [L] each."""
    node_L = torch.arange(num_nodes + 1, device=device)
    return (node_L - 1).clamp_min(0), node_L, (2 << node_L) - 1


def _chain(logprob_BK: Tensor, num_nodes: int) -> CandidateTree:
    shape = (len(logprob_BK), num_nodes + 1)
    parent_BL, depth_BL, ancestors_BL = (each_L.expand(shape) for each_L in chain(num_nodes, logprob_BK.device))
    score_BM = logprob_BK[:, :num_nodes].cumsum(1)
    return CandidateTree(parent_BL, depth_BL, ancestors_BL, torch.zeros_like(score_BM, dtype=torch.int64), score_BM)


def grow_tree_on_cpu(logprob_BKX: Tensor, num_nodes: int) -> CandidateTree:
    """Best-first search; also the reference for the kernel."""
    trees = [_grow_one(logprob_KX, num_nodes) for logprob_KX in logprob_BKX.float().numpy(force=True)]
    device = logprob_BKX.device
    *links, score_BM = (np.stack(columns) for columns in zip(*trees, strict=True))
    parent_BL, depth_BL, ancestors_BL, choice_BM = (torch.from_numpy(link).to(device) for link in links)
    return CandidateTree(
        parent_BL, depth_BL, ancestors_BL, choice_BM, torch.from_numpy(score_BM).to(device, logprob_BKX.dtype)
    )


def _grow_one(logprob_KX: np.ndarray, num_nodes: int) -> tuple[np.ndarray, ...]:
    """The tree of one request. The frontier holds the best child of each node that is left; rounds take the best."""
    is_paired, frontier = logprob_KX.ndim == 3, list[tuple[float, int, int]]()
    # Places without a node keep these values.
    parent, depth, choice = [0] * (num_nodes + 1), [0] + [1] * num_nodes, [0] * (num_nodes + 1)
    score = np.full(num_nodes + 1, -np.inf, np.float32)
    score[0] = 0.0

    children: list[list[tuple[float, int, int]]] = []
    """of each node, the best last"""

    def add_children(node: int) -> None:
        if depth[node] < len(logprob_KX):
            below_X = logprob_KX[depth[node]]
            values = (score[node] + (below_X[choice[node]] if is_paired else below_X)).tolist()
            own = [(-value, node, place) for place, value in enumerate(values) if value > -np.inf]
            children.append(sorted(own, reverse=True))
        else:
            children.append([])
        add_next(node)

    def add_next(node: int) -> None:
        if children[node]:
            heapq.heappush(frontier, children[node].pop())

    add_children(0)
    for node in range(1, num_nodes + 1):
        if not frontier:
            break
        negative, parent[node], choice[node] = heapq.heappop(frontier)
        score[node], depth[node] = -negative, depth[parent[node]] + 1
        add_next(parent[node])
        add_children(node)
    ancestors = [1] * (num_nodes + 1)
    for node in range(1, num_nodes + 1):
        ancestors[node] = ancestors[parent[node]] | 1 << node
    links = (np.array(each, np.int64) for each in (parent, depth, ancestors, choice[1:]))
    return (*links, score[1:])


def _grow_tree_on_gpu(logprob_BKX: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    # Imported lazily: triton may not be installed.
    from peagle.kernels.candidate_tree_triton import grow_tree_triton

    return grow_tree_triton(logprob_BKX, num_nodes)


# A custom op, so that torch.compile does not trace into the kernel.
grow_tree_on_gpu = torch.library.custom_op("peagle::grow_tree", _grow_tree_on_gpu, mutates_args=())


@grow_tree_on_gpu.register_fake
def _(logprob_BKX: Tensor, num_nodes: int) -> tuple[Tensor, ...]:
    size = logprob_BKX.shape[0]  # len() would fix it to one number
    nodes = [logprob_BKX.new_empty(size, num_nodes + 1, dtype=torch.int64) for _ in range(3)]
    return (*nodes, nodes[0].new_empty(size, num_nodes), logprob_BKX.new_empty(size, num_nodes))
