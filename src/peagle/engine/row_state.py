"""What the passes of `step.py` read and leave behind: the rows on the device, pieces of prompts, and emitted tokens.

Shapes: R rows, L = K + 1 for K draft tokens, P pages a request, N tokens, C chunks, B requests, E = L + 2, S scored
tokens.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowState:
    """What the device knows of every row. The last row is nobody's: it pads batches."""

    page_table: Tensor
    """int32 [R, P]; the last column always holds the waste page, where whatever lies beyond the others goes"""
    length: Tensor
    """int64 [R]: tokens in the target's memory, which is the index of the newest token"""
    tokens: Tensor
    """int64 [R, L]: the newest token, then its drafts"""
    confidence: Tensor
    """float32 [R, K]: how sure the drafter is that the drafts up to each are all right, a log-probability"""
    max_draft: Tensor
    """int64 [R]: draft tokens this request wants verified"""
    seed: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def empty(cls, num_rows: int, num_pages: int, num_draft_tokens: int, device: torch.device) -> "RowState":
        """State for `num_rows` requests of at most `num_pages` pages."""

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(num_rows + 1, *shape, dtype=dtype, device=device)

        return cls(
            page_table=zeros(torch.int32, num_pages + 1),
            length=zeros(torch.int64),
            tokens=zeros(torch.int64, num_draft_tokens + 1),
            confidence=zeros(torch.float32, num_draft_tokens),
            max_draft=zeros(torch.int64),
            seed=zeros(torch.int64),
            temperature=zeros(torch.float32),
            top_k=zeros(torch.int32),
            top_p=zeros(torch.float32) + 1,
            min_p=zeros(torch.float32),
        )

    @property
    def nobody(self) -> int:
        return len(self.length) - 1


class Chunks(NamedTuple):
    """Pieces of texts for one prefill pass, one after another in one long row of N tokens, padded to fixed shapes."""

    token_ids_N: Tensor
    next_ids_N: Tensor
    """the token after each one; that after a text's last token is not known yet, and may be anything here"""
    chunk_N: Tensor
    """the chunk each token belongs to; padding belongs to the last chunk, which has no rows"""
    row_C: Tensor
    """the row of each chunk's request"""
    first_token_C1: Tensor
    """C + 1 entries: tokens of chunk c are first_token[c] .. first_token[c + 1] - 1"""
    start_C: Tensor
    """index in its text of each chunk's first token"""
    first_write_C: Tensor
    """tokens of a lower index have their keys in a shared page already"""
    is_last_C: Tensor
    """1 or 0: whether the chunk ends its text, so that a token is to be chosen after it"""


class Decoded(NamedTuple):
    """What a pass emits."""

    emitted_BE: Tensor
    """for each request how many tokens are emitted, how many drafts were verified, and at least so many tokens"""
    logits_NV: Tensor
    """what the target said"""
    place_BL: Tensor
    """which row of the logits the tokens of each request came from"""
    scored_logits_SV: Tensor | None = None
    """what it said after those tokens of a prefill that were asked for"""
