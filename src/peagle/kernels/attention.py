"""Paged attention: `paged_attention` runs PyTorch on a CPU and a Triton kernel on a GPU.

The KV cache is split into pages. A batch has a few new rows per request. One call writes their keys and values to the
pages and attends from each row to its request's sequence. Two requests, pages of four cells:

    request 0   6 cached keys in pages 2 and 5, 2 new rows      row 0 has index 6, row 1 index 7
    request 1   3 cached keys in page 4, 1 new row              row 2 has index 3

>>> rows = PagedRows(
...     page_table_BP=torch.tensor([[2, 5], [4, 0]]), first_row_B1=torch.tensor([0, 2, 3]),
...     context_B=torch.tensor([6, 3]), cell_N=torch.tensor([5 * 4 + 2, 5 * 4 + 3, 4 * 4 + 3]),
...     span_L0=torch.empty(2, 0))
>>> visible_indexes(rows, request=0, window=0).int().tolist()
[[1, 1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1, 1]]
>>> visible_indexes(rows, request=0, window=4).int().tolist()
[[0, 0, 0, 1, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1, 1, 1]]

A row that must not write to the cache (padding, or a token whose key is already in a shared page) gets a cell of page
0, the waste page, which belongs to no request.

Shapes: N rows, B requests, H query heads, G key-value heads (H a multiple of G), E head width, P pages per request,
L rows per request, M rows of one request times the query heads of a group, T keys of one request.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from peagle.kernels.tilings import MOST_DECODE_ROWS

WASTE_PAGE = 0


class PagedRows(NamedTuple):
    """Where the new rows of a batch belong. All tensors are integer and on the device of the pages."""

    page_table_BP: Tensor
    """The page table: page ids of each request in sequence order, padded with the waste page."""
    first_row_B1: Tensor
    """B + 1 entries: request b has rows first_row[b] .. first_row[b + 1] - 1, possibly none."""
    context_B: Tensor
    """Number of cached keys of each request; also the index of its first new row."""
    cell_N: Tensor
    """Cell of each row's own key and value: page * page_size + offset."""
    span_L0: Tensor
    """Empty. Its length L is the most rows of any request, except in a batch that is `joined`; a shape, so that
    torch.compile treats it as symbolic."""
    tree: "RowTree | None" = None
    """The new rows of each request form a tree; None if each row follows the one before it."""
    host: "RowsOnHost | None" = None
    """A host copy made by `on_host`, shared by all layers of a forward pass."""


class RowTree(NamedTuple):
    """New rows that form a tree: a row attends to the cached keys, to itself and to the rows above it.

    A row is stored at the index after the row before it, but its position in the sequence, which a sliding window
    counts from, is that of its depth.
    """

    ancestors_N: Tensor
    """int64: bit j is set if the row attends to row j of its request, itself included. 0: to that and all before it."""
    depth_N: Tensor
    """int64: rows above it."""


