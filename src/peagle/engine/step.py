"""The step on the device: verify, accept or recover, commit, draft, for all rows of a batch, without asking the host.

A running request owns a row of `RowState`. One decode step takes the rows of a batch through

    verify    the target runs [newest token, draft 1 .. draft K] of every row in one pass, or, of a large batch, the
              drafts that are likeliest to be kept (`verify_rows`)
    accept    each row keeps its drafts while they are what the target wants, and one token more
    commit    the row's length grows by what it kept; keys of rejected drafts are overwritten later
    draft     the drafter reads the kept tokens with the target's states and proposes K more

and leaves in the row what the next step needs, so that steps can follow each other without a look by the host. Plain
decoding is the same with K = 0. Prefill runs chunks of several requests' texts, fills both memories, and ends, for a
request's last chunk, where a decode step ends: with a newest token and drafts in the row.

Everything is shaped by B and K alone, so each (B, K) is one CUDA graph; passes with a request whose logits are changed
before the choice (`Adjustments`) are a second one.

Where things are kept: token i of a text has its target key at index i of its pages. The drafter's entry that reads
token i (anchor i - 1) is kept at index i of the same pages: what a page holds then depends on the tokens up to its end
and not on the one after it, so that pages can be shared by requests that go on differently.

Shapes: R rows, B requests of a batch, K draft tokens, L = K + 1, E = L + 2 numbers of what is emitted, N tokens, C
chunks, P pages a request, D drafter width, A concatenated aux width.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from peagle.decoding.sampling import STREAM_DRAW
from peagle.decoding.verify import keep_matches
from peagle.drafter.model import Attend, Drafter
from peagle.drafter.slots import PADDING, Slots, batch_serving_slots, packed_serving_slots, slot_inputs
from peagle.engine.adjustments import Adjustments
from peagle.engine.row_state import Chunks, Decoded, RowState
from peagle.engine.verify_rows import VerifyRows, all_rows, cells, likeliest_rows, num_verify_rows
from peagle.kernels.attention import WASTE_PAGE, PagedRows, on_host, paged_attention
from peagle.kernels.choose import choose_tokens
from peagle.kernels.likeliest import likeliest
from peagle.targets.paged import Compile, Memory, PagedTarget


class Verified(NamedTuple):
    """What the first half of a step leaves for the second."""

    decoded: Decoded
    rows: VerifyRows
    aux_NA: Tensor | None
    """None where there is no drafter to read them"""
    known_BL1: Tensor
    """the text from the old newest token on"""
    next_B1: Tensor
    """the new newest token"""
    num_accepted_B: Tensor


class DrafterRows(NamedTuple):
    """Slots of one pass of the drafter: where they stand, and what its layers read."""

    paged_rows: PagedRows
    fused_1ND: Tensor
    embedding_1ND: Tensor
    rotary: tuple[Tensor, Tensor]
    last_B: Tensor
    """the row of each request's last anchor; those of its deeper slots follow"""


