"""Chunks of prompts for one prefill pass, and the buffer that uploads them to the device in one copy.

Shapes: N tokens, C chunks.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
from torch import Tensor

from peagle.kernels.attention import PagedRows
from peagle.scheduling.plan import Chunk


class Chunks(NamedTuple):
    """Chunks of several sequences, concatenated to N tokens and padded to fixed shapes."""

    token_ids_N: Tensor
    next_ids_N: Tensor
    """the token after each one; arbitrary for the last token of a sequence, whose successor is not known yet"""
    chunk_N: Tensor
    """the chunk of each token; padding tokens belong to the last chunk, which is empty"""
    row_C: Tensor
    """the row of each chunk's request"""
    first_token_C1: Tensor
    """C + 1 entries: chunk c has the tokens first_token[c] .. first_token[c + 1] - 1"""
    start_C: Tensor
    """index in its sequence of each chunk's first token"""
    first_write_C: Tensor
    """tokens below this index are in a shared page and must not be written again"""
    is_last_C: Tensor
    """1 if the chunk ends its sequence, so that the pass emits the next token; else 0"""


class ChunkLayout(NamedTuple):
    """Places of the tokens of a prefill pass."""

    index_N: Tensor
    """index of each token in its sequence"""
    position_N: Tensor
    """the same, clamped to the target's last position"""
    end_C: Tensor
    """length of each sequence after its chunk"""
    last_C: Tensor
    """the last token of each chunk, among the N"""
    paged_rows: PagedRows


class FirstTokens(NamedTuple):
    """The token that a prefill pass chose after each chunk; valid if the chunk ends its sequence."""

    rows_C: Tensor
    """the row of each chunk that ends its sequence, the padding row for others"""
    next_C1: Tensor
    emitted_C4: Tensor
    """as `PassResult.emitted_BE`: one token each, no drafts"""


def upload_size(num_tokens: int, num_chunks: int) -> int:
    return 3 * num_tokens + 5 * num_chunks + 1


def upload_slices(num_tokens: int, num_chunks: int) -> list[slice]:
    """The part of the upload buffer that holds each field of `Chunks`."""
    sizes = [num_tokens] * 3 + [num_chunks, num_chunks + 1] + [num_chunks] * 3
    ends = np.cumsum(sizes).tolist()
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def fill_upload(chunks: Sequence[Chunk], padding_row: int, num_tokens: int, num_chunks: int) -> np.ndarray:
    """An upload buffer with these chunks, padded with empty chunks and with tokens of the last chunk."""
    upload = np.zeros(upload_size(num_tokens, num_chunks), np.int64)
    fields = [upload[part] for part in upload_slices(num_tokens, num_chunks)]
    token_ids, next_ids, owner, rows, first_token, start, first_write, is_last = fields
    owner[:] = num_chunks - 1
    rows[:] = padding_row
    used = 0
    for index, chunk in enumerate(chunks):
        size = chunk.end - chunk.start
        text = chunk.request.token_ids[chunk.start : chunk.end + 1]
        token_ids[used : used + size] = text[:size]
        next_ids[used : used + len(text) - 1] = text[1:]
        owner[used : used + size] = index
        rows[index] = cast(int, chunk.request.row)
        start[index], first_write[index], is_last[index] = chunk.start, chunk.first_write, chunk.is_last
        first_token[index] = used
        used += size
    first_token[len(chunks) :] = used
    return upload


def chunk_views(upload: Tensor, num_tokens: int, num_chunks: int) -> Chunks:
    """The fields of an upload buffer on the device, as views."""
    return Chunks(*(upload[part] for part in upload_slices(num_tokens, num_chunks)))
