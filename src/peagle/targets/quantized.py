"""Quantized targets: which ones are dequantized when loaded, and how.

transformers turns MXFP4 (GPT-OSS) and block-wise FP8 (Qwen3-Coder and others) into plain weights on any device. The
kernels that compute with the quantized weights exist for some GPUs only, and transformers downloads them at first use.
bfloat16 holds MXFP4 exactly; FP8 is rounded to the target's dtype.
"""

import json
import logging
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)


def dequantize_options(directory: Path) -> dict[str, Any]:
    """Options that make transformers dequantize the directory's weights; empty for plain and other formats."""
    try:
        stored = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("quantization_config")
        kind = stored.get("quant_method") if isinstance(stored, dict) else None
    except (OSError, ValueError, AttributeError):
        return {}  # loading reports the problem
    if kind not in ("mxfp4", "fp8"):
        return {}
    from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

    log.info("dequantizing %s weights while loading (vLLM would keep them quantized)", kind)
    if kind == "mxfp4":
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
