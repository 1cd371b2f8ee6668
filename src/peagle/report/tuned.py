"""The part of a report that comes from a recommendation of `peagle tune`."""

from collections.abc import Mapping
from typing import Any

from peagle.bench.report import number
from peagle.report.parts import Section, Table


def tuned_section(document: Mapping[str, Any]) -> Section:
    tuned, said = document["tuned"], document["verdict"]
    is_served = bool(tuned.get("served"))
    rows = [
        (
            number(row["concurrency"]),
            number(row["output_tokens_per_second"], 1),
            *([number(row["served_tokens_per_second"], 1)] if is_served else []),
            number(row["plain_tokens_per_second"], 1),
            f"{row['fastest']}: {number(row['fastest_tokens_per_second'], 1)}",
            *(number(row[f"tpot_{which}_ms"], 2) for which in ("p50", "p99")),
            *(number(row[f"ttft_{which}_ms"], 1) for which in ("p50", "p99")),
            number(row["acceptance_length"], 2),
        )
        for row in tuned["by_concurrency"]
    ]
    heads = ("concurrency", "tokens/s", *(["served"] if is_served else []), "plain", "fastest", "ms per token", "p99")
    table = Table(
        f"Expected of {tuned['label']}: output tokens/s, medians and 99th percentiles, acceptance length",
        (*heads, "TTFT ms", "p99", "acceptance"),
        rows,
    )
    return Section("Recommendation", [f"{said[:1].upper()}{said[1:]}."], (), [table])
