"""A target's decoder layers on a CPU as our kernels, where these compute what transformers' layers do.

transformers' model calls one layer after another. The first one that is called runs all layers up to the next with a
hook, which wants to see what enters it, and the others then return what they get. So a pass is a few parallel regions,
not one per layer. Passes with many rows run transformers' code.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from peagle.errors import first_line
from peagle.kernels.attention import PagedRows, on_host
from peagle.native.layer import LAYER_PARTS, NativeLayer, UnknownPartError, Workspace, run_layers

log = logging.getLogger(__name__)

MAX_DIFFERENCE = 1e-4
"""Relative difference that counts as rounding."""
PAGE_SIZE, CONTEXT, NUM_ROWS = 8, 2, 3
"""of the pass that compares a layer's outputs"""

Forward = Callable[..., Any]
Pages = tuple[Tensor, Tensor]
"""the keys and values of a layer"""


def native_layers(
    layers: Sequence[nn.Module], forwards: Sequence[Forward], windows: Sequence[int], rotaries: Sequence[Any]
) -> list[Forward]:
    """The forwards to use: native ones for all layers, or `forwards`, their own. They get the pages of all layers.

    `rotaries` are the rotary embeddings that the model gave its layers for one token.
    """
    own = [_with_own_pages(*each) for each in enumerate(forwards)]
    kind, workspace = type(layers[0]).__name__, Workspace()
    try:
        native = [_native_layer(*each, workspace) for each in zip(layers, windows, rotaries, strict=True)]
    except UnknownPartError as reason:
        log.info("%s runs on torch's kernels: it has %s", kind, reason)
        return own
    if not all(map(_is_right, layers, native, forwards)):
        log.info("%s runs on torch's kernels: it computes something else than its parts say", kind)
        return own
    for each in native:
        each.compile()
    together = _Together(layers, native, rotaries)
    return [partial(together.run, index, forward) for index, forward in enumerate(own)]


def _native_layer(layer: Any, window: int, rotary: Any, workspace: Workspace) -> NativeLayer:
    if {name for name, _ in layer.named_children()} != LAYER_PARTS:
        raise UnknownPartError("other parts than attention, an MLP and a norm before each")
    if not isinstance(rotary, tuple) or rotary[0].shape[-1] != getattr(layer.self_attn, "head_dim", None):
        raise UnknownPartError("a rotary embedding of another width than its heads")
    return NativeLayer(layer, workspace, window)


def _with_own_pages(index: int, forward: Forward) -> Forward:
    def run(*args: Any, paged_memory: Sequence[Pages], **kwargs: Any) -> Any:
        return forward(*args, **kwargs, paged_pages=paged_memory[index])

    return run


class _Together:
    """Runs the layers between two hooks when the first of them is called."""

    def __init__(self, layers: Sequence[nn.Module], native: Sequence[NativeLayer], rotaries: Sequence[Any]) -> None:
        self._layers, self._native, self._rotaries = layers, native, rotaries
        self._next = 0
        """the layer that has not run in this pass; each pass begins with layer 0"""

    def run(self, index: int, own_forward: Forward, hidden_states: Tensor, **kwargs: Any) -> Any:
        """The forward of layer `index`. `own_forward` is transformers'."""
        if hidden_states.shape[1] > self._native[index].most_rows:
            return own_forward(hidden_states, **kwargs)
        if 0 < index < self._next:
            return hidden_states
        self._next = end = self._end(index)
        rotary, rows, memory = (kwargs[name] for name in ("position_embeddings", "paged_rows", "paged_memory"))
        return run_layers(
            self._native[index:end], hidden_states, rotary, [memory[each] for each in range(index, end)], rows
        )

    def _end(self, first: int) -> int:
        """The layer after those that run together with layer `first`."""
        for index in range(first + 1, len(self._layers)):
            layer = self._layers[index]
            is_seen = layer._forward_pre_hooks or layer._forward_hooks
            if is_seen or self._rotaries[index] is not self._rotaries[first]:
                return index
        return len(self._layers)


@torch.no_grad()
def _is_right(layer: Any, native: NativeLayer, forward: Forward) -> bool:
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
    rotary = angle_1NE.cos(), angle_1NE.sin()
    own_pages, other_pages = ([each.clone() for each in pages] for _ in range(2))
    try:
        wanted_1ND = forward(
            x_1ND.clone(),
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool),
            position_embeddings=rotary,
            paged_pages=tuple(other_pages),
            paged_rows=on_host(rows),
        )
    except Exception as error:  # a layer that reads more than these, for example the positions
        log.info("%s cannot be compared: %s", type(layer).__name__, first_line(error))
        return False
    if not isinstance(wanted_1ND, Tensor):
        return False
    found_1ND = run_layers([native], x_1ND, rotary, [(own_pages[0], own_pages[1])], on_host(rows))
    pairs = [(found_1ND - x_1ND, wanted_1ND - x_1ND), *zip(own_pages, other_pages, strict=True)]
    return all(bool((found - wanted).norm() <= MAX_DIFFERENCE * wanted.norm()) for found, wanted in pairs)
