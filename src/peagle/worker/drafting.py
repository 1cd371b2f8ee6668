"""Drafting: the drafter reads the newly accepted tokens with the target's hidden states and proposes K more.

A P-EAGLE drafter (`config.parallel`) proposes the tokens of all K depths in one pass, from mask slots behind the last
anchor; the likeliest ones grow a tree (`candidate_tree`), or a chain. A pair head (`drafter/pair_head.py`) scores them
by the token before. An EAGLE-3 drafter runs K passes: from the second on, its own token and state take the place of the
target's.

The drafter's entry that reads token i (anchor i - 1) is stored at index i of the request's pages. A page then depends
only on the tokens up to its end, so requests with the same prefix can share it.

Shapes: B requests, K depths, W tokens per depth, X = W or W x W (pairs), M drafts, N slots of a pass, S slots of one
request, T tokens, D drafter width, P pages per request, C chunks, A width of the concatenated hidden states (aux) of
the target.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from peagle.drafter.model import Attend, Drafter
from peagle.drafter.paged import PagedAttend
from peagle.drafter.pair_head import PairHead
from peagle.drafter.slots import PADDING, Slots, batch_serving_slots, packed_serving_slots, slot_inputs
from peagle.kernels.attention import WASTE_PAGE, PagedRows, joined, on_host
from peagle.kernels.candidate_tree import CandidateTree, grow_tree
from peagle.kernels.compiler import Compile
from peagle.kernels.likeliest import likeliest
from peagle.targets.paged import Memory
from peagle.worker.chunks import ChunkLayout, Chunks, FirstTokens
from peagle.worker.row_state import RowState
from peagle.worker.verify_batch import Accepted, VerifyBatch, cells

FIRST_DEPTH, DEEPER = 4, 2
"""with `adapts_depth`: the least depth, and the margin below the last step's deepest accepted draft; a path accepted to
its end doubles the depth"""


class DrafterBatch(NamedTuple):
    """Slots of one drafter pass: their places in the KV cache and the inputs of the layers."""

    paged_rows: PagedRows
    fused_1ND: Tensor
    embedding_1ND: Tensor
    rotary: tuple[Tensor, Tensor]
    last_B: Tensor
    """the slot of each request's last anchor; the mask slots of that anchor follow it"""


class Draft(NamedTuple):
    """The likeliest tokens of each depth, their log-probabilities, and the drafter states they come from."""

    tokens_BKW: Tensor
    logprob_BKX: Tensor
    state_BKD: Tensor


