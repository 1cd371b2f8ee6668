"""What the rest of peagle asks of a target.

Shapes: B requests, T tokens, V vocabulary, A concatenated aux width (number of aux layers times the hidden size).
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from peagle.errors import ConfigError


class TargetOutput(NamedTuple):
    """`aux_hidden_BTA` concatenates, in ascending layer order, the residual stream entering each aux layer."""

    logits_BTV: Tensor
    aux_hidden_BTA: Tensor


class TargetCache(Protocol):
    """Key-value memory of one request. It grows with each `forward`; `crop(-n)` drops its last n tokens."""

    def crop(self, max_length: int) -> Any: ...


class Target(Protocol):
    """The model whose distribution is preserved. It owns its weights; nobody else writes to them."""

    name: str
    aux_layer_ids: tuple[int, ...]
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_length: int
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device

    def new_cache(self) -> TargetCache:
        """An empty cache that can be cut back to any earlier length."""
        ...

    def forward(self, token_ids_BT: Tensor, cache: TargetCache | None = None) -> TargetOutput:
        """Run the tokens after those in `cache`, which is extended by them. Without a cache nothing is kept."""
        ...


def default_aux_layer_ids(num_layers: int) -> tuple[int, ...]:
    """Layers 2, L/2 and L-3, the field's default; for L < 7, where these collide, layers 1, L/2 and L-1.

    Id i means the residual stream ENTERING layer i. Very shallow targets get fewer than three.
    """
    if num_layers >= 7:
        return (2, num_layers // 2, num_layers - 3)
    return tuple(sorted({min(1, num_layers - 1), num_layers // 2, num_layers - 1}))


def check_aux_layer_ids(aux_layer_ids: tuple[int, ...], num_layers: int) -> None:
    in_order = tuple(sorted(set(aux_layer_ids))) == tuple(aux_layer_ids)
    if not aux_layer_ids or not in_order or not all(0 <= index < num_layers for index in aux_layer_ids):
        raise ConfigError(
            f"aux_layer_ids must be distinct, ascending and between 0 and {num_layers - 1}, got {list(aux_layer_ids)}",
            hint=f"the default for this target is {list(default_aux_layer_ids(num_layers))}",
        )
