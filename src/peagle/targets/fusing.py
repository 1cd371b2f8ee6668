"""Fuse the gate of an MLP with its two projections, in any model that has a gated MLP.

Most decoders compute down(activation(gate(x)) * up(x)). We recognize such a module by the names of its parts and by
comparing its output, not by a table of models. Only passes with few rows are fused, and all passes with quantized
weights; others run the model's code.
"""

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from peagle.linears.joined_linear import JoinedPart, gate_activation
from peagle.linears.skinny_linear import ACTIVATIONS, gated_linear, is_few

log = logging.getLogger(__name__)

MAX_DIFFERENCE = 0.02
"""Relative difference that counts as rounding in half precision."""


class GatedProduct:
    """Mixed into a gated MLP: for few rows, both projections and the gate are one kernel."""

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
    """Fuse the gated MLPs inside `root` whose projections are joined. Returns a function that undoes it."""
    fused: list[tuple[nn.Module, type]] = []
    for module in list(root.modules()):
        activation = gate_activation(module)
        if activation is not None and _is_plain(module, activation, next(root.parameters())):
            fused.append((module, type(module)))
            module.__dict__.update(plain_forward=module.forward, activation=activation)
            module.__class__ = _gated(type(module))  # type: ignore[arg-type]  # classes are hashable

    def restore() -> None:
        while fused:
            module, original = fused.pop()
            module.__class__ = original
            del module.__dict__["plain_forward"], module.__dict__["activation"]

    return restore


def _is_plain(module: nn.Module, activation: str, like: Tensor) -> bool:
    """Whether the module computes down(activation(gate) * up), on random rows of the dtype and device of `like`."""
    draw = torch.Generator(like.device).manual_seed(0)
    size: int = module.gate_proj.in_features  # type: ignore[union-attr, assignment]
    x = torch.randn(4, size, generator=draw, device=like.device).to(like.dtype)
    gate, up = module.gate_proj(x), module.up_proj(x)  # type: ignore[operator]
    expected = module.down_proj(ACTIVATIONS[activation](gate) * up)  # type: ignore[operator]
    difference = (module(x) - expected).float().norm() / expected.float().norm()
    if difference > MAX_DIFFERENCE:
        log.info("%s is not fused: it computes more than a gated MLP", type(module).__name__)
    return bool(difference <= MAX_DIFFERENCE)


@cache
def _gated(original: type) -> type:
    """One class per original class, so that torch.compile shares its code."""
    return type(f"Gated{original.__name__}", (GatedProduct, original), {})
