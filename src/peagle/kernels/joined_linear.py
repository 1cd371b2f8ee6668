"""Linear layers that read the same input, as one product.

Query, key and value projections, and gate and up projections, read the same rows. A product of a few rows costs
little more than its launch, so one product instead of three saves two launches, in every layer and every step.
"""

import torch
from torch import Tensor, nn

from peagle.kernels.skinny_linear import skinny_linear

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Joined:
    """Weights of several layers under one another, and the product of the input that is being asked for."""

    def __init__(self, parts: list[nn.Linear]) -> None:
        self.parts = parts
        """the layers as they were, to be given back; meanwhile their parameters are views of the joined ones"""
        self.sizes = [part.out_features for part in parts]
        self.weight = torch.cat([part.weight for part in parts])
        has_bias = any(name == "bias" for part in parts for name, _ in part.named_parameters())
        self.bias = torch.cat([part.bias for part in parts]) if has_bias else None
        for index, part in enumerate(parts):
            part.weight.data = self.weight.split(self.sizes)[index]
            if self.bias is not None:
                part.bias.data = self.bias.split(self.sizes)[index]
        self.packed: nn.Module | None = None
        """computes the product from a packed form of the weight, where one was made"""
        self.forget()

    def forget(self) -> None:
        self._input: Tensor | None = None
        self._parts: list[Tensor] = []
        self._num_taken = 0

    def product(self, x: Tensor, index: int) -> Tensor:
        """One layer's part of the product with `x`: computed for the first to ask, forgotten with the last."""
        if self._input is not x:
            self._input, self._num_taken = x, 0
            self._parts = list(self._multiply(x).split(self.sizes, dim=-1))
        part = self._parts[index]
        self._num_taken += 1
        if self._num_taken == len(self.sizes):
            self.forget()
        return part

    def _multiply(self, x: Tensor) -> Tensor:
        return skinny_linear(x, self.weight, self.bias) if self.packed is None else self.packed(x)


class JoinedPart(nn.Module):
    """One layer of a joined group. Its `weight` and `bias` are views of the joined ones."""

    def __init__(self, joined: Joined, index: int) -> None:
        super().__init__()
        self.joined, self.index = joined, index
        plain = joined.parts[index]
        self.out_features, self.in_features = plain.out_features, plain.in_features
        self.weight, self.bias = plain.weight, plain.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.joined.product(x, self.index)


@torch.no_grad()
def join_linears(module: nn.Module) -> int:
    """Join the projections that stand side by side in `module`, in place, and return how many groups there were.

    The state dict keeps its names and values, and takes no more memory than before.
    """
    num_joined = 0
    for parent in list(module.modules()):
        for names in SIBLINGS:
            parts = [part for name in names if type(part := getattr(parent, name, None)) is nn.Linear]
            kinds = {(part.in_features, part.bias is None) for part in parts}
            if len(parts) < len(names) or len(kinds) > 1:
                continue
            joined = Joined(parts)
            for index, name in enumerate(names):
                setattr(parent, name, JoinedPart(joined, index))
            num_joined += 1
    return num_joined


def joined_groups(module: nn.Module) -> list[Joined]:
    """What `join_linears` has made in `module`."""
    groups = {id(part.joined): part.joined for part in module.modules() if isinstance(part, JoinedPart)}
    return list(groups.values())


@torch.no_grad()
def part_linears(module: nn.Module) -> None:
    """Undo `join_linears`: the very layers and parameters that were there, each with memory of its own."""
    for parent in list(module.modules()):
        for name, part in list(parent.named_children()):
            if isinstance(part, JoinedPart):
                plain = part.joined.parts[part.index]
                for parameter in plain.parameters():
                    parameter.data = parameter.data.clone()
                setattr(parent, name, plain)
