"""A drafter's layers over pages: attention, and on a CPU all layers as one call (`NativeLayer`).

Shapes: N slots, D drafter width, H query and G key-value heads, E head width.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from peagle.drafter.model import Attend, Drafter, Layer
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
    """Let passes over few slots run all layers as one call, where the kernels can."""
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
    for native in layers:
        native.compile()
    drafter.run_layers = _run_layers(drafter, layers)  # type: ignore[method-assign]


def use_plain_layers(drafter: Drafter) -> None:
    """Undo `use_native_layers`."""
    drafter.__dict__.pop("run_layers", None)


def _run_layers(drafter: Drafter, natives: list[NativeLayer]) -> Callable[..., Tensor]:
    plain, first = drafter.run_layers, cast(Layer, drafter.layers[0])

    def run(
        state: Tensor, embedding: Tensor, rotary: tuple[Tensor, Tensor], attend_in: Callable[[int], Attend]
    ) -> Tensor:
        attends = [attend_in(index) for index in range(len(natives))]
        if state.shape[1] > natives[0].most_rows or not isinstance(attends[0], PagedAttend):
            return plain(state, embedding, rotary, attends.__getitem__)
        state, attention_input = first.inputs(state, embedding)
        pages = [cast(PagedAttend, each).pages for each in attends]
        return run_layers(natives, state, rotary, pages, attends[0].rows, attention_input)

    return run
