"""Compare `peagle tune` with a full sweep and with a server that runs its recommendation.

    python benchmarks/tune_accuracy.py --prompts question.jsonl,HumanEval.jsonl.gz --concurrency 1,2,4 \\
        --num-draft-tokens auto,1,2,3,4,5,6,7,8 --limit 8 --max-turns 1 --max-tokens 64

For each concurrency: tune it, measure all methods and draft lengths again, then serve the recommended settings and load
that server. Prints the recommendation's share of the fastest cell of the sweep, and of the tokens/s that tune expected.
"""

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PEAGLE = [sys.executable, "-m", "peagle"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--num-draft-tokens", default="auto,1,2,3,4,5,6,7,8", help="those of the full sweep")
    options, workload = parser.parse_known_args()
    workload += ["--prompts", options.prompts]
    print("| concurrency | recommended | fastest of the sweep | share | expected | served | served / expected |")
    print("|---|---|---|---|---|---|---|")
    for concurrency in options.concurrency.split(","):
        load = [*workload, "--concurrency", concurrency]
        with tempfile.TemporaryDirectory() as work:
            settings = Path(work) / "settings.toml"
            tuned = document("tune", *load, "--output", str(settings))["tuned"]
            sweep = ["--methods", "none,p-eagle,eagle3", "--num-draft-tokens", options.num_draft_tokens]
            speeds = {
                cell["label"]: cell["output_tokens_per_second"] for cell in document("bench", *load, *sweep)["cells"]
            }
            fastest = max(speeds, key=lambda label: speeds[label])
            served, expected = serve(settings, load), tuned["expected"]["output_tokens_per_second"]
        print(
            f"| {concurrency} | {tuned['label']}: {speeds[tuned['label']]:.1f} tokens/s | {fastest}: "
            f"{speeds[fastest]:.1f} | {speeds[tuned['label']] / speeds[fastest]:.1%} | {expected:.1f} | {served:.1f} | "
            f"{served / expected:.1%} |",
            flush=True,
        )


def document(*arguments: str) -> dict[str, Any]:
    """What a command prints with --json."""
    found = subprocess.run([*PEAGLE, *arguments, "--json"], check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, Any] = json.loads(found.splitlines()[-1])
    return result


def serve(settings: Path, load: list[str]) -> float:
    """Output tokens/s of a server with the recommended settings."""
    command = [*PEAGLE, "serve", "--settings", str(settings), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            [url] = next(filter(None, (re.findall(r"listening on (http://[^\s,]+)", line) for line in server.stderr)))
            [row] = document("bench", "serve", url, *load, "--ready-seconds", "300")["results"]
            return float(row["output_throughput"])
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate()


if __name__ == "__main__":
    main()
