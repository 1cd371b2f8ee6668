"""Decode a prompt file for real and report acceptance, speed and whether the answers equal plain decoding's.

Prompt files are recognised by their keys: MT-Bench and Spec-Bench (turns), HumanEval, GSM8K (question), OpenAI messages,
ShareGPT conversations, plain {"prompt": ...}; JSON, JSONL or text, gzipped or not.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from peagle.bench.workloads import read_prompts, workload_name
from peagle.cli.arguments import ModelArguments, Models, parse
from peagle.errors import ConfigError
from peagle.provenance import provenance
from peagle.sampling_params import SamplingParams


@dataclass(frozen=True)
class Arguments:
    prompts: Path
    """prompt file"""
    limit: int | None = None
    """use only the first so many prompts"""
    num_draft_tokens: int = 7
    """draft tokens a step"""
    max_tokens: int = 256
    """tokens to answer each prompt with, at most"""
    temperature: float = 0.0
    seed: int = 0
    compare: bool = True
    """also decode plainly, and compare speed and tokens"""
    json: bool = False
    """print one JSON document as the last line of stdout, instead of a table"""
    models: Models = field(default_factory=ModelArguments)


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, "eval", argv)
    if arguments.limit is not None and arguments.limit < 1:
        raise ConfigError(f"limit must be at least 1, got {arguments.limit}")
    params = SamplingParams(
        max_tokens=arguments.max_tokens, temperature=arguments.temperature, seed=arguments.seed
    )
    prompts = read_prompts(arguments.prompts, limit=arguments.limit)
    target = arguments.models.load_target()
    drafter = arguments.models.load_drafter(target)

    from peagle.bench.acceptance import Evaluation, evaluate

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    talk = Console(stderr=True)
    with Progress(*columns, console=talk, disable=not talk.is_terminal) as progress:
        task = progress.add_task("decoding", total=len(prompts))

        def on_prompt(totals: Evaluation) -> None:
            length = totals.acceptance.acceptance_length
            progress.update(task, completed=totals.num_prompts, description=f"acceptance length {length:.2f}")

        totals = evaluate(
            target,
            drafter,
            prompts,
            params,
            arguments.num_draft_tokens,
            compare=arguments.compare,
            on_prompt=on_prompt,
        )
    document = totals.report() | {
        "workload": workload_name(arguments.prompts),
        "target": target.name,
        "method": drafter.config.method,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        "provenance": provenance(),
    }
    if arguments.json:
        print(json.dumps(document))
    else:
        Console().print(table(document))
    return 0


def table(document: dict[str, Any]) -> Table:
    result = Table(title=f"{document['workload']}, {document['num_prompts']} prompts, {document['method']}")
    result.add_column("measure")
    result.add_column("value", justify="right")
    per_position = " ".join(f"{share:.2f}" for share in document["per_position"])
    rows = {
        f"acceptance length (K = {document['num_draft_tokens']})": f"{document['acceptance_length']:.3f}",
        "accepted, by position": per_position,
        "tokens/s with drafts": f"{document['tokens_per_second']:.1f}",
    }
    if document["num_compared"]:
        rows |= {
            "tokens/s plain": f"{document['plain_tokens_per_second']:.1f}",
            "speed-up": f"{document['speedup']:.2f}x",
            "answers identical to plain": f"{document['num_identical']} of {document['num_compared']}",
            "differing at a near tie of the target": str(document["num_divergences_at_near_ties"]),
        }
    for name, value in rows.items():
        result.add_row(name, value)
    return result
