"""Prove that answers with drafts are the target's own: greedy, seeded and sampled. Exit status 0: lossless, 1: not.

Use it before production or after a change. `peagle eval` measures acceptance; `peagle generate --compare` shows one
prompt side by side.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from peagle.bench.report import check_output
from peagle.compare.lossless import Settings, examine
from peagle.compare.lossless_report import document_of, markdown_of
from peagle.console.arguments import ServedModelArguments, accelerator, parse, with_positional
from peagle.console.progress import progress_bar
from peagle.data.config import require_at_least
from peagle.data.prompts import Prompt, read_prompts
from peagle.errors import ConfigError
from peagle.provenance import provenance
from peagle.report.build import check_report, write_report

if TYPE_CHECKING:
    from peagle.drafter.model import Drafter
    from peagle.targets.hf import HFTarget

NOT_LOSSLESS = 1
SUFFIXES = (".md", ".json")
OWN_PROMPTS = "those that ship with peagle"


@dataclass(frozen=True)
class Arguments(ServedModelArguments):
    name: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[TARGET]")] = None
    """the target; the same as --target"""
    output: Path | None = None
    """write the comparison to this file, .md or .json"""
    report: Path | None = None
    """write a report into this file (.html or .md), as `peagle report` does"""
    prompts: Path | None = None
    """prompt file; default: four prompts that ship with peagle"""
    limit: int = 16
    """use at most this many prompts of the file"""
    num_draft_tokens: int | None = None
    """judge chains of this many draft tokens, all verified; default: as the engine drafts, a tree if the drafter can
    draft one, of which each pass verifies what pays"""
    max_tokens: int = 48
    """longest answer, in tokens"""
    temperature: float = 1.0
    """temperature of the sampled answers"""
    num_seeds: int = 4
    """sampled answers per prompt that are compared token by token"""
    num_samples: int = 256
    """answers drawn per prompt of the distribution test, which uses the first two prompts"""
    json: bool = False
    """print one JSON document instead of Markdown"""


def main(argv: list[str]) -> int:
    if any(argument.startswith("--tolerance") for argument in argv):
        raise ConfigError("answers with a tolerance are not lossless", hint="omit --tolerance")
    arguments = parse(Arguments, "lossless", argv)
    target_arguments = with_positional(arguments.target, "target", arguments.name)
    output = arguments.output and arguments.output.expanduser()
    if output is not None:
        check_output("--output", output, SUFFIXES)
    if arguments.report is not None:
        check_report("--report", arguments.report)
    require_at_least(arguments, 1, "limit")
    settings = Settings(
        1 if arguments.num_draft_tokens is None else arguments.num_draft_tokens,
        arguments.max_tokens,
        arguments.temperature,
        arguments.num_seeds,
        arguments.num_samples,
    )
    prompts = None if arguments.prompts is None else read_prompts(arguments.prompts, limit=arguments.limit)
    target = arguments.drafter.pair(target_arguments).load()
    drafter = arguments.drafter.load(target)
    settings = settings.with_drafts(drafter, arguments.num_draft_tokens)
    token_ids = render(target, prompts)
    with progress_bar() as progress:
        task = progress.add_task("comparing", total=None)
        findings = examine(target, drafter, token_ids, settings, lambda stage: progress.update(task, description=stage))
    facts = facts_of(arguments, target, drafter, token_ids)
    document = document_of(findings, settings=asdict(settings), **facts)
    markdown = markdown_of(document, lambda ids: str(target.tokenizer.decode(list(ids))))
    if output is not None:
        is_json = output.suffix.lower() == ".json"
        output.write_text(json.dumps(document, indent=2) + "\n" if is_json else markdown, encoding="utf-8")
    if arguments.report is not None:
        write_report([document], arguments.report)
    print(json.dumps(document) if arguments.json else markdown, end="\n" if arguments.json else "")
    return 0 if findings.is_lossless else NOT_LOSSLESS


def render(target: "HFTarget", prompts: list[Prompt] | None) -> list[list[int]]:
    from peagle.compare.answers import render_prompt
    from peagle.compare.evidence import gate_prompts

    if prompts is not None:
        return [render_prompt(target, prompt) for prompt in prompts]
    own = gate_prompts(target.tokenizer, target.max_length)
    if not own:
        raise ConfigError(
            f"the prompts that ship with peagle do not fit into the {target.max_length} tokens of {target.name!r}",
            hint="give shorter ones with --prompts",
        )
    return own


def facts_of(
    arguments: Arguments, target: "HFTarget", drafter: "Drafter", token_ids: list[list[int]]
) -> dict[str, Any]:
    """What the report is about: names and hashes."""
    from peagle.checkpoint.card import TargetIdentity
    from peagle.checkpoint.native import drafter_directory
    from peagle.compare.evidence import fingerprints, own_tensors, prompts_hash

    content = json.dumps(fingerprints(own_tensors(target, drafter)), sort_keys=True).encode()
    return {
        "target": asdict(TargetIdentity.of(target)) | {"dtype": target.precision, "device": str(target.device)},
        "drafter": {
            "name": drafter_directory(arguments.drafter.drafter, target).name,
            "method": drafter.config.method,
            "tensors": hashlib.sha256(content).hexdigest()[:32],
        },
        "num_prompts": len(token_ids),
        "prompts": OWN_PROMPTS if arguments.prompts is None else str(arguments.prompts),
        "prompts_hash": prompts_hash(token_ids),
        "provenance": provenance(accelerator(target)),
    }
