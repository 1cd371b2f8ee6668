"""Keep quantized weights as stored: transformers loads placeholders, which quantized layers then replace.

A placeholder is one number, expanded to the shape of the plain weight, so nothing of that size is allocated. Its
storage identifies the weight, whatever transformers renames. Weights that our kernels cannot read have placeholders too
and are dequantized on the device, so the host never holds them.
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

from peagle.linears import few_bit
from peagle.linears.few_bit import FORMS, FewBitWeight, group_limit
from peagle.linears.few_bit_linear import FewBitLinear
from peagle.quantized.headers import FewBitCheckpoint, StoredWeight
from peagle.quantized.unpack import dequantize, fits_kernels, keep

NUMBERED = re.compile(r"\.experts\.\d+\.")
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
STACKS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
"""The stacks of experts, and the projections of each expert whose outputs follow each other in them."""
TABLES = ("embed_tokens", "lm_head")
SCALE_BYTES = {"U8": 1, "F16": 2, "BF16": 2, "F32": 4}

Stack = list[dict[str, StoredWeight]]
"""The weights of each expert by name, outputs of one after those of the other; of MXFP4 one, a stack already."""


class Keep(NamedTuple):
    """Where weights are kept, and what `peagle.experts` does for those of experts."""

    device: torch.device
    gate_of: Callable[[nn.Module], str | None]
    set_experts: Callable[[nn.Module, str, FewBitWeight, FewBitWeight], None]


def kept_bytes(checkpoint: FewBitCheckpoint, itemsize: int) -> int:
    """Bytes of a model that keeps its quantized weights, as far as headers tell. Other numbers take `itemsize` each."""
    total = sum(prod(info.shape) for info in checkpoint.plain.values()) * itemsize
    for name, weight in checkpoint.weights.items():
        if may_keep(name, weight):
            form = "mxfp4" if weight.scheme.layout == "mxfp4" else f"int{weight.scheme.bits}"
            size = group_limit(form, weight.shape[-1]) if form == "mxfp4" else weight.shape[-1]
            num_scales = prod(weight.shape[:-1]) * ceil(size / weight.block[1])
            total += prod(weight.shape[:-1]) * group_limit(form, weight.shape[-1]) * weight.scheme.bits // 8
            total += num_scales * (SCALE_BYTES[weight.scale_dtype] + weight.scheme.has_zeros)
        else:
            total += prod(weight.shape) * itemsize
    return total


def may_keep(name: str, weight: StoredWeight) -> bool:
    """Whether our kernels can read a weight, as far as its name and header tell.

    Drafters read the head. Experts may have no zeros, and transformers stacks those of other names itself.
    """
    is_expert, has_zeros = NUMBERED.search(name) is not None, weight.scheme.has_zeros
    return (
        fits_kernels(weight)
        and weight.module.rpartition(".")[2] not in TABLES
        and not (is_expert and (has_zeros or EXPERT.fullmatch(name) is None))
    )


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
        self._held: dict[int, tuple[FewBitWeight | Tensor, Tensor]] = {}
        """What each placeholder stands for, by the storage of the placeholder, which must live as long."""
        self._lock = Lock()
        """One at a time, because packing takes many times the memory of the codes; transformers reads in threads."""
        self._gates: dict[str, str] = {}
        self.reads: dict[str, Callable[[], Tensor]] = {}
        """What reads each tensor that becomes a placeholder."""
        self.covered: set[str] = set()
        """The weights of the checkpoint that these stand for."""
        self.bits: set[int] = set()
        self.num_plain = 0
        """Covered weights that were dequantized."""
        modules = dict(empty.named_modules())
        linears = {
            (name.rpartition(".")[2], each.weight.shape) for name, each in modules.items() if type(each) is nn.Linear
        }
        for name, weight in checkpoint.weights.items():
            # transformers may rename a layer, but not its last part. Experts it may stack.
            is_linear = (weight.module.rpartition(".")[2], weight.shape) in linears and not NUMBERED.search(name)
            if is_linear or type(modules.get(weight.module)) is nn.Linear:
                self.reads[name] = partial(self._linear, name, weight)
                self.covered.add(name)
        for path, stacks in _stacks(checkpoint):
            if path in modules:
                self._add_experts(path, modules[path], stacks)

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
            self.reads[f"{path}.{name}"] = partial(self._experts, experts, name, stack)
            self.covered |= set(chain.from_iterable(stack))

    def put_into(self, model: Any) -> str | None:
        """Replace the placeholders in a loaded model. Returns why that is impossible for one of them."""
        problem = self._problem(model)
        if problem is None:
            for path, gate in self._gates.items():
                self._put_experts(model.get_submodule(path), gate)
            self._put_linears(model)
        self._held.clear()  # `reads` refers to itself, so the codes would stay until garbage is collected
        self.reads.clear()
        return problem

    def _problem(self, model: nn.Module) -> str | None:
        held = {name for name, each in model.named_parameters() if self._is_placeholder(each)}
        linears = {f"{name}.weight" for name, module in model.named_modules() if type(module) is nn.Linear}
        experts = {f"{path}.{name}" for path in self._gates for name in STACKS}
        if lost := sorted(held - linears - experts):
            return f"{lost[0]} is not the weight of a linear layer"
        return "transformers merges or transforms some of them" if len(held) < len(self._held) else None

    def _put_linears(self, model: Any) -> None:
        head = model.get_output_embeddings()
        found: dict[nn.Module, nn.Module] = {}
        for parent in list(model.modules()):
            for name, child in list(parent._modules.items()):
                if type(child) is nn.Linear and self._is_placeholder(child.weight):
                    found[child] = found.get(child) or self._filled(child, is_head=child is head)
                    setattr(parent, name, found[child])

    def _put_experts(self, experts: Any, gate: str) -> None:
        gate_up, down = (self._held_by(experts.get_parameter(name)) for name in STACKS)
        for name in STACKS:
            delattr(experts, name)
        if isinstance(gate_up, FewBitWeight) and isinstance(down, FewBitWeight) and gate_up.form == down.form:
            self._options.set_experts(experts, gate, gate_up, down)
        else:
            for name, value in zip(STACKS, (gate_up, down), strict=True):
                setattr(experts, name, nn.Parameter(self._plain(value), requires_grad=False))

    def _filled(self, linear: nn.Linear, *, is_head: bool) -> nn.Module:
        """The layer for a placeholder: a quantized one, or the same one with a plain weight."""
        value = self._held_by(linear.weight)
        if isinstance(value, FewBitWeight) and not is_head:
            return FewBitLinear(value, linear.bias)
        linear.weight = nn.Parameter(self._plain(value), requires_grad=False)
        return linear

    def _linear(self, name: str, weight: StoredWeight) -> Tensor:
        return self._placeholder(self._read(name, weight), weight.shape, 1)

    def _experts(self, experts: Any, projection: str, stack: Stack) -> Tensor:
        values = [self._read(name, weight) for expert in stack for name, weight in expert.items()]
        with self._lock:
            value = self._joined(values, len(stack))
            if isinstance(value, FewBitWeight) and projection == "gate_up_proj" and not experts.is_concatenated:
                value = value._replace(words=_apart(value.words), scale=_apart(value.scale))
        return self._placeholder(value, experts.get_parameter(projection).shape, len(values))

    def _read(self, name: str, weight: StoredWeight) -> FewBitWeight | Tensor:
        """The weight on the device, quantized if our kernels can read it."""
        tensors = self._parts(weight)
        with self._lock:
            tensors = {part: tensor.to(self._options.device) for part, tensor in tensors.items()}
            kept = keep(weight, tensors) if may_keep(name, weight) else None
            return dequantize(weight, tensors).to(self._dtype) if kept is None else kept

    def _joined(self, values: list[FewBitWeight | Tensor], num_experts: int) -> FewBitWeight | Tensor:
        """One stack of the weights of each expert, quantized if all are alike."""
        kept = [value for value in values if isinstance(value, FewBitWeight) and value.zero is None]
        first = kept[0] if kept else None
        if first is not None and first.words.ndim == 3:
            return first
        alike = {(each.form, each.size, each.group, each.scale.dtype) for each in kept}
        if first is None or len(kept) < len(values) or len(alike) > 1:
            return torch.cat([self._plain(value) for value in values]).unflatten(0, (num_experts, -1))
        words, scale = (torch.cat([getattr(each, part) for each in kept]) for part in ("words", "scale"))
        shape = (num_experts, -1)
        return first._replace(words=words.unflatten(0, shape), scale=scale.unflatten(0, shape))

    def _plain(self, value: FewBitWeight | Tensor) -> Tensor:
        """The numbers of one weight or of a stack, which takes many times their memory for one expert at a time."""
        if isinstance(value, Tensor):
            return value
        if value.words.ndim == 2:
            return few_bit.dequantize(value).to(self._dtype)
        parts = zip(value.words, value.scale, strict=True)
        return torch.stack([self._plain(value._replace(words=words, scale=scale)) for words, scale in parts])

    def _is_placeholder(self, parameter: Tensor) -> bool:
        """Whether a parameter of the loaded model is a placeholder as it was read."""
        _, placeholder = self._held.get(parameter.untyped_storage().data_ptr(), (None, None))
        return placeholder is not None and parameter.shape == placeholder.shape

    def _held_by(self, placeholder: Tensor) -> FewBitWeight | Tensor:
        return self._held[placeholder.untyped_storage().data_ptr()][0]

    def _placeholder(self, value: FewBitWeight | Tensor, shape: tuple[int, ...], num_weights: int) -> Tensor:
        placeholder = torch.zeros(1, dtype=self._dtype).expand(shape)
        with self._lock:
            self._held[placeholder.untyped_storage().data_ptr()] = value, placeholder
            if isinstance(value, FewBitWeight):
                self.bits.add(FORMS[value.form].bits)
            else:
                self.num_plain += num_weights
        return placeholder


def _stacks(checkpoint: FewBitCheckpoint) -> Iterator[tuple[str, dict[str, Stack]]]:
    """The stacks of experts by the experts' path. A checkpoint has them whole, or expert by expert."""
    whole: dict[str, dict[str, Stack]] = {}
    single: dict[str, dict[tuple[int, str], str]] = {}
    for name, weight in checkpoint.weights.items():
        path, _, projection = name.rpartition(".")
        if weight.scheme.layout == "mxfp4":
            whole.setdefault(path, {})[projection] = [{name: weight}]
        elif (match := EXPERT.fullmatch(name)) is not None:
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
    """Whether a stack is what the model's experts hold; those stored one by one, as transformers would stack them."""
    first = list(stack[0].values())
    outputs, inputs = sum(weight.shape[-2] for weight in first), first[0].shape[-1]
    is_whole = len(first[0].shape) == 3
    num_experts = first[0].shape[0] if is_whole else len(stack)
    shape = (num_experts, inputs, outputs) if experts.is_transposed else (num_experts, outputs, inputs)
    is_simple = experts.is_concatenated and not experts.is_transposed and not experts.has_bias
    return experts.get_parameter(name).shape == shape and (is_whole or is_simple)


def _apart(interleaved_EN: Tensor) -> Tensor:
    """The even outputs of each expert, then the odd ones."""
    return torch.cat([interleaved_EN[:, ::2], interleaved_EN[:, 1::2]], dim=1)
