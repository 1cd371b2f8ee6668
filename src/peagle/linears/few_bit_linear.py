"""A linear layer whose weight stays in 4 or 8 bits."""

import torch
from torch import Tensor, nn

from peagle.linears.few_bit import FewBitWeight, dequantize, quantize
from peagle.linears.skinny_linear import skinny_linear


class FewBitLinear(nn.Module):
    """Like `nn.Linear`, for inference. On a GPU in bfloat16 a kernel reads the codes; elsewhere they are
    dequantized."""

    words: Tensor
    scale: Tensor
    zero: Tensor | None

    def __init__(self, weight: FewBitWeight, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.form, self.in_features, self.group = weight.form, weight.size, weight.group
        self.out_features = weight.num_outputs
        for name in ("words", "scale", "zero"):
            self.register_buffer(name, getattr(weight, name))
        self.bias = bias

    @classmethod
    def from_linear(cls, linear: nn.Linear, form: str) -> "FewBitLinear":
        return cls(quantize(linear.weight.detach(), form), linear.bias)

    @property
    def stored(self) -> FewBitWeight:
        return FewBitWeight(self.form, self.in_features, self.group, self.words, self.scale, self.zero)

    @property
    def num_weights(self) -> int:
        return self.in_features * self.out_features

    def to_linear(self, dtype: torch.dtype) -> nn.Linear:
        """A plain layer with the dequantized weight."""
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(dequantize(self.stored).to(dtype), requires_grad=False)
        linear.register_parameter("bias", self.bias)
        return linear

    def forward(self, x: Tensor) -> Tensor:
        return skinny_linear(x, self.stored, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, form={self.form}"
