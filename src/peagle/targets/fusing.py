"""Letting a layer's norms and gates join the products beside them, in any model that is built that way.

In most decoders the rows of a norm are read by one group of joined projections alone, and a gated MLP is
down(activation(gate(x)) * up(x)). Where that is so, the norm and the gate can be part of the product. Which models are
built so is not looked up in a table but found out: one pass is watched to see which norm feeds which projections, and
after the change a second pass must give what the first gave, or everything is put back.

Only passes of a few rows are changed; larger ones run the model's own code.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from peagle.kernels.joined_linear import Joined, JoinedPart
from peagle.kernels.skinny_linear import ACTIVATIONS, gated_linear, is_few
from peagle.targets.hf import norm_scale

log = logging.getLogger(__name__)

LARGEST_CHANGE = 0.05
"""Relative difference of a pass's outputs up to which a change counts as rounding, in the precision of the weights."""


class LeftToProduct:
    """Mixed into a norm whose work the product after it does: it hands its rows on as they are."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class GatedProduct:
    """Mixed into a gated MLP: for a few rows, both projections and the gate are one product."""

    plain_forward: Callable[..., Tensor]
    gate_proj: JoinedPart
    down_proj: nn.Module
    activation: str

    def forward(self, x: Tensor) -> Tensor:
        joined = self.gate_proj.joined
        if not is_few(x):
            return self.plain_forward(x)
        scale, eps = (None, 0.0) if joined.norm is None else (joined.norm.scale, joined.norm.eps)
        return self.down_proj(gated_linear(x, scale, eps, joined.weight, joined.bias, self.activation))


class Norm:
    """A root-mean-square norm that a product may do itself: its scale and epsilon, and its own code."""

    def __init__(self, module: nn.Module, scale: Tensor, eps: float) -> None:
        self.module, self.scale, self.eps = module, scale, eps
        self.kind = type(module)

    def __call__(self, x: Tensor) -> Tensor:
        normed: Tensor = self.kind.forward(self.module, x)
        return normed


@torch.no_grad()
def fuse(root: nn.Module, run: Callable[[], Tensor]) -> Callable[[], None]:
    """Let norms and gates below `root` join the products of its joined projections; returns what undoes it.

    `run` is a pass that uses all of them and gives the same each time.
    """
    sources, expected = _watch(root, run)
    undo: list[Callable[[], None]] = []
    for joined, norm in sources:
        joined.norm = norm
        undo.append(_become(norm.module, LeftToProduct))
        undo.append(lambda joined=joined: setattr(joined, "norm", None))  # type: ignore[misc]
    for module in list(root.modules()):
        activation = _activation(module)
        if activation is not None:
            undo.append(_become(module, GatedProduct, plain_forward=module.forward, activation=activation))

    def put_back() -> None:
        for step in reversed(undo):
            step()
        undo.clear()

    change = (run().float() - expected.float()).norm() / expected.float().norm()
    if not change <= LARGEST_CHANGE:
        put_back()
        log.info("%s: norms and gates stay on their own, joined they change its output", type(root).__name__)
    return put_back


def _watch(root: nn.Module, run: Callable[[], Tensor]) -> tuple[list[tuple[Joined, Norm]], Tensor]:
    """Which norm's rows each joined group reads, and the pass's output."""
    made_by: dict[int, tuple[nn.Module, Tensor]] = {}
    found: dict[int, tuple[Joined, nn.Module]] = {}

    def after_norm(module: nn.Module, inputs: Any, output: Any) -> None:
        made_by[id(output)] = (module, output)  # kept, so that no other tensor takes its id

    def before_part(module: nn.Module, inputs: Any) -> None:
        assert isinstance(module, JoinedPart)
        source = made_by.get(id(inputs[0])) if inputs else None
        if source is not None:
            found[id(module.joined)] = (module.joined, source[0])

    hooks = []
    for module in root.modules():
        if _eps(module) is not None:
            hooks.append(module.register_forward_hook(after_norm))
        elif isinstance(module, JoinedPart):
            hooks.append(module.register_forward_pre_hook(before_part))
    try:
        output = run()
    finally:
        for hook in hooks:
            hook.remove()
    sources = []
    for joined, module in found.values():
        scale, eps = _scale(module), _eps(module)
        if scale is not None and eps is not None:
            sources.append((joined, Norm(module, scale, eps)))
    return sources, output


def _eps(module: nn.Module) -> float | None:
    """The epsilon of a root-mean-square norm; None for any other module."""
    if "RMSNorm" not in type(module).__name__:
        return None
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _scale(module: nn.Module) -> Tensor | None:
    """What a norm multiplies by; None where it has other parameters than a scale."""
    parameters = list(module.parameters())
    return norm_scale(module) if len(parameters) == 1 and parameters[0].ndim == 1 else None


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
