"""A tree of drafts on the host, slow and simple: the judge of `kernels/candidate_tree.py`, and what a grammar edits.

Shapes: K depths, W tokens per depth, U draft vocabulary.
"""

import heapq
from collections.abc import Sequence

from torch import Tensor

from peagle.drafter.model import Drafter
from peagle.errors import ConfigError
from peagle.kernels.candidate_tree import MAX_NODES


class DraftTree:
    """Nodes 1, 2, ... behind node 0, which is the text so far. A parent comes before its children."""

    def __init__(self, chain: Sequence[int] = ()) -> None:
        """Start with tokens that follow one another."""
        self.token_ids: list[int] = []
        """of nodes 1, 2, ..."""
        self.parents, self.depths, self.ancestors = [0], [0], [1]
        """of nodes 0, 1, ..., as in `CandidateTree`"""
        self.scores = [0.0]
        """of nodes 0, 1, ...: log-probability of each path"""
        for parent, token_id in enumerate(chain):
            self.add(parent, token_id)

    def __len__(self) -> int:
        return len(self.token_ids)

    def add(self, parent: int, token_id: int, score: float = 0.0) -> int:
        """The new node."""
        node = len(self.parents)
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.ancestors.append(self.ancestors[parent] | 1 << node)
        self.scores.append(score)
        return node

    def children(self, parent: int) -> list[int]:
        return [node for node in range(1, len(self.parents)) if self.parents[node] == parent]

    def child(self, parent: int, token_id: int) -> int | None:
        """The node of a token behind a node, if the tree has it."""
        return next((node for node in self.children(parent) if self.token_ids[node - 1] == token_id), None)

    def path(self, node: int) -> list[int]:
        """The nodes from below the root down to a node."""
        return [*self.path(self.parents[node]), node] if node else []

    def branch(self, node: int) -> list[int]:
        """The path through a node down to a leaf, always to the first child: the best one."""
        while children := self.children(node):
            node = children[0]
        return self.path(node)

    def best_first(self) -> tuple["DraftTree", list[int]]:
        """The same tree with the likeliest nodes first, and the nodes of this one in that order.

        No node may be likelier than its parent.
        """
        order, tree = sorted(range(len(self.parents)), key=lambda node: -self.scores[node]), DraftTree()
        for node in order[1:]:
            tree.add(order.index(self.parents[node]), self.token_ids[node - 1], self.scores[node])
        return tree, order

    def tokens(self, nodes: Sequence[int]) -> list[int]:
        return [self.token_ids[node - 1] for node in nodes]


def best_first(drafter: Drafter, logits_KU: Tensor, num_nodes: int) -> DraftTree:
    """The `num_nodes` likeliest paths, by the product of the probabilities of their tokens."""
    tokens_KW, logprob_KW = drafter.candidates(logits_KU)
    token_ids = drafter.to_target_ids(tokens_KW).tolist()
    if drafter.pair_head is not None:
        logprobs = drafter.pair_head.conditionals(tokens_KW, logprob_KW).tolist()
    else:
        logprobs = [[row] * len(row) for row in logprob_KW.tolist()]
    tree = DraftTree()
    heap = [(-logprob, 0, choice, 0) for choice, logprob in enumerate(logprobs[0][0])]
    heapq.heapify(heap)
    while heap and len(tree) < num_nodes:
        score, parent, choice, depth = heapq.heappop(heap)
        node = tree.add(parent, token_ids[depth][choice])
        if depth + 1 < len(logprobs):
            for child, logprob in enumerate(logprobs[depth + 1][choice]):
                heapq.heappush(heap, (score - logprob, node, child, depth + 1))
    return tree


def check_tree(drafter: Drafter | None, tree_nodes: int | None) -> None:
    """Refuse a tree that is too large, or that the drafter cannot grow."""
    if tree_nodes is None:
        return
    if not 1 <= tree_nodes <= MAX_NODES:
        raise ConfigError(f"tree_nodes must be between 1 and {MAX_NODES}, got {tree_nodes}")
    if drafter is None or not drafter.config.parallel:
        found = "there is none" if drafter is None else "this one drafts token by token (EAGLE-3)"
        raise ConfigError(f"tree_nodes={tree_nodes} needs a parallel drafter, but {found}", hint="omit tree_nodes")
