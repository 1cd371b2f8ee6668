"""Measure a drafter's acceptance: decode prompts with the engine and count the draft tokens that are accepted.

Use it to judge a drafter on your prompts. `peagle bench` measures speed; `peagle lossless` proves that answers do not
change; `peagle generate --compare` shows one prompt side by side. Prompt files are JSON, JSONL or text, gzipped or not:
MT-Bench and Spec-Bench, HumanEval, GSM8K, OpenAI messages, ShareGPT, or {"prompt": ...}.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from peagle.cli.arguments import DrafterArguments, TargetArguments, accelerator, parse
from peagle.cli.progress import progress_bar
from peagle.errors import ConfigError
from peagle.provenance import provenance
from peagle.sampling_params import SamplingParams

if TYPE_CHECKING:
    from peagle.drafter.model import Drafter


@dataclass(frozen=True)
class Arguments:
    prompts: Path | None = None
    """prompt file; default: 40 mixed prompts that ship with peagle"""
    limit: int | None = None
    """use only the first prompts of the file"""
    num_draft_tokens: int | None = None
    """draft tokens per step; default: 7, or what the drafter was trained for"""
    max_tokens: int = 256
    """longest answer, in tokens"""
    temperature: float = 0.0
    """0 decodes greedily; 1 samples the target's own distribution"""
    record: bool = False
    """write the result to the drafter's card, as the baseline of the server's drift alarm"""
    json: bool = False
    """print one JSON document instead of a table"""
    target: TargetArguments = field(default_factory=TargetArguments)
    drafter: DrafterArguments = field(default_factory=DrafterArguments)


def main(argv: list[str]) -> int:
    from peagle.data.prompts import read_prompts

    arguments = parse(Arguments, "eval", argv)
    params = SamplingParams(max_tokens=arguments.max_tokens, temperature=arguments.temperature)
    if arguments.limit is not None and arguments.limit < 1:
        raise ConfigError(f"--limit must be at least 1, got {arguments.limit}")
    given = None if arguments.prompts is None else read_prompts(arguments.prompts, limit=arguments.limit)
    arguments.drafter.check(arguments.target)
    target = arguments.target.load()
    drafter = arguments.drafter.load(target)

    from peagle.checkpoint.native import drafter_directory
    from peagle.compare.acceptance import entry, measure, mixed_prompts, record_baseline
    from peagle.compare.answers import render_prompt

    if given is None:
        token_ids = mixed_prompts(target, arguments.max_tokens)[: arguments.limit]
    else:
        token_ids = [render_prompt(target, prompt) for prompt in given]
    if not token_ids:
        raise ConfigError("there is no prompt to decode", hint="lower --max-tokens, or give a file with --prompts")
    with progress_bar() as progress:
        task = progress.add_task("decoding", total=len(token_ids))
        depth = draft_tokens(arguments, drafter)
        found, num_tokens = measure(
            target, drafter, token_ids, params, depth, lambda done: progress.update(task, completed=done)
        )
    document = entry(found, name_of(arguments.prompts), len(token_ids), params) | {
        "workload": name_of(arguments.prompts),
        "num_tokens": num_tokens,
        "target": target.name,
        "method": drafter.config.method,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "provenance": provenance(accelerator(target)),
    }
    if arguments.record:
        measured = entry(found, name_of(arguments.prompts), len(token_ids), params)
        record_baseline(drafter_directory(arguments.drafter.drafter, target), target, drafter, measured)
    if arguments.json:
        print(json.dumps(document))
    else:
        Console().print(table(document))
    return 0


def draft_tokens(arguments: Arguments, drafter: "Drafter") -> int:
    """As given; else the usual number, or for the card the trained number, which covers every shorter draft."""
    if arguments.num_draft_tokens is not None:
        return arguments.num_draft_tokens
    usual = drafter.config.usual_num_draft_tokens
    return drafter.config.num_draft_tokens or usual if arguments.record else usual


def name_of(prompts: Path | None) -> str:
    from peagle.compare.acceptance import MIXED_PROMPTS
    from peagle.data.prompts import workload_name

    return MIXED_PROMPTS if prompts is None else workload_name(prompts)


def table(document: dict[str, Any]) -> Table:
    result = Table(title=f"{document['prompts']}, {document['num_prompts']} prompts, {document['method']}")
    result.add_column("measure")
    result.add_column("value", justify="right")
    rows = {
        f"acceptance length (K = {document['num_draft_tokens']})": f"{document['acceptance_length']:.3f}",
        "accepted, by position": " ".join(f"{share:.2f}" for share in document["per_position"]),
        "answer tokens": f"{document['num_tokens']:,}",
        "drafts verified": f"{document['num_drafts']:,}",
    }
    for name, value in rows.items():
        result.add_row(name, value)
    return result
