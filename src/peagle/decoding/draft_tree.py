"""A tree of drafts on the host, slow and simple: the judge of `kernels/candidate_tree.py`, and what a grammar edits.

Shapes: K depths, U draft vocabulary.
"""

import heapq
from collections.abc import Callable, Sequence

from torch import Tensor

WIDTH = 16
"""tokens per depth that a tree is grown from"""


class DraftTree:
    """Nodes 1, 2, ... behind node 0, which is the text so far. A parent comes before its children."""

    def __init__(self, token_ids: Sequence[int] = (), parents: Sequence[int] | None = None) -> None:
        """Without parents, each token follows the one before it."""
        self.token_ids: list[int] = []
        """of nodes 1, 2, ..."""
        self.parents, self.depths, self.ancestors = [0], [0], [1]
        """of nodes 0, 1, ..., as in `CandidateTree`"""
        for parent, token_id in zip(range(len(token_ids)) if parents is None else parents, token_ids, strict=True):
            self.add(parent, token_id)

    def __len__(self) -> int:
        return len(self.token_ids)

    def add(self, parent: int, token_id: int) -> int:
        """The new node."""
        node = len(self.parents)
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.ancestors.append(self.ancestors[parent] | 1 << node)
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

    def tokens(self, nodes: Sequence[int]) -> list[int]:
        return [self.token_ids[node - 1] for node in nodes]


def best_first(logits_KU: Tensor, to_target_ids: Callable[[Tensor], Tensor], num_nodes: int) -> DraftTree:
    """The `num_nodes` likeliest paths, by the product of the probabilities of their tokens."""
    top = logits_KU.float().log_softmax(-1).topk(min(WIDTH, logits_KU.shape[-1]), dim=-1)
    logprobs, token_ids = top.values.tolist(), to_target_ids(top.indices).tolist()
    tree = DraftTree()
    heap = [(-logprob, 0, choice, 0) for choice, logprob in enumerate(logprobs[0])]
    heapq.heapify(heap)
    while heap and len(tree) < num_nodes:
        score, parent, choice, depth = heapq.heappop(heap)
        node = tree.add(parent, token_ids[depth][choice])
        if depth + 1 < len(logprobs):
            for child, logprob in enumerate(logprobs[depth + 1]):
                heapq.heappush(heap, (score - logprob, node, child, depth + 1))
    return tree
