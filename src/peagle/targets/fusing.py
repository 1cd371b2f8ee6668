"""Letting the gate of an MLP join its two products, in any model that is built that way.

Most decoders have a gated MLP, down(activation(gate(x)) * up(x)). Which modules are one is not looked up in a table:
they are told by the names of their parts, and by giving what such an MLP gives. Only passes of a few rows are changed;
larger ones run the model's own code.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from peagle.kernels.joined_linear import JoinedPart
from peagle.kernels.skinny_linear import ACTIVATIONS, gated_linear, is_few

log = logging.getLogger(__name__)

LARGEST_DIFFERENCE = 0.02
"""Relative difference of two results that counts as rounding, in half precision."""


class GatedProduct:
    """Mixed into a gated MLP: for a few rows, both projections and the gate are one product."""

    plain_forward: Callable[..., Tensor]
    gate_proj: JoinedPart
    down_proj: nn.Module
    activation: str

    def forward(self, x: Tensor) -> Tensor:
        joined = self.gate_proj.joined
        if not is_few(x, joined.weight, is_gated=True):
            return self.plain_forward(x)
        gated: Tensor = self.down_proj(gated_linear(x, joined.weight, joined.bias, self.activation))
        return gated


@torch.no_grad()
def fuse(root: nn.Module) -> Callable[[], None]:
    """Let gates below `root` join the products of its joined projections; returns what undoes it."""
    undo: list[Callable[[], None]] = []
    for module in list(root.modules()):
        activation = _activation(module)
        if activation is not None and _is_plain(module, activation):
            undo.append(_become(module, GatedProduct, plain_forward=module.forward, activation=activation))

    def put_back() -> None:
        for step in reversed(undo):
            step()
        undo.clear()

    return put_back


def _activation(module: nn.Module) -> str | None:
    """The activation of a gated MLP whose gate and up projections are joined; None for any other module."""
    gate, up, act = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "act_fn"))
    is_pair = isinstance(gate, JoinedPart) and isinstance(up, JoinedPart) and gate.joined is up.joined
    if not is_pair or not hasattr(module, "down_proj") or act is None:
        return None
    x = torch.linspace(-4, 4, 33)
    for name, function in ACTIVATIONS.items():
        if torch.allclose(act(x), function(x), atol=1e-6):
            return name
    return None


def _is_plain(module: nn.Module, activation: str) -> bool:
    """Whether a module computes what its parts say, on rows drawn at random."""
    weight: Tensor = module.gate_proj.joined.weight  # type: ignore[union-attr, assignment]
    draw = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(4, weight.shape[1], generator=draw, device=weight.device).to(weight.dtype)
    gate, up = module.gate_proj(x), module.up_proj(x)  # type: ignore[operator]
    expected = module.down_proj(ACTIVATIONS[activation](gate) * up)  # type: ignore[operator]
    difference = (module(x) - expected).float().norm() / expected.float().norm()
    if difference > LARGEST_DIFFERENCE:
        log.info("%s: its gate stays on its own, it does more than its parts say", type(module).__name__)
    return bool(difference <= LARGEST_DIFFERENCE)


@cache
def _mixed(mixin: type, original: type) -> type:
    """One class for all modules of a kind, so that a compiler sees them as one kind."""
    return type(f"{mixin.__name__}{original.__name__}", (mixin, original), {})


def _become(module: nn.Module, mixin: type, **attributes: Any) -> Callable[[], None]:
    """Give one module the mixin's forward, under its own names and parameters; returns what undoes it."""
    original = type(module)
    module.__class__ = _mixed(mixin, original)  # type: ignore[arg-type]  # classes can be hashed
    for name, value in attributes.items():
        object.__setattr__(module, name, value)

    def undo() -> None:
        module.__class__ = original
        for name in attributes:
            object.__delattr__(module, name)

    return undo
