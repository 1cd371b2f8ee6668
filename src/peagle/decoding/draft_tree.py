"""A tree of drafts, slow and simple: the judge of `kernels/candidate_tree.py`.

Shapes: K depths, U draft vocabulary.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

WIDTH = 16
"""tokens per depth that a tree is grown from"""


@dataclass
class DraftTree:
    """Nodes behind the newest token, which is node 0. A parent comes before its children, a better node first."""

    token_ids: list[int] = field(default_factory=list)
    """of nodes 1, 2, ..."""
    parents: list[int] = field(default_factory=list)

    @classmethod
    def chain(cls, token_ids: Sequence[int]) -> "DraftTree":
        return cls(list(token_ids), list(range(len(token_ids))))

    def tokens(self, nodes: Sequence[int]) -> list[int]:
        return [self.token_ids[node - 1] for node in nodes]

    def children(self, parent: int) -> list[int]:
        return [node for node, own in enumerate(self.parents, start=1) if own == parent]

    def child(self, parent: int, token_id: int) -> int | None:
        """The node of a token behind a node, if the tree has it."""
        return next((node for node in self.children(parent) if self.token_ids[node - 1] == token_id), None)

    def branch_below(self, node: int) -> list[int]:
        """The nodes from the best child of a node down to a leaf, always by the best child."""
        branch = []
        while children := self.children(node):
            branch.append(node := children[0])
        return branch


def best_first(logits_KU: Tensor, to_target_ids: Callable[[Tensor], Tensor], num_nodes: int) -> DraftTree:
    """The `num_nodes` likeliest paths, by the product of the probabilities of their tokens."""
    logprob_KU = logits_KU.float().log_softmax(-1)
    top = logprob_KU.topk(min(WIDTH, logits_KU.shape[-1]), dim=-1)
    logprobs, token_ids = top.values.tolist(), to_target_ids(top.indices).tolist()
    tree = DraftTree()
    heap = [(-logprob, 0, choice, 0) for choice, logprob in enumerate(logprobs[0])]
    heapq.heapify(heap)
    while heap and len(tree.token_ids) < num_nodes:
        score, parent, choice, depth = heapq.heappop(heap)
        tree.token_ids.append(token_ids[depth][choice])
        tree.parents.append(parent)
        if depth + 1 < len(logprobs):
            for child, logprob in enumerate(logprobs[depth + 1]):
                heapq.heappush(heap, (score - logprob, len(tree.token_ids), child, depth + 1))
    return tree
