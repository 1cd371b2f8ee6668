"""Targets that are stored in fewer bits: which ones are widened when they are loaded, and how.

MXFP4 (GPT-OSS) and block-wise FP8 (Qwen3-Coder and others) are turned into plain weights by transformers, on whatever
device the target runs: the kernels that would run them as they are exist for some GPUs only, and transformers fetches
them from outside when they are first used. MXFP4 is held exactly by bfloat16; FP8 is rounded to the target's precision.
"""

import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

import torch

from peagle.errors import MissingExtraError

log = logging.getLogger(__name__)


def widening(directory: Path) -> dict[str, Any]:
    """Arguments that have transformers widen what the directory holds; none for plain weights and other kinds."""
    try:
        stored = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("quantization_config")
        kind = stored.get("quant_method") if isinstance(stored, dict) else None
    except (OSError, ValueError, AttributeError):
        return {}  # the load that follows says what is wrong with the file
    if kind not in ("mxfp4", "fp8"):
        return {}
    from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

    log.info("%s weights: widened while they are loaded (vLLM would keep them as they are)", kind)
    if kind == "mxfp4":
        return {"quantization_config": Mxfp4Config(dequantize=True)}
    if importlib.util.find_spec("accelerate") is None:
        raise MissingExtraError("accelerate", "quant", "reading FP8 weights")
    # What is left out of the quantization must be said again: transformers takes it from here, not from the file.
    kept = stored.get("modules_to_not_convert")
    return {"quantization_config": FineGrainedFP8Config(dequantize=True, modules_to_not_convert=kept)}


def settle(model: Any, dtype: torch.dtype) -> None:
    """Make a widened model a plain one: transformers leaves experts in bfloat16, and goes on calling it quantized."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype.itemsize < dtype.itemsize:
            parameter.data = parameter.data.to(dtype)
    forget_quantization(model)


def forget_quantization(model: Any) -> None:
    """The weights are plain tensors now; transformers would still refuse to save or to cast a "quantized" model."""
    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer = None
    model.is_quantized = False