class Step:
    """Target, drafter and their memories, and the passes over them. All state is on the device.

    `verify_rows` limits the rows of a verification pass as `num_verify_rows` says. `compile` is applied to what lies
    between the layers, which is many small operations.
    """

    def __init__(
        self,
        target: PagedTarget,
        drafter: Drafter | None,
        num_draft_tokens: int,
        state: RowState,
        target_memory: Memory,
        drafter_memory: Memory,
        max_position: int,
        compile: Compile | None = None,
        verify_rows: int | None = None,
    ) -> None:
        self.target, self.drafter, self.num_draft_tokens = target, drafter, num_draft_tokens
        self.verify_rows = verify_rows
        self.state, self.target_memory, self.drafter_memory = state, target_memory, drafter_memory
        self.adjustments: Adjustments | None = None
        """given to it before the first pass that `adjusts`"""
        self.page_size = target_memory[0][0].shape[1]
        self.max_position = max_position
        compile = compile or (lambda function: function)
        self._all_rows, self._likeliest_rows = compile(all_rows), compile(likeliest_rows)
        for name in ("accept", "accept_adjusted", "lay_out_chunks", "start", "start_adjusted"):
            setattr(self, f"_{name}", compile(getattr(self, f"_{name}")))
        if drafter is not None:
            self._fuse = compile(drafter.fuse)
            for name in ("likeliest", "lay_out_kept", "lay_out_slots", "lay_out_prompt_slots", "leave"):
                setattr(self, f"_{name}", compile(getattr(self, f"_{name}")))
            with torch.no_grad():
                mask_hidden = drafter.mask_hidden if drafter.config.parallel else drafter.fc.weight.new_zeros(0)
                self.fused_mask_D = drafter.fuse(mask_hidden) if drafter.config.parallel else mask_hidden

    # A decode step ----------------------------------------------------------------------------------------------------

    def decode(self, rows_B: Tensor, adjusts: bool = False) -> Decoded:
        """One step of the given rows; `adjusts` where a request among them asks for it."""
        verified = self.verify(rows_B, adjusts)
        self.draft(rows_B, verified)
        return verified.decoded

    def verify(self, rows_B: Tensor, adjusts: bool = False) -> Verified:
        """The first half of a step, up to the commit."""
        num_rows = num_verify_rows(len(rows_B), self.num_draft_tokens, self.verify_rows)
        if adjusts or num_rows == len(rows_B) * (self.num_draft_tokens + 1):
            rows = self._all_rows(self.state, rows_B, self.page_size, self.max_position)
        else:
            rows = self._likeliest_rows(self.state, rows_B, num_rows, self.page_size, self.max_position)
        logits_NV, aux_NA = self.target.forward(
            rows.token_ids_N,
            rows.position_N,
            self.target_memory,
            rows.paged_rows,
            None,
            has_aux=self.drafter is not None,
        )
        accept = self._accept_adjusted if adjusts else self._accept
        emitted_BE, known_BL1, next_B1, num_accepted_B = accept(rows_B, rows, logits_NV)
        return Verified(Decoded(emitted_BE, logits_NV, rows.place_BL), rows, aux_NA, known_BL1, next_B1, num_accepted_B)

    def draft(self, rows_B: Tensor, verified: Verified) -> None:
        """The second half: leave the newest token in the row, and the drafts behind it where there is a drafter."""
        _, rows, aux_NA, known_BL1, next_B1, num_accepted_B = verified
        if self.drafter is None:
            self.state.tokens.index_copy_(0, rows_B, next_B1)
            return
        assert aux_NA is not None, "asked for where there is a drafter"
        if not rows_B.is_cuda:
            # Shapes may follow values here, so rows that no request has kept are left out.
            num_rows = int(num_accepted_B.max()) + 1
            aux_NA, known_BL1 = aux_NA[rows.place_BL[:, :num_rows].flatten()], known_BL1[:, : num_rows + 1]
            rows = rows._replace(place_BL=torch.arange(len(aux_NA)).view(-1, num_rows))
        slots = self._lay_out_kept(rows, num_accepted_B, known_BL1, self._fuse(aux_NA))
        table_BP, first_anchor_B = rows.paged_rows.page_table_BP, rows.paged_rows.context_B
        self._leave(rows_B, next_B1, *self._draft(slots, table_BP, first_anchor_B + num_accepted_B))

    def _accept(self, rows_B: Tensor, rows: VerifyRows, logits_NV: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Decide and commit: what is emitted [B, E], the text from the old newest token on [B, L + 1], the new
        newest token [B, 1], and how many drafts were accepted [B]."""
        return self._commit(rows_B, rows, self._choose(logits_NV, rows.row_N, rows.position_N + 1))

    def _accept_adjusted(
        self, rows_B: Tensor, rows: VerifyRows, logits_NV: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`_accept` by what the rows' requests make of the logits; their counts take the emitted tokens in."""
        assert self.adjustments is not None, "given before"
        drafts_BK = rows.token_ids_N.view(len(rows_B), self.num_draft_tokens + 1)[:, 1:]
        adjusted_NV = self.adjustments.apply(logits_NV, rows_B, drafts_BK, rows.paged_rows.context_B + 1)
        wanted_N = self._choose(adjusted_NV, rows.row_N, rows.position_N + 1)
        committed = self._commit(rows_B, rows, wanted_N)
        self.adjustments.count(rows_B, wanted_N.view(len(rows_B), -1), committed[0][:, 0])
        return committed

    def _commit(self, rows_B: Tensor, rows: VerifyRows, wanted_N: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        state, num_drafts_B = self.state, rows.num_drafts_B
        tokens_BL, wanted_BL = rows.token_ids_N[rows.place_BL], wanted_N[rows.place_BL]
        num_accepted_B, next_B = keep_matches(wanted_BL, tokens_BL[:, 1:], num_drafts_B)
        # The row that is nobody's must not grow: it stands in several places of a batch, and its text is all waste.
        new_length_B = rows.paged_rows.context_B + num_accepted_B + 1
        state.length.index_copy_(0, rows_B, new_length_B.masked_fill(rows_B == state.nobody, 0))
        emitted_BE = torch.cat([num_accepted_B[:, None] + 1, num_drafts_B[:, None], wanted_BL], dim=1)
        known_BL1 = torch.cat([tokens_BL[:, :1], wanted_BL], dim=1)
        return emitted_BE, known_BL1, next_B[:, None], num_accepted_B

    def _choose(self, logits_NV: Tensor, row_N: Tensor, position_N: Tensor) -> Tensor:
        """What the target wants at each position, by the settings of the row it belongs to, [N]."""
        state = self.state
        return choose_tokens(
            logits_NV,
            state.temperature[row_N],
            state.top_k[row_N],
            state.top_p[row_N],
            state.min_p[row_N],
            state.seed[row_N],
            position_N,
            STREAM_DRAW,
        )

    # Prefill ----------------------------------------------------------------------------------------------------------

    def prefill(self, chunks: Chunks, adjusts: bool = False, scored_S: Tensor | None = None) -> Decoded:
        """Run pieces of texts. Each emits one token, which means something where the chunk is its text's last.

        `scored_S` are places among the N tokens whose logits are wanted too.
        """
        index_N, position_N, end_C, last_C, paged_rows = self._lay_out_chunks(chunks)
        logit_rows_R = last_C if scored_S is None else torch.cat([last_C, scored_S])
        logits_RV, aux_NA = self.target.forward(
            chunks.token_ids_N,
            position_N,
            self.target_memory,
            paged_rows,
            logit_rows_R,
            has_aux=self.drafter is not None,
        )
        logits_CV = logits_RV[: len(last_C)]
        scored_logits_SV = None if scored_S is None else logits_RV[len(last_C) :]
        start = self._start_adjusted if adjusts else self._start
        rows_C, next_C1, emitted_C3 = start(chunks, end_C, logits_CV)
        place_C1 = torch.arange(len(last_C), device=last_C.device)[:, None]
        decoded = Decoded(emitted_C3, logits_CV, place_C1, scored_logits_SV)
        if self.drafter is None:
            self.state.tokens.index_copy_(0, rows_C, next_C1)
            return decoded
        slots = self._lay_out_prompt_slots(chunks, index_N, end_C, next_C1, self._fuse(aux_NA))
        # What is drafted after a chunk that is not its text's last goes to waste.
        table_CP = paged_rows.page_table_BP.masked_fill((chunks.is_last_C == 0)[:, None], WASTE_PAGE)
        self._leave(rows_C, next_C1, *self._draft(slots, table_CP, end_C - 1))
        return decoded

    def _lay_out_chunks(self, chunks: Chunks) -> tuple[Tensor, Tensor, Tensor, Tensor, PagedRows]:
        """Index and position of every token, the length of each text so far, its last token, and where all stand."""
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
        return index_N, index_N.clamp_max(self.max_position), end_C, last_C, paged_rows

    def _start(self, chunks: Chunks, end_C: Tensor, logits_CV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choose the token after each chunk and commit it where the chunk is its text's last: rows, tokens, emitted."""
        state = self.state
        next_C1 = self._choose(logits_CV, chunks.row_C, end_C)[:, None]
        # A chunk that is not its text's last leaves no trace in the row.
        rows_C = chunks.row_C.masked_fill(chunks.is_last_C == 0, state.nobody)
        state.length.index_copy_(0, rows_C, end_C.masked_fill(rows_C == state.nobody, 0))
        return rows_C, next_C1, torch.cat([torch.ones_like(next_C1), torch.zeros_like(next_C1), next_C1], dim=1)

    def _start_adjusted(self, chunks: Chunks, end_C: Tensor, logits_CV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert self.adjustments is not None, "given before"
        no_drafts_C0 = chunks.row_C.new_empty(len(chunks.row_C), 0)
        adjusted_CV = self.adjustments.apply(logits_CV, chunks.row_C, no_drafts_C0, end_C)
        rows_C, next_C1, emitted_C3 = self._start(chunks, end_C, adjusted_CV)
        self.adjustments.count(rows_C, next_C1, emitted_C3[:, 0])
        return rows_C, next_C1, emitted_C3

    def _lay_out_prompt_slots(
        self, chunks: Chunks, index_N: Tensor, end_C: Tensor, next_C1: Tensor, fused_ND: Tensor
    ) -> DrafterRows:
        """All the chunks' anchors, and the placeholders that hang from the last one of each."""
        is_end_N = (chunks.is_last_C[chunks.chunk_N] != 0) & (index_N == end_C[chunks.chunk_N] - 1)
        next_N = torch.where(is_end_N, next_C1[chunks.chunk_N, 0], chunks.next_ids_N)
        slots, chunk_S, token_S, first_slot_C1 = packed_serving_slots(
            chunks.start_C, chunks.first_token_C1, len(next_N), self._num_depths
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
        # What follows token t in column t + 1, as `slot_inputs` reads it.
        text_1N1 = functional.pad(next_N, (1, 0))[None]
        return self._drafter_rows(slots, paged_rows, text_1N1, fused_ND[None], slots.anchor_BS - token_S, last_C)

    # Drafting ---------------------------------------------------------------------------------------------------------

    @property
    def _num_depths(self) -> int:
        """Drafts of one pass of the drafter."""
        assert self.drafter is not None, "only asked with one"
        return self.num_draft_tokens if self.drafter.config.parallel else 1

    def _draft(self, rows: DrafterRows, table_BP: Tensor, last_anchor_B: Tensor) -> tuple[Tensor, Tensor]:
        """Run the slots of newly known anchors and draft from the last one of each request: tokens and their
        log-probabilities, [B, K]."""
        assert self.drafter is not None, "drafts come from a drafter"
        drafts_BK, logprob_BK, carried_BKD = self._likeliest(self._run_layers(rows), rows.last_B, self._num_depths)
        drafts, logprobs = [drafts_BK], [logprob_BK]
        one_B = torch.ones_like(last_anchor_B)
        for depth in range(self._num_depths, self.num_draft_tokens):
            # EAGLE-3: the drafter's own token and state take the place of the target's.
            rows = self._lay_out_slots(table_BP, last_anchor_B + depth, one_B, drafts[-1].expand(-1, 2), carried_BKD)
            next_B1, logprob_B1, carried_BKD = self._likeliest(self._run_layers(rows), rows.last_B, 1)
            drafts.append(next_B1)
            logprobs.append(logprob_B1)
        return torch.cat(drafts, dim=1), torch.cat(logprobs, dim=1)

    def _leave(self, rows_B: Tensor, next_B1: Tensor, drafts_BK: Tensor, logprob_BK: Tensor) -> None:
        """In the rows: the newest token, its drafts, and how likely those are to be kept."""
        self.state.tokens.index_copy_(0, rows_B, torch.cat([next_B1, drafts_BK], dim=1))
        if self.verify_rows is not None:
            self.state.confidence.index_copy_(0, rows_B, logprob_BK.cumsum(1))

    def _lay_out_kept(
        self, rows: VerifyRows, num_accepted_B: Tensor, known_BL1: Tensor, fused_ND: Tensor
    ) -> DrafterRows:
        """The slots behind the tokens that a step has kept."""
        table_BP, first_anchor_B = rows.paged_rows.page_table_BP, rows.paged_rows.context_B
        return self._lay_out_slots(table_BP, first_anchor_B, num_accepted_B + 1, known_BL1, fused_ND[rows.place_BL])

    def _lay_out_slots(
        self, table_BP: Tensor, first_anchor_B: Tensor, num_anchors_B: Tensor, token_ids_BT: Tensor, fused_BTD: Tensor
    ) -> DrafterRows:
        """The slots of a decode step's drafter pass.

        Column t of `token_ids_BT` and `fused_BTD` belongs to index first_anchor + t, as for `slot_inputs`.
        """
        slots = batch_serving_slots(first_anchor_B, num_anchors_B, fused_BTD.shape[1], self._num_depths)
        num_requests, num_slots = slots.depth_BS.shape
        first_row_B1 = torch.arange(num_requests + 1, device=table_BP.device) * num_slots
        cell_BS = cells(table_BP, slots.position_BS + 1, self.page_size)
        cell_N = cell_BS.masked_fill(slots.depth_BS == PADDING, WASTE_PAGE).flatten()
        paged_rows = PagedRows(table_BP, first_row_B1, first_anchor_B + 1, cell_N, cell_N.new_empty(num_slots, 0))
        last_B = first_row_B1[:-1] + num_anchors_B - 1
        return self._drafter_rows(slots, paged_rows, token_ids_BT, fused_BTD, first_anchor_B[:, None], last_B)

    def _drafter_rows(
        self,
        slots: Slots,
        paged_rows: PagedRows,
        token_ids_BT: Tensor,
        fused_BTD: Tensor,
        offset_BS: Tensor,
        last_B: Tensor,
    ) -> DrafterRows:
        """What the layers read in these slots; arguments as for `slot_inputs`."""
        assert self.drafter is not None, "only called with one"
        fused_mask_D = self.fused_mask_D if self.drafter.config.parallel else fused_BTD[0, 0]
        token_ids_BS, fused_BSD = slot_inputs(
            slots, token_ids_BT, fused_BTD, self.drafter.config.mask_token_id or 0, fused_mask_D, offset_BS
        )
        fused_1ND = fused_BSD.flatten(0, 1)[None]
        position_1N = slots.position_BS.reshape(1, -1).clamp_max(self.max_position)
        embedding_1ND, rotary = self.drafter.layer_inputs(token_ids_BS.reshape(1, -1), fused_1ND, position_1N)
        return DrafterRows(paged_rows, fused_1ND, embedding_1ND, rotary, last_B)

    def _run_layers(self, rows: DrafterRows) -> Tensor:
        """The drafter's layers, each over its pages."""
        assert self.drafter is not None, "only called with one"
        paged_rows, window = on_host(rows.paged_rows), self.drafter.config.window

        def attention_of(layer: int) -> Attend:
            return partial(_attend_pages, *self.drafter_memory[layer], paged_rows, window(layer))

        return self.drafter.run_layers(rows.fused_1ND, rows.embedding_1ND, rows.rotary, attention_of)

    def _likeliest(self, state_1ND: Tensor, last_B: Tensor, num_depths: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draft tokens of each request's last anchor, their log-probabilities, and the states they came from."""
        assert self.drafter is not None, "only called with one"
        rows_BK = last_B[:, None] + torch.arange(num_depths, device=last_B.device)
        normed_BKD, carried_BKD = self.drafter.layer_outputs(state_1ND[0, rows_BK])
        logits_BKV = self.drafter.logits(normed_BKD)
        if self.verify_rows is None and not logits_BKV.is_cuda:  # nobody asks how likely they are
            tokens_BK, logprob_BK = logits_BKV.argmax(-1), logits_BKV.new_zeros(rows_BK.shape)
        else:
            tokens_BK, logprob_BK = (each_N.view(rows_BK.shape) for each_N in likeliest(logits_BKV.flatten(0, 1)))
        return self.drafter.to_target_ids(tokens_BK), logprob_BK, carried_BKD


def _attend_pages(
    key_pages: Tensor,
    value_pages: Tensor,
    rows: PagedRows,
    window: int,
    query_1HNE: Tensor,
    key_1GNE: Tensor,
    value_1GNE: Tensor,
) -> Tensor:
    """Attention of a drafter layer. Index 0 of its pages is empty: no slot reads a text's first token."""
    attended_NHE = paged_attention(
        query_1HNE[0].transpose(0, 1),
        key_1GNE[0].transpose(0, 1),
        value_1GNE[0].transpose(0, 1),
        key_pages,
        value_pages,
        rows,
        scale=query_1HNE.shape[-1] ** -0.5,
        window=window,
        first_key=1,
    )
    return attended_NHE.transpose(0, 1)[None]
