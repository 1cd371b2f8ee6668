"""Decode a prompt file for real and report acceptance, speed and whether the answers equal plain decoding's.

Prompt files are recognized by their keys: MT-Bench and Spec-Bench (turns), HumanEval, GSM8K (question), OpenAI
messages, ShareGPT conversations, plain {"prompt": ...}; JSON, JSONL or text, gzipped or not.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from peagle.bench.acceptance import Evaluation, evaluate
from peagle.bench.workloads import read_prompts, workload_name
from peagle.cli.arguments import (
    DrafterArguments,
    DrafterOptions,
    TargetArguments,
    TargetOptions,
    accelerator,
    parse,
)
from peagle.cli.progress import progress_bar
from peagle.provenance import provenance
from peagle.sampling_params import SamplingParams


@dataclass(frozen=True)
class Arguments:
    prompts: Path
    """prompt file"""
    limit: int | None = None
    """use only the first so many prompts"""
    num_draft_tokens: int | None = None
    """draft tokens a step; by default 7, or fewer where the drafter was trained for fewer"""
    max_tokens: int = 256
    """tokens to answer each prompt with, at most"""
    temperature: float = 0.0
    """0 takes the most likely token; 1 samples the target's own distribution"""
    seed: int = 0
    """with the position in the text it fixes every random draw"""
    compare: bool = True
    """also decode plainly, and compare speed and tokens"""
    json: bool = False
    """print one JSON document as the last line of stdout, instead of a table"""
    target: TargetOptions = field(default_factory=TargetArguments)
    drafter: DrafterOptions = field(default_factory=DrafterArguments)


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, "eval", argv)
    params = SamplingParams(max_tokens=arguments.max_tokens, temperature=arguments.temperature, seed=arguments.seed)
    prompts = read_prompts(arguments.prompts, limit=arguments.limit)
    arguments.drafter.check(arguments.target)
    target = arguments.target.load()
    drafter = arguments.drafter.load(target)
    num_draft_tokens = arguments.num_draft_tokens
    if num_draft_tokens is None:
        num_draft_tokens = drafter.config.usual_num_draft_tokens
    with progress_bar() as progress:
        task = progress.add_task("decoding", total=len(prompts))

        def on_prompt(totals: Evaluation) -> None:
            length = totals.acceptance.acceptance_length
            progress.update(task, completed=totals.num_prompts, description=f"acceptance length {length:.2f}")

        totals = evaluate(
            target, drafter, prompts, params, num_draft_tokens, compare=arguments.compare, on_prompt=on_prompt
        )
    document = totals.report() | {
        "workload": workload_name(arguments.prompts),
        "target": target.name,
        "method": drafter.config.method,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        "provenance": provenance(accelerator(target)),
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
