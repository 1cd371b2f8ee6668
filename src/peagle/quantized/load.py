"""Load a quantized causal LM: keep its weights for our kernels, or dequantize them.

We dequantize each tensor of AWQ, GPTQ, compressed-tensors and FP8 with a scale per tensor or output when transformers
asks for it. transformers itself dequantizes MXFP4 (GPT-OSS) and block-wise FP8 (Qwen3-Coder and others). bfloat16 holds
MXFP4 exactly; other formats are rounded to the target's dtype.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Set
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from peagle.errors import TargetError
from peagle.host_memory import total_bytes
from peagle.quantized.formats import CONFIG_KEYS, Description, is_read_by_transformers, quantization_config
from peagle.quantized.headers import FewBitCheckpoint, StoredWeight, read_few_bit
from peagle.quantized.keep import Keep, KeptWeights, may_keep
from peagle.quantized.unpack import dequantize

log = logging.getLogger(__name__)


def load_model(
    directory: Path, dtype: torch.dtype, keep: Keep | None = None, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """The model in `dtype`, and transformers' report on its tensors. `options` are those of `from_pretrained`.

    keep: keep quantized weights as stored, where our kernels can read them.
    """
    from transformers import AutoModelForCausalLM

    if keep is not None and (checkpoint := keepable(directory)) is not None:
        kept = _load_kept(checkpoint, dtype, keep)
        if kept is not None:
            return kept
    options |= {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}  # the report has them
    if (few_bit := read_few_bit(directory)) is not None:
        return _load_few_bit(few_bit, options)
    dequantizing = dequantize_options(directory)
    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, **options, **dequantizing)
    model, report = loaded
    if dequantizing:
        finish_dequantizing(model, dtype)
    return model, report


def keepable(directory: Path) -> FewBitCheckpoint | None:
    """The directory's quantized weights if our kernels may read them; None if transformers has to."""
    try:
        checkpoint = read_few_bit(directory, with_all=True)
        return checkpoint if checkpoint is not None and checkpoint.weights else None
    except TargetError:
        if is_read_by_transformers(quantization_config(directory)):
            return None
        raise


def _load_few_bit(checkpoint: FewBitCheckpoint, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    described, read = checkpoint.described, _Reader(checkpoint)
    log.info("dequantizing %s weights while loading (vLLM would keep them quantized)", described.method)
    _log_activations(described)
    state = read.plain() | read.dequantized(checkpoint.weights)
    return _load_state(checkpoint, _empty_model(described), state, options)


def _load_kept(checkpoint: FewBitCheckpoint, dtype: torch.dtype, keep: Keep) -> tuple[Any, dict[str, Any]] | None:
    """The model with quantized weights; None if it must be loaded with plain ones."""
    described, read = checkpoint.described, _Reader(checkpoint)
    empty = _empty_model(described)
    kept = KeptWeights(checkpoint, empty, read.parts, dtype, keep)
    others = checkpoint.weights.keys() - kept.covered
    if (reason := _why_not(checkpoint, others, dtype)) is None:
        options = {"dtype": dtype, "output_loading_info": True}
        model, report = _load_state(checkpoint, empty, read.plain() | read.dequantized(others) | kept.reads, options)
        reason = kept.put_into(model)
    if reason is not None:
        log.info("%s weights are not kept quantized: %s", described.method, reason)
        return None
    log.info("keeping %s weights in %s bits", described.method, " and ".join(map(str, sorted(kept.bits))))
    if num_plain := kept.num_plain + len(others):
        log.info("dequantizing %d of them, which our kernels cannot read", num_plain)
    _log_activations(described)
    return model, report


def _why_not(checkpoint: FewBitCheckpoint, others: Set[str], dtype: torch.dtype) -> str | None:
    """Why weights are not kept, if so. transformers dequantizes `others`, in the host's memory."""
    if not any(may_keep(name, weight) for name, weight in checkpoint.weights.items() if name not in others):
        return "our kernels cannot read them"
    if any(checkpoint.weights[name].scheme.layout == "mxfp4" for name in others):
        return "our kernels cannot compute these experts"
    num_bytes = sum(prod(checkpoint.weights[name].shape) for name in others) * dtype.itemsize
    if num_bytes > total_bytes() // 2:
        return f"the others would take {num_bytes / 1e9:.1f} GB of the host's memory"
    return None


def _log_activations(described: Description) -> None:
    if described.rounds_activations:
        log.info("activations are not quantized here (vLLM would round them too)")


def _empty_model(described: Description) -> Any:
    """The model on the meta device. It tells the class: only a class takes a state dict, not the Auto class."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(described.directory)
    for part, key in product((config, config.get_text_config()), CONFIG_KEYS):
        part.__dict__.pop(key, None)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _load_state(
    checkpoint: FewBitCheckpoint, empty: Any, state: dict[str, Callable[[], Tensor]], options: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The model from a function per tensor, each called when transformers wants the tensor."""
    from transformers import GenerationConfig

    directory = checkpoint.described.directory
    with contextlib.suppress(OSError):  # the file is optional
        options["generation_config"] = GenerationConfig.from_pretrained(directory)
    state_dict = {name: _Unread(read) for name, read in state.items()}
    model, report = type(empty).from_pretrained(None, config=empty.config, state_dict=state_dict, **options)
    model.config.name_or_path = str(directory)
    return model, report


class _Reader:
    """Reads the tensors of a checkpoint."""

    def __init__(self, checkpoint: FewBitCheckpoint) -> None:
        from safetensors import safe_open

        self._checkpoint = checkpoint
        self._files = {path: safe_open(path, framework="pt") for path in set(checkpoint.files.values())}

    def plain(self) -> dict[str, Callable[[], Tensor]]:
        """What reads each plain tensor."""
        return {name: partial(self._tensor, name) for name in self._checkpoint.plain}

    def dequantized(self, names: Iterable[str]) -> dict[str, Callable[[], Tensor]]:
        """What reads quantized weights as plain ones."""
        return {name: partial(self._dequantized, self._checkpoint.weights[name]) for name in names}

    def parts(self, weight: StoredWeight) -> dict[str, Tensor]:
        """The tensors of a quantized weight."""
        return {part: self._tensor(f"{weight.module}.{part}") for part in weight.parts}

    def _dequantized(self, weight: StoredWeight) -> Tensor:
        return dequantize(weight, self.parts(weight))

    def _tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._files[self._checkpoint.files[name]].get_tensor(name)
        return tensor


class _Unread:
    """A tensor that is read when it is indexed, which is how transformers reads those of a file."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self._read = read

    def __getitem__(self, index: EllipsisType) -> Tensor:
        return self._read()


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