class RowsOnHost:
    """`PagedRows` as Python numbers for the loop over requests, with cached cells and masks."""

    def __init__(self, rows: PagedRows) -> None:
        bounds: list[int] = rows.first_row_B1.tolist()
        contexts: list[int] = rows.context_B.tolist()
        self.requests = [
            (request, bounds[request], bounds[request + 1], context)
            for request, context in enumerate(contexts)
            if bounds[request + 1] > bounds[request]
        ]
        """(request, first row, end of its rows, context) of each request that has rows."""
        self._cells: dict[tuple[int, int], slice | Tensor] = {}
        self._masks: dict[tuple[Any, ...], Tensor | None] = {}
        self._for_kernels: tuple[Tensor, Tensor, Tensor] | None = None

    def for_kernels(self, rows: PagedRows, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """The int32 page table, int64 cells, and a table [N, 5], as `peagle.native` reads them.

        The table has each row's request, cached keys, index among the new rows, bits of those that it sees, and depth.
        Rows that belong to no request see the first cell of the first one.
        """
        if self._for_kernels is None:
            request_N = torch.searchsorted(rows.first_row_B1[1:], torch.arange(num_rows), right=True)
            is_own_N = request_N < len(rows.context_B)
            request_N = request_N.where(is_own_N, 0)
            index_N = (torch.arange(num_rows) - rows.first_row_B1[request_N]).where(is_own_N, 0)
            context_N = rows.context_B[request_N].where(is_own_N, 0)
            seen_N, depth_N = rows.tree or (torch.zeros_like(index_N), index_N)
            # A row that sees all rows before it counts them as cached: they are, once all rows are stored.
            is_causal_N = seen_N == 0
            passed_N = index_N.where(is_causal_N, 0)
            columns = (request_N, context_N + passed_N, index_N - passed_N, seen_N + is_causal_N, depth_N - passed_N)
            table_N5 = torch.stack(columns, dim=1).long()
            page_table_BP = rows.page_table_BP.to(torch.int32).contiguous()
            self._for_kernels = page_table_BP, rows.cell_N.long().contiguous(), table_N5
        return self._for_kernels

    def cells(self, rows: PagedRows, request: int, num_keys: int, page_size: int) -> slice | Tensor:
        """The cells of a request's keys: a slice if its pages are consecutive, else an index tensor."""
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
        """Additive mask for a request's rows, repeated per head of a group; None if nothing is masked."""
        settings = (request, window, first_key, group_size, dtype)
        if settings not in self._masks:
            visible_MT = visible_indexes(rows, request, window, first_key)
            mask_MT = None
            if not bool(visible_MT.all()):
                hidden_MT = torch.zeros(visible_MT.shape, dtype=dtype, device=visible_MT.device)
                mask_MT = hidden_MT.masked_fill_(~visible_MT, float("-inf")).repeat(group_size, 1)
            self._masks[settings] = mask_MT
        return self._masks[settings]


def joined(first: PagedRows, second: PagedRows, depth_M: Tensor | None = None) -> PagedRows:
    """One batch of the requests of both, those of `second` last.

    If those of `first` have trees, the M rows of `second` follow each other in each request, at `depth_M`. Kernels
    split the work as for `MOST_DECODE_ROWS` per request.
    """
    num_rows, tree = len(first.cell_N), first.tree
    if tree is not None:
        assert depth_M is not None, "rows of a tree have depths"
        ancestors_N = torch.cat([tree.ancestors_N, torch.zeros_like(depth_M)])
        tree = RowTree(ancestors_N, torch.cat([tree.depth_N, depth_M]))
    return PagedRows(
        torch.cat([first.page_table_BP, second.page_table_BP]),
        torch.cat([first.first_row_B1[:-1], second.first_row_B1 + num_rows]),
        torch.cat([first.context_B, second.context_B]),
        torch.cat([first.cell_N, second.cell_N]),
        first.span_L0.new_empty(MOST_DECODE_ROWS, 0),
        tree,
    )


def on_host(rows: PagedRows) -> PagedRows:
    """The same rows with a host copy for all layers of a forward pass. A no-op on a GPU: it would synchronize."""
    if rows.context_B.is_cuda or rows.host is not None:
        return rows
    return rows._replace(host=RowsOnHost(rows))


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
    """Write the rows' keys and values to the pages [pages, page_size, G, E] and return the attention output [N, H, E].

    A row of index i attends to indexes `first_key` .. i, only to the last `window` of these if `window` is not 0, and
    among new rows that form a tree only to those above it. `softcap` bounds scores by softcap * tanh(score / softcap).
    `sinks_H` are extra scores, one per head, that enter the softmax but carry no value.
    """
    run = paged_attention_triton if query_NHE.is_cuda else paged_attention_torch
    tensors = (query_NHE, key_NGE, value_NGE, key_pages, value_pages)
    return run(*tensors, rows, float(scale), int(window), float(softcap), sinks_H, int(first_key))


def paged_attention_triton(
    query_NHE: Tensor,
    key_NGE: Tensor,
    value_NGE: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    rows: PagedRows,
    *settings: Any,
) -> Tensor:
    # Imported lazily: triton may not be installed.
    from peagle.kernels.attention_triton import launch

    tensors = (query_NHE, key_NGE, value_NGE, key_pages, value_pages)
    places = (rows.page_table_BP, rows.first_row_B1, rows.context_B, rows.cell_N, rows.span_L0)
    return launch(*tensors, *places, *(rows.tree or (None, None)), *settings)


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
    """The CPU implementation, and the reference for the kernel: a loop over requests."""
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
        # Query heads of a group become extra rows of one head, so keys are not repeated.
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
    # index_select copies whole cells: five times faster than indexing with a tensor.
    return cells_CGE[cells] if isinstance(cells, slice) else cells_CGE.index_select(0, cells)


def visible_indexes(rows: PagedRows, request: int, window: int, first_key: int = 0) -> Tensor:
    """Mask: which keys each new row of a request attends to, bool [rows, keys]."""
    first, end = rows.first_row_B1[request : request + 2].tolist()
    context, num_rows = int(rows.context_B[request]), end - first
    row_M = torch.arange(num_rows, device=rows.context_B.device)
    if rows.tree is None:
        depth_M, is_above_MM = row_M, row_M <= row_M[:, None]
    else:
        ancestors_M1, depth_M = rows.tree.ancestors_N[first:end, None], rows.tree.depth_N[first:end]
        is_above_MM = torch.where(ancestors_M1 == 0, row_M <= row_M[:, None], (ancestors_M1 >> row_M) & 1 != 0)
    key_T = torch.arange(context + num_rows, device=row_M.device)
    visible_MT = (key_T >= first_key).repeat(num_rows, 1)
    visible_MT[:, context:] &= is_above_MM
    if window:
        position_T = torch.cat([key_T[:context], context + depth_M])
        visible_MT &= position_T > (context + depth_M)[:, None] - window
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
