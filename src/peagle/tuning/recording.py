"""A recording of traffic (`peagle serve --record DIR --record-text`) as a load to tune for."""

import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.bench.cells import percentile
from peagle.errors import DataError
from peagle.rows import read_rows

NUM_PROMPTS = 64
"""How many of the newest requests are answered again."""


@dataclass(frozen=True)
class Recording:
    prompts: list[list[int]]
    """token ids"""
    request_rate: float | None
    """requests per second; None for fewer than two requests"""
    max_tokens: int
    """longer than 95% of the answers"""
    temperature: float
    num_requests: int


def read_recording(directory: Path, limit: int | None = None) -> Recording:
    """The newest prompts, at most `limit` or `NUM_PROMPTS`, and the load of all requests."""
    files = sorted(directory.expanduser().glob("traffic-*.jsonl"))
    if not files:
        raise DataError(f"{directory} holds no recording", hint="pass the directory of `peagle serve --record DIR`")
    rows = [row for path in files for _, row in read_rows(path)]
    first_of = {row["id"]: row for row in rows}  # one of several answers to a request
    texts = [row["prompt_ids"] for row in first_of.values() if row.get("prompt_ids")]
    if not texts:
        raise DataError(f"{directory} has lengths, but no text to measure on", hint="record it with --record-text")
    times = sorted(float(row["time"]) for row in first_of.values())
    seconds = times[-1] - times[0]
    known = [row["temperature"] for row in rows if row.get("temperature") is not None]
    lengths: list[Any] = [row["num_answer_tokens"] for row in rows]
    return Recording(
        texts[-(limit or NUM_PROMPTS) :],
        (len(times) - 1) / seconds if seconds > 0 else None,
        max(1, round(percentile(lengths, 95) if len(lengths) > 1 else statistics.fmean(lengths))),
        Counter(known).most_common(1)[0][0] if known else 0.0,
        len(first_of),
    )
