"""Measure the figures of the README and the log that need a GPU, in parts that can be measured again one by one.

    python benchmarks/gpu_figures.py --output DIR --prompts question.jsonl,HumanEval.jsonl.gz [--parts sweep shapes]

Writes the output of each command to DIR/PART-N.txt, which ends with one JSON document where the command prints one. A
command that has finished is not run again, so a run that was interrupted resumes. A part may take --minutes in all.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

BENCHMARKS = Path(__file__).parent
PEAGLE = [sys.executable, "-m", "peagle"]
DRAFTED = ("llama-8b", "gpt-oss-20b:mxfp4", "qwen3-30b-a3b")
"""Shapes that are also measured with drafts."""
NUM_REQUESTS = {8: 160, 32: 320, 64: 640, 128: 1024, 256: 2048}
"""Per cell, so that the end of a cell, where requests run out, is a small part of it."""


def script(name: str, *arguments: str) -> list[str]:
    return [sys.executable, str(BENCHMARKS / name), *arguments]


def tests(prompts: str) -> Iterator[list[str]]:
    yield [sys.executable, "-m", "pytest", "-q", "-m", "gpu", str(BENCHMARKS.parent / "tests")]


def kernels(prompts: str) -> Iterator[list[str]]:
    yield script("few_bit.py", "--tilings", "--rows", "8", "64")
    yield script("tree_steps.py", "--max-batch", "8")


def sweep(prompts: str) -> Iterator[list[str]]:
    """Plain decoding, trees and chains of P-EAGLE, and EAGLE-3, by concurrency."""
    drafts = ["--methods", "none,p-eagle,eagle3", "--num-draft-tokens", "auto,5,7", "--max-turns", "1"]
    load = [*PEAGLE, "bench", "--prompts", prompts, *drafts, "--json"]
    yield [*load, "--limit", "40", "--concurrency", "1"]
    for concurrency, num_requests in NUM_REQUESTS.items():
        yield [*load, "--concurrency", str(concurrency), "--num-requests", str(num_requests)]


def shapes(prompts: str) -> Iterator[list[str]]:
    """Steps of large models with random weights, plain, and with drafters of the published size and slimmer ones."""
    yield script("shapes.py")
    yield script("shapes.py", *DRAFTED, "--drafts", "--drafter-layers", "4", "2", "--draft-vocab", "0", "32000")


def tune(prompts: str) -> Iterator[list[str]]:
    yield script("tune_accuracy.py", "--prompts", prompts, "--concurrency", "1,8,64", "--limit", "40")


PARTS = {part.__name__: part for part in (tests, kernels, sweep, shapes, tune)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--prompts", required=True, help="prompt files, comma-separated")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=60, help="the most that a part may take")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for name in options.parts:
        deadline = time.monotonic() + 60 * options.minutes
        for number, command in enumerate(PARTS[name](options.prompts)):
            run(command, options.output / f"{name}-{number}.txt", deadline - time.monotonic())


def run(command: list[str], output: Path, seconds: float) -> None:
    """Run a command unless its output is there; an unfinished one leaves `output`.part."""
    said, part = " ".join(command), output.with_suffix(".part")
    if output.exists():
        print(f"{output}: measured before", flush=True)
        return
    started = time.monotonic()
    with part.open("w") as file:
        print(said, file=file, flush=True)
        try:
            status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=max(seconds, 0)).returncode
        except subprocess.TimeoutExpired:
            status = None
    if status == 0:
        part.rename(output)
    how = {0: "done", None: "ran out of time"}.get(status, f"exit status {status}, see {part}")
    print(f"{output}: {how} after {time.monotonic() - started:.0f} s: {said}", flush=True)


if __name__ == "__main__":
    main()
