"""What the host sends to the device: the settings and page tables of rows, and the tokens of prefill chunks.

Numbers are written into numpy arrays here and copied to the device in one piece each.
"""

from collections.abc import Sequence

import numpy as np

from peagle.engine.request import Request
from peagle.engine.scheduler import Chunk


class HostRows:
    """The host's copy of what it decides about rows. The last row is nobody's, as in `RowState`."""

    def __init__(self, num_rows: int, num_pages: int) -> None:
        self.page_table = np.zeros((num_rows + 1, num_pages + 1), np.int32)
        self.max_draft = np.zeros(num_rows + 1, np.int64)
        self.seed = np.zeros(num_rows + 1, np.int64)
        self.temperature = np.zeros(num_rows + 1, np.float32)
        self.top_k = np.zeros(num_rows + 1, np.int32)
        self.top_p = np.ones(num_rows + 1, np.float32)
        self.min_p = np.zeros(num_rows + 1, np.float32)

    def settle(self, request: Request) -> None:
        """Write a request's sampling settings into its row."""
        row, params = request.row, request.params
        self.max_draft[row] = request.num_draft_tokens
        self.seed[row] = params.seed
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p

    def place(self, request: Request) -> None:
        """Write a request's pages into its row; what lies beyond them goes to the waste page."""
        table = self.page_table[request.row]
        table[: len(request.pages)] = request.pages
        table[len(request.pages) :] = 0


def packed_size(num_tokens: int, num_chunks: int) -> int:
    return 3 * num_tokens + 5 * num_chunks + 1


def split_packed(num_tokens: int, num_chunks: int) -> list[slice]:
    """Where the fields of `Chunks` lie in a packed array, in their order."""
    sizes = [num_tokens] * 3 + [num_chunks, num_chunks + 1] + [num_chunks] * 3
    ends = np.cumsum(sizes).tolist()
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def pack_chunks(chunks: Sequence[Chunk], nobody: int, num_tokens: int, num_chunks: int, packed: np.ndarray) -> None:
    """Write chunks into `packed`, padded: further chunks have no tokens, further tokens belong to the last chunk."""
    fields = [packed[part] for part in split_packed(num_tokens, num_chunks)]
    token_ids, next_ids, owner, rows, first_token, start, first_write, is_last = fields
    packed[:] = 0
    owner[:] = num_chunks - 1
    rows[:] = nobody
    used = 0
    for index, chunk in enumerate(chunks):
        size = chunk.end - chunk.start
        text = chunk.request.token_ids[chunk.start : chunk.end + 1]
        token_ids[used : used + size] = text[:size]
        next_ids[used : used + len(text) - 1] = text[1:]
        owner[used : used + size] = index
        rows[index] = chunk.request.row
        start[index], first_write[index], is_last[index] = chunk.start, chunk.first_write, chunk.is_last
        first_token[index] = used
        used += size
    first_token[len(chunks) :] = used
