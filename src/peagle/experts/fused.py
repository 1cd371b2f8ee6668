"""Compute the experts of a layer for few rows in two kernels, in any model with transformers' experts.

transformers' own forms either wait for the host (eager), copy the weight of every chosen expert (batched_mm), or sort,
gather and scatter rows around two library products (grouped_mm). We recognize a module by its parameters and by
comparing its output, not by a table of models. Passes with more rows run the model's code.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from peagle.linears.skinny_linear import ACTIVATIONS

log = logging.getLogger(__name__)

MOST_ROWS = 512
"""Limit in bfloat16. In other dtypes transformers' code waits for the host, which cannot be captured as a graph."""
MAX_DIFFERENCE = 0.02
"""Relative difference that counts as rounding in half precision."""
PROBES = ((4, 2), (MOST_ROWS, 8))
"""Rows and experts per row of the probes: the smallest and the largest tiles."""


class FusedExperts:
    """Mixed into the experts of a layer: for few rows, both products run in our kernels."""

    plain_forward: Callable[..., Tensor]
    gate_up_proj: Tensor
    down_proj: Tensor
    has_bias: bool
    is_transposed: bool
    fused_gate: str
    """a key of `product_triton.GATES`"""
    gate_numbers: tuple[float, float]
    """alpha and limit of the clamped gate"""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs or len(args) != 3 or not is_few(args[0]):
            return self.plain_forward(*args, **kwargs)
        return self.few_rows(*args)

    def few_rows(self, x_ND: Tensor, index_NT: Tensor, weight_NT: Tensor) -> Tensor:
        products_NTD = expert_products(
            x_ND,
            index_NT,
            weight_NT,
            self.gate_up_proj,
            self.gate_up_proj_bias if self.has_bias else None,  # type: ignore[attr-defined]
            self.down_proj,
            self.down_proj_bias if self.has_bias else None,  # type: ignore[attr-defined]
            self.is_transposed,
            self.fused_gate,
            *self.gate_numbers,
        )
        return products_NTD.sum(1)


def is_few(x_ND: Tensor) -> bool:
    """Whether our kernels take this input. Compiled code has one variant for each answer."""
    return x_ND.is_cuda and (x_ND.dtype != torch.bfloat16 or x_ND.shape[0] <= MOST_ROWS)


@torch.library.custom_op("peagle::expert_products", mutates_args=())
def expert_products(
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    is_transposed: bool,
    gate: str,
    alpha: float,
    limit: float,
) -> Tensor:
    """See `expert_products_triton`."""
    from peagle.experts.product_triton import expert_products_triton

    return expert_products_triton(
        x, index, weight, gate_up, gate_up_bias, down, down_bias, is_transposed, gate, alpha, limit
    )


@expert_products.register_fake
def _(
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    is_transposed: bool,
    gate: str,
    alpha: float,
    limit: float,
) -> Tensor:
    return x.new_empty(*index.shape, x.shape[1])


@torch.no_grad()
def fuse_experts(root: nn.Module) -> Callable[[], None]:
    """Fuse the experts inside `root` that our kernels can compute. Returns a function that undoes it."""
    fused: list[tuple[nn.Module, type]] = []
    problems: dict[tuple[Any, ...], str | None] = {}
    """by class and shape: layers are alike, so one of them is probed"""

    def restore() -> None:
        while fused:
            _restore(*fused.pop())

    for module in list(root.modules()):
        gate = gate_of(module)
        if gate is None:
            continue
        original = type(module)
        module.__dict__.update(plain_forward=module.forward, fused_gate=gate, gate_numbers=gate_numbers(module))
        module.__class__ = _fused_class(original)  # type: ignore[arg-type]  # classes are hashable
        fused.append((module, original))
        kind = (original, gate, *(weight.shape for weight in module.parameters()))
        if kind not in problems:
            problems[kind] = _problem(module)
            if problems[kind]:
                log.warning("%s is not fused, which is slower: %s", original.__name__, problems[kind])
        if problems[kind]:
            _restore(*fused.pop())
    return restore


def _restore(module: nn.Module, original: type) -> None:
    module.__class__ = original
    for name in ("plain_forward", "fused_gate", "gate_numbers"):
        del module.__dict__[name]


def gate_of(module: nn.Module) -> str | None:
    """The gate of experts that are stacked as our kernels read them; None for other modules."""
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    flags = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate")
    is_stack = all(type(weight) is nn.Parameter and weight.ndim == 3 and weight.is_contiguous() for weight in weights)
    if not is_stack or not all(hasattr(module, name) for name in flags) or not module.has_gate:
        return None
    probe = 4 * torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    found: Tensor = module._apply_gate(probe)  # type: ignore[operator]
    if not module.is_concatenated:
        return "clamped" if torch.allclose(found, _clamped_gate(probe, *gate_numbers(module)), atol=1e-5) else None
    gate, up = probe.chunk(2, dim=-1)
    for name, function in ACTIVATIONS.items():
        if torch.allclose(found, function(gate) * up, atol=1e-5):
            return name
    return None


def gate_numbers(module: nn.Module) -> tuple[float, float]:
    alpha, limit = getattr(module, "alpha", 1.0), getattr(module, "limit", 1.0)
    return (float(alpha), float(limit)) if isinstance(alpha, float) and isinstance(limit, float) else (1.0, 1.0)


def _clamped_gate(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """GPT-OSS's gate, over interleaved halves."""
    gate, up = gate_up[..., ::2].clamp(max=limit), gate_up[..., 1::2].clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def _problem(module: nn.Module) -> str | None:
    """Why the kernels cannot stand in for the module: they fail, or differ from it on random rows."""
    weight: Tensor = module.down_proj  # type: ignore[assignment]
    num_experts, width = len(weight), weight.shape[2 if module.is_transposed else 1]
    draw = torch.Generator(weight.device).manual_seed(0)
    for num_rows, num_chosen in PROBES:
        x = torch.randn(num_rows, width, generator=draw, device=weight.device).to(weight.dtype)
        if not is_few(x):
            continue  # on a CPU, where the kernels never run
        scores = torch.rand(num_rows, num_experts, generator=draw, device=weight.device)
        chosen = scores.topk(min(num_chosen, num_experts))
        rows = x, chosen.indices, chosen.values.to(weight.dtype)
        expected = module.plain_forward(*rows).float()  # type: ignore[operator]
        try:
            found = module.few_rows(*rows).float()  # type: ignore[operator]
        except Exception as error:  # Triton may raise anything on a GPU that it was not tried on
            return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        difference = ((found - expected).norm() / expected.norm()).item()
        if not difference <= MAX_DIFFERENCE:
            return f"its output differs by {difference:.1%} on random rows"
    return None


@cache
def _fused_class(original: type) -> type:
    """One class per original class, so that torch.compile shares its code."""
    return type(f"Fused{original.__name__}", (FusedExperts, original), {})
