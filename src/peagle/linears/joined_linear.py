"""Join linear layers that read the same input into one product.

Query, key and value projections read the same rows, and so do gate and up projections. With few rows a product costs
little more than its launch, so one product instead of three saves two launches per layer and step.
"""

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from peagle.linears.few_bit import FewBitWeight
from peagle.linears.few_bit_linear import FewBitLinear
from peagle.linears.skinny_linear import ACTIVATIONS, skinny_linear

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Joined:
    """The stacked weights of several layers, and their product with the current input."""

    weight: Tensor | FewBitWeight
    bias: Tensor | None

    def __init__(self, parts: list[nn.Linear] | list[FewBitLinear]) -> None:
        self.parts = parts
        """The original layers, for `part_linears`. Their tensors are views of the joined ones."""
        self.sizes = [part.out_features for part in parts]
        whole: dict[str, Tensor] = {}
        for tensors in zip(*map(_tensors, parts), strict=True):
            name = tensors[0][0]
            whole[name] = torch.cat([tensor for _, tensor in tensors])
            for (_, tensor), view in zip(tensors, whole[name].split(self.sizes), strict=True):
                tensor.data = view
        if isinstance(parts[0], FewBitLinear):
            words, scale, zero = whole["words"], whole["scale"], whole.get("zero")
            self.weight = parts[0].stored._replace(words=words, scale=scale, zero=zero)
        else:
            self.weight = whole["weight"]
        self.bias = whole.get("bias")
        self.packed: nn.Module | None = None
        """Computes the product from a packed form of the weight, if there is one."""
        self._reset()

    def _reset(self) -> None:
        self._input: Tensor | None = None
        self._parts: list[Tensor] = []
        self._num_taken = 0

    def product(self, x: Tensor, index: int) -> Tensor:
        """One layer's part of the product with `x`: computed at the first call, dropped after the last."""
        if self._input is not x:
            self._input, self._num_taken = x, 0
            whole = skinny_linear(x, self.weight, self.bias) if self.packed is None else self.packed(x)
            self._parts = list(whole.split(self.sizes, dim=-1))
        part = self._parts[index]
        self._num_taken += 1
        if self._num_taken == len(self.sizes):
            self._reset()
        return part


class JoinedPart(nn.Module):
    """One layer of a joined group. Its tensors are views of the joined ones."""

    def __init__(self, joined: Joined, index: int) -> None:
        super().__init__()
        self.joined, self.index = joined, index
        plain = joined.parts[index]
        self.out_features, self.in_features = plain.out_features, plain.in_features
        self._parameters |= plain._parameters
        self._buffers |= plain._buffers

    def forward(self, x: Tensor) -> Tensor:
        return self.joined.product(x, self.index)


def _tensors(linear: nn.Module) -> list[tuple[str, Tensor]]:
    return [*linear.named_parameters(), *linear.named_buffers()]


def _kind(linear: nn.Linear | FewBitLinear) -> tuple[object, ...]:
    """What layers must have in common to be joined."""
    form = None
    if isinstance(linear, FewBitLinear):
        form = (linear.form, linear.group, linear.zero is None, linear.scale.dtype)
    return linear.in_features, linear.bias is None, form


@torch.no_grad()
def join_linears(module: nn.Module, *, few_bit: bool = False) -> int:
    """Join sibling projections inside `module`, in place, and return the number of groups.

    The state dict keeps its names, values and size. With `few_bit`, also joins quantized layers.
    """
    num_joined, kinds = 0, (nn.Linear, FewBitLinear) if few_bit else (nn.Linear,)
    for parent in list(module.modules()):
        for names in SIBLINGS:
            found: list[Any] = [getattr(parent, name, None) for name in names]
            parts = [part for part in found if type(part) in kinds]
            if len(parts) < len(names) or len(set(map(_kind, parts))) > 1:
                continue
            joined = Joined(parts)
            for index, name in enumerate(names):
                setattr(parent, name, JoinedPart(joined, index))
            num_joined += 1
    return num_joined


def joined_groups(module: nn.Module) -> list[Joined]:
    """The groups that `join_linears` has made in `module`."""
    groups = {id(part.joined): part.joined for part in module.modules() if isinstance(part, JoinedPart)}
    return list(groups.values())


@torch.no_grad()
def part_linears(module: nn.Module) -> None:
    """Undo `join_linears`: restore the original layers and tensors, with their own memory."""
    for parent in list(module.modules()):
        for name, part in list(parent.named_children()):
            if isinstance(part, JoinedPart):
                plain = part.joined.parts[part.index]
                for tensor in chain(plain.parameters(), plain.buffers()):
                    tensor.data = tensor.data.clone()
                setattr(parent, name, plain)


def gate_activation(module: nn.Module) -> str | None:
    """The activation of a gated MLP with joined gate and up projections; None for other modules."""
    gate, up, act = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "act_fn"))
    is_pair = isinstance(gate, JoinedPart) and isinstance(up, JoinedPart) and gate.joined is up.joined
    if not is_pair or not hasattr(module, "down_proj") or act is None:
        return None
    x = torch.linspace(-4, 4, 33)
    for name, function in ACTIVATIONS.items():
        if torch.allclose(act(x), function(x), atol=1e-6):
            return name
    return None
