"""What the host sends to the device before a plan runs: sampling settings, page tables, penalties, grammars.

Only what changed is sent, and nothing waits: launches in flight still read the old values.

Shapes: L places of a row, W words of bits.
"""

from collections.abc import Sequence

import numpy as np
import torch

from peagle.errors import CapacityError
from peagle.scheduling.plan import Plan
from peagle.scheduling.request import Request
from peagle.worker.adjustments import Adjustments
from peagle.worker.row_state import HostRows, RowState
from peagle.worker.transfers import Transfers


class Uploads:
    """Owns the host copy of the rows and the tables of adjustments."""

    adjustments: Adjustments | None = None
    """tables for penalties, biases and grammars, allocated when a request first needs them"""

    def __init__(self, state: RowState, transfers: Transfers, vocab_size: int) -> None:
        num_rows, num_pages = (size - 1 for size in state.page_table.shape)
        self.state, self.rows = state, HostRows(num_rows, num_pages)
        self._transfers, self._vocab_size = transfers, vocab_size
        self._adjusted_rows: set[int] = set()
        """rows whose adjustments are possibly not the defaults"""

    def prepare_adjustments(self) -> None:
        """Allocate the tables for penalties, biases and grammars, if they do not exist yet."""
        if self.adjustments is not None:
            return
        num_rows, num_drafts = len(self.state.length) - 1, self.state.tokens.shape[1] - 1
        try:
            self.adjustments = Adjustments.empty(num_rows, num_drafts, self._vocab_size, self.state.length.device)
        except torch.cuda.OutOfMemoryError as error:
            raise CapacityError(
                f"the GPU has no memory left for penalties and grammars: {str(error).splitlines()[0]}",
                hint="lower --memory-share or --max-batch",
            ) from error

    def send(self, plan: Plan) -> None:
        """Send what a plan changes, before it runs: the settings of new requests, and page tables."""
        for chunk in plan.chunks:
            self.rows.write_settings(chunk.request)
            self.rows.write_pages(chunk.request)
            if chunk.is_last:
                self._send_adjustments(chunk.request)
                self._send_grammar(chunk.request)
        for request in plan.grown:
            if request.is_running:
                self.rows.write_pages(request)
        if plan.chunks:
            for name in HostRows.SETTINGS:
                self._transfers.send(getattr(self.rows, name), getattr(self.state, name))
        if plan.chunks or plan.grown:
            self._transfers.send(self.rows.page_table, self.state.page_table)
        for request in plan.decodes:
            if request.guide is not None:
                self._send_grammar(request)

    def _send_adjustments(self, request: Request) -> None:
        """Send the adjustments of a request, or reset its row if an earlier request left some."""
        assert request.row is not None, "the request is running"
        if not request.adjusts and request.row not in self._adjusted_rows:
            return
        assert self.adjustments is not None, "allocated when the request was added"
        self._adjusted_rows.add(request.row)  # first, so that a row half written is known after an error
        self.adjustments.write_request(request)
        if not request.adjusts:
            self._adjusted_rows.discard(request.row)

    def _send_grammar(self, request: Request) -> None:
        """Send the tokens that a request's grammar allows in its next pass, and the drafts that it leaves or forces."""
        if request.guide is None:
            return
        adjustments, state, row = self.adjustments, self.state, request.row
        assert adjustments is not None and row is not None, "allocated when the request was added"
        allowed_LW = np.empty(adjustments.allowed.shape[1:], np.int32)
        drafts = request.guide.plan(request.drafts, request.num_draft_tokens, allowed_LW)
        adjustments.write(adjustments.allowed[row], allowed_LW)
        if not request.drafts:  # a prefill pass
            return
        num_kept = len(drafts)
        adjustments.write(state.tokens[row, 1 : 1 + num_kept], np.array(drafts.token_ids, np.int64))
        confidence = np.full(len(state.confidence[row]), -np.inf, np.float32)
        confidence[:num_kept] = drafts.scores[1:]
        adjustments.write(state.confidence[row], confidence)
        if state.is_tree:
            for name, values in (("parent", drafts.parents), ("depth", drafts.depths), ("ancestors", drafts.ancestors)):
                adjustments.write(getattr(state, name)[row, : 1 + num_kept], np.array(values, np.int64))

    def pause(self, requests: Sequence[Request]) -> None:
        """Stop drafting for these requests: drafts do not pay now."""
        for request in requests:
            request.is_paused = True
            self.rows.max_draft[request.row] = 0
        self._transfers.send(self.rows.max_draft, self.state.max_draft)
