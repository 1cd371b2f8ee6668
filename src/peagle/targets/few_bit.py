"""Keep the weights of a target's decoder layers in 4 or 8 bits.

The embedding, the head, norms and routers stay as they are: they are few, or they decide between experts.
"""

import logging
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from peagle.errors import TargetError, nearest
from peagle.experts.few_bit import FewBitExperts, quantize_experts
from peagle.linears.few_bit import FORMS, INT4_GROUP, MXFP4_GROUP
from peagle.linears.few_bit_linear import FewBitLinear
from peagle.linears.joined_linear import JoinedPart
from peagle.targets.hf import decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

ROUTERS = {"gate", "router"}
SCALE_BITS = {"int4": 16 / INT4_GROUP, "mxfp4": 8 / MXFP4_GROUP, "int8": 0, "fp8": 0}
"""Per weight."""
PLAIN_SHARE = 0.025
"""The embedding and the head of a large model, if their size is not known."""


def check_quantize(form: str, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse an unknown form, and a device or dtype that our kernels for quantized weights do not take."""
    if form not in FORMS:
        raise TargetError(f"unknown form {form!r} of weights", hint=nearest(form, FORMS))
    if device.type != "cuda":
        raise TargetError(
            f"--quantize {form} needs a GPU",
            hint="on a CPU use a GGUF file, whose weights stay in 4 or 8 bits: --target FILE.gguf",
        )
    if dtype != torch.bfloat16:
        raise TargetError(
            f"--quantize {form} computes in bfloat16, not in {str(dtype).removeprefix('torch.')}",
            hint="use --dtype bfloat16, or load it without --quantize",
        )


def quantized_bytes(num_parameters: int, form: str, num_plain: int | None = None) -> int:
    """About what the weights of a large model take in a form. `num_plain` are those of the embedding and the head."""
    if num_plain is None:
        num_plain = round(PLAIN_SHARE * num_parameters)
    return 2 * num_plain + round((num_parameters - num_plain) * (FORMS[form].bits + SCALE_BITS[form]) / 8)


@torch.no_grad()
def quantize_model(model: "PreTrainedModel", form: str, device: torch.device | None = None) -> None:
    """Round the layers' weights to `form`, in place, one layer at a time.

    With a `device`, moves each layer there first and then the rest, so that the plain model never has to fit there.
    """
    for layer in decoder_layers(model):
        quantize_layer(layer if device is None else layer.to(device), form)
    if device is not None:
        model.to(device)  # type: ignore[arg-type]  # transformers hides the signature
    check_quantized(model, form)


@torch.no_grad()
def create_quantized(empty: "PreTrainedModel", form: str, device: torch.device) -> "PreTrainedModel":
    """Give random weights to a model on the meta device, one layer at a time, so that it never has to fit as it is."""
    for layer in decoder_layers(empty):
        for module in layer.modules():
            _create(empty, module, device)
        quantize_layer(layer, form)
    for module in empty.modules():
        _create(empty, module, device)
    empty.tie_weights()
    return empty


def _create(model: "PreTrainedModel", module: nn.Module, device: torch.device) -> None:
    """Create a module's own tensors, if they do not exist, as transformers does."""
    if any(tensor.is_meta for tensor in chain(module.parameters(recurse=False), module.buffers(recurse=False))):
        module.to_empty(device=device, recurse=False)
        model._init_weights(module)


@torch.no_grad()
def quantize_layer(layer: nn.Module, form: str) -> None:
    """Round the weights of one layer. "mxfp4" is for experts only."""
    for module in list(layer.modules()):
        quantize_experts(module, form)
    for parent, name, linear in [] if form == "mxfp4" else list(_linears(layer)):
        setattr(parent, name, FewBitLinear.from_linear(linear, form))


def check_quantized(model: "PreTrainedModel", form: str) -> None:
    """Refuse a model without a quantized weight, and say which large weights stayed plain."""
    layers = decoder_layers(model)
    if not any(few_bit_modules(layers)):
        raise TargetError(
            f"no layer of {type(model).__name__} has weights that can be kept in {form}",
            hint="mxfp4 is for experts; use int4, int8 or fp8" if form == "mxfp4" else "load it without --quantize",
        )
    stacks = {
        type(module).__name__ for module in layers.modules() for own in module._parameters.values() if _is_stack(own)
    }
    if stacks:
        log.warning("%s stay in %s: their gate is unknown", ", ".join(sorted(stacks)), model.dtype)


def _is_stack(parameter: nn.Parameter | None) -> bool:
    """Whether these are the weights of several experts."""
    return parameter is not None and parameter.ndim == 3


def _linears(layer: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """The linear layers inside a layer, with their places, without routers and what stands next to experts."""
    for path, parent in layer.named_modules():
        if hasattr(parent, "experts") or ROUTERS & set(path.split(".")):
            continue
        for name, module in parent.named_children():
            if type(module) is nn.Linear and name not in ROUTERS:
                yield parent, name, module


def num_bytes(model: nn.Module) -> int:
    """Bytes of all weights."""
    return sum(tensor.nbytes for tensor in chain(model.parameters(), model.buffers()))


def num_parameters(model: nn.Module) -> int:
    """The number of weights, as in the plain model."""
    plain = sum(parameter.numel() for parameter in model.parameters())
    return plain + sum(module.num_weights for _, module in few_bit_modules(model))


def few_bit_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules with quantized weights, by name. Their buffers are these weights, also while layers are joined."""
    for name, module in model.named_modules():
        own = module.joined.parts[module.index] if isinstance(module, JoinedPart) else module
        if isinstance(own, FewBitLinear | FewBitExperts):
            yield name, own
