"""Measure a drafter's acceptance: decode prompts with the engine and count the draft tokens that are accepted.

Use it to judge a drafter on your prompts. `peagle bench` measures speed; `peagle lossless` proves that answers do not
change; `peagle generate --compare` shows one prompt side by side. Prompt files are JSON, JSONL or text, gzipped or not:
MT-Bench and Spec-Bench, HumanEval, GSM8K, OpenAI messages, ShareGPT, or {"prompt": ...}.
"""

from dataclasses import dataclass
from pathlib import Path

from peagle.bench.report import make_table, print_document
from peagle.bench.verdict import acceptance_verdict, shortest_draft
from peagle.console.arguments import ServedModelArguments, accelerator, parse
from peagle.console.progress import progress_bar
from peagle.data.config import require_at_least
from peagle.data.prompts import read_prompts, workload_name
from peagle.errors import ConfigError
from peagle.provenance import provenance
from peagle.sampling_params import SamplingParams


@dataclass(frozen=True)
class Arguments(ServedModelArguments):
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
    """write the result to the drafter's card, under the name of the prompt file; without --prompts as the baseline of
    the server's drift alarm: for greedy requests, or with --temperature for sampled ones"""
    as_baseline: bool = False
    """with --record: the baseline of the drift alarm is that of these prompts"""
    json: bool = False
    """print one JSON document instead of a table"""


def main(argv: list[str]) -> int:
    arguments = parse(Arguments, "eval", argv)
    params = SamplingParams(max_tokens=arguments.max_tokens, temperature=arguments.temperature)
    require_at_least(arguments, 1, "limit", "num_draft_tokens")
    arguments.target.refuse_quantize("--record", arguments.record)
    if arguments.as_baseline and not arguments.record:
        raise ConfigError("--as-baseline needs --record", hint="add --record")
    given = None if arguments.prompts is None else read_prompts(arguments.prompts, limit=arguments.limit)
    target = arguments.drafter.pair(arguments.target).load()
    drafter = arguments.drafter.load(target)

    from peagle.checkpoint.native import drafter_directory
    from peagle.compare.acceptance import MIXED_PROMPTS, entry, measure, mixed_prompts, record
    from peagle.compare.answers import render_prompt
    from peagle.decoding.acceptance import length_rows

    if given is None:
        token_ids = mixed_prompts(target, arguments.max_tokens)[: arguments.limit]
    else:
        token_ids = [render_prompt(target, prompt) for prompt in given]
    if not token_ids:
        raise ConfigError("there is no prompt to decode", hint="lower --max-tokens, or give a file with --prompts")
    depth, config = arguments.num_draft_tokens, drafter.config
    if depth is None:  # the card gets the trained number, which covers every shorter draft
        depth = (arguments.record and config.num_draft_tokens) or config.usual_num_draft_tokens
    with progress_bar() as progress:
        task = progress.add_task("decoding", total=len(token_ids))
        found, num_tokens, by_length = measure(
            target, drafter, token_ids, params, depth, lambda done: progress.update(task, completed=done)
        )
    workload = MIXED_PROMPTS if arguments.prompts is None else workload_name(arguments.prompts)
    measured = entry(drafter, found, workload, len(token_ids), params) | {"by_length": by_length}
    if arguments.record:
        as_baseline = arguments.as_baseline or arguments.prompts is None
        directory = drafter_directory(arguments.drafter.drafter, target)
        record(directory, target, drafter, measured, as_baseline=as_baseline)
    document = measured | {
        "workload": workload,
        "num_tokens": num_tokens,
        "verdict": acceptance_verdict(measured["per_position"], measured["num_drafts"]),
        "recommended_num_draft_tokens": shortest_draft(measured["per_position"]),
        "target": target.name,
        "method": config.method,
        "dtype": target.precision,
        "device": str(target.device),
        "provenance": provenance(accelerator(target)),
    }
    rows = {
        f"acceptance length (K = {depth})": f"{measured['acceptance_length']:.3f}",
        "accepted, by position": " ".join(f"{share:.2f}" for share in measured["per_position"]),
        **length_rows(by_length),
        "answer tokens": f"{num_tokens:,}",
        "drafts verified": f"{measured['num_drafts']:,}",
    }
    title = f"{workload}, {len(token_ids)} prompts, {config.method}"
    table = make_table(title, ("measure", "value"), rows.items())
    print_document(document, arguments.json, table, verdict=document["verdict"])
    return 0
