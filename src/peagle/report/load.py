"""The parts of a report that come from a document of `peagle bench serve`."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from peagle.bench.online_report import category_cells, percent
from peagle.bench.report import number
from peagle.report.charts import Points, histogram
from peagle.report.parts import Chart, Section, Table
from peagle.report.sweep import acceptance_section, chart, cost_section, per_user

SPREADS = {"ttft": "time to first token", "tpot": "time per output token", "e2el": "whole answer"}
FIGURES = ("mean", "median", "p90", "p95", "p99")
Row = Mapping[str, Any]


def load_sections(document: Mapping[str, Any]) -> list[Section]:
    rows = [row for row in document["results"] if row["output_throughput"]]
    sections = [_speed(rows), _latency(rows), _acceptance(rows)]
    if document.get("cost"):
        sections.append(cost_section(document["cost"]))
    return [section for section in sections if section.charts or section.tables]


def _name(row: Row) -> str:
    places = "no limit" if row["max_concurrency"] is None else f"concurrency {row['max_concurrency']}"
    return places if row["request_rate"] == "inf" else f"{row['request_rate']:g} requests/s, {places}"


def _axis(rows: Sequence[Row]) -> tuple[str, str]:
    if all(row["max_concurrency"] is not None for row in rows):
        return "max_concurrency", "concurrent requests"
    return "request_rate", "requests/s sent"


def _points(rows: Sequence[Row], key: str, value: str) -> Points:
    return [(float(row[key]), row[value]) for row in rows if row[key] not in (None, "inf") and row[value]]


def _speed(rows: Sequence[Row]) -> Section:
    key, axis = _axis(rows)
    users = [(per_user(row["median_tpot_ms"]), row["output_throughput"]) for row in rows if row["median_tpot_ms"]]
    known = [(speed, total) for speed, total in users if speed]
    by_user = {"server": known} if known else {}
    points = _points(rows, key, "output_throughput")
    charts = [
        *chart("Throughput", {"server": points} if points else {}, axis, "output tokens/s"),
        *chart("Throughput against speed per user", by_user, "tokens/s per user", "output tokens/s", "values"),
    ]
    heads = ["load", "completed", "failed", "requests/s", "output tokens/s", "tokens/s per user", "acceptance length"]
    has_goals = any(row.get("request_goodput") is not None for row in rows)
    cells = [
        (
            _name(row),
            f"{row['completed']} of {row['num_prompts']}",
            number(row["failed"]),
            number(row["request_throughput"], 2),
            number(row["output_throughput"], 1),
            number(per_user(row["median_tpot_ms"]), 1),
            number(row.get("spec_decode_acceptance_length"), 2),
            *([number(row["request_goodput"], 2), percent(row.get("share_within_goals"))] if has_goals else []),
        )
        for row in rows
    ]
    heads += ["requests/s within the goals", "share within the goals"] if has_goals else []
    return Section("Throughput of the server", (), charts, [Table("Every measured load", heads, cells)])


def _latency(rows: Sequence[Row]) -> Section:
    key, axis = _axis(rows)
    charts: list[Chart] = []
    for name, title in SPREADS.items():
        of = {label: _points(rows, key, f"{label}_{name}_ms") for label in ("median", "p95", "p99")}
        charts += chart(title.capitalize(), {label: each for label, each in of.items() if each}, axis, "ms")
    for row in rows:
        waits = [1e3 * seconds for seconds in row.get("ttfts") or () if seconds]
        if waits:
            shape = f"{len(waits)} requests between {min(waits):.1f} and {max(waits):.1f} ms"
            title = f"Time to first token, {_name(row)}"
            charts.append(Chart(title, f"Histogram: {shape}.", partial(histogram, values=waits, x_label="ms")))
    tables = [
        Table(
            f"{title.capitalize()}, ms",
            ("load", *FIGURES),
            [(_name(row), *(number(row.get(f"{figure}_{name}_ms"), 2) for figure in FIGURES)) for row in rows],
        )
        for name, title in SPREADS.items()
    ]
    return Section("Latency at the client", (), charts, tables)


def _acceptance(rows: Sequence[Row]) -> Section:
    found = {_name(row): row.get("spec_decode_per_position_acceptance_rates") or [] for row in rows}
    shown = [(_name(row), *each) for row in rows for each in category_cells(row) if len(row["by_category"]) > 1]
    heads = ("load", "category", "requests", "tokens/s of one request", "TTFT ms", "time per token ms")
    more = [Table("By category, medians", (*heads, "acceptance length"), shown, num_left=2)] if shown else []
    lengths = {name: own["acceptance_length"] for name, own in (rows[0].get("by_category") or {}).items()}
    return acceptance_section({name: rates for name, rates in found.items() if rates}, more, lengths)


def load_summary(document: Mapping[str, Any]) -> list[str]:
    """Three sentences: how much, how soon, and with what acceptance."""
    rows = [row for row in document["results"] if row["output_throughput"]]
    top = max(rows, key=lambda row: row["output_throughput"])
    said = [
        f"{document['model_id']} at {document['base_url']} emits up to {top['output_throughput']:,.0f} output tokens/s "
        f"({_name(top)})."
    ]
    low = rows[0]
    if low["median_ttft_ms"] is not None and low["median_tpot_ms"] is not None:
        said.append(
            f"At {_name(low)} the first token takes {low['median_ttft_ms']:,.1f} ms and each further one "
            f"{low['median_tpot_ms']:.2f} ms, in the median."
        )
    length, failed = low.get("spec_decode_acceptance_length"), sum(row["failed"] for row in rows)
    drafts = "The server reports no drafts" if length is None else f"A step emits {length:.2f} tokens on average"
    return [*said, f"{drafts}; {failed} of {sum(row['num_prompts'] for row in rows)} requests failed."]
