"""Publish a drafter as a model repository on the Hugging Face Hub: weights, config, and a model card.

The directory is written in vLLM's layout, which peagle reads too. --output writes it to a directory instead.
"""

import logging
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from peagle.checkpoint.card import CARD_NAME, read_card
from peagle.checkpoint.layouts import CONFIG_NAME, complete_directory, weights_files
from peagle.cli.export import check_output
from peagle.console.arguments import DrafterArguments, TargetArguments, parse
from peagle.errors import CheckpointError, ConfigError, PeagleError
from peagle.report.model_card import Publication, model_card
from peagle.report.publication import README, described, is_complete
from peagle.targets.hub_upload import PublishError, check_repository, upload

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arguments:
    directory: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """drafter directory, as `peagle train` or `peagle export` writes it"""
    repo: str | None = None
    """repository to create, as ORG/NAME"""
    output: Path | None = None
    """write the files to this directory, new or empty, instead of uploading them"""
    card_only: bool = False
    """write only README.md, into DIR itself"""
    license: str | None = None
    """license of the drafter, for example apache-2.0; default: that of the README.md in DIR, or the catalog's"""
    base_model: str | None = None
    """the target's id on the Hugging Face Hub; default: from the drafter card"""
    private: bool = False
    """create a private repository"""
    update: bool = False
    """add a commit to a repository that has files"""
    target: TargetArguments = field(default_factory=TargetArguments)


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, "publish", argv)
    publication = publication_of(arguments)
    directory = complete_directory(arguments.directory)
    if arguments.card_only:
        (arguments.directory / README).write_text(model_card(publication), encoding="utf-8")
        print(arguments.directory / README)
        return 0
    if arguments.output is not None:
        stage(arguments, directory, publication, arguments.output.expanduser().absolute())
        print(arguments.output)
        return 0
    assert arguments.repo is not None, "publication_of refuses a command without"
    check_repository(arguments.repo, is_update=arguments.update)
    staged = Path(tempfile.mkdtemp(prefix="peagle-publish-"))
    try:
        stage(arguments, directory, publication, staged)
        address = upload(staged, arguments.repo, is_private=arguments.private)
    except PublishError as error:
        kept = f"the files are in {staged}: run the command again, or `hf upload {arguments.repo} {staged}`"
        raise PublishError(error.message, hint=f"{error.hint}; {kept}" if error.hint else kept) from error
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    shutil.rmtree(staged)
    print(address)
    return 0


def publication_of(arguments: Arguments) -> Publication:
    """What to publish. Refuses missing files before torch is imported and anything is sent."""
    directory = complete_directory(arguments.directory)
    wanted = [arguments.repo is not None, arguments.output is not None, arguments.card_only]
    if sum(wanted) != 1:
        raise ConfigError(
            "nowhere to publish to" if not any(wanted) else "--repo, --output and --card-only exclude each other",
            hint="pass --repo ORG/NAME, --output DIR or --card-only",
        )
    if not (directory / CONFIG_NAME).is_file() or not weights_files(directory):
        raise CheckpointError(f"{directory} is not a drafter directory", hint="pass what `peagle train` has written")
    card = read_card(directory)
    if card is None:
        raise CheckpointError(
            f"{directory} has no {CARD_NAME}: nothing is known about the drafter",
            hint=f"measure it first: peagle eval --drafter {directory} --record",
        )
    if arguments.output is not None:
        check_output(arguments.output.expanduser().absolute())
    name = arguments.repo or (arguments.output or arguments.directory).expanduser().absolute().name
    return described(directory, card, name, arguments.base_model, arguments.license, as_it_is=arguments.card_only)


def stage(arguments: Arguments, directory: Path, publication: Publication, output: Path) -> None:
    """Write the repository's files: exported if vLLM cannot read the directory as it is, else copied."""
    if is_complete(directory):
        output.mkdir(parents=True, exist_ok=True)
        for path in (directory / CONFIG_NAME, directory / CARD_NAME, *weights_files(directory)):
            shutil.copy(path, output / path.name)
        for path in directory.glob("*.safetensors.index.json"):
            shutil.copy(path, output / path.name)
    else:
        export(arguments, directory, output)
    (output / README).write_text(model_card(publication), encoding="utf-8")


def export(arguments: Arguments, directory: Path, output: Path) -> None:
    options = DrafterArguments(str(directory))
    try:
        target = options.pair(arguments.target).load()
    except PeagleError as error:
        raise replace_hint(error, directory) from error
    drafter = options.load(target)

    from peagle.checkpoint import vllm
    from peagle.checkpoint.card import card_of

    vllm.write(drafter, target, card_of(drafter, target), output)


def replace_hint(error: PeagleError, directory: Path) -> CheckpointError:
    """Say that the target is needed, for tables that vLLM reads from the drafter."""
    return CheckpointError(
        f"{directory} lacks tables that vLLM needs, and the target to take them from cannot be loaded: {error.message}",
        hint=f"pass --target, or publish what `peagle export {directory} --output OTHER` writes",
    )
