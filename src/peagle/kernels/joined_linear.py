"""Join linear layers that read the same input into one product.

Query, key and value projections read the same rows, and so do gate and up projections. With few rows a product costs
little more than its launch, so one product instead of three saves two launches per layer and step.
"""

import torch
from torch import Tensor, nn

from peagle.kernels.skinny_linear import ACTIVATIONS, skinny_linear

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Joined:
    """The stacked weights of several layers, and their product with the current input."""

    def __init__(self, parts: list[nn.Linear]) -> None:
        self.parts = parts
        """The original layers, for `part_linears`. Their parameters are views of the joined ones."""
        self.sizes = [part.out_features for part in parts]
        self.weight = torch.cat([part.weight for part in parts])
        has_bias = any(name == "bias" for part in parts for name, _ in part.named_parameters())
        self.bias = torch.cat([part.bias for part in parts]) if has_bias else None
        for index, part in enumerate(parts):
            part.weight.data = self.weight.split(self.sizes)[index]
            if self.bias is not None:
                part.bias.data = self.bias.split(self.sizes)[index]
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
    """Join sibling projections inside `module`, in place, and return the number of groups.

    The state dict keeps its names, values and size.
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
    """The groups that `join_linears` has made in `module`."""
    groups = {id(part.joined): part.joined for part in module.modules() if isinstance(part, JoinedPart)}
    return list(groups.values())


@torch.no_grad()
def part_linears(module: nn.Module) -> None:
    """Undo `join_linears`: restore the original layers and parameters, with their own memory."""
    for parent in list(module.modules()):
        for name, part in list(parent.named_children()):
            if isinstance(part, JoinedPart):
                plain = part.joined.parts[part.index]
                for parameter in plain.parameters():
                    parameter.data = parameter.data.clone()
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
