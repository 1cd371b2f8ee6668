"""Attention over paged keys and values: one signature, a plain PyTorch implementation, and a Triton one on GPUs.

Keys and values live in pages. A batch brings a few new rows for each of its requests; one call stores their keys and
values in the pages and lets every row attend to its request's text. Two requests, pages of four, page 0 for waste:

    request 0   6 keys in pages 2 and 5, brings 2 rows      row 0 has index 6, row 1 index 7
    request 1   3 keys in page 4, brings 1 row              row 2 has index 3

>>> rows = PagedRows(
...     page_table_BP=torch.tensor([[2, 5], [4, 0]]), first_row_B1=torch.tensor([0, 2, 3]),
...     context_B=torch.tensor([6, 3]), cell_N=torch.tensor([5 * 4 + 2, 5 * 4 + 3, 4 * 4 + 3]),
...     span_L0=torch.empty(2, 0))
>>> visible_indexes(rows, request=0, window=0).int().tolist()
[[1, 1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1, 1]]
>>> visible_indexes(rows, request=0, window=4).int().tolist()
[[0, 0, 0, 1, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1, 1, 1]]

A row that must leave no trace (padding, or a token whose key is in a shared page already) is given a cell of page 0,
the waste page, which belongs to no request.

Shapes: N rows, B requests, H query heads, G key-value heads (H a multiple of G), E head width, P pages a request,
L rows a request.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

WASTE_PAGE = 0
MOST_SPLITS = 32
SHARED_BYTES_OF_DEPTH = 228 << 10
"""of a processor that holds two programs with several steps in flight, as those of H100 and later do"""
NUM_COUNTERS = 1 << 16


class PagedRows(NamedTuple):
    """Where the new rows of a batch stand. All tensors are integer and on the device of the pages."""

    page_table_BP: Tensor
    """page ids of each request in the order of its text, padded with the waste page"""
    first_row_B1: Tensor
    """B + 1 entries: the rows of request b are first_row[b] .. first_row[b + 1] - 1; there may be none"""
    context_B: Tensor
    """keys of each request that come before its first new row, which has this index"""
    cell_N: Tensor
    """page * page_size + offset at which each row's own key and value are kept"""
    span_L0: Tensor
    """empty; no request brings more rows than its length L, which as a shape is a variable to a compiler"""
    tree_BLL: Tensor | None = None
    """bool: whether new row i of a request sees its new row j; None is causal. Its own diagonal must be set."""
    host: "RowsOnHost | None" = None
    """the same on the host, where `on_host` put it: the layers of a pass then share one look at the tensors"""


