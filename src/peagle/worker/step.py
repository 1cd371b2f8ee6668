"""A decode step on the device: verify, accept, commit, draft, for every request of a batch.

A running request owns a row of `RowState`, which holds its newest token and a tree of M drafts, at most K deep. A
chain is a tree without branches. One step:

    verify    the target runs [newest token, draft 1 .. draft M] of every request in one pass. A large batch verifies
              only the drafts most likely to be accepted (`verify_batch`)
    accept    each request keeps the branch of drafts that the target would have chosen, plus the target's own token
              after them: the recovered token, or the bonus token at the end of a branch
    commit    the row's length grows by the number of kept tokens. The KV cache entries of a kept branch move up to
              where a chain would have left them; a later step overwrites the others
    draft     the drafter proposes drafts behind the new newest token (`drafting`)

The step leaves the newest token and its drafts in the row, so the next step can start without the host. Decoding
without a drafter is the same with K = 0. `prefill.py` puts new requests into this state.

All shapes depend on B, M, K and N alone, so each B and N is one CUDA graph. A batch with a request that adjusts its
logits or tolerates drafts (`Adjustments`), and a batch without drafts, have graphs of their own.

Shapes: B requests of the batch, M drafts, L = M + 1, K depths, D = K + 1, E = D + 3, N tokens of the verification
pass, V vocabulary, A width of the concatenated hidden states (aux) of the target.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from peagle.decoding.verify import keep_path, tolerate
from peagle.kernels.adjust import Places
from peagle.kernels.compiler import Compile
from peagle.targets.paged import Memory, PagedTarget
from peagle.worker.adjustments import Adjustments
from peagle.worker.drafting import Drafting
from peagle.worker.launch import PassResult
from peagle.worker.row_state import RowState
from peagle.worker.verify_batch import (
    Accepted,
    VerifyBatch,
    all_drafts,
    assume_acceptance,
    cells,
    draft_curve,
    likeliest_drafts,
)


class Verified(NamedTuple):
    """The first half of a step, and the input of the second."""

    result: PassResult
    batch: VerifyBatch
    accepted: Accepted
    aux_NA: Tensor | None
    """the target's hidden states, which the drafter reads; None without a drafter"""


