"""Write a report on whether answers with drafts are the target's own: exit status 0 if they are, 1 if not.

Greedy answers are compared token for token with plain decoding and with transformers' generate, seeded ones with
plain decoding, and the distribution of sampled openings with the target's exact probabilities. In float32 nothing may
differ; in a lower precision every place where answers part is listed with how undecided the target was there.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from peagle.bench.lossless import Answers, Settings, examine
from peagle.bench.lossless_report import document_of, markdown_of
from peagle.cli.arguments import (
    DrafterArguments,
    DrafterOptions,
    TargetArguments,
    TargetOptions,
    accelerator,
    parse,
)
from peagle.cli.progress import progress_bar
from peagle.errors import ConfigError
from peagle.provenance import provenance
from peagle.sampling_params import SamplingParams

if TYPE_CHECKING:
    from peagle.decoding.acceptance import Acceptance
    from peagle.drafter.model import Drafter
    from peagle.targets.hf import HFTarget

NOT_LOSSLESS = 1
SUFFIXES = (".md", ".json")
OWN_PROMPTS = "those that ship with peagle"


@dataclass(frozen=True)
class Arguments:
    name: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[TARGET]")] = None
    """the target; the same as --target"""
    prompts: Path | None = None
    """prompt file; by default the few prompts that ship with peagle"""
    limit: int = 16
    """use at most so many prompts of the file"""
    num_draft_tokens: int | None = None
    """draft tokens a step; by default 7, or fewer where the drafter was trained for fewer"""
    max_tokens: int = 48
    """tokens to answer each prompt with, at most"""
    temperature: float = 1.0
    """of the sampled answers"""
    num_seeds: int = 4
    """sampled answers to each prompt that are compared token for token"""
    num_samples: int = 256
    """answers drawn for each prompt of the distribution test"""
    num_sampled_prompts: int = 2
    """prompts of the distribution test"""
    output: Path | None = None
    """write the report there: Markdown to a name in .md, JSON to one in .json"""
    json: bool = False
    """print one JSON document as the last line of stdout, instead of the Markdown"""
    target: TargetOptions = field(default_factory=TargetArguments)
    drafter: DrafterOptions = field(default_factory=DrafterArguments)


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, "lossless", argv)
    check_options(arguments)
    target_arguments = arguments.target
    if arguments.name is not None:
        target_arguments = dataclasses.replace(target_arguments, target=arguments.name)
    prompts = read_rows(arguments)
    settings_of(arguments, 1)  # refuse settings before anything is loaded
    target = target_arguments.load()
    drafter = arguments.drafter.load(target)
    settings = settings_of(arguments, drafter.config.usual_num_draft_tokens)
    token_ids = render(target, prompts)
    with progress_bar() as progress:
        task = progress.add_task("comparing", total=None)
        findings = examine(
            target,
            drafter,
            token_ids,
            settings,
            lambda rows, params: ask_engine(target, drafter, settings, rows, params),
            lambda stage: progress.update(task, description=stage),
        )
    facts = facts_of(arguments, target, drafter, token_ids)
    document = document_of(findings, settings=dataclasses.asdict(settings), **facts)
    markdown = markdown_of(document, lambda ids: str(target.tokenizer.decode(list(ids))))
    if arguments.output is not None:
        is_json = arguments.output.suffix.lower() == ".json"
        text = json.dumps(document, indent=2) + "\n" if is_json else markdown
        arguments.output.expanduser().write_text(text, encoding="utf-8")
    print(json.dumps(document) if arguments.json else markdown, end="\n" if arguments.json else "")
    return 0 if findings.is_lossless else NOT_LOSSLESS


def check_options(arguments: Arguments) -> None:
    if arguments.name is not None and arguments.target.target is not None:
        raise ConfigError(
            f"two targets are given: {arguments.name} and, with --target, {arguments.target.target}",
            hint="give one of them",
        )
    output = arguments.output
    if output is not None and output.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--output {output}: the name must end in {' or '.join(SUFFIXES)}")
    if output is not None and not output.expanduser().absolute().parent.is_dir():
        raise ConfigError(f"--output {output}: there is no directory {output.parent}", hint="make it first")
    if arguments.limit < 1:
        raise ConfigError(f"--limit must be at least 1, got {arguments.limit}")


def settings_of(arguments: Arguments, usual: int) -> Settings:
    return Settings(
        usual if arguments.num_draft_tokens is None else arguments.num_draft_tokens,
        arguments.max_tokens,
        arguments.temperature,
        arguments.num_seeds,
        arguments.num_samples,
        arguments.num_sampled_prompts,
    )


def read_rows(arguments: Arguments) -> list[Any] | None:
    from peagle.bench.workloads import read_prompts

    return None if arguments.prompts is None else list(read_prompts(arguments.prompts, limit=arguments.limit))


def render(target: "HFTarget", prompts: list[Any] | None) -> list[list[int]]:
    from peagle.bench.acceptance import render_prompt
    from peagle.drafter.evidence import gate_prompts

    if prompts is not None:
        return [render_prompt(target, prompt) for prompt in prompts]
    own = gate_prompts(target.tokenizer, target.max_length)
    if not own:
        raise ConfigError(
            f"target {target.name!r} holds {target.max_length} tokens, too few for the prompts that ship",
            hint="give shorter ones with --prompts",
        )
    return own


def ask_engine(
    target: "HFTarget",
    drafter: "Drafter",
    settings: Settings,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
) -> tuple[Answers, list["Acceptance"]]:
    """Answers of the engine that `peagle serve` runs, all prompts at the same time."""
    from peagle.engine.llm import LLM

    longest = max(map(len, prompts)) + max(each.max_tokens for each in params) + 2 * settings.num_draft_tokens
    num_draft_tokens = max(each.num_draft_tokens or settings.num_draft_tokens for each in params)
    with LLM(
        target,
        drafter,
        num_draft_tokens,
        max_batch=min(16, len(prompts)),
        max_length=min(longest, target.max_length),
    ) as llm:
        outputs = llm.generate([list(prompt) for prompt in prompts], list(params))
    return [output.outputs[0].token_ids for output in outputs], [output.metrics.acceptance for output in outputs]


def facts_of(
    arguments: Arguments, target: "HFTarget", drafter: "Drafter", token_ids: list[list[int]]
) -> dict[str, Any]:
    """What the report is about, by names and hashes."""
    from peagle.drafter.card import TargetIdentity
    from peagle.drafter.checkpoint import drafter_directory
    from peagle.drafter.evidence import fingerprints, own_tensors, prompts_hash

    identity = dataclasses.asdict(TargetIdentity.of(target))
    tensors = fingerprints(own_tensors(target, drafter))
    content = json.dumps(tensors, sort_keys=True).encode()
    return {
        "target": identity | {"dtype": str(target.dtype).removeprefix("torch."), "device": str(target.device)},
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
