"""Load a causal LM whose weights are stored in few bits, with plain weights.

Ours turns AWQ, GPTQ, compressed-tensors and FP8 with a scale per tensor or output into plain tensors, each when
transformers asks for it. transformers itself turns MXFP4 (GPT-OSS) and block-wise FP8 (Qwen3-Coder and others) into
plain weights on any device. Kernels that compute with few bits exist for some GPUs only, and transformers downloads
them at first use. bfloat16 holds MXFP4 exactly; other formats are rounded to the target's dtype.
"""

import contextlib
import logging
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from peagle.quantized.formats import CONFIG_KEYS, is_read_by_transformers, quantization_config
from peagle.quantized.headers import FewBitCheckpoint, read_few_bit
from peagle.quantized.unpack import dequantize

log = logging.getLogger(__name__)


def load_model(directory: Path, dtype: torch.dtype, **options: Any) -> tuple[Any, dict[str, Any]]:
    """The model in `dtype`, and transformers' report on its tensors. `options` are those of `from_pretrained`."""
    from transformers import AutoModelForCausalLM

    options |= {"dtype": dtype, "output_loading_info": True}
    if (few_bit := read_few_bit(directory)) is not None:
        return _load_few_bit(few_bit, options)
    dequantizing = dequantize_options(directory)
    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, **options, **dequantizing)
    model, report = loaded
    if dequantizing:
        finish_dequantizing(model, dtype)
    return model, report


def _load_few_bit(checkpoint: FewBitCheckpoint, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    described = checkpoint.described
    log.info("dequantizing %s weights while loading (vLLM would keep them quantized)", described.method)
    if described.rounds_activations:
        log.info("activations are not quantized here (vLLM would round them too)")
    config = AutoConfig.from_pretrained(described.directory)
    for part, key in product((config, config.get_text_config()), CONFIG_KEYS):
        part.__dict__.pop(key, None)
    with contextlib.suppress(OSError):  # the file is optional
        options["generation_config"] = GenerationConfig.from_pretrained(described.directory)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)  # only a class takes a state dict, not the Auto class
    model, report = type(empty).from_pretrained(
        None, config=empty.config, state_dict=plain_state_dict(checkpoint), **options
    )
    model.config.name_or_path = str(described.directory)
    return model, report


def plain_state_dict(checkpoint: FewBitCheckpoint) -> dict[str, Any]:
    """The checkpoint as plain tensors by name; each is read, and dequantized, when it is indexed with `[...]`."""
    from safetensors import safe_open

    open_files = {path: safe_open(path, framework="pt") for path in set(checkpoint.files.values())}

    def read(name: str) -> Tensor:
        tensor: Tensor = open_files[checkpoint.files[name]].get_tensor(name)
        return tensor

    def read_few_bit(name: str) -> Tensor:
        weight = checkpoint.weights[name]
        return dequantize(weight, {part: read(f"{weight.module}.{part}") for part in weight.parts})

    plain = {name: _Unread(name, read) for name in checkpoint.plain}
    return plain | {name: _Unread(name, read_few_bit) for name in checkpoint.weights}


class _Unread:
    """A tensor that is read when it is indexed, which is how transformers reads those of a file."""

    def __init__(self, name: str, read: Callable[[str], Tensor]) -> None:
        self._name, self._read = name, read

    def __getitem__(self, index: EllipsisType) -> Tensor:
        return self._read(self._name)


def dequantize_options(directory: Path) -> dict[str, Any]:
    """Options that make transformers dequantize the directory's weights; empty for plain and other formats."""
    stored = quantization_config(directory)
    if not is_read_by_transformers(stored):
        return {}
    from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

    log.info("dequantizing %s weights while loading (vLLM would keep them quantized)", stored["quant_method"])
    if stored["quant_method"] == "mxfp4":
        return {"quantization_config": Mxfp4Config(dequantize=True)}
    # transformers reads the exceptions from here, not from the file.
    kept = stored.get("modules_to_not_convert")
    return {"quantization_config": FineGrainedFP8Config(dequantize=True, modules_to_not_convert=kept)}


def finish_dequantizing(model: Any, dtype: torch.dtype) -> None:
    """Cast the experts, which transformers leaves in bfloat16, and clear the quantized state."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype.itemsize < dtype.itemsize:
            parameter.data = parameter.data.to(dtype)
    forget_quantization(model)


def forget_quantization(model: Any) -> None:
    """Mark the model as plain: transformers refuses to save or cast a "quantized" one."""
    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer = None
    model.is_quantized = False
