"""What tree, pair head and budget bring, each alone and together, by concurrency.

    python benchmarks/draft_parts.py --prompts question.jsonl,HumanEval.jsonl.gz [--concurrency 1 8 64] [--json FILE]
        [--parts plain opted-out chain chain+head tree+head+budget]

plain: no drafter. opted-out: there is one, but every request has num_draft_tokens=0. chain: 7 draft tokens. tree: the
default tree. head: the drafter's pair head. budget: the engine decides how many drafts each pass verifies; without it,
all of them. An engine does tree+head+budget by default.

TTFT is the median in the closed loop, idle TTFT that of prompts that arrive one by one at an idle engine.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from peagle import LLM, SamplingParams
from peagle.bench.cells import PLAIN, Cell, CellResult
from peagle.bench.offline import sweep
from peagle.bench.report import make_table, number, print_document
from peagle.checkpoint.native import load_drafter
from peagle.console.arguments import accelerator
from peagle.data.prompts import read_prompts
from peagle.drafter.model import Drafter
from peagle.provenance import provenance
from peagle.targets.hf import HFTarget
from peagle.targets.load import load_target
from peagle.tokenizer import prompt_ids

CHAIN = 7
DRAFTED = [form + head + budget for form in ("chain", "tree") for head in ("", "+head") for budget in ("", "+budget")]
PARTS = ["plain", "opted-out", *DRAFTED]
REQUESTS_PER_PLACE = 8
"""at concurrency above 1, as in `peagle bench`"""
IDLE_PROMPTS, IDLE_TOKENS = 40, 32
COLUMNS = ("drafts", "at", "tokens/s", "speedup", "acceptance length", "drafts per step", "TTFT ms", "idle TTFT ms")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, help="prompt files, comma-separated")
    parser.add_argument("--limit", type=int, default=40, help="prompts per file, of which the first turn is asked")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--num-requests", type=int, help="per cell; default: all prompts, at least 8 x concurrency")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--drafter", help="default: the one that ships with the embedded target")
    parser.add_argument("--json", type=Path, help="write the rows here too, after each part")
    options = parser.parse_args(argv)

    target = load_target(None)
    drafter = load_drafter(options.drafter, target)
    if drafter.pair_head is None and any("head" in part for part in options.parts):
        parser.error("the drafter has no pair head, so leave the parts with +head out of --parts")
    prompts = [
        prompt_ids(target.tokenizer, prompt.messages)
        for file in options.prompts.split(",")
        for prompt in read_prompts(file, limit=options.limit)
    ]
    rows: list[dict[str, Any]] = []
    document = {"num_prompts": len(prompts), "max_tokens": options.max_tokens, "rows": rows}
    document |= {"provenance": provenance(accelerator(target))}
    try:
        for part in options.parts:
            measure(part, target, drafter, prompts, options, rows)
            add_speedups(rows)
            if options.json is not None:
                options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    finally:
        add_speedups(rows)
        table = make_table("", COLUMNS, map(shown, sorted(rows, key=lambda row: row["concurrency"])))
        print_document(document, False, table)


def measure(
    part: str,
    target: HFTarget,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    options: argparse.Namespace,
    rows: list[dict[str, Any]],
) -> None:
    """Add a row for each concurrency, all of one engine."""
    form, *others = part.split("+")
    params = SamplingParams(max_tokens=options.max_tokens, num_draft_tokens=0 if form == "opted-out" else None)
    num_draft_tokens = {"plain": 0, "chain": CHAIN}.get(form)
    has_head, has_budget = form == "opted-out" or "head" in others, part not in DRAFTED or "budget" in others
    own = drafter if has_head else drafter.without_pair_head()
    max_length = min(max(map(len, prompts)) + options.max_tokens, target.max_length)
    sizes: dict[str, Any] = {"max_batch": max(options.concurrency), "max_length": max_length, "reuse_prefixes": False}
    engines: list[LLM] = []
    idle_ttft: list[float] = []

    def make_llm(*_: object) -> LLM:
        used, verify_tokens = None if form == "plain" else own, None if has_budget else 0
        engines.append(LLM(target, used, num_draft_tokens, verify_tokens=verify_tokens, **sizes))
        return engines[-1]

    def on_cell(result: CellResult) -> None:
        print(
            f"{part} at {result.cell.concurrency}: {result.failure or f'{result.tokens_per_second:,.1f} tokens/s'}",
            flush=True,
        )
        if not idle_ttft and result.failure is None:
            idle_ttft.append(ttft_when_idle(engines[-1], prompts[:: -(-len(prompts) // IDLE_PROMPTS)], params))
        rows.append(row(part, result, idle_ttft))

    method = part if part in DRAFTED else PLAIN
    cells = [Cell(method, num_draft_tokens, places) for places in sorted(options.concurrency)]
    num_requests = {
        places: options.num_requests or max(len(prompts), REQUESTS_PER_PLACE * places if places > 1 else 0)
        for places in options.concurrency
    }
    sweep(cells, make_llm, prompts, params, [], num_requests=num_requests, on_cell=on_cell)


def row(part: str, result: CellResult, idle_ttft: Sequence[float]) -> dict[str, Any]:
    figures, acceptance = result.report(), result.acceptance
    drafts_per_step = None
    if acceptance is not None:
        # Prefill emits the first token of an answer, and a step one more than it accepts, unless the answer ends there.
        num_steps = result.num_tokens - len(result.answers) - acceptance.num_accepted
        drafts_per_step = result.num_verified / max(num_steps, acceptance.num_drafts, 1)
    idle_ttft_ms = idle_ttft[0] if idle_ttft else None
    return {"part": part, "drafts_per_step": drafts_per_step, "idle_ttft_ms": idle_ttft_ms} | figures


def ttft_when_idle(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> float:
    """The median TTFT in ms of requests that arrive after the engine has finished everything."""
    short, times = replace(params, max_tokens=IDLE_TOKENS), []
    for prompt in prompts:
        while llm.engine.has_work:
            llm.engine.step()
        if llm.target.device.type == "cuda":
            torch.cuda.synchronize()
        [output] = llm.generate([list(prompt)], short)
        times.append(output.metrics.first_token_seconds)
    return 1e3 * statistics.median(time for time in times if time is not None)


def add_speedups(rows: Sequence[dict[str, Any]]) -> None:
    plain = {row["concurrency"]: row["output_tokens_per_second"] for row in rows if row["part"] == "plain"}
    for row in rows:
        speed, base = row["output_tokens_per_second"], plain.get(row["concurrency"])
        row["speedup"] = speed / base if speed and base else None


def shown(row: dict[str, Any]) -> list[str]:
    """The row as cells of the table."""
    if row["failure"]:
        return [row["part"], str(row["concurrency"]), row["failure"], *["-"] * (len(COLUMNS) - 3)]
    figures = {
        "output_tokens_per_second": 1,
        "speedup": 2,
        "acceptance_length": 2,
        "drafts_per_step": 1,
        "ttft_ms": 2,
        "idle_ttft_ms": 2,
    }
    values = row | {"ttft_ms": (row["ttft_ms"] or {}).get("p50")}
    return [row["part"], str(row["concurrency"]), *(number(values[name], digits) for name, digits in figures.items())]


if __name__ == "__main__":
    main()
