"""Write a drafter as the full directory that vLLM loads: embedding table included, with the command to serve it."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from peagle.cli.arguments import ModelArguments, Models, parse
from peagle.errors import ConfigError


@dataclass(frozen=True)
class Arguments:
    output: tyro.conf.Positional[Path]
    """directory to write; it must not hold a drafter yet"""
    models: Models = field(default_factory=ModelArguments)


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, "export", argv)
    if (arguments.output / "model.safetensors").exists():
        raise ConfigError(f"{arguments.output} already holds a model", hint="give a new directory")
    target = arguments.models.load_target()
    drafter = arguments.models.load_drafter(target)

    from peagle.drafter.card import DrafterCard, TargetIdentity, read_card
    from peagle.drafter.checkpoint import drafter_directory, save_drafter
    from peagle.provenance import provenance

    config = drafter.config
    card = read_card(drafter_directory(arguments.models.drafter, target)) or DrafterCard(
        TargetIdentity.of(target), config.method, config.num_draft_tokens, config.max_length, config.aux_layer_ids
    )
    save_drafter(drafter, arguments.output, dataclasses.replace(card, provenance=provenance()), full=True)
    speculative = {
        "method": "eagle3",
        "model": str(arguments.output),
        "num_speculative_tokens": min(7, config.num_draft_tokens or 7),
        "parallel_drafting": config.parallel,
    }
    print(f"vllm serve {target.directory} --speculative-config '{json.dumps(speculative)}'")
    return 0