class Drafting:
    """A drafter over its KV cache. It writes the newest token and its drafts into the rows.

    Each pass has three parts: build the slots, run the layers, choose the tokens. `compile` is applied to the first and
    the last, which are many small operations; the runner compiles the layers.
    """

    def __init__(
        self,
        drafter: Drafter,
        state: RowState,
        memory: Memory,
        max_position: int,
        compile: Compile,
        needs_confidence: bool,
        adapts_depth: bool = False,
    ) -> None:
        """`adapts_depth`: draft trees no deeper than accepted drafts suggest. On a CPU, where less depth costs less."""
        self.drafter, self.state, self.memory = drafter, state, memory
        self.num_draft_tokens = state.num_draft_tokens
        self.page_size, self.max_position = memory.page_size, max_position
        self.needs_confidence = needs_confidence
        self.adapts_depth = adapts_depth and state.is_tree
        self._depth = min(FIRST_DEPTH, state.num_draft_tokens) if self.adapts_depth else state.num_draft_tokens
        self.width = drafter.num_candidates if state.is_tree else 1
        self.fused_mask_D = self._fuse_mask()
        self._run_fuse = compile(drafter.fuse)
        self._run_accepted_slots = compile(self._accepted_slots)
        self._run_decode_slots = compile(self._decode_slots)
        self._run_prompt_slots = compile(self._prompt_slots)
        self._run_join = compile(_join)
        self._run_choose = compile(self._choose)
        self._run_store = compile(self._store)

    @torch.no_grad()
    def _fuse_mask(self) -> Tensor:
        """The input of the mask slots, which does not depend on the text; empty for EAGLE-3."""
        drafter = self.drafter
        return drafter.fuse(drafter.mask_hidden) if drafter.config.parallel else drafter.fc.weight.new_zeros(0)

    def renew(self) -> None:
        """Recompute what depends on the weights, after they changed: in place, where captured graphs read it."""
        self.fused_mask_D.copy_(self._fuse_mask())

    @property
    def num_depths(self) -> int:
        """Draft tokens per drafter pass."""
        return self._depth if self.drafter.config.parallel else 1

    def after_decode(self, rows_B: Tensor, batch: VerifyBatch, accepted: Accepted, aux_NA: Tensor) -> None:
        """Draft behind the tokens that a verification pass accepted."""
        table_BP, first_anchor_B = batch.paged_rows.page_table_BP, batch.paged_rows.context_B
        if not rows_B.is_cuda:
            # On a CPU shapes may depend on values: drop the requests without drafts, which need the newest token only,
            # and the tokens that no request accepted.
            self.state.tokens[:, :1].index_copy_(0, rows_B, accepted.next_B1)
            self.state.confidence.index_fill_(0, rows_B, float("-inf"))
            drafting_B = (self.state.max_draft[rows_B] > 0).nonzero()[:, 0]
            if not len(drafting_B):
                return
            rows_B, table_BP, first_anchor_B = rows_B[drafting_B], table_BP[drafting_B], first_anchor_B[drafting_B]
            accepted = Accepted(*(each[drafting_B] for each in accepted))
            num_kept = int(accepted.num_accepted_B.max()) + 1
            if self.adapts_depth:
                deepest = num_kept - 1
                deeper = 2 * deepest if deepest >= self._depth else max(deepest + DEEPER, self._depth - 1, FIRST_DEPTH)
                self._depth = min(deeper, self.num_draft_tokens)
            aux_NA = aux_NA[accepted.place_BD[:, :num_kept].flatten()]
            place_BD = torch.arange(len(aux_NA)).view(-1, num_kept)
            accepted = accepted._replace(known_BD1=accepted.known_BD1[:, : num_kept + 1], place_BD=place_BD)
        slots = self._run_accepted_slots(table_BP, first_anchor_B, accepted, self._run_fuse(aux_NA))
        draft = self._draft(slots, table_BP, first_anchor_B + accepted.num_accepted_B)
        self._run_store(rows_B, accepted.next_B1, draft.tokens_BKW, draft.logprob_BKX)

    def after_prefill(self, chunks: Chunks, layout: ChunkLayout, first: FirstTokens, aux_NA: Tensor) -> None:
        """Fill the drafter's KV cache for the chunks, and draft behind those that end their sequence."""
        slots = self._run_prompt_slots(chunks, layout.index_N, layout.end_C, first.next_C1, self._run_fuse(aux_NA))
        draft = self._draft(slots, _table_of_last(chunks, layout), layout.end_C - 1)
        self._run_store(first.rows_C, first.next_C1, draft.tokens_BKW, draft.logprob_BKX)

    def after_shared(
        self,
        rows_B: Tensor,
        batch: VerifyBatch,
        accepted: Accepted,
        chunks: Chunks,
        layout: ChunkLayout,
        first: FirstTokens,
        aux: Tensor,
    ) -> None:
        """Both of the above in one pass, after a shared pass of the target. In `aux` the decode step's tokens come
        first."""
        fused, size = self._run_fuse(aux), len(batch.token_ids_N)
        table_BP, first_anchor_B = batch.paged_rows.page_table_BP, batch.paged_rows.context_B
        slots = self._run_join(
            self._run_accepted_slots(table_BP, first_anchor_B, accepted, fused[:size]),
            self._run_prompt_slots(chunks, layout.index_N, layout.end_C, first.next_C1, fused[size:]),
        )
        table = torch.cat([table_BP, _table_of_last(chunks, layout)])
        draft = self._draft(slots, table, torch.cat([first_anchor_B + accepted.num_accepted_B, layout.end_C - 1]))
        rows, next_ids = torch.cat([rows_B, first.rows_C]), torch.cat([accepted.next_B1, first.next_C1])
        self._run_store(rows, next_ids, draft.tokens_BKW, draft.logprob_BKX)

    def _draft(self, batch: DrafterBatch, table_BP: Tensor, last_anchor_B: Tensor) -> Draft:
        """Run the slots of the new anchors, and draft from the last anchor of each request."""
        draft: Draft = self._run_choose(self._run_layers(batch), batch.last_B, self.num_depths)
        drafts = [draft]
        one_B = torch.ones_like(last_anchor_B)
        num_passes = 0 if self.drafter.config.parallel else self.num_draft_tokens
        for depth in range(self.num_depths, num_passes):
            # EAGLE-3: the drafter's own token and state take the place of the target's.
            tokens_B2 = draft.tokens_BKW[..., 0].expand(-1, 2)
            batch = self._run_decode_slots(table_BP, last_anchor_B + depth, one_B, tokens_B2, draft.state_BKD)
            draft = self._run_choose(self._run_layers(batch), batch.last_B, 1)
            drafts.append(draft)
        tokens_BKW = torch.cat([each.tokens_BKW for each in drafts], dim=1)
        return Draft(tokens_BKW, torch.cat([each.logprob_BKX for each in drafts], dim=1), draft.state_BKD)

    # Building slots ---------------------------------------------------------------------------------------------------

    def _accepted_slots(
        self, table_BP: Tensor, first_anchor_B: Tensor, accepted: Accepted, fused_ND: Tensor
    ) -> DrafterBatch:
        """Slots for the tokens that a verification pass accepted."""
        num_anchors_B, fused_BTD = accepted.num_accepted_B + 1, fused_ND[accepted.place_BD]
        return self._decode_slots(table_BP, first_anchor_B, num_anchors_B, accepted.known_BD1, fused_BTD)

    def _decode_slots(
        self, table_BP: Tensor, first_anchor_B: Tensor, num_anchors_B: Tensor, token_ids_BT: Tensor, fused_BTD: Tensor
    ) -> DrafterBatch:
        """Slots of a decode step.

        Column t of `token_ids_BT` and `fused_BTD` belongs to index first_anchor + t, as in `slot_inputs`.
        """
        slots = batch_serving_slots(first_anchor_B, num_anchors_B, fused_BTD.shape[1], self.num_depths)
        num_requests, num_slots = slots.depth_BS.shape
        first_slot_B1 = torch.arange(num_requests + 1, device=table_BP.device) * num_slots
        cell_BS = cells(table_BP, slots.position_BS + 1, self.page_size)
        cell_N = cell_BS.masked_fill(slots.depth_BS == PADDING, WASTE_PAGE).flatten()
        paged_rows = PagedRows(table_BP, first_slot_B1, first_anchor_B + 1, cell_N, cell_N.new_empty(num_slots, 0))
        last_B = first_slot_B1[:-1] + num_anchors_B - 1
        return self._drafter_batch(slots, paged_rows, token_ids_BT, fused_BTD, first_anchor_B[:, None], last_B)

    def _prompt_slots(
        self, chunks: Chunks, index_N: Tensor, end_C: Tensor, next_C1: Tensor, fused_ND: Tensor
    ) -> DrafterBatch:
        """Slots of a prefill pass: every anchor of the chunks, and the mask slots behind the last anchor of each."""
        is_end_N = (chunks.is_last_C[chunks.chunk_N] != 0) & (index_N == end_C[chunks.chunk_N] - 1)
        next_N = torch.where(is_end_N, next_C1[chunks.chunk_N, 0], chunks.next_ids_N)
        slots, chunk_S, token_S, first_slot_C1 = packed_serving_slots(
            chunks.start_C, chunks.first_token_C1, len(next_N), self.num_depths
        )
        depth_S, position_S = slots.depth_BS[0], slots.position_BS[0]
        is_kept_S = torch.where(
            depth_S == 0, position_S + 1 >= chunks.first_write_C[chunk_S], chunks.is_last_C[chunk_S] != 0
        )
        table_CP = self.state.page_table[chunks.row_C]
        cell_S = cells(table_CP[chunk_S], position_S[:, None] + 1, self.page_size).flatten()
        cell_S = cell_S.masked_fill(~is_kept_S | (depth_S == PADDING), WASTE_PAGE)
        span_S0 = index_N.new_empty(len(cell_S), 0)
        paged_rows = PagedRows(table_CP, first_slot_C1, chunks.start_C + 1, cell_S, span_S0)
        last_C = (first_slot_C1[:-1] + chunks.first_token_C1.diff() - 1).clamp_min(0)
        # `slot_inputs` reads the token after token t from column t + 1.
        text_1N1 = functional.pad(next_N, (1, 0))[None]
        return self._drafter_batch(slots, paged_rows, text_1N1, fused_ND[None], slots.anchor_BS - token_S, last_C)

    def _drafter_batch(
        self,
        slots: Slots,
        paged_rows: PagedRows,
        token_ids_BT: Tensor,
        fused_BTD: Tensor,
        offset_BS: Tensor,
        last_B: Tensor,
    ) -> DrafterBatch:
        """The inputs of the layers for these slots; arguments as in `slot_inputs`."""
        fused_mask_D = self.fused_mask_D if self.drafter.config.parallel else fused_BTD[0, 0]
        token_ids_BS, fused_BSD = slot_inputs(
            slots, token_ids_BT, fused_BTD, self.drafter.config.mask_token_id or 0, fused_mask_D, offset_BS
        )
        fused_1ND = fused_BSD.flatten(0, 1)[None]
        position_1N = slots.position_BS.reshape(1, -1).clamp_max(self.max_position)
        embedding_1ND, rotary = self.drafter.layer_inputs(token_ids_BS.reshape(1, -1), fused_1ND, position_1N)
        return DrafterBatch(paged_rows, fused_1ND, embedding_1ND, rotary, last_B)

    # Running the layers -----------------------------------------------------------------------------------------------

    def _run_layers(self, batch: DrafterBatch) -> Tensor:
        paged_rows, window = on_host(batch.paged_rows), self.drafter.config.window

        def attention_of(layer: int) -> Attend:
            return PagedAttend(self.memory[layer], paged_rows, window(layer))

        return self.drafter.run_layers(batch.fused_1ND, batch.embedding_1ND, batch.rotary, attention_of)

    # Choosing tokens --------------------------------------------------------------------------------------------------

    def _choose(self, state_1ND: Tensor, last_B: Tensor, num_depths: int) -> Draft:
        """The most likely tokens of each of the last slots of each request."""
        slots_BK = last_B[:, None] + torch.arange(num_depths, device=last_B.device)
        normed_BKD, state_BKD = self.drafter.layer_outputs(state_1ND[0, slots_BK])
        logits_BKV = self.drafter.logits(normed_BKD)
        if self.drafter.pair_head is not None:
            return Draft(*self._choose_pairs(self.drafter.pair_head, logits_BKV), state_BKD)
        logits_NV, shape = logits_BKV.flatten(0, 1), (*slots_BK.shape, self.width)
        if self.width > 1:
            found = self.drafter.candidates(logits_NV)
        elif self.needs_confidence or logits_NV.is_cuda:
            found = likeliest(logits_NV)
        else:
            found = logits_NV.argmax(-1), torch.zeros(len(logits_NV))
        tokens_BKW, logprob_BKW = (each.view(shape) for each in found)
        return Draft(self.drafter.to_target_ids(tokens_BKW), logprob_BKW, state_BKD)

    def _choose_pairs(self, pair_head: PairHead, logits_BKV: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest tokens of each depth and the log-probabilities of pairs, or the one token of a chain."""
        found, shape = self.drafter.candidates(logits_BKV.flatten(0, 1)), (*logits_BKV.shape[:2], -1)
        tokens_BKW, logprob_BKW = (each.view(shape) for each in found)
        if self.state.is_tree:
            return self.drafter.to_target_ids(tokens_BKW), pair_head.conditionals(tokens_BKW, logprob_BKW)
        tokens_BK, logprob_BK = pair_head.chain(tokens_BKW, logprob_BKW)
        return self.drafter.to_target_ids(tokens_BK)[..., None], logprob_BK[..., None]

    def _store(self, rows_B: Tensor, next_B1: Tensor, tokens_BKW: Tensor, logprob_BKX: Tensor) -> None:
        """Write the newest token and the tree of its drafts into the rows."""
        state, num_nodes = self.state, self.state.tokens.shape[1] - 1
        tree: CandidateTree = grow_tree(logprob_BKX, state.max_draft[rows_B], num_nodes)
        if not state.is_tree:
            drafts_BM = tokens_BKW[..., 0]
        else:
            place_BM = (tree.depth_BL[:, 1:] - 1).clamp_max(self.num_draft_tokens - 1) * self.width + tree.choice_BM
            drafts_BM = tokens_BKW.flatten(1).gather(1, place_BM)
            for table, new_BL in zip((state.parent, state.depth, state.ancestors), tree[:3], strict=True):
                table.index_copy_(0, rows_B, new_BL)
        state.tokens.index_copy_(0, rows_B, torch.cat([next_B1, drafts_BM], dim=1))
        state.confidence.index_copy_(0, rows_B, tree.score_BM)


def _join(first: DrafterBatch, second: DrafterBatch) -> DrafterBatch:
    """The slots of both."""
    num_slots = len(first.paged_rows.cell_N)
    cos, sin = (torch.cat(pair, dim=1) for pair in zip(first.rotary, second.rotary, strict=True))
    return DrafterBatch(
        joined(first.paged_rows, second.paged_rows),
        torch.cat([first.fused_1ND, second.fused_1ND], dim=1),
        torch.cat([first.embedding_1ND, second.embedding_1ND], dim=1),
        (cos, sin),
        torch.cat([first.last_B, second.last_B + num_slots]),
    )


def _table_of_last(chunks: Chunks, layout: ChunkLayout) -> Tensor:
    """The page tables of the chunks that end their sequence. Drafts behind other chunks are discarded."""
    return layout.paged_rows.page_table_BP.masked_fill((chunks.is_last_C == 0)[:, None], WASTE_PAGE)
