"""Serve the recommended settings and put the load on the server: what clients will see.

A sweep drives the engine in its own process. A server also streams over HTTP, and on a CPU its clients take time from
the engine, so it is slower.
"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from peagle.bench.client import Question
from peagle.bench.online import Load, Result
from peagle.data.prompts import Prompt
from peagle.errors import ServerError

ADDRESS = re.compile(r"listening on (http://[\w.:]+)")
START_SECONDS, END_SECONDS, POLL_SECONDS = 1800.0, 40.0, 0.2
SHOWN_LINES = 10
KEYS = ("PEAGLE_API_KEY", "PEAGLE_API_KEYS")


@dataclass(frozen=True)
class RecordedQuestion(Question):
    """Asks with the token ids of recorded prompts; the id of a prompt is its place."""

    prompt_ids: Sequence[Sequence[int]] = ()

    def body(self, prompt: Prompt, index: int) -> dict[str, Any]:
        return super().body(prompt, index) | {"prompt": list(self.prompt_ids[int(prompt.id)])}


def loads_of(tuned: Mapping[str, Any]) -> list[Load]:
    """The request rate, else every measured concurrency."""
    if tuned["request_rate"] is not None:
        return [Load(None, tuned["request_rate"])]
    return [Load(row["concurrency"]) for row in tuned["by_concurrency"]]


@contextlib.contextmanager
def server(settings: Path, words: Sequence[str]) -> Iterator[str]:
    """Run `peagle serve` with these settings and options on a free port; yields its address once it is ready."""
    command = [sys.executable, "-m", "peagle", "serve", "--settings", str(settings), "--no-reuse-prefixes", *words]
    command += ["--host", "127.0.0.1", "--port", "0"]
    environment = {name: value for name, value in os.environ.items() if name not in KEYS}
    with tempfile.TemporaryDirectory() as work:
        said = Path(work) / "log"
        with said.open("w", encoding="utf-8") as log_file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log_file, stderr=subprocess.STDOUT, env=environment
            )
        try:
            yield _address(process, said)
        finally:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process: "subprocess.Popen[bytes]", said: Path) -> str:
    """Wait until the server is ready."""
    started = time.monotonic()
    while process.poll() is None and time.monotonic() < started + START_SECONDS:
        time.sleep(POLL_SECONDS)
        if (found := ADDRESS.search(said.read_text(encoding="utf-8", errors="replace"))) is None:
            continue
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{found[1]}/health", trust_env=False).is_success:
                return found[1]
    status = process.poll()
    lines = said.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:]
    raise ServerError(
        f"`peagle serve` {'was not ready in time' if status is None else f'ended with status {status}'}; its last "
        "lines:\n" + "\n".join(f"  {line}" for line in lines),
        hint="start it by hand with --settings, or add --no-serve",
    )


def with_served(tuned: Mapping[str, Any], results: Sequence[Result]) -> dict[str, Any]:
    """The recommendation with what was served: the figures to expect, and tokens/s by concurrency."""
    rows = [_row(result) for result in results]
    speeds = {row["concurrency"]: row["output_tokens_per_second"] for row in rows}
    place = tuned["expected"]["concurrency"]
    is_rate = tuned["request_rate"] is not None
    expected = rows[0] | {"concurrency": place} if is_rate else next(row for row in rows if row["concurrency"] == place)
    by_concurrency = [
        row | {"served_tokens_per_second": speeds.get(row["concurrency"])} for row in tuned["by_concurrency"]
    ]
    return dict(tuned) | {"expected": expected, "served": rows, "by_concurrency": by_concurrency}


def _row(result: Result) -> dict[str, Any]:
    report = result.report()
    if not result.answered:
        raise ServerError(f"no request was answered at {result.load.label}: {', '.join(report['failures'])}")
    return {
        "concurrency": result.load.concurrency,
        "output_tokens_per_second": report["output_throughput"],
        "tpot_p50_ms": report["median_tpot_ms"],
        "tpot_p99_ms": report["p99_tpot_ms"],
        "ttft_p50_ms": report["median_ttft_ms"],
        "ttft_p99_ms": report["p99_ttft_ms"],
        "acceptance_length": report.get("spec_decode_acceptance_length"),
    }
