"""Prefill: run chunks of prompts through the target and the drafter, and emit the first token of finished prompts.

One pass takes chunks of several requests. It fills both KV caches. For a chunk that ends its sequence it leaves the row
as a decode step does: with a newest token and its drafts. The pass has two halves, so that the first token can leave
before its drafts are made. If no request of the pass has drafts, the second half does not run.

Shapes: N tokens, C chunks, S tokens whose logits are kept for prompt_logprobs, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.kernels.adjust import Places
from peagle.kernels.attention import WASTE_PAGE, PagedRows
from peagle.kernels.compiler import Compile
from peagle.targets.paged import Memory, PagedTarget
from peagle.worker.adjustments import Adjustments
from peagle.worker.chunks import ChunkLayout, Chunks, FirstTokens
from peagle.worker.drafting import Drafting
from peagle.worker.launch import PassResult
from peagle.worker.row_state import RowState
from peagle.worker.verify_batch import cells


class Prefilled(NamedTuple):
    """The first half of a pass, and the input of the second."""

    result: PassResult
    chunks: Chunks
    layout: ChunkLayout
    first: FirstTokens
    aux_NA: Tensor | None
    """the target's hidden states, which the drafter reads; None without a drafter"""


class Prefill:
    """Prefill passes over the target's KV cache. `compile` is applied to what runs before and after the layers."""

    def __init__(
        self,
        target: PagedTarget,
        drafting: Drafting | None,
        state: RowState,
        memory: Memory,
        max_position: int,
        compile: Compile,
    ) -> None:
        self.target, self.drafting, self.state, self.memory = target, drafting, state, memory
        self.page_size, self.max_position = memory.page_size, max_position
        self._run_lay_out = compile(self._lay_out)
        self._run_first_tokens = compile(self._first_tokens)
        self._run_first_tokens_adjusted = compile(self._first_tokens_adjusted)

    def run(self, chunks: Chunks, adjustments: Adjustments | None = None, scored_S: Tensor | None = None) -> Prefilled:
        """Run chunks through the target. Pass `adjustments` if a request among them adjusts its logits.

        `scored_S` are tokens, among the N, whose logits are returned too.
        """
        layout = self.lay_out(chunks)
        last_C = layout.last_C
        logits_RV, aux_NA = self.target.forward(
            chunks.token_ids_N,
            layout.position_N,
            self.memory,
            layout.paged_rows,
            last_C if scored_S is None else torch.cat([last_C, scored_S]),
            has_aux=self.drafting is not None,
        )
        return self.emit(chunks, layout, logits_RV, aux_NA, adjustments)

    def lay_out(self, chunks: Chunks) -> ChunkLayout:
        layout: ChunkLayout = self._run_lay_out(chunks)
        return layout

    def emit(
        self,
        chunks: Chunks,
        layout: ChunkLayout,
        logits_RV: Tensor,
        aux_NA: Tensor | None,
        adjustments: Adjustments | None = None,
    ) -> Prefilled:
        """Choose the first tokens, once the target ran. Logits behind those of the chunks are of scored tokens."""
        last_C = layout.last_C
        logits_CV, scored_logits_SV = logits_RV[: len(last_C)], logits_RV[len(last_C) :]
        first: FirstTokens
        if adjustments is None:
            first = self._run_first_tokens(chunks, layout.end_C, logits_CV)
        else:
            first = self._run_first_tokens_adjusted(chunks, layout.end_C, logits_CV, adjustments)
        place_C1 = torch.arange(len(last_C), device=last_C.device)[:, None]
        # Plain rows, until `draft` runs.
        self.state.tokens[:, :1].index_copy_(0, first.rows_C, first.next_C1)
        self.state.confidence.index_fill_(0, first.rows_C, float("-inf"))
        result = PassResult(first.emitted_C4, logits_CV, place_C1, scored_logits_SV)
        return Prefilled(result, chunks, layout, first, aux_NA)

    def draft(self, prefilled: Prefilled) -> None:
        """Run the same chunks through the drafter, and leave drafts in the rows."""
        if self.drafting is not None:
            assert prefilled.aux_NA is not None, "requested by has_aux"
            self.drafting.after_prefill(prefilled.chunks, prefilled.layout, prefilled.first, prefilled.aux_NA)

    def _lay_out(self, chunks: Chunks) -> ChunkLayout:
        table_CP = self.state.page_table[chunks.row_C]
        offset_N = torch.arange(len(chunks.token_ids_N), device=chunks.row_C.device)
        index_N = chunks.start_C[chunks.chunk_N] + offset_N - chunks.first_token_C1[chunks.chunk_N]
        cell_N = cells(table_CP[chunks.chunk_N], index_N[:, None], self.page_size).flatten()
        is_shared_N = index_N < chunks.first_write_C[chunks.chunk_N]
        paged_rows = PagedRows(
            table_CP,
            chunks.first_token_C1,
            chunks.start_C,
            cell_N.masked_fill(is_shared_N, WASTE_PAGE),
            index_N.new_empty(len(index_N), 0),
        )
        end_C = chunks.start_C + chunks.first_token_C1.diff()
        last_C = (chunks.first_token_C1[1:] - 1).clamp_min(0)
        return ChunkLayout(index_N, index_N.clamp_max(self.max_position), end_C, last_C, paged_rows)

    def _first_tokens(self, chunks: Chunks, end_C: Tensor, logits_CV: Tensor) -> FirstTokens:
        """Choose the token after each chunk, and set the length of the rows whose sequence ends with the chunk."""
        state = self.state
        next_C1 = state.choose(logits_CV, chunks.row_C, end_C)[:, None]
        rows_C = chunks.row_C.masked_fill(chunks.is_last_C == 0, state.padding_row)
        state.length.index_copy_(0, rows_C, end_C.masked_fill(rows_C == state.padding_row, 0))
        zero_C1 = torch.zeros_like(next_C1)
        emitted_C4 = torch.cat([zero_C1 + 1, zero_C1, zero_C1, next_C1], dim=1)
        return FirstTokens(rows_C, next_C1, emitted_C4)

    def _first_tokens_adjusted(
        self, chunks: Chunks, end_C: Tensor, logits_CV: Tensor, adjustments: Adjustments
    ) -> FirstTokens:
        no_drafts_C0, root_C = end_C.new_empty(len(end_C), 0), torch.zeros_like(end_C)
        places = Places(chunks.row_C, end_C, no_drafts_C0, root_C + 1)
        adjusted_CV = adjustments.apply(logits_CV, places, root_C)
        first = self._first_tokens(chunks, end_C, adjusted_CV)
        adjustments.count(first.rows_C, first.next_C1, first.emitted_C4[:, 0])
        return first
