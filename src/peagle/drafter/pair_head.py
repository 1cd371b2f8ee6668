"""The pair head of a parallel drafter: how well a token follows the token drafted before it.

A parallel drafter predicts each depth without knowing what it drafts at the depths before, so neighboring drafts may
contradict each other ("New" + "Angeles"). The pair head adds a score <left[a], right[b]> for token b behind token a:
two tables of R numbers per token of the draft vocabulary, and no pass of a network.

Only the W likeliest tokens of each depth are scored, and they keep the probability that they have together. The first
depth has no pair: the drafter reads the newest token itself.

Two depths of two tokens. Behind "New" nothing changes. The head multiplies the odds of "Angeles" behind "Los" by 6, so
they are 0.2 * 6 to 0.6, that is two to one, and both keep 0.8 together:

>>> new, los, york, angeles = range(4)
>>> left_UR, right_UR = torch.zeros(4, 1), torch.zeros(4, 1)
>>> left_UR[los], right_UR[angeles] = 1.0, torch.tensor(6.0).log()
>>> head = PairHead(left_UR, right_UR)
>>> logprob_KW = torch.tensor([[0.5, 0.4], [0.6, 0.2]]).log()
>>> pairs_KWW = head.conditionals(torch.tensor([[new, los], [york, angeles]]), logprob_KW)
>>> [[round(probability, 3) for probability in row] for row in pairs_KWW[1].exp().tolist()]
[[0.6, 0.2], [0.267, 0.533]]

A chain starts with the likeliest token of the first depth and continues with the likeliest one behind it:

>>> for first in ([new, los], [los, new]):
...     token_ids_K, logprob_K = head.chain(torch.tensor([first, [york, angeles]]), logprob_KW)
...     print(token_ids_K.tolist() == [first[0], york if first[0] == new else angeles], logprob_K.exp())
True tensor([0.5000, 0.6000])
True tensor([0.5000, 0.5333])

Shapes: B requests (or any leading dimensions), K depths, W tokens per depth, U draft vocabulary, R rank, D width.
The first W of [B, K, W, W] is the token at the depth before.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional


class PairHead(nn.Module):
    """Scores of neighboring drafts. Token ids are those of the draft vocabulary."""

    def __init__(self, left_UR: Tensor, right_UR: Tensor) -> None:
        super().__init__()
        self.left = nn.Parameter(left_UR, requires_grad=False)
        self.right = nn.Parameter(right_UR, requires_grad=False)

    @property
    def rank(self) -> int:
        return self.left.shape[1]

    def tables(self) -> tuple[Tensor, Tensor]:
        """Both tables [U, R], with gradients if they are trained."""
        return self.left, self.right

    def conditionals(self, tokens_BKW: Tensor, logprob_BKW: Tensor) -> Tensor:
        """Log-probability of each token behind each token of the depth before, [B, K, W, W]; at depth 1 its own."""
        left_BKWR = functional.embedding(tokens_BKW[..., :-1, :], self.left).float()
        right_BKWR = functional.embedding(tokens_BKW[..., 1:, :], self.right).float()
        deeper_BKW = logprob_BKW[..., 1:, :]
        paired_BKWW = deeper_BKW[..., None, :] + left_BKWR @ right_BKWR.transpose(-1, -2)
        paired_BKWW = paired_BKWW.log_softmax(-1) + deeper_BKW.logsumexp(-1)[..., None, None]
        first_B1WW = logprob_BKW[..., :1, None, :].expand(*logprob_BKW.shape[:-2], 1, *paired_BKWW.shape[-2:])
        return torch.cat([first_B1WW, paired_BKWW], dim=-3)

    def chain(self, tokens_BKW: Tensor, logprob_BKW: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest token of the first depth, then always the likeliest behind it, [B, K], with log-probability."""
        pairs_BKWW = self.conditionals(tokens_BKW, logprob_BKW)
        found_B1 = logprob_BKW[..., 0, :].argmax(-1, keepdim=True)
        places, logprobs = [found_B1], [logprob_BKW[..., 0, :].gather(-1, found_B1)]
        for depth in range(1, logprob_BKW.shape[-2]):
            row_B1W = found_B1[..., None].expand(*found_B1.shape, pairs_BKWW.shape[-1])
            behind_BW = pairs_BKWW[..., depth, :, :].gather(-2, row_B1W)[..., 0, :]
            found_B1 = behind_BW.argmax(-1, keepdim=True)
            places.append(found_B1)
            logprobs.append(behind_BW.gather(-1, found_B1))
        place_BK1 = torch.cat(places, dim=-1)[..., None]
        return tokens_BKW.gather(-1, place_BK1)[..., 0], torch.cat(logprobs, dim=-1)


class ProjectedPairHead(PairHead):
    """A head in training: to rows of its own it adds a projection of the target's tables.

    Tokens that are rare in the data so share what is learned about similar ones. `read_tables` gives the embeddings and
    the head's rows of the draft vocabulary, [U, D] each, when they are first needed: a resumed run loads its weights
    late. Rows are scaled to length one, so the target's scale does not matter.
    """

    def __init__(
        self, left_UR: Tensor, right_UR: Tensor, width: int, read_tables: Callable[[], tuple[Tensor, Tensor]]
    ) -> None:
        super().__init__(left_UR, right_UR)
        self.left_projection, self.right_projection = (
            nn.Parameter(left_UR.new_zeros(width, left_UR.shape[1]), requires_grad=False) for _ in range(2)
        )
        # Plain tensors behind a function: the target's tables must not enter the state dict.
        self._read_rows = cache(lambda: [(rows_UD, _inverse_length(rows_UD)) for rows_UD in read_tables()])

    def tables(self) -> tuple[Tensor, Tensor]:
        (left_UD, left_U1), (right_UD, right_U1) = self._read_rows()
        left_UR = left_UD @ self.left_projection.to(left_UD.dtype)
        right_UR = right_UD @ self.right_projection.to(right_UD.dtype)
        return self.left + left_UR * left_U1, self.right + right_UR * right_U1


def _inverse_length(rows_UD: Tensor) -> Tensor:
    """One by the length of each row, [U, 1]; 0 for a row of zeros."""
    return rows_UD.norm(dim=-1, keepdim=True, dtype=torch.float32).reciprocal().nan_to_num(posinf=0.0)
