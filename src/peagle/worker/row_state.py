"""Rows: the state of each running request, on the device (`RowState`) and the part that the host writes (`HostRows`).

A request owns one row from admission until it finishes or is preempted. The last row is the padding row. It belongs to
no request, fills up batches to a captured size, and absorbs writes that must leave no trace.

Shapes: R rows, M nodes of a candidate tree, L = M + 1, P pages per request, N tokens of a pass, V vocabulary.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from peagle.kernels.candidate_tree import chain
from peagle.kernels.choose import choose_tokens
from peagle.kernels.random_numbers import STREAM_DRAW
from peagle.scheduling.request import Request


@dataclass(frozen=True)
class RowState:
    """Device state of every row. Each step reads it and leaves what the next step needs."""

    page_table: Tensor
    """int32 [R, P]; the last column always holds the waste page, which takes every index beyond the other pages"""
    length: Tensor
    """int64 [R]: tokens in the target's KV cache, and so the index of the newest token"""
    tokens: Tensor
    """int64 [R, L]: the newest token, then the drafts behind it: the nodes of a `CandidateTree`, best first"""
    confidence: Tensor
    """float32 [R, M]: the drafter's log-probability that each draft is accepted; -inf for places without one"""
    parent: Tensor
    depth: Tensor
    ancestors: Tensor
    """int64 [R, L] each: the tree, as in `CandidateTree`. They never change if drafts are chains"""
    max_draft: Tensor
    """int64 [R]: depth of the drafts"""
    seed: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    num_draft_tokens: int
    """K: the maximum depth of the drafts"""
    is_tree: bool
    """whether drafts may branch"""

    @classmethod
    def empty(
        cls,
        num_rows: int,
        num_pages: int,
        num_draft_tokens: int,
        device: torch.device,
        tree_nodes: int | None = None,
    ) -> "RowState":
        """State for `num_rows` requests of at most `num_pages` pages each. Drafts are chains without `tree_nodes`."""
        num_nodes = num_draft_tokens if tree_nodes is None else tree_nodes
        parent, depth, ancestors = (each_L.expand(num_rows + 1, -1).clone() for each_L in chain(num_nodes, device))

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(num_rows + 1, *shape, dtype=dtype, device=device)

        return cls(
            page_table=zeros(torch.int32, num_pages + 1),
            length=zeros(torch.int64),
            tokens=zeros(torch.int64, num_nodes + 1),
            confidence=zeros(torch.float32, num_nodes) - float("inf"),
            parent=parent,
            depth=depth,
            ancestors=ancestors,
            max_draft=zeros(torch.int64),
            seed=zeros(torch.int64),
            temperature=zeros(torch.float32),
            top_k=zeros(torch.int32),
            top_p=zeros(torch.float32) + 1,
            min_p=zeros(torch.float32),
            num_draft_tokens=num_draft_tokens,
            is_tree=tree_nodes is not None,
        )

    def without_drafts(self) -> "RowState":
        """The same rows for plain decoding: only the newest token of each."""
        return replace(
            self,
            tokens=self.tokens[:, :1],
            confidence=self.confidence[:, :0],
            parent=self.parent[:, :1],
            depth=self.depth[:, :1],
            ancestors=self.ancestors[:, :1],
            num_draft_tokens=0,
            is_tree=False,
        )

    @property
    def padding_row(self) -> int:
        return len(self.length) - 1

    def choose(self, logits_NV: Tensor, row_N: Tensor, position_N: Tensor) -> Tensor:
        """The target's token at each position, [N], by the sampling settings of its row."""
        return choose_tokens(
            logits_NV,
            self.temperature[row_N],
            self.top_k[row_N],
            self.top_p[row_N],
            self.min_p[row_N],
            self.seed[row_N],
            position_N,
            STREAM_DRAW,
        )


class HostRows:
    """Host copy of the tables that the host writes: page tables and sampling settings."""

    SETTINGS = ("max_draft", "seed", "temperature", "top_k", "top_p", "min_p")

    def __init__(self, num_rows: int, num_pages: int) -> None:
        self.page_table = np.zeros((num_rows + 1, num_pages + 1), np.int32)
        self.max_draft = np.zeros(num_rows + 1, np.int64)
        self.seed = np.zeros(num_rows + 1, np.int64)
        self.temperature = np.zeros(num_rows + 1, np.float32)
        self.top_k = np.zeros(num_rows + 1, np.int32)
        self.top_p = np.ones(num_rows + 1, np.float32)
        self.min_p = np.zeros(num_rows + 1, np.float32)

    def write_settings(self, request: Request) -> None:
        row, params = request.row, request.params
        self.max_draft[row] = request.num_draft_tokens if request.has_drafts else 0
        self.seed[row] = params.seed
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p

    def write_pages(self, request: Request) -> None:
        """Write the page table of a request; entries beyond its pages point to the waste page."""
        table = self.page_table[request.row]
        table[: len(request.pages)] = request.pages
        table[len(request.pages) :] = 0
