"""Write a drafter, whoever made it, as a directory for vLLM or for speculators, and print the command to serve it.

The directory is read back and compared before the command is printed. `vllm` is vLLM's own layout, which every drafter
has; `speculators` is the library's, which names its target and needs no further settings.
"""

import dataclasses
import json
import logging
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from peagle.cli.arguments import (
    DrafterArguments,
    DrafterOptions,
    TargetArguments,
    TargetOptions,
    accelerator,
    parse,
)
from peagle.deploy.vllm import RUNNER_VARIABLE
from peagle.errors import ConfigError

if TYPE_CHECKING:
    from peagle.drafter.model import Drafter
    from peagle.targets.hf import HFTarget

log = logging.getLogger(__name__)

Layout = Literal["vllm", "speculators"]


@dataclass(frozen=True)
class Arguments:
    output: Path
    """directory to write, new or empty"""
    directory: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[DRAFTER]")] = None
    """the same as --drafter"""
    to: Layout = "vllm"
    """whose layout to write"""
    target: TargetOptions = field(default_factory=TargetArguments)
    drafter: DrafterOptions = field(default_factory=DrafterArguments)

    def __post_init__(self) -> None:
        if self.directory is not None and self.drafter.drafter is not None:
            raise ConfigError(
                f"two drafters are given: {self.directory} and {self.drafter.drafter}", hint="leave one of them out"
            )


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, "export", argv)
    output = arguments.output.expanduser().absolute()
    check_output(output)
    target = arguments.target.load()
    options = arguments.drafter
    if arguments.directory is not None:
        options = dataclasses.replace(options, drafter=arguments.directory)
    drafter = options.load(target)

    from peagle.export import speculators, vllm
    from peagle.export.card import card_of
    from peagle.provenance import provenance

    card = card_of(drafter, target, provenance(accelerator(target)))
    write = speculators.write if arguments.to == "speculators" else vllm.write
    write(drafter, target, card, output)
    print(shlex.join(serve_command(arguments.to, drafter, target, output)))
    log.info("`peagle deploy vllm --drafter %s` prints it with flags for large batches and several GPUs", output)
    return 0


def serve_command(layout: Layout, drafter: "Drafter", target: "HFTarget", directory: Path) -> list[str]:
    """The words that serve an exported directory in vLLM, whose second model runner cannot draft in parallel."""
    variables = [f"{RUNNER_VARIABLE}=0"] if drafter.config.parallel else []
    if layout == "speculators":
        return [*variables, "vllm", "serve", str(directory)]

    from peagle.export.vllm import speculative_config

    settings = json.dumps(speculative_config(drafter, directory))
    return [*variables, "vllm", "serve", str(target.directory), "--speculative-config", settings]


def check_output(output: Path) -> None:
    """Refuse a place where something is already, whose files would be mixed with the drafter's."""
    if output.exists() and not output.is_dir():
        raise ConfigError(f"{output} is a file, not a directory", hint="give a new directory")
    if output.is_dir() and any(output.iterdir()):
        raise ConfigError(f"{output} is not empty", hint="give a new directory, or remove that one first")