class RowsOnHost:
    """What the loop over requests needs of `PagedRows`, as Python numbers, and the masks it has built so far."""

    def __init__(self, rows: PagedRows) -> None:
        bounds: list[int] = rows.first_row_B1.tolist()
        contexts: list[int] = rows.context_B.tolist()
        self.requests = [
            (request, bounds[request], bounds[request + 1], context)
            for request, context in enumerate(contexts)
            if bounds[request + 1] > bounds[request]
        ]
        """(request, first row, end of its rows, context) of those that bring rows"""
        self._cells: dict[tuple[int, int], slice | Tensor] = {}
        self._masks: dict[tuple[Any, ...], Tensor | None] = {}

    def cells(self, rows: PagedRows, request: int, num_keys: int, page_size: int) -> slice | Tensor:
        """Where a request's keys lie among all cells: a slice if its pages follow one another, else every cell."""
        cells = self._cells.get((request, page_size))
        if cells is None:
            ids_P = rows.page_table_BP[request, : -(-num_keys // page_size)]
            ids: list[int] = ids_P.tolist()
            first = ids[0] * page_size
            if ids == list(range(ids[0], ids[0] + len(ids))):
                cells = slice(first, first + num_keys)
            else:
                offset_C = torch.arange(page_size, device=ids_P.device)
                cells = (ids_P.long()[:, None] * page_size + offset_C).flatten()[:num_keys]
            self._cells[request, page_size] = cells
        return cells

    def mask(
        self, rows: PagedRows, request: int, window: int, first_key: int, group_size: int, dtype: torch.dtype
    ) -> Tensor | None:
        """What is added to the scores of a request's rows, once for each head of a group; None where all is seen."""
        settings = (request, window, first_key, group_size, dtype)
        if settings not in self._masks:
            visible_MT = visible_indexes(rows, request, window, first_key)
            mask_MT = None
            if not bool(visible_MT.all()):
                hidden_MT = torch.zeros(visible_MT.shape, dtype=dtype, device=visible_MT.device)
                mask_MT = hidden_MT.masked_fill_(~visible_MT, float("-inf")).repeat(group_size, 1)
            self._masks[settings] = mask_MT
        return self._masks[settings]


def on_host(rows: PagedRows) -> PagedRows:
    """The same rows, read on the host once for all the layers of a pass. On a GPU as they were: it is not asked."""
    if rows.context_B.is_cuda or rows.host is not None:
        return rows
    return rows._replace(host=RowsOnHost(rows))


class Processors(NamedTuple):
    """What a GPU has of them."""

    number: int
    shared_bytes: int
    """of each, for the programs that run on it"""


class Cut(NamedTuple):
    """How the GPU's kernel is cut."""

    tile: int
    """entries, which are rows times query heads, of a program"""
    step: int
    """keys of a step"""
    num_splits: int
    num_warps: int = 4
    num_stages: int = 2
    """of the loop over steps, where finding a page takes as many as fetching its keys: 2 to 4 keep one step in flight,
    5 and 6 two, 7 three"""


def cut(num_entries: int, num_teams: int, padded_width: int, dtype: torch.dtype, processors: Processors) -> Cut:
    """For so many entries of a request and key-value head, of which there are `num_teams` in a batch.

    A decode step's attention waits for its first keys longer than for the rest, so what counts is how many are asked
    for at once: by several programs a text where requests are few, by steps in flight where they are not. More programs
    than processors only pay where each text has one: they seem to hold up the kernel that follows.
    Measured inside steps on an H200 (docs/log.md); benchmarks/attention.py tries others.
    """
    is_wide = padded_width > 256  # Gemma-4's 512: smaller tiles, or they do not fit beside each other
    tile = min(max(16, 1 << (num_entries - 1).bit_length()), 16 if is_wide else 64)
    room = 2 * processors.number
    num_splits = _num_splits(num_teams, room) if num_entries <= tile else 1
    row_bytes = padded_width * dtype.itemsize
    if num_entries > tile or row_bytes > 256:  # prompts, and wide heads
        step = 64 if padded_width <= 128 else 16 if is_wide else 32
        return Cut(tile, step, num_splits, num_stages=1 if is_wide and dtype == torch.float32 else 2)
    is_narrow, is_deep = row_bytes <= 128, processors.shared_bytes >= SHARED_BYTES_OF_DEPTH
    num_small = -(-num_entries // 16) * num_teams
    if num_small * MOST_SPLITS <= room:  # processors are left over, whatever is split
        return Cut(16, 64, MOST_SPLITS)
    if 2 * num_teams < processors.number:
        if not is_narrow or num_entries > 32:
            return Cut(tile, 64, num_splits)
        return Cut(tile, 128, _num_splits(num_teams, processors.number), num_stages=5 if is_deep else 2)
    num_warps = 2 if tile == 32 and padded_width > 64 else 4
    if num_teams > room or not is_deep:
        return Cut(tile, 64, num_splits, num_warps)
    if is_narrow and num_entries <= 32:
        if num_small <= processors.number:
            return Cut(16, 128, 1, num_stages=5)
        return Cut(16, 64, 1, num_warps=2, num_stages=5)
    if num_small <= room:
        return Cut(16, 128 if is_narrow else 64, 1, num_stages=7)
    return Cut(tile, 128 if is_narrow else 64, 1, num_warps, num_stages=5)


def _num_splits(num_programs: int, num_places: int) -> int:
    return max(1, min(MOST_SPLITS, num_places // num_programs))


def paged_attention(
    query_NHE: Tensor,
    key_NGE: Tensor,
    value_NGE: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    rows: PagedRows,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks_H: Tensor | None = None,
    first_key: int = 0,
) -> Tensor:
    """Keep the rows' keys and values in the pages [pages, page_size, G, E] and return what they attend to, [N, H, E].

    A row of index i sees the indexes `first_key` .. i, of these only the last `window` where that is not 0, and of
    the new rows only those its tree allows. `softcap` bounds the scores by softcap * tanh(score / softcap); `sinks_H`
    are scores, one a head, that take part in the softmax and carry no value.
    """
    settings = (float(scale), int(window), float(softcap), sinks_H, int(first_key))
    tensors = (query_NHE, key_NGE, value_NGE, key_pages, value_pages)
    if query_NHE.is_cuda:
        # Imported where it is needed: the package must work where triton is not installed.
        from peagle.kernels.attention_triton import paged_attention_triton

        return paged_attention_triton(*tensors, rows, *settings)
    return paged_attention_torch(*tensors, rows, *settings)


def paged_attention_torch(
    query_NHE: Tensor,
    key_NGE: Tensor,
    value_NGE: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    rows: PagedRows,
    scale: float,
    window: int,
    softcap: float,
    sinks_H: Tensor | None,
    first_key: int,
) -> Tensor:
    """The oracle, and what runs on a CPU: a loop over requests."""
    key_cells, value_cells = key_pages.flatten(0, 1), value_pages.flatten(0, 1)
    key_cells.index_copy_(0, rows.cell_N, key_NGE)
    value_cells.index_copy_(0, rows.cell_N, value_NGE)
    num_groups, width = key_NGE.shape[1:]
    group_size = query_NHE.shape[1] // num_groups
    host = rows.host or RowsOnHost(rows)
    attended_NHE: Tensor | None = None
    for request, first, end, context in host.requests:
        num_rows = end - first
        cells = host.cells(rows, request, context + num_rows, key_pages.shape[1])
        mask_MT = host.mask(rows, request, window, first_key, group_size, query_NHE.dtype)
        # Heads that share keys become further rows of one head, so nothing is repeated.
        query_GME = query_NHE[first:end].unflatten(1, (num_groups, -1)).permute(1, 2, 0, 3).flatten(1, 2)
        key_GTE, value_GTE = _taken(key_cells, cells).transpose(0, 1), _taken(value_cells, cells).transpose(0, 1)
        attended_GME = _attend(query_GME, key_GTE, value_GTE, mask_MT, scale, softcap, sinks_H, num_rows)
        own_NHE = attended_GME.view(num_groups, group_size, num_rows, width).permute(2, 0, 1, 3).flatten(1, 2)
        if num_rows == len(query_NHE):
            return own_NHE
        if attended_NHE is None:
            attended_NHE = torch.zeros_like(query_NHE)
        attended_NHE[first:end] = own_NHE
    return torch.zeros_like(query_NHE) if attended_NHE is None else attended_NHE


def _taken(cells_CGE: Tensor, cells: slice | Tensor) -> Tensor:
    # Indexing by a tensor copies number by number, index_select whole cells: a fifth of the time.
    return cells_CGE[cells] if isinstance(cells, slice) else cells_CGE.index_select(0, cells)


def visible_indexes(rows: PagedRows, request: int, window: int, first_key: int = 0) -> Tensor:
    """Whether each new row of a request sees each index of its text, bool [rows, keys]."""
    num_rows = int(rows.first_row_B1[request + 1] - rows.first_row_B1[request])
    context = int(rows.context_B[request])
    device = rows.context_B.device
    key_T = torch.arange(context + num_rows, device=device)
    own_M1 = torch.arange(context, context + num_rows, device=device)[:, None]
    visible_MT = (key_T <= own_M1) & (key_T >= first_key)
    if window:
        visible_MT &= key_T > own_M1 - window
    if rows.tree_BLL is not None:
        visible_MT[:, context:] &= rows.tree_BLL[request, :num_rows, :num_rows]
    return visible_MT


def _attend(
    query_GME: Tensor,
    key_GTE: Tensor,
    value_GTE: Tensor,
    mask_MT: Tensor | None,
    scale: float,
    softcap: float,
    sinks_H: Tensor | None,
    num_rows: int,
) -> Tensor:
    if not softcap and sinks_H is None:
        attended_1GME = functional.scaled_dot_product_attention(
            query_GME[None], key_GTE[None], value_GTE[None], attn_mask=mask_MT, scale=scale
        )
        return attended_1GME[0]
    scores_GMT = (query_GME @ key_GTE.transpose(1, 2)).float() * scale
    if softcap:
        scores_GMT = softcap * torch.tanh(scores_GMT / softcap)
    if mask_MT is not None:
        scores_GMT = scores_GMT + mask_MT
    if sinks_H is not None:
        sinks_GM1 = sinks_H.float().view(len(key_GTE), -1, 1).expand(-1, -1, num_rows).flatten(1)[..., None]
        scores_GMT = torch.cat([scores_GMT, sinks_GM1], dim=-1)
    weights_GMT = torch.softmax(scores_GMT, dim=-1)[..., : key_GTE.shape[1]]
    return (weights_GMT.to(value_GTE.dtype)) @ value_GTE
