"""The experts of a layer with weights in 4 or 8 bits, in any model with transformers' experts.

On a GPU our kernels read the codes of the chosen experts, for any number of rows. Elsewhere the weights are dequantized
and the model's own code runs.

Shapes: N rows, T experts per row, E experts, D model width, I inner width.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from peagle.experts.fused import gate_numbers, gate_of
from peagle.linears.few_bit import FewBitWeight, dequantize, quantize
from peagle.linears.skinny_linear import reads_codes

MOST_WEIGHTS = 1 << 26
"""Weights that are rounded at once: rounding takes many times their memory."""
PROJECTIONS = ("gate_up", "down")


class FewBitExperts:
    """Mixed into the experts of a layer, whose weights it replaces. Halves of the first product are not interleaved."""

    plain_class: type[nn.Module]
    form: str
    groups: tuple[int, int]
    few_bit_gate: str
    gate_numbers: tuple[float, float]
    """alpha and limit of the clamped gate"""
    gate_up_words: Tensor
    gate_up_scale: Tensor
    gate_up_bias: Tensor | None
    down_words: Tensor
    down_scale: Tensor
    down_bias: Tensor | None

    @property
    def num_weights(self) -> int:
        num_experts, width = self.down_words.shape[:2]
        num_outputs = self.gate_up_words.shape[1]
        biases = sum(bias.numel() for bias in (self.gate_up_bias, self.down_bias) if bias is not None)
        return num_experts * width * (num_outputs + num_outputs // 2) + biases

    def forward(self, x_ND: Tensor, index_NT: Tensor, weight_NT: Tensor) -> Tensor:
        if not reads_codes(x_ND):
            result: Tensor = plain_experts(self, x_ND.dtype)(x_ND, index_NT, weight_NT)  # type: ignore[arg-type]
            return result
        products_NTD = few_bit_expert_products(
            x_ND,
            index_NT,
            weight_NT,
            self.gate_up_words,
            self.gate_up_scale,
            self.gate_up_bias,
            self.down_words,
            self.down_scale,
            self.down_bias,
            self.form,
            *self.groups,
            self.few_bit_gate,
            *self.gate_numbers,
        )
        return products_NTD.sum(1)


@torch.library.custom_op("peagle::few_bit_expert_products", mutates_args=())
def few_bit_expert_products(
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    gate_up_words: Tensor,
    gate_up_scale: Tensor,
    gate_up_bias: Tensor | None,
    down_words: Tensor,
    down_scale: Tensor,
    down_bias: Tensor | None,
    form: str,
    gate_up_group: int,
    down_group: int,
    gate: str,
    alpha: float,
    limit: float,
) -> Tensor:
    """See `few_bit_expert_products_triton`."""
    from peagle.experts.few_bit_triton import few_bit_expert_products_triton

    gate_up = FewBitWeight(form, x.shape[1], gate_up_group, gate_up_words, gate_up_scale)
    down = FewBitWeight(form, gate_up.num_outputs // 2, down_group, down_words, down_scale)
    return few_bit_expert_products_triton(x, index, weight, gate_up, gate_up_bias, down, down_bias, gate, alpha, limit)


@few_bit_expert_products.register_fake
def _(
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    gate_up_words: Tensor,
    gate_up_scale: Tensor,
    gate_up_bias: Tensor | None,
    down_words: Tensor,
    down_scale: Tensor,
    down_bias: Tensor | None,
    form: str,
    gate_up_group: int,
    down_group: int,
    gate: str,
    alpha: float,
    limit: float,
) -> Tensor:
    return x.new_empty(*index.shape, x.shape[1])


def quantize_experts(module: nn.Module, form: str) -> bool:
    """Round the weights of experts, in place. Returns whether this module is one that our kernels can compute."""
    gate = gate_of(module)
    if gate is None:
        return False
    found = []
    for name in PROJECTIONS:
        stack = getattr(module, f"{name}_proj").detach()
        stack = stack.transpose(1, 2) if module.is_transposed else stack
        interleaved = name == "gate_up" and not module.is_concatenated
        found.append(quantize_stack(_apart(stack) if interleaved else stack, form))
        delattr(module, f"{name}_proj")
    set_experts(module, gate, *found)
    return True


def set_experts(module: nn.Module, gate: str, gate_up: FewBitWeight, down: FewBitWeight) -> None:
    """Let experts, whose plain weights are gone, compute from these weights. Their biases become buffers."""
    assert gate_up.form == down.form and gate_up.zero is None and down.zero is None, "what the kernels take"
    for name, weight in zip(PROJECTIONS, (gate_up, down), strict=True):
        bias = None
        if module.has_bias:
            bias = getattr(module, f"{name}_proj_bias").detach()
            bias = _apart(bias) if name == "gate_up" and not module.is_concatenated else bias
            delattr(module, f"{name}_proj_bias")
        for part, tensor in (("words", weight.words), ("scale", weight.scale), ("bias", bias)):
            module.register_buffer(f"{name}_{part}", tensor)
    module.__dict__.update(
        plain_class=type(module),
        form=gate_up.form,
        groups=(gate_up.group, down.group),
        few_bit_gate=gate,
        gate_numbers=gate_numbers(module),
    )
    module.__class__ = _few_bit_class(type(module))  # type: ignore[arg-type]  # classes are hashable


def plain_experts(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The experts with plain weights, dequantized, as the model's own code reads them."""
    experts: Any = module
    plain: Any = object.__new__(experts.plain_class)
    plain.__dict__.update(module.__dict__)
    plain.__dict__.update(_parameters={}, _buffers={})
    num_inner = experts.gate_up_words.shape[1] // 2
    for name, size, group in zip(PROJECTIONS, (len(experts.down_words[0]), num_inner), experts.groups, strict=True):
        words, scale, bias = (getattr(module, f"{name}_{part}") for part in ("words", "scale", "bias"))
        weight = dequantize(FewBitWeight(experts.form, size, group, words, scale)).to(dtype)
        if name == "gate_up" and not experts.is_concatenated:
            weight, bias = _interleaved(weight), None if bias is None else _interleaved(bias)
        weight = weight.transpose(1, 2).contiguous() if experts.is_transposed else weight
        setattr(plain, f"{name}_proj", nn.Parameter(weight, requires_grad=False))
        if bias is not None:
            setattr(plain, f"{name}_proj_bias", nn.Parameter(bias, requires_grad=False))
    return plain


def quantize_stack(stack_ENK: Tensor, form: str) -> FewBitWeight:
    """`quantize`, a few experts at a time."""
    num_experts = len(stack_ENK) if stack_ENK.is_meta else max(1, MOST_WEIGHTS // stack_ENK[0].numel())
    parts = [quantize(part.contiguous(), form) for part in stack_ENK.split(num_experts)]
    return parts[0]._replace(
        words=torch.cat([part.words for part in parts]), scale=torch.cat([part.scale for part in parts])
    )


def _apart(interleaved_EN: Tensor) -> Tensor:
    """The even outputs of each expert, then the odd ones."""
    return torch.cat([interleaved_EN[:, ::2], interleaved_EN[:, 1::2]], dim=1)


def _interleaved(apart_EN: Tensor) -> Tensor:
    return torch.stack(apart_EN.chunk(2, dim=1), dim=2).flatten(1, 2)


@cache
def _few_bit_class(original: type) -> type:
    """One class per original class, so that torch.compile shares its code."""
    return type(f"FewBit{original.__name__}", (FewBitExperts, original), {})
