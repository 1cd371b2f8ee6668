"""One load of `bench serve` as the files that readers of `vllm bench serve` and of AIPerf expect."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peagle.bench.online import Result

AIPERF_NAME, VLLM_NAME = "profile_export_aiperf.json", "vllm.json"
AIPERF_SCHEMA = "1.4"
"""Version of the JSON export of AIPerf 0.13."""
PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)


def write_exports(results: Sequence[Result], document: Mapping[str, Any], directory: Path) -> None:
    """For each load a directory with both files; `document` is that of the whole run."""
    for result, row in zip(results, document["results"], strict=True):
        own = directory / _name(result)
        own.mkdir(parents=True, exist_ok=True)
        found = {VLLM_NAME: row, AIPERF_NAME: aiperf_document(result, document)}
        for name, content in found.items():
            (own / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _name(result: Result) -> str:
    """
    >>> from peagle.bench.online import Load
    >>> _name(Result(Load(8), 1)), _name(Result(Load(8, 2.5), 1)), _name(Result(Load(), 1))
    ('concurrency8', 'rate2.5-concurrency8', 'unlimited')
    """
    load = result.load
    rate = [] if math.isinf(load.request_rate) else [f"rate{load.request_rate:g}"]
    places = [] if load.concurrency is None else [f"concurrency{load.concurrency}"]
    return "-".join([*rate, *places]) or "unlimited"


def aiperf_document(result: Result, document: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of AIPerf's `profile_export_aiperf.json` for what was measured; its names, units and definitions."""
    answered, seconds, goals = result.answered, result.duration, document["goodput"]
    tpots = [outcome.tpot for outcome in answered if outcome.tpot]
    num_output = sum(outcome.num_output for outcome in answered)
    metrics = {
        "request_throughput": _one("requests/sec", len(answered) / seconds if seconds else None),
        "request_latency": _spread("ms", [1e3 * outcome.latency for outcome in answered]),
        "request_count": _one("requests", len(answered)),
        "time_to_first_token": _spread("ms", [1e3 * each.ttft for each in answered if each.ttft is not None]),
        "inter_token_latency": _spread("ms", [1e3 * tpot for tpot in tpots]),
        "inter_chunk_latency": _spread("ms", [1e3 * gap for outcome in answered for gap in outcome.itls]),
        "output_token_throughput": _one("tokens/sec", num_output / seconds if seconds else None),
        "output_token_throughput_per_user": _spread("tokens/sec/user", [1 / tpot for tpot in tpots]),
        "output_sequence_length": _spread("tokens", [outcome.num_output for outcome in answered]),
        "input_sequence_length": _spread("tokens", [outcome.num_input for outcome in answered]),
        "total_osl": _one("tokens", num_output),
        "total_isl": _one("tokens", sum(outcome.num_input for outcome in answered)),
        "benchmark_duration": _one("sec", seconds),
        "error_request_count": _one("requests", len(result.outcomes) - len(answered) or None),
        "goodput": _one("requests/sec", result.num_good(goals) / seconds if goals and seconds else None),
        "good_request_count": _one("requests", result.num_good(goals) if goals else None),
        **_drafts(result),
    }
    return {
        "schema_version": AIPERF_SCHEMA,
        **{name: metric for name, metric in metrics.items() if metric is not None},
        "run_info": {
            "random_seed": document["seed"],
            "run_label": _name(result),
            "cli_command": document["provenance"]["command"],
        },
        "was_cancelled": result.is_interrupted,
        "is_complete": not result.is_interrupted,
    }


def _drafts(result: Result) -> dict[str, dict[str, Any] | None]:
    """Acceptance of the whole load, by the server's counters."""
    found = result.speculation
    if found is None:
        return {}
    return {
        "spec_decode_token_weighted_acceptance_length": _one("ratio", found.acceptance_length),
        "spec_decode_overall_draft_acceptance_rate": _one("%", 100 * found.acceptance_rate),
        "total_spec_decode_steps": _one("count", found.num_drafts),
        "total_accepted_draft_tokens": _one("tokens", found.num_accepted),
        "total_draft_tokens": _one("tokens", found.num_draft_tokens),
    }


def _one(unit: str, value: float | None) -> dict[str, Any] | None:
    return None if value is None else {"unit": unit, "avg": value}


def _spread(unit: str, values: Sequence[float]) -> dict[str, Any] | None:
    """The statistics that AIPerf gives of a metric of requests; None without values."""
    if not values:
        return None
    import numpy as np

    percentiles = np.percentile(values, PERCENTILES)
    return {
        "unit": unit,
        "avg": float(np.mean(values)),
        **{f"p{percent}": float(value) for percent, value in zip(PERCENTILES, percentiles, strict=True)},
        "min": min(values),
        "max": max(values),
        "std": float(np.std(values)),
        "count": len(values),
        "sum": sum(values),
    }
