"""Compare `peagle tune` with a full sweep and with servers that run its recommendations.

    python benchmarks/tune_accuracy.py --prompts question.jsonl,HumanEval.jsonl.gz --concurrency 1,8,64 --limit 40 \\
        --output tuned.json
    peagle report tuned.json --price-per-hour 4.50 --output tuned.html

A round measures all settings at all loads in one process: as a server runs them, and `--fixed` numbers of draft tokens
verified in full. Then, for each load, `peagle tune` recommends settings with the options it has by default, and a
server runs them for `peagle bench serve`. All figures are medians over the rounds: a CPU needs several (`--rounds 3`),
because its speed changes from minute to minute.

Prints the recommendation's share of the fastest cell, and what was served as a share of what `tune` expected. --output
keeps the cells as a document of `peagle tune`, so a cost table and a report need no other run.
"""

import argparse
import importlib
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from peagle.bench.verdict import best_by_concurrency
from peagle.tuning.recommend import recommend
from peagle.tuning.shown import lines_of

PEAGLE = [sys.executable, "-m", "peagle"]
Cells = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--methods", default="none,p-eagle,eagle3")
    parser.add_argument("--num-draft-tokens", default="auto,1,2,3,4,5,6,7,8", help="limits of the full sweep")
    parser.add_argument("--fixed", default="5,7", help="also verify these in full, as `peagle bench`; '' for none")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--target")
    parser.add_argument("--drafter")
    parser.add_argument("--output", type=Path)
    options, workload = parser.parse_known_args()
    importlib.import_module("peagle.server.app")  # fail before the sweep if packages of the server are missing
    load = [*workload, "--prompts", options.prompts]
    models = [
        word for name in ("target", "drafter") if (value := getattr(options, name)) for word in (f"--{name}", value)
    ]
    sweep = [*load, *models, "--concurrency", options.concurrency, "--methods"]
    loads = [int(places) for places in options.concurrency.split(",")]
    documents, fixed, tuned = [], [], defaultdict[int, list[dict[str, Any]]](list)
    served: dict[int, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as work:
        for _ in range(options.rounds):
            limits = [options.methods, "--num-draft-tokens", options.num_draft_tokens]
            documents.append(document("tune", "--no-serve", *sweep, *limits))
            if options.fixed:
                full = [options.methods.removeprefix("none,"), "--num-draft-tokens", options.fixed]
                fixed.append(in_full(document("bench", *sweep, *full)["cells"]))
            for places in loads:
                settings, here = Path(work) / f"{places}.toml", [*load, "--concurrency", str(places)]
                tuned[places].append(document("tune", *models, *here, "--output", str(settings))["tuned"])
                served[places].append(serve(settings, here))
                own = tuned[places][-1]
                expected = own["expected"]["output_tokens_per_second"]
                print(f"{own['label']} at {places}: {served[places][-1]:.1f} tokens/s of {expected:.1f}", flush=True)
    merged = summary(documents, fixed)
    rows = [row(merged, tuned[places], places, served[places]) for places in loads]
    heads = ("concurrency", "recommended", "fastest of the sweep", "share", "expected", "served", "served / expected")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for each in rows:
        print(
            f"| {each['concurrency']} | {each['label']}: {each['tokens_per_second']:.1f} tokens/s | {each['fastest']}: "
            f"{each['fastest_tokens_per_second']:.1f} | {each['share']:.1%} | {each['expected']:.1f} | "
            f"{each['served']:.1f} | {each['served_over_expected']:.1%} |"
        )
    if options.output is not None:
        options.output.write_text(json.dumps(merged | {"accuracy": rows, "num_rounds": options.rounds}) + "\n")


def document(*arguments: str) -> dict[str, Any]:
    """What a command prints with --json."""
    found = subprocess.run([*PEAGLE, *arguments, "--json"], check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, Any] = json.loads(found.splitlines()[-1])
    return result


def in_full(cells: Cells) -> Cells:
    return [cell | {"label": f"{cell['label']} in full"} for cell in cells]


def at(cells: Cells, places: int) -> Cells:
    return [cell for cell in cells if cell["concurrency"] == places]


def summary(documents: list[dict[str, Any]], fixed: list[Cells]) -> dict[str, Any]:
    """The document of all rounds: of each setting and load the cell with the median tokens/s."""
    cells = [median([found["cells"][index] for found in documents]) for index in range(len(documents[0]["cells"]))]
    cells += [median([found[index] for found in fixed]) for index in range(len(fixed[0]) if fixed else 0)]
    plain = {cell["concurrency"]: cell["output_tokens_per_second"] for cell in cells if cell["method"] == "none"}
    for cell in cells:
        speed, base = cell["output_tokens_per_second"], plain[cell["concurrency"]]
        cell["speedup"] = round(speed / base, 3) if speed and base else None
    tuned = recommend([cell for cell in cells if not cell["label"].endswith(" in full")]) or {}
    verdict = " ".join(lines_of(tuned)).removesuffix(".")
    return documents[0] | {
        "cells": cells, "tuned": tuned, "verdict": verdict, "recommended": best_by_concurrency(cells)
    }  # fmt: skip


def median(cells: Cells) -> dict[str, Any]:
    ordered = sorted(cells, key=lambda cell: cell["output_tokens_per_second"] or 0.0)
    return ordered[(len(ordered) - 1) // 2]


def row(merged: dict[str, Any], tuned: list[dict[str, Any]], places: int, served: list[float]) -> dict[str, Any]:
    """One load: how good its recommendation is, and whether a server keeps what each round's `tune` promised."""
    speeds = {cell["label"]: cell["output_tokens_per_second"] or 0.0 for cell in at(merged["cells"], places)}
    fastest, label = max(speeds, key=lambda name: speeds[name]), tuned[0]["label"]
    promised = [own["expected"]["output_tokens_per_second"] for own in tuned]
    ratios = [own / expected for own, expected in zip(served, promised, strict=True)]
    return {
        "concurrency": places,
        "label": label,
        "tokens_per_second": speeds[label],
        "fastest": fastest,
        "fastest_tokens_per_second": speeds[fastest],
        "share": round(speeds[label] / speeds[fastest], 4),
        "expected": statistics.median(promised),
        "served": statistics.median(served),
        "served_over_expected": round(statistics.median(ratios), 4),
    }


def serve(settings: Path, load: list[str]) -> float:
    """Output tokens/s of a server with the recommended settings; like tune, it reuses no prefixes."""
    command = [*PEAGLE, "serve", "--settings", str(settings), "--port", "0", "--no-reuse-prefixes"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            [url] = next(filter(None, (re.findall(r"listening on (http://[^\s,]+)", line) for line in server.stderr)))
            [result] = document("bench", "serve", url, *load, "--ready-seconds", "300")["results"]
            return float(result["output_throughput"])
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate()


if __name__ == "__main__":
    main()
