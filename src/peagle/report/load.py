"""The parts of a report that come from a document of `peagle bench serve`, or of two that `pair.py` joined."""

from collections.abc import Mapping, Sequence
from typing import Any

from peagle.bench.online_report import category_cells, percent
from peagle.bench.report import number
from peagle.cost import dollars
from peagle.report.charts import Points
from peagle.report.pair import DRAFTED, PLAIN
from peagle.report.parts import Chart, Section, Table
from peagle.report.sweep import MAX_BARS, USERS, acceptance_section, chart, cost_section, per_user, spread_chart

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
    load = places if row["request_rate"] == "inf" else f"{row['request_rate']:g} requests/s, {places}"
    return f"{row['label']}, {load}" if row.get("label") else load


def _by_server(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The loads of each server: of one, or of the plain one and the one with drafts."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.get("label") or "server", []).append(row)
    return found


def _axis(rows: Sequence[Row]) -> tuple[str, str]:
    if all(row["max_concurrency"] is not None for row in rows):
        return "max_concurrency", USERS
    return "request_rate", "requests/s sent"


def _points(rows: Sequence[Row], key: str, value: str) -> Points:
    return [(float(row[key]), row[value]) for row in rows if row[key] not in (None, "inf") and row.get(value)]


def _curves(of: Mapping[str, Points]) -> dict[str, Points]:
    return {name: points for name, points in of.items() if points}


def _speed(rows: Sequence[Row]) -> Section:
    key, axis = _axis(rows)
    servers = _by_server(rows)
    by_user: dict[str, Points] = {
        name: [(speed, row["output_throughput"]) for row in own if (speed := per_user(row["median_tpot_ms"]))]
        for name, own in servers.items()
    }
    speedups = {DRAFTED: _points(rows, key, "speedup")}
    throughput = _curves({name: _points(own, key, "output_throughput") for name, own in servers.items()})
    charts = [
        *chart("Throughput", throughput, axis, "output tokens/s"),
        *chart("Speedup over plain decoding", _curves(speedups), axis, "times plain decoding"),
        *chart("Throughput against speed per user", _curves(by_user), "tokens/s per user", "output tokens/s", "values"),
    ]
    has_goals = any(row.get("request_goodput") is not None for row in rows)
    is_pair = len(servers) > 1
    heads = ["load", "completed", "failed", *(["speedup"] if is_pair else ["requests/s"])]
    heads += ["output tokens/s", "tokens/s per user", "acceptance length"]
    cells = [
        (
            _name(row),
            f"{row['completed']} of {row['num_prompts']}",
            number(row["failed"]),
            number(row["speedup" if is_pair else "request_throughput"], 2),
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
    servers = _by_server(rows)
    charts: list[Chart] = []
    for name, title in SPREADS.items():
        if len(servers) > 1:
            of = {server: _points(own, key, f"median_{name}_ms") for server, own in servers.items()}
            title = f"{title}, median"
        else:
            of = {figure: _points(rows, key, f"{figure}_{name}_ms") for figure in ("median", "p95", "p99")}
        charts += chart(title.capitalize(), _curves(of), axis, "ms")
    for name, title in SPREADS.items():
        charts += spread_chart(f"{title.capitalize()}, spread", _quartiles(rows, name))
    tables = [
        Table(
            f"{title.capitalize()}, ms",
            ("load", *FIGURES),
            [(_name(row), *(number(row.get(f"{figure}_{name}_ms"), 2) for figure in FIGURES)) for row in rows],
        )
        for name, title in SPREADS.items()
    ]
    return Section("Latency at the client", (), charts, tables)


def _quartiles(rows: Sequence[Row], name: str) -> dict[str, dict[str, float]]:
    """How a latency is spread over the requests of each load; older results lack the quartiles."""
    return {
        _name(row): {
            "p50": row[f"median_{name}_ms"],
            **{each: row[f"{each}_{name}_ms"] for each in ("p5", "p25", "p75", "p99")},
        }
        for row in rows[:MAX_BARS]
        if row.get(f"p25_{name}_ms") is not None
    }


def _acceptance(rows: Sequence[Row]) -> Section:
    found = {_name(row): row.get("spec_decode_per_position_acceptance_rates") or [] for row in rows}
    shown = [(_name(row), *each) for row in rows for each in category_cells(row) if len(row["by_category"]) > 1]
    heads = ("load", "category", "requests", "tokens/s of one request", "TTFT ms", "time per token ms")
    more = [Table("By category, medians", (*heads, "acceptance length"), shown, num_left=2)] if shown else []
    first = next((row for row in rows if found[_name(row)]), rows[0])
    lengths = {name: own["acceptance_length"] for name, own in (first.get("by_category") or {}).items()}
    return acceptance_section({name: rates for name, rates in found.items() if rates}, more, lengths)


def load_summary(document: Mapping[str, Any]) -> list[str]:
    """Three sentences: how much, how soon, and with what acceptance."""
    rows = [row for row in document["results"] if row["output_throughput"]]
    if compared := [row for row in rows if row.get("speedup")]:
        return _pair_summary(document, rows, compared)
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


def _pair_summary(document: Mapping[str, Any], rows: Sequence[Row], compared: Sequence[Row]) -> list[str]:
    """Three sentences on a server with drafts beside one without: how fast, how soon, at what cost or acceptance."""
    low, high = compared[0], compared[-1]
    ends = [low] if low is high else [low, high]
    speeds = " and ".join(f"{row['speedup']:.2f} times at {_load(row)}" for row in ends)
    speeds = speeds.replace(" times ", " times the tokens/s of plain decoding ", 1)
    said = [f"With drafts, {document['model_id']} at {document['base_url']} emits {speeds}."]
    plain = next(row for row in rows if row["label"] == PLAIN and _load(row) == _load(low))
    if plain["median_tpot_ms"] and low["median_tpot_ms"]:
        change = f"from {plain['median_tpot_ms']:.2f} to {low['median_tpot_ms']:.2f} ms"
        said.append(f"The median time per output token at {_load(low)} goes {change}.")
    costs = (document.get("cost") or {}).get("by_concurrency")
    if costs:
        last, price = costs[-1], document["cost"]["price"]
        spent = f"{dollars(last['drafted_usd_per_million'])} instead of {dollars(last['plain_usd_per_million'])}"
        paid = f"at ${price['charged_usd_per_hour']:,.2f} per hour on {price['date']}"
        return [*said, f"At concurrency {last['concurrency']} a million output tokens cost {spent}, {paid}."]
    length, failed = low.get("spec_decode_acceptance_length"), sum(row["failed"] for row in rows)
    emitted = "no draft was verified" if length is None else f"a step with drafts emits {length:.2f} tokens on average"
    return [*said, f"At {_load(low)} {emitted}; {failed} of {sum(row['num_prompts'] for row in rows)} requests failed."]


def _load(row: Row) -> str:
    return _name({**row, "label": None})
