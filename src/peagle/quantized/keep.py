"""Load few-bit weights as they are: transformers gets placeholders, and layers that keep few bits then replace them.

A placeholder is one number, expanded to the shape of the plain weight, so nothing of that size is allocated. Its
storage tells which weight it stands for, whatever transformers renames.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from math import ceil, prod
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from peagle.linears.few_bit import FORMS, FewBitWeight, group_limit
from peagle.linears.few_bit_linear import FewBitLinear
from peagle.quantized.headers import FewBitCheckpoint, StoredWeight
from peagle.quantized.unpack import dequantize, fits_kernels, keep

EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
STACKS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
"""The stacks of experts, and the projections of each expert whose outputs follow each other in them."""
SCALE_BYTES = {"U8": 1, "F16": 2, "BF16": 2, "F32": 4}

Stack = list[dict[str, StoredWeight]]
"""The weights of each expert by name, outputs of one after those of the other; of MXFP4 one, a stack already."""


class Keep(NamedTuple):
    """Where weights are kept, and what `peagle.experts` does for those of experts."""

    device: torch.device
    gate_of: Callable[[nn.Module], str | None]
    set_experts: Callable[[nn.Module, str, FewBitWeight, FewBitWeight], None]


def kept_bytes(checkpoint: FewBitCheckpoint, itemsize: int) -> int:
    """Bytes of a model that keeps its few-bit weights, as far as headers tell. Other numbers take `itemsize` each."""
    total = sum(prod(info.shape) for info in checkpoint.plain.values()) * itemsize
    for name, weight in checkpoint.weights.items():
        if _may_keep(name, weight):
            num_scales = prod(weight.shape[:-1]) * ceil(weight.shape[-1] / weight.block[1])
            form = "mxfp4" if weight.scheme.layout == "mxfp4" else f"int{weight.scheme.bits}"
            total += prod(weight.shape[:-1]) * group_limit(form, weight.shape[-1]) * weight.scheme.bits // 8
            total += num_scales * (SCALE_BYTES[weight.scale_dtype] + weight.scheme.has_zeros)
        else:
            total += prod(weight.shape) * itemsize
    return total


def _may_keep(name: str, weight: StoredWeight) -> bool:
    """Our kernels for experts take no zeros."""
    return fits_kernels(weight) and not (weight.scheme.has_zeros and EXPERT.fullmatch(name))


class KeptWeights:
    """The weights of a checkpoint that are kept while its model is loaded."""

    def __init__(
        self,
        checkpoint: FewBitCheckpoint,
        empty: Any,
        parts: Callable[[StoredWeight], dict[str, Tensor]],
        dtype: torch.dtype,
        options: Keep,
    ) -> None:
        """`empty` is the model on the meta device; `parts` reads the tensors of a weight."""
        self._parts, self._dtype, self._options = parts, dtype, options
        self._kept: dict[int, tuple[FewBitWeight, Tensor]] = {}
        """By the storage of the placeholder, which must live as long."""
        self._unread: list[str] = []
        self._lock = Lock()
        """One at a time, because packing takes many times the memory of the codes; transformers reads in threads."""
        self._gates: dict[str, str] = {}
        self.reads: dict[str, Callable[[], Tensor]] = {}
        """What reads each tensor that may become a placeholder."""
        self.covered: set[str] = set()
        """The weights of the checkpoint that these stand for."""
        modules = dict(empty.named_modules())
        head = next((name for name, module in modules.items() if module is empty.get_output_embeddings()), None)
        for name, weight in checkpoint.weights.items():
            is_linear = weight.scheme.layout != "mxfp4" and not EXPERT.fullmatch(name)
            if is_linear and _may_keep(name, weight) and name != f"{head}.weight":  # drafters read the head
                self.reads[name] = partial(self._linear, weight)
                self.covered.add(name)
        for path, stacks in _stacks(checkpoint):
            if path in modules:
                self._add_experts(path, modules[path], stacks)
        self.num_plain = len(checkpoint.weights) - len(self.covered)

    def _add_experts(self, path: str, experts: Any, stacks: dict[str, Stack]) -> None:
        gate = self._options.gate_of(experts)
        if (
            gate is None
            or stacks.keys() != STACKS.keys()
            or not all(_fits(experts, name, stack) for name, stack in stacks.items())
        ):
            return
        self._gates[path] = gate
        for name, stack in stacks.items():
            self.reads[f"{path}.{name}"] = partial(self._experts, experts, f"{path}.{name}", stack)
            self.covered |= set(chain.from_iterable(stack))

    @property
    def bits(self) -> str:
        """The bits of the kept weights: "4", or "4 and 8"; empty if none is kept."""
        return " and ".join(sorted({str(FORMS[weight.form].bits) for weight, _ in self._kept.values()}))

    def put_into(self, model: nn.Module) -> str | None:
        """Replace the placeholders in a loaded model. Returns why that is impossible for one of them."""
        found: dict[nn.Module, FewBitLinear] = {}
        num_found = 0
        for path, parent in list(model.named_modules()):
            if path in self._gates:
                gate_up, down = (self._weight(getattr(parent, name)) for name in STACKS)
                if gate_up is not None and down is not None:
                    for name in STACKS:
                        delattr(parent, name)
                    self._options.set_experts(parent, self._gates[path], gate_up, down)
                    num_found += 2
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear and (weight := self._weight(child.weight)) is not None:
                    num_found += child not in found
                    setattr(parent, name, found.setdefault(child, FewBitLinear(weight, child.bias)))
        lost = [name for name, each in model.named_parameters() if self._weight(each) is not None]
        if lost or num_found < len(self._kept):
            return f"{lost[0] if lost else 'one of them'} is not the weight of a linear layer"
        return next(iter(self._unread), None)

    def _weight(self, placeholder: Tensor) -> FewBitWeight | None:
        kept = self._kept.get(placeholder.untyped_storage().data_ptr())
        return None if kept is None else kept[0]

    def _linear(self, weight: StoredWeight) -> Tensor:
        if (kept := self._read(weight)) is not None:
            return self._placeholder(kept, weight.shape)
        self.num_plain += 1
        return dequantize(weight, self._parts(weight))

    def _experts(self, experts: Any, name: str, stack: Stack) -> Tensor:
        projection = name.rpartition(".")[2]
        weights = [[self._read(weight) for weight in expert.values()] for expert in stack]
        with self._lock:
            kept = _joined(weights)
            if kept is None:
                self._unread.append(f"our kernels cannot read {name}")
            elif projection == "gate_up_proj" and not experts.is_concatenated:
                kept = kept._replace(words=_apart(kept.words), scale=_apart(kept.scale))
        return self._placeholder(kept, experts.get_parameter(projection).shape)

    def _read(self, weight: StoredWeight) -> FewBitWeight | None:
        tensors = self._parts(weight)
        with self._lock:
            return keep(weight, {part: tensor.to(self._options.device) for part, tensor in tensors.items()})

    def _placeholder(self, weight: FewBitWeight | None, shape: tuple[int, ...]) -> Tensor:
        number = torch.zeros(1, dtype=self._dtype)
        if weight is not None:
            self._kept[number.untyped_storage().data_ptr()] = weight, number
        return number.expand(shape)


def _stacks(checkpoint: FewBitCheckpoint) -> Iterator[tuple[str, dict[str, Stack]]]:
    """The stacks of experts by the experts' path. A checkpoint has them whole, or expert by expert."""
    whole: dict[str, dict[str, Stack]] = {}
    single: dict[str, dict[tuple[int, str], str]] = {}
    for name, weight in checkpoint.weights.items():
        path, _, projection = name.rpartition(".")
        if weight.scheme.layout == "mxfp4":
            whole.setdefault(path, {})[projection] = [{name: weight}]
        elif (match := EXPERT.fullmatch(name)) is not None and _may_keep(name, weight):
            single.setdefault(match[1], {})[int(match[2]), match[3]] = name
    yield from whole.items()
    for path, names in single.items():
        num_experts = max(expert for expert, _ in names) + 1
        if len(names) == 3 * num_experts:
            yield (
                path,
                {
                    stack: [
                        {names[expert, part]: checkpoint.weights[names[expert, part]] for part in parts}
                        for expert in range(num_experts)
                    ]
                    for stack, parts in STACKS.items()
                },
            )


