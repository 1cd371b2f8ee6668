"""A hash of a model's weights: the same whether quantized weights are kept or dequantized."""

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from peagle.experts.few_bit import PROJECTIONS, FewBitExperts
from peagle.linears.few_bit import FewBitWeight, dequantize
from peagle.linears.few_bit_linear import FewBitLinear

NUM_SAMPLES = 64
"""Elements of each weight that count."""

Weight = tuple[str, tuple[int, ...], Callable[[Tensor], Tensor]]
"""The name and shape of a plain weight, and what reads its elements by their index."""


def fingerprint(model: nn.Module) -> str:
    samples, names = [], []
    for name, shape, read in sorted([*_plain(model), *_few_bit(model)]):
        size = prod(shape)
        index = torch.linspace(0, size - 1, min(NUM_SAMPLES, size), dtype=torch.float64).long()
        samples.append(read(index).to(torch.bfloat16))
        names.append(f"{name}:{list(shape)}")
    content = torch.cat(samples).view(torch.int16).cpu().numpy().tobytes()
    return hashlib.sha256("\n".join(names).encode() + content).hexdigest()[:32]


def _plain(model: nn.Module) -> Iterator[Weight]:
    for name, parameter in model.named_parameters():
        yield name, tuple(parameter.shape), partial(_elements, parameter.detach())


def _elements(tensor: Tensor, index: Tensor) -> Tensor:
    return tensor.flatten()[index.to(tensor.device)]


def _few_bit(model: nn.Module) -> Iterator[Weight]:
    for path, module in model.named_modules():
        if isinstance(module, FewBitLinear):
            shape = (module.out_features, module.in_features)
            yield f"{path}.weight", shape, partial(_few_bit_elements, module.stored, False, False)
        elif isinstance(module, FewBitExperts):
            yield from _experts(path, module)


def _experts(path: str, experts: Any) -> Iterator[Weight]:
    sizes = experts.down_words.shape[1], experts.gate_up_words.shape[1] // 2
    for name, size, group in zip(PROJECTIONS, sizes, experts.groups, strict=True):
        words, scale, bias = (getattr(experts, f"{name}_{part}") for part in ("words", "scale", "bias"))
        is_interleaved = name == "gate_up" and not experts.is_concatenated
        weight = FewBitWeight(experts.form, size, group, words, scale)
        shape = (len(words), size, words.shape[1]) if experts.is_transposed else (*words.shape[:2], size)
        yield f"{path}.{name}_proj", shape, partial(_few_bit_elements, weight, experts.is_transposed, is_interleaved)
        if bias is not None:
            plain = torch.stack(bias.chunk(2, dim=1), dim=2).flatten(1) if is_interleaved else bias
            yield f"{path}.{name}_proj_bias", tuple(bias.shape), partial(_elements, plain)


def _few_bit_elements(weight: FewBitWeight, is_transposed: bool, is_interleaved: bool, index: Tensor) -> Tensor:
    num_outputs, index = weight.num_outputs, index.to(weight.words.device)
    experts, rest = index // (num_outputs * weight.size), index % (num_outputs * weight.size)
    if is_transposed:
        outputs, inputs = rest % num_outputs, rest // num_outputs
    else:
        outputs, inputs = rest // weight.size, rest % weight.size
    if is_interleaved:
        outputs = outputs // 2 + outputs % 2 * (num_outputs // 2)
    rows = experts * num_outputs + outputs
    words, scale = (part.flatten(0, -2)[rows] for part in (weight.words, weight.scale))
    zero = None if weight.zero is None else weight.zero[rows]
    return dequantize(weight._replace(words=words, scale=scale, zero=zero)).gather(1, inputs[:, None])[:, 0]
