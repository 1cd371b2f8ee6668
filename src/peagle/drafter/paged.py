"""A drafter's layers over pages: attention, and on a CPU whole layers as one call each (`NativeLayer`).

Shapes: N slots, D drafter width, H query and G key-value heads, E head width.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peagle.drafter.model import Drafter
from peagle.kernels.attention import PagedRows, paged_attention
from peagle.native.layer import NativeLayer, UnknownPartError, Workspace, run_layers

log = logging.getLogger(__name__)

FIRST_KEY = 1
"""Index 0 of a sequence is empty: no slot reads its first token."""


@dataclass(frozen=True)
class PagedAttend:
    """Attention of a drafter layer over its pages."""

    pages: tuple[Tensor, Tensor]
    rows: PagedRows
    window: int

    def __call__(self, query_1HNE: Tensor, key_1GNE: Tensor, value_1GNE: Tensor) -> Tensor:
        attended_NHE = paged_attention(
            query_1HNE[0].transpose(0, 1),
            key_1GNE[0].transpose(0, 1),
            value_1GNE[0].transpose(0, 1),
            *self.pages,
            self.rows,
            scale=query_1HNE.shape[-1] ** -0.5,
            window=self.window,
            first_key=FIRST_KEY,
        )
        return attended_NHE.transpose(0, 1)[None]


def use_native_layers(drafter: Drafter) -> None:
    """Let passes over few slots run native layers, where the kernels can."""
    use_plain_layers(drafter)
    workspace = Workspace()
    try:
        layers = [
            NativeLayer(layer, workspace, drafter.config.window(index), FIRST_KEY)
            for index, layer in enumerate(drafter.layers)
        ]
    except UnknownPartError as reason:
        log.info("the drafter runs on torch's kernels: it has %s", reason)
        return
    for layer, native in zip(drafter.layers, layers, strict=True):
        native.compile()
        layer.forward = _forward(layer, native)


def use_plain_layers(drafter: Drafter) -> None:
    """Undo `use_native_layers`."""
    for layer in drafter.layers:
        layer.__dict__.pop("forward", None)


def _forward(layer: Any, native: NativeLayer) -> Callable[..., Tensor]:
    plain = layer.forward

    def run(state: Tensor, embedding: Tensor, rotary: tuple[Tensor, Tensor], attend: Any) -> Tensor:
        if state.shape[1] > native.most_rows or not isinstance(attend, PagedAttend):
            return plain(state, embedding, rotary, attend)
        attention_input = None
        if layer.hidden_norm is not None:
            normed = layer.hidden_norm(state)
            attention_input = torch.cat([layer.input_layernorm(embedding), normed], dim=-1)
            state = normed if layer.norm_before_residual else state
        return run_layers([native], state, rotary, [attend.pages], attend.rows, attention_input)

    return run