def run_eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Stands in for a compiler."""
    return function


class Step:
    """Decode steps over the target's KV cache. All state is on the device.

    `compile` is applied to what runs before and after the layers, which is many small operations.
    """

    def __init__(
        self,
        target: PagedTarget,
        drafting: Drafting | None,
        state: RowState,
        memory: Memory,
        max_position: int,
        compile: Compile = run_eagerly,
        assumed: Sequence[float] = (),
    ) -> None:
        """`assumed` as `EngineConfig.assumed_acceptance`."""
        self.target, self.drafting, self.state, self.memory = target, drafting, state, memory
        self.page_size, self.max_position = memory.page_size, max_position
        self._assumed_K = torch.tensor(assumed, dtype=torch.float64, device=state.length.device) if assumed else None
        self._run_all_drafts = compile(all_drafts)
        self._run_likeliest_drafts = compile(likeliest_drafts)
        self._run_accept = compile(self._accept)
        self._run_accept_adjusted = compile(self._accept_adjusted)
        self._run_moves = compile(self._moves)
        self._run_curve = compile(draft_curve)

    def decode(
        self, rows_B: Tensor, adjustments: Adjustments | None = None, num_tokens: int | None = None
    ) -> PassResult:
        """Run one step for these rows. Pass `adjustments` if a request among them adjusts its logits.

        `num_tokens` limits the verification pass to the likeliest drafts.
        """
        verified = self.verify(rows_B, adjustments, num_tokens)
        self.draft(rows_B, verified)
        return self.with_curve(rows_B, verified.result)

    def with_curve(self, rows_B: Tensor, result: PassResult) -> PassResult:
        """The result with the new drafts by probability, if there is a drafter."""
        if self.drafting is None:
            return result
        return result._replace(curve_2T=self._run_curve(self.state.confidence, rows_B))

    # First half: verify, accept, commit -------------------------------------------------------------------------------

    def verify(self, rows_B: Tensor, adjustments: Adjustments | None = None, num_tokens: int | None = None) -> Verified:
        batch = self.verify_batch(rows_B, num_tokens)
        logits_NV, aux_NA = self.target.forward(
            batch.token_ids_N,
            batch.position_N,
            self.memory,
            batch.paged_rows,
            None,
            has_aux=self.drafting is not None,
        )
        return self.accept(rows_B, batch, logits_NV, aux_NA, adjustments)

    def accept(
        self,
        rows_B: Tensor,
        batch: VerifyBatch,
        logits_NV: Tensor,
        aux_NA: Tensor | None,
        adjustments: Adjustments | None = None,
    ) -> Verified:
        """Accept and commit, once the target ran."""
        accepted: Accepted
        if adjustments is None:
            accepted = self._run_accept(rows_B, batch, logits_NV)
        else:
            accepted = self._run_accept_adjusted(rows_B, batch, logits_NV, adjustments)
        if self.state.is_tree:
            self.memory.move(*self._run_moves(batch, accepted))
        return Verified(PassResult(accepted.emitted_BE, logits_NV, accepted.place_BD), batch, accepted, aux_NA)

    def verify_batch(self, rows_B: Tensor, num_tokens: int | None) -> VerifyBatch:
        batch: VerifyBatch
        if num_tokens is None or num_tokens >= len(rows_B) * self.state.tokens.shape[1]:
            batch = self._run_all_drafts(self.state, rows_B, self.page_size, self.max_position)
        else:
            batch = self._run_likeliest_drafts(self.state, rows_B, num_tokens, self.page_size, self.max_position)
        return batch

    def _accept(self, rows_B: Tensor, batch: VerifyBatch, logits_NV: Tensor) -> Accepted:
        wanted_N = self.state.choose(logits_NV, batch.row_N, batch.position_N + 1)
        wanted_BL = wanted_N[batch.place_BL]
        if self._assumed_K is not None:
            tokens_BL, length_B = batch.token_ids_N[batch.place_BL], batch.paged_rows.context_B
            wanted_BL = assume_acceptance(wanted_BL, tokens_BL, self._assumed_K, rows_B, length_B)
        return self._commit(rows_B, batch, wanted_BL)

    def _accept_adjusted(
        self, rows_B: Tensor, batch: VerifyBatch, logits_NV: Tensor, adjustments: Adjustments
    ) -> Accepted:
        """Adjust the logits before accepting, and count the emitted tokens for the penalties of the next step."""
        state, row_N, node_N = self.state, batch.row_N, batch.node_N
        places = Places(row_N, batch.position_N + 1, state.tokens[:, 1:][row_N], state.ancestors[row_N, node_N])
        adjusted_NV = adjustments.apply(logits_NV, places, node_N)
        exact_N = state.choose(adjusted_NV, row_N, places.index_N)
        wanted_BL = tolerate(
            exact_N[batch.place_BL],
            adjusted_NV,
            batch.place_BL,
            batch.token_ids_N[batch.place_BL],
            state.parent[rows_B],
            batch.num_drafts_B,
            adjustments.tolerated_gap[rows_B],
        )
        accepted = self._commit(rows_B, batch, wanted_BL, exact_N)
        adjustments.count(rows_B, accepted.emitted_BE[:, 3:], accepted.emitted_BE[:, 0])
        return accepted

    def _commit(self, rows_B: Tensor, batch: VerifyBatch, wanted_BL: Tensor, exact_N: Tensor | None = None) -> Accepted:
        """Compare the drafts with the wanted tokens, and set the new lengths of the rows.

        `exact_N` are the target's own tokens if they may differ from `wanted_BL`, because a draft is tolerated.
        """
        state, num_drafts_B = self.state, batch.num_drafts_B
        tokens_BL = batch.token_ids_N[batch.place_BL]
        tree = (state.parent[rows_B], state.depth[rows_B], state.ancestors[rows_B])
        num_accepted_B, node_BD = keep_path(wanted_BL, tokens_BL, *tree, num_drafts_B, state.num_draft_tokens)
        wanted_BD = wanted_BL.gather(1, node_BD)
        next_B1 = wanted_BD.gather(1, num_accepted_B[:, None])
        # The padding row must not grow: it occurs several times in a batch, and all its tokens are waste.
        new_length_B = batch.paged_rows.context_B + num_accepted_B + 1
        state.length.index_copy_(0, rows_B, new_length_B.masked_fill(rows_B == state.padding_row, 0))
        known_BD1 = torch.cat([tokens_BL[:, :1], wanted_BD], dim=1)
        place_BD = batch.place_BL.gather(1, node_BD)
        node_L = torch.arange(tokens_BL.shape[1], device=rows_B.device)
        is_draft_BL = (node_L > 0) & (node_L <= num_drafts_B[:, None])
        has_child_B = (is_draft_BL & (tree[0] == node_BD.gather(1, num_accepted_B[:, None]))).any(1)
        marks_B = (~has_child_B).long() << num_accepted_B
        if exact_N is not None:
            depth_D = torch.arange(node_BD.shape[1], device=rows_B.device)
            is_tolerated_BD = (wanted_BD != exact_N[place_BD]) & (depth_D < num_accepted_B[:, None])
            marks_B += (is_tolerated_BD.long() << depth_D).sum(1)
        counts_B3 = torch.stack([num_accepted_B + 1, num_drafts_B, marks_B], dim=1)
        emitted_BE = torch.cat([counts_B3, wanted_BD], dim=1)
        return Accepted(emitted_BE, known_BD1, next_B1, num_accepted_B, place_BD, node_BD)

    def _moves(self, batch: VerifyBatch, accepted: Accepted) -> tuple[Tensor, Tensor]:
        """Cells of the accepted drafts, and the cells where the sequence continues; -1 for rejected drafts."""
        table_BP, length_B1 = batch.paged_rows.page_table_BP, batch.paged_rows.context_B[:, None]
        depth_K = torch.arange(1, accepted.node_BD.shape[1], device=length_B1.device)
        source_BK = cells(table_BP, length_B1 + accepted.node_BD[:, 1:], self.page_size)
        destination_BK = cells(table_BP, length_B1 + depth_K, self.page_size)
        is_rejected_BK = depth_K > accepted.num_accepted_B[:, None]
        return source_BK, destination_BK.masked_fill(is_rejected_BK, -1)

    # Second half: draft -----------------------------------------------------------------------------------------------

    def draft(self, rows_B: Tensor, verified: Verified) -> None:
        """Leave the newest token in the rows, and its drafts if there is a drafter."""
        if self.drafting is None:
            self.state.tokens.index_copy_(0, rows_B, verified.accepted.next_B1)
            return
        assert verified.aux_NA is not None, "requested by has_aux"
        self.drafting.after_decode(rows_B, verified.batch, verified.accepted, verified.aux_NA)
