"""A decode step and chunks of prompts in one pass of the target and, if there is one, of the drafter.

A few more tokens hardly slow down a pass over few: it reads all weights and launches as many kernels anyway. So a
prompt that shares the pass of the decode step costs a fraction of a prefill pass. The new request decodes from the next
step on.

Shapes: B decoding requests, N tokens of the verification pass, C chunks, M tokens of the chunks, R rows of logits, A
width of the concatenated hidden states (aux) of the target.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.kernels.attention import PagedRows, joined
from peagle.kernels.compiler import Compile
from peagle.worker.chunks import ChunkLayout, Chunks
from peagle.worker.launch import PassResult
from peagle.worker.prefill import Prefill
from peagle.worker.step import Step
from peagle.worker.verify_batch import VerifyBatch


class SharedTokens(NamedTuple):
    """Input of the target: the tokens of the decode step, then those of the chunks."""

    token_ids: Tensor
    position: Tensor
    paged_rows: PagedRows
    logit_rows_R: Tensor
    """every token of the decode step, and the last of each chunk"""


class SharedPass:
    """`Step` and `Prefill` as one pass. `compile` is applied to what runs before the layers."""

    def __init__(self, step: Step, prefill: Prefill, compile: Compile) -> None:
        self.step, self.prefill = step, prefill
        self._run_join = compile(_join)

    def run(self, rows_B: Tensor, chunks: Chunks, num_tokens: int | None = None) -> tuple[PassResult, PassResult]:
        """Run a decode step of these rows, as `Step.decode`, and prefill the chunks; the results of both."""
        step, prefill, drafting = self.step, self.prefill, self.step.drafting
        batch, layout = step.verify_batch(rows_B, num_tokens), prefill.lay_out(chunks)
        tokens: SharedTokens = self._run_join(batch, chunks, layout)
        logits_RV, aux = step.target.forward(
            tokens.token_ids,
            tokens.position,
            step.memory,
            tokens.paged_rows,
            tokens.logit_rows_R,
            has_aux=drafting is not None,
        )
        size = len(batch.token_ids_N)
        verified = step.accept(rows_B, batch, logits_RV[:size], None)
        prefilled = prefill.emit(chunks, layout, logits_RV[size:], None)
        if drafting is None:
            step.draft(rows_B, verified)
        else:
            assert aux is not None, "requested by has_aux"
            drafting.after_shared(rows_B, batch, verified.accepted, chunks, layout, prefilled.first, aux)
        return step.with_curve(rows_B, verified.result), prefilled.result


def _join(batch: VerifyBatch, chunks: Chunks, layout: ChunkLayout) -> SharedTokens:
    size, depth_M = len(batch.token_ids_N), layout.index_N - chunks.start_C[chunks.chunk_N]
    own_N = torch.arange(size, device=depth_M.device)
    return SharedTokens(
        torch.cat([batch.token_ids_N, chunks.token_ids_N]),
        torch.cat([batch.position_N, layout.position_N]),
        joined(batch.paged_rows, layout.paged_rows, depth_M),
        torch.cat([own_N, layout.last_C + size]),
    )
