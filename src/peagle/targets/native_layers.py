"""A target's decoder layers on a CPU as one call each (`NativeLayer`), where it computes what transformers' layer does.

Passes with many rows run transformers' code.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from peagle.kernels.attention import PagedRows, on_host
from peagle.native.layer import LAYER_PARTS, NativeLayer, UnknownPartError, Workspace

log = logging.getLogger(__name__)

MAX_DIFFERENCE = 1e-4
"""Relative difference that counts as rounding."""
PAGE_SIZE, CONTEXT, NUM_ROWS = 8, 2, 3
"""of the pass that compares a layer's outputs"""

Forward = Callable[..., Any]


def native_layers(layers: Sequence[nn.Module], forwards: Sequence[Forward], windows: Sequence[int]) -> list[Forward]:
    """The forwards to use: native ones for all layers, or their own, `forwards`, which run over pages."""
    kind, workspace = type(layers[0]).__name__, Workspace()
    try:
        native = [
            _with_fallback(_native_layer(layer, workspace, window), forward)
            for layer, forward, window in zip(layers, forwards, windows, strict=True)
        ]
    except UnknownPartError as reason:
        log.info("%s runs on torch's kernels: it has %s", kind, reason)
        return list(forwards)
    if not all(_is_right(layer, *pair) for layer, *pair in zip(layers, native, forwards, strict=True)):
        log.info("%s runs on torch's kernels: it computes something else than its parts say", kind)
        return list(forwards)
    return native


def _native_layer(layer: Any, workspace: Workspace, window: int) -> NativeLayer:
    if {name for name, _ in layer.named_children()} != LAYER_PARTS:
        raise UnknownPartError("other parts than attention, an MLP and a norm before each")
    return NativeLayer(layer, workspace, window)


def _with_fallback(native: NativeLayer, forward: Forward) -> Forward:
    def run(
        hidden_states: Tensor,
        *args: Any,
        position_embeddings: tuple[Tensor, Tensor],
        paged_pages: tuple[Tensor, Tensor],
        paged_rows: PagedRows,
        **kwargs: Any,
    ) -> Any:
        if hidden_states.shape[1] <= native.most_rows:
            return native.run(hidden_states, position_embeddings, paged_pages, paged_rows)
        own = {"position_embeddings": position_embeddings, "paged_pages": paged_pages, "paged_rows": paged_rows}
        return forward(hidden_states, *args, **own, **kwargs)

    return run


@torch.no_grad()
def _is_right(layer: Any, native: Forward, forward: Forward) -> bool:
    """Whether both forwards give the same output and the same cached entries for a few random rows."""
    draw = torch.Generator().manual_seed(0)
    attention, width = layer.self_attn, layer.input_layernorm.weight.shape[0]
    x_1ND = torch.randn(1, NUM_ROWS, width, generator=draw)
    angle_1NE = torch.randn(1, NUM_ROWS, attention.head_dim // 2, generator=draw).repeat(1, 1, 2)
    num_groups = attention.k_proj.out_features // attention.head_dim
    pages = [torch.randn(2, PAGE_SIZE, num_groups, attention.head_dim, generator=draw) for _ in range(2)]
    rows = PagedRows(
        page_table_BP=torch.tensor([[1]], dtype=torch.int32),
        first_row_B1=torch.tensor([0, NUM_ROWS]),
        context_B=torch.tensor([CONTEXT]),
        cell_N=PAGE_SIZE + CONTEXT + torch.arange(NUM_ROWS),
        span_L0=torch.empty(NUM_ROWS, 0),
    )
    results = []
    for run in (native, forward):
        own = [each.clone() for each in pages]
        y_1ND = run(
            x_1ND.clone(),
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool),
            position_embeddings=(angle_1NE.cos(), angle_1NE.sin()),
            paged_pages=tuple(own),
            paged_rows=on_host(rows),
        )
        if not isinstance(y_1ND, Tensor):
            return False
        results.append([y_1ND - x_1ND, *own])
    return all(
        bool((found - wanted).norm() <= MAX_DIFFERENCE * wanted.norm()) for found, wanted in zip(*results, strict=True)
    )
