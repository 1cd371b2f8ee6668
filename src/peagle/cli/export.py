"""Write a drafter of any project as a directory for vLLM or speculators, and print the command that serves it.

The directory is read back and compared first. `vllm` is vLLM's own layout and takes every drafter; `speculators` is
that library's, which names its target, so that `vllm serve DIR` needs no more options.
"""

import json
import logging
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from peagle.console.arguments import ModelArguments, accelerator, check_directory, parse, with_positional
from peagle.errors import ConfigError
from peagle.vllm.command import RUNNER_VARIABLE

if TYPE_CHECKING:
    from peagle.drafter.model import Drafter
    from peagle.targets.hf import HFTarget

log = logging.getLogger(__name__)

Layout = Literal["vllm", "speculators"]


@dataclass(frozen=True)
class Arguments(ModelArguments):
    output: Path
    """directory to write, new or empty"""
    directory: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[DRAFTER]")] = None
    """the drafter; the same as --drafter"""
    to: Layout = "vllm"
    """layout to write"""


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, "export", argv)
    options = with_positional(arguments.drafter, "drafter", arguments.directory)
    output = arguments.output.expanduser().absolute()
    check_output(output)
    target = options.pair(arguments.target).load()
    drafter = options.load(target)

    from peagle.checkpoint import speculators, vllm
    from peagle.checkpoint.card import card_of
    from peagle.provenance import provenance

    card = card_of(drafter, target, provenance(accelerator(target)))
    write = speculators.write if arguments.to == "speculators" else vllm.write
    write(drafter, target, card, output)
    print(shlex.join(serve_command(arguments.to, drafter, target, output)))
    deploy = shlex.join(["peagle", "deploy", "vllm", str(target.source), "--drafter", str(output)])
    log.info("`%s` adds options for large batches and several GPUs", deploy)
    return 0


def serve_command(layout: Layout, drafter: "Drafter", target: "HFTarget", directory: Path) -> list[str]:
    """The command that serves an exported directory. vLLM's V2 model runner cannot draft in parallel."""
    variables = [f"{RUNNER_VARIABLE}=0"] if drafter.config.parallel else []
    if layout == "speculators":
        return [*variables, "vllm", "serve", str(directory)]

    from peagle.checkpoint.vllm import speculative_config

    settings = json.dumps(speculative_config(drafter, directory))
    return [*variables, "vllm", "serve", str(target.directory), "--speculative-config", settings]


def check_output(output: Path) -> None:
    """Refuse a directory with files in it."""
    check_directory(output)
    if output.is_dir() and any(output.iterdir()):
        raise ConfigError(f"{output} is not empty", hint="give a new directory, or remove that one first")
