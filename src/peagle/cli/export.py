"""Write a drafter as the full directory that vLLM loads: embedding table included, with the command to serve it."""

import dataclasses
import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from peagle.cli.arguments import (
    DrafterArguments,
    DrafterOptions,
    TargetArguments,
    TargetOptions,
    accelerator,
    parse,
)
from peagle.errors import ConfigError


@dataclass(frozen=True)
class Arguments:
    output: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUTPUT")]
    """directory to write, new or empty"""
    target: TargetOptions = field(default_factory=TargetArguments)
    drafter: DrafterOptions = field(default_factory=DrafterArguments)


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, "export", argv)
    output = arguments.output.expanduser().absolute()
    check_output(output)
    target = arguments.target.load()
    drafter = arguments.drafter.load(target)

    from peagle.drafter.card import DrafterCard, TargetIdentity, read_card
    from peagle.drafter.checkpoint import drafter_directory, save_drafter
    from peagle.provenance import provenance

    config = drafter.config
    card = read_card(drafter_directory(arguments.drafter.drafter, target)) or DrafterCard(
        TargetIdentity.of(target), config.method, config.num_draft_tokens, config.max_length, config.aux_layer_ids
    )
    save_drafter(drafter, output, dataclasses.replace(card, provenance=provenance(accelerator(target))), full=True)
    speculative = {
        "method": "eagle3",
        "model": str(output),
        "num_speculative_tokens": drafter.config.usual_num_draft_tokens,
        "parallel_drafting": config.parallel,
    }
    words = ["vllm", "serve", str(target.directory), "--speculative-config", json.dumps(speculative)]
    print(shlex.join(words))
    return 0


def check_output(output: Path) -> None:
    """Refuse a place where something is already, whose files would be mixed with the drafter's."""
    if output.exists() and not output.is_dir():
        raise ConfigError(f"{output} is a file, not a directory", hint="give a new directory")
    if output.is_dir() and any(output.iterdir()):
        raise ConfigError(f"{output} is not empty", hint="give a new directory, or remove that one first")
