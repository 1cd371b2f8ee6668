"""Per-row tables for requests that adjust their logits or tolerate drafts: penalties, biases, min_tokens, grammars.

The tables are as wide as the vocabulary, so they are allocated when a request first needs them. A pass without such a
request does not read them.

Shapes: R rows, B requests of a batch, L places per row, N tokens of a pass, V vocabulary, E edits, W words of bits.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from peagle.errors import RequestError
from peagle.kernels.adjust import BITS, Edits, Penalties, Places, adjust_logits
from peagle.sampling_params import SamplingParams
from peagle.scheduling.request import Request

MAX_EDITS = 512
FOREVER = 2**62


@dataclass(frozen=True)
class Adjustments:
    """One entry per row of `RowState`. The defaults, which the padding row keeps, change nothing."""

    edit_ids: Tensor
    edit_value: Tensor
    edit_end: Tensor
    """[R, E] each, as in `Edits`"""
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    counts: Tensor
    """int32 [R, V]: output tokens, the newest included; valid for rows that take part in every adjusted pass"""
    is_in_prompt: Tensor
    """bool [R, V]"""
    allowed: Tensor
    """int32 [R, L, W]: bit mask of the tokens that the grammar allows after the newest token and after each draft"""
    tolerated_gap: Tensor
    """float32 [R], as in `tolerate`"""

    @classmethod
    def empty(cls, num_rows: int, num_drafts: int, vocab_size: int, device: torch.device) -> "Adjustments":
        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(num_rows + 1, *shape, dtype=dtype, device=device)

        return cls(
            edit_ids=zeros(torch.int64, MAX_EDITS),
            edit_value=zeros(torch.float32, MAX_EDITS),
            edit_end=zeros(torch.int64, MAX_EDITS),
            repetition=zeros(torch.float32) + 1,
            frequency=zeros(torch.float32),
            presence=zeros(torch.float32),
            counts=zeros(torch.int32, vocab_size),
            is_in_prompt=zeros(torch.bool, vocab_size),
            allowed=zeros(torch.int32, num_drafts + 1, -(-vocab_size // BITS)) - 1,
            tolerated_gap=zeros(torch.float32) - 1,
        )

    # On the device ----------------------------------------------------------------------------------------------------

    def apply(self, logits_NV: Tensor, places: Places, node_N: Tensor) -> Tensor:
        """Adjusted logits, float32 [N, V]; see `adjust_logits`. The tokens are those of these nodes of their rows."""
        return adjust_logits(
            logits_NV,
            places,
            Edits(self.edit_ids, self.edit_value, self.edit_end),
            Penalties(self.repetition, self.frequency, self.presence, self.counts, self.is_in_prompt),
            self.allowed[places.row_N, node_N],
        )

    def count(self, rows_B: Tensor, tokens_BL: Tensor, num_tokens_B: Tensor) -> None:
        """Count the first `num_tokens_B` of these tokens as output."""
        is_new_BL = torch.arange(tokens_BL.shape[1], device=rows_B.device) < num_tokens_B[:, None]
        place_BL = rows_B[:, None] * self.counts.shape[1] + tokens_BL
        self.counts.view(-1).scatter_add_(0, place_BL.flatten(), is_new_BL.flatten().to(torch.int32))

    # From the host ----------------------------------------------------------------------------------------------------

    def write_request(self, request: Request) -> None:
        """Write the settings of a request and its token counts so far into its row, without waiting."""
        row, params, vocab_size = request.row, request.params, self.counts.shape[1]
        assert row is not None, "the request is running"
        edits = edits_of(params, request.prompt_length, request.end_ids, vocab_size)
        ids, values, ends = (
            np.zeros(MAX_EDITS, np.int64),
            np.zeros(MAX_EDITS, np.float32),
            np.zeros(MAX_EDITS, np.int64),
        )
        for index, (token, value, end) in enumerate(edits):
            ids[index], values[index], ends[index] = token, value, end
        for table, array in ((self.edit_ids, ids), (self.edit_value, values), (self.edit_end, ends)):
            self.write(table[row], array)
        for setting, number in (
            (self.repetition, params.repetition_penalty),
            (self.frequency, params.frequency_penalty),
            (self.presence, params.presence_penalty),
            (self.tolerated_gap, -1 if params.tolerated_gap is None else params.tolerated_gap),
        ):
            setting[row].fill_(number)
        self.allowed[row].fill_(-1)
        if not request.adjusts:
            return
        text = np.asarray(request.token_ids, np.int64)
        counts = np.bincount(text[request.prompt_length :], minlength=vocab_size).astype(np.int32)
        is_in_prompt = np.zeros(vocab_size, np.bool_)
        is_in_prompt[text[: request.prompt_length]] = True
        self.write(self.counts[row], counts)
        self.write(self.is_in_prompt[row], is_in_prompt)

    @staticmethod
    def write(destination: Tensor, source: np.ndarray) -> None:
        """Copy to the device, in stream order: earlier launches still read the old values."""
        values = torch.from_numpy(source)
        if destination.is_cuda:
            values = values.pin_memory()  # torch keeps the buffer until the copy is done
        destination.copy_(values, non_blocking=True)


def edits_of(
    params: SamplingParams, prompt_length: int, end_ids: Collection[int], vocab_size: int
) -> list[tuple[int, float, int]]:
    """Edits of a request: (token, value added to its logit, index of the sequence at which the edit ends)."""
    edits = [(token, bias, FOREVER) for token, bias in params.logit_bias.items()]
    if params.min_tokens:
        end = prompt_length + params.min_tokens
        edits += [(token, float("-inf"), end) for token in sorted(end_ids) if token < vocab_size]
    return edits


def check_edits(params: SamplingParams, end_ids: Collection[int]) -> None:
    """Raise RequestError if a request has more edits than a row holds."""
    num_edits = len(params.logit_bias) + (len(end_ids) if params.min_tokens else 0)
    if num_edits > MAX_EDITS:
        raise RequestError(
            f"{num_edits} edits (logit_bias, stop tokens of min_tokens) exceed the limit of {MAX_EDITS}",
            hint="pass fewer logit_bias entries or stop_token_ids",
        )
