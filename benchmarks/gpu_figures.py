"""Measure the figures of the README and the log that need a GPU, in parts that can be measured again one by one.

    python benchmarks/gpu_figures.py --output DIR --prompts question.jsonl,HumanEval.jsonl.gz [--parts sweep shapes]
        [--minutes 8]

Writes the output of each command to DIR/PART-N.txt, which ends with one JSON document where the command prints one. A
command that has finished is not run again, so a run that was interrupted resumes. After --minutes the command is
interrupted, as by Ctrl-C, and what it has measured stays in DIR/PART-N.part; it has a minute to print that. No command
should take more than 8 minutes on an H200.

Commands get the first 40 prompts of each file (JSONL, plain or gzipped) as files of their own, in DIR/prompts, because
`peagle bench --limit` leaves out batches that are larger than the number of prompts.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from peagle.rows import read_lines

BENCHMARKS = Path(__file__).parent
TESTS = BENCHMARKS.parent / "tests"
PEAGLE = [sys.executable, "-m", "peagle"]
DRAFTED = ("llama-8b", "gpt-oss-20b:mxfp4", "qwen3-30b-a3b")
"""Shapes that are also measured with drafts."""
NUM_PROMPTS = 40
OWN_PARTS = ("budget", "head", "head+budget")
SECONDS_TO_STOP = 60


def script(name: str, *arguments: str) -> list[str]:
    return [sys.executable, str(BENCHMARKS / name), *arguments]


def tests(prompts: str) -> Iterator[list[str]]:
    """Only the files with GPU tests: others may need packages that are not there."""
    files = [str(file) for file in sorted(TESTS.rglob("test_*.py")) if "mark.gpu" in file.read_text(encoding="utf-8")]
    yield [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--continue-on-collection-errors", *files]


def kernels(prompts: str) -> Iterator[list[str]]:
    yield script("few_bit.py", "--tilings", "--rows", "8", "64", "--seconds", "450")
    yield script("tree_steps.py", "--max-batch", "8")


def sweep(prompts: str) -> Iterator[list[str]]:
    """Plain decoding, trees and chains of P-EAGLE, and EAGLE-3, by concurrency."""
    for method, depths in (("p-eagle", "auto,5,7"), ("eagle3", "auto,3,5")):
        drafts = ["--methods", f"none,{method}", "--num-draft-tokens", depths, "--max-turns", "1"]
        yield [*PEAGLE, "bench", "--prompts", prompts, *drafts, "--concurrency", "1,8,32,64,128,256", "--json"]


def parts(prompts: str) -> Iterator[list[str]]:
    """Tree, pair head and budget, each alone and together."""
    load = ["--prompts", prompts, "--concurrency", "1", "8", "64", "--parts", "plain"]
    for form, others in (("tree", ["opted-out"]), ("chain", [])):
        yield script("draft_parts.py", *load, *others, form, *(f"{form}+{own}" for own in OWN_PARTS))


def shapes(prompts: str) -> Iterator[list[str]]:
    """Steps of large models with random weights, plain, and with drafters of the published size and slimmer ones."""
    yield script("shapes.py", "llama-8b", "llama-8b:fp8", "llama-8b:int8", "llama-8b:int4", "gpt-oss-20b:mxfp4")
    yield script("shapes.py", "qwen3-30b-a3b", "qwen3-30b-a3b:fp8", "gemma-4-31b", "gpt-oss-120b:mxfp4")
    yield script("shapes.py", *DRAFTED, "--drafts", "--drafter-layers", "4", "2", "--draft-vocab", "0", "32000")


def tune(prompts: str) -> Iterator[list[str]]:
    sweep = ["--methods", "none,p-eagle", "--num-draft-tokens", "auto,3,5,7", "--fixed", "", "--limit", "40"]
    yield script("tune_accuracy.py", "--prompts", prompts, "--concurrency", "1,8,64", *sweep)


PARTS = {part.__name__: part for part in (tests, kernels, sweep, parts, shapes, tune)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--prompts", required=True, help="prompt files, comma-separated")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=60, help="the most that all parts may take")
    options = parser.parse_args()
    files = [trimmed(Path(file), options.output / "prompts") for file in options.prompts.split(",")]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it, and so would its commands
    deadline = time.monotonic() + 60 * options.minutes
    for name in options.parts:
        for number, command in enumerate(PARTS[name](",".join(map(str, files)))):
            run(command, options.output / f"{name}-{number}.txt", deadline - time.monotonic())


def trimmed(file: Path, directory: Path) -> Path:
    """The first prompts of a file, in a file that reports give the same name."""
    path = directory / file.absolute().parent.name / file.name.removesuffix(".gz")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line for _, line in islice(read_lines(file), NUM_PROMPTS)), encoding="utf-8")
    return path


def run(command: list[str], output: Path, seconds: float) -> None:
    """Run a command unless its output is there. Unfinished ones leave their output in PART-N.part."""
    said, part = " ".join(command), output.with_suffix(".part")
    if output.exists() or seconds <= 0:
        print(f"{output}: {'measured before' if output.exists() else 'no time left'}: {said}", flush=True)
        return
    started = time.monotonic()
    with part.open("a") as file:
        print(said, file=file, flush=True)
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
            stop(process)
    if status == 0:
        part.rename(output)
    how = {0: "done", None: "ran out of time"}.get(status, f"exit status {status}, see {part}")
    print(f"{output}: {how} after {time.monotonic() - started:.0f} s: {said}", flush=True)


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(SECONDS_TO_STOP)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