def _fits(experts: Any, name: str, stack: Stack) -> bool:
    """Whether a stack is what the model's experts hold."""
    first = list(stack[0].values())
    outputs, inputs = sum(weight.shape[-2] for weight in first), first[0].shape[-1]
    is_whole = len(first[0].shape) == 3
    num_experts = first[0].shape[0] if is_whole else len(stack)
    shape = (num_experts, inputs, outputs) if experts.is_transposed else (num_experts, outputs, inputs)
    return experts.get_parameter(name).shape == shape and (
        is_whole or (experts.is_concatenated and not experts.has_bias)
    )


def _joined(experts: list[list[FewBitWeight | None]]) -> FewBitWeight | None:
    """One stack of the weights of each expert; None if they cannot be one."""
    weights = [weight for weight in chain.from_iterable(experts) if weight is not None and weight.zero is None]
    kinds = {(weight.form, weight.size, weight.group, weight.scale.dtype) for weight in weights}
    if len(weights) < sum(map(len, experts)) or len(kinds) > 1:
        return None
    if weights[0].words.ndim == 3:
        return weights[0]
    shape = (len(experts), -1)
    words, scale = (torch.cat([getattr(weight, part) for weight in weights]) for part in ("words", "scale"))
    return weights[0]._replace(words=words.unflatten(0, shape), scale=scale.unflatten(0, shape))


def _apart(interleaved_EN: Tensor) -> Tensor:
    """The even outputs of each expert, then the odd ones."""
    return torch.cat([interleaved_EN[:, ::2], interleaved_EN[:, 1::2]], dim=1)
