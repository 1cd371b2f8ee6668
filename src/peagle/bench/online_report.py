"""An online sweep as tables, and as a plot of throughput and TPOT."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from peagle.bench.client import Question
from peagle.bench.online import BUSY_CLIENT, PERCENTILES, Load, Result
from peagle.bench.plot import MARKERS, hardware_of, log2_axis, save, value_at, value_axis
from peagle.bench.report import make_table, number, position_table
from peagle.provenance import provenance

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
TAIL = f"p{max(PERCENTILES)}"
SPREADS = {"TTFT ms": "ttft", "TPOT ms": "tpot", "ITL ms": "itl", "E2E ms": "e2el"}


def document_of(
    results: Sequence[Result],
    question: Question,
    *,
    goals: Mapping[str, float] | None,
    is_detailed: bool,
    **facts: Any,
) -> dict[str, Any]:
    """The JSON document of a run. Every result repeats the head, as in the documents of `vllm bench serve`.

    The document of a single load has the load's fields too, so tools can read it as one.
    """
    rows = [result.report(goals=goals, is_detailed=is_detailed) for result in results]
    backend = "openai-chat" if question.is_chat else "openai"
    head = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": backend,
        "backend": backend,
        "label": None,
        "model_id": question.model or None,
        "tokenizer_id": None,
    }
    return (
        head
        | {key: getattr(question, key) for key in ("max_tokens", "temperature", "ignore_eos", "seed")}
        | {"percentiles": list(PERCENTILES), "goodput": goals, "provenance": provenance()}
        | (({"burstiness": 1.0} | rows[0]) if len(rows) == 1 else {})
        | facts
        | {"results": [head | {"burstiness": 1.0} | row for row in rows]}
    )


def tables(document: dict[str, Any]) -> list[Table]:
    """The loads; then, if present, acceptance by position and failures."""
    rows = document["results"]
    found = [_load_table(document)]
    rates = [(load_name(row), row.get("spec_decode_per_position_acceptance_rates") or []) for row in rows]
    if any(each for _, each in rates):
        found.append(position_table((name, each) for name, each in rates if each))
    if any(len(row["by_category"]) > 1 for row in rows):
        found.append(_category_table(rows))
    if failures := [(load_name(row), str(n), reason) for row in rows for reason, n in row["failures"].items()]:
        found.append(make_table("failed requests", ("load", "requests", "reason"), failures, num_right=1))
    return found


def _category_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("load", "category", "completed", "tokens/s\nper request", "TTFT ms\np50", "TPOT ms\np50")
    cells = [(load_name(row), *each) for row in rows for each in category_cells(row)]
    return make_table("by category", (*columns, "acceptance\nlength"), cells)


def category_cells(row: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Category, requests, tokens/s per request, median TTFT and TPOT, and acceptance length of one load."""
    return [
        (
            name,
            str(own["completed"]),
            number(own["tokens_per_second_per_request"], 1),
            number(own["median_ttft_ms"], 1),
            number(own["median_tpot_ms"], 2),
            number(own["acceptance_length"], 2),
        )
        for name, own in (row.get("by_category") or {}).items()
    ]


def _load_table(document: dict[str, Any]) -> Table:
    rows = document["results"]
    has_rates = any(row["request_rate"] != "inf" for row in rows)
    has_goals = document["goodput"] is not None
    columns = ["concurrency", *(["request\nrate"] if has_rates else []), "completed", "failed", "requests/s"]
    columns += [*(["goodput\nrequests/s", "within\ngoals"] if has_goals else []), "output\ntokens/s"]
    columns += [f"{name}\nmean p50 {TAIL}" for name in SPREADS]
    cells = []
    for row in rows:
        rate = row.get("spec_decode_acceptance_rate")
        cells.append(
            (
                number(row["max_concurrency"]),
                *([str(row["request_rate"])] if has_rates else []),
                f"{row['completed']} of {row['num_prompts']}",
                str(row["failed"]),
                number(row["request_throughput"], 2),
                *([number(row["request_goodput"], 2), percent(row["share_within_goals"])] if has_goals else []),
                number(row["output_throughput"], 1),
                *(_spread(row, key) for key in SPREADS.values()),
                number(row.get("spec_decode_acceptance_length"), 2),
                "-" if rate is None else f"{rate:.1f}%",
            )
        )
    columns += ["acceptance\nlength", "acceptance\nrate"]
    return make_table(_title(document), columns, cells, caption=_caption(document))


def _title(document: dict[str, Any]) -> str:
    asked = f"up to {document['max_tokens']} tokens, temperature {document['temperature']:g}"
    return f"{document['model_id']} at {document['base_url']}; {document['workload']}, {asked}"


def _caption(document: dict[str, Any]) -> str | None:
    """Warnings about the numbers."""
    rows, notes = document["results"], []
    if any(row["is_interrupted"] for row in rows):
        notes.append("interrupted: the last row has only the requests that finished")
    if any(not row["output_tokens_from_usage"] and row["completed"] for row in rows):
        notes.append("the server does not report token usage: stream chunks are counted instead")
    if (share := max((row["prefix_cache_hit_rate"] or 0.0 for row in rows), default=0.0)) >= 0.01:
        notes.append(f"up to {share:.0%} of prompt tokens hit the server's prefix cache, which shortens TTFT")
    if (busy := max((row["client_busy"] for row in rows), default=0.0)) > BUSY_CLIENT:
        notes.append(f"this client used up to {busy:.0%} of a core: it may be the bottleneck")
    return "\n".join(notes) or None


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def load_name(row: Mapping[str, Any]) -> str:
    return Load(row["max_concurrency"], float(row["request_rate"])).label


def _spread(row: dict[str, Any], name: str) -> str:
    values = [row[f"{key}_{name}_ms"] for key in ("mean", "median", TAIL)]
    return "-" if values[0] is None else " ".join(number(value, 1) for value in values)


def plot(document: dict[str, Any], path: Path) -> None:
    """Plot output tokens/s and TPOT (median, with a band up to the highest percentile).

    Against concurrency, one curve per request rate; against the request rate if concurrency is unlimited.
    """
    from matplotlib.figure import Figure

    rows = [row for row in document["results"] if row["output_throughput"]]
    by_rate = all(row["max_concurrency"] is None for row in rows)
    x_key, curve_key = ("request_rate", "max_concurrency") if by_rate else ("max_concurrency", "request_rate")
    curves = list(dict.fromkeys(row[curve_key] for row in rows))
    figure = Figure(figsize=(13, 5.5), layout="constrained")
    speed, wait = figure.subplots(1, 2)
    labels = []
    for index, value in enumerate(curves):
        points = [row for row in rows if row[curve_key] == value]
        color = COLORS[index % len(COLORS)]
        style = {"color": color, "marker": MARKERS[index % len(MARKERS)], "linewidth": 1.8}
        is_only = len(curves) == 1
        label = None if is_only else "no rate limit" if value == "inf" else f"{value:g} requests/s"
        x = [_place(point[x_key]) for point in points]
        speed.plot(x, [point["output_throughput"] for point in points], label=label, **style)
        for place, point in zip(x, points, strict=True):
            labels.append(value_at(speed, place, point["output_throughput"], color))
            if is_only and (length := point.get("spec_decode_acceptance_length")) is not None:
                labels[-1].set_text(f"{labels[-1].get_text()}\nacceptance length {length:.2f}")
        timed = [point for point in points if point["median_tpot_ms"] is not None]
        places = [_place(point[x_key]) for point in timed]
        median = [point["median_tpot_ms"] for point in timed]
        worst = [point[f"{TAIL}_tpot_ms"] for point in timed]
        wait.plot(places, median, label=label or "median", **style)
        labels += [value_at(wait, *point, color) for point in zip(places, median, strict=True)]
        band = {"color": color, "alpha": 0.15, "linewidth": 0, "label": TAIL if is_only else None}
        wait.fill_between(places, median, worst, **band)
    _finish(speed, "output tokens/s", rows, x_key, ("output_throughput",))
    _finish(wait, "TPOT, ms", rows, x_key, ("median_tpot_ms", f"{TAIL}_tpot_ms"))
    figure.suptitle(f"{_title(document)}\nmeasured by a client on {hardware_of(document)}", fontsize=9)
    save(figure, labels, path)


def _place(value: Any) -> float:
    """Where a load stands on the x axis; the only load without any limit stands at 1."""
    return 1.0 if value in (None, "inf") else float(value)


def _finish(axes: Any, y_label: str, rows: list[dict[str, Any]], x_key: str, y_keys: tuple[str, ...]) -> None:
    places = sorted({_place(row[x_key]) for row in rows})
    log2_axis(axes, places, "concurrent requests" if x_key == "max_concurrency" else "requests/s sent")
    if all(row[x_key] in (None, "inf") for row in rows):
        axes.set_xticks(places, labels=["no limit"])
    value_axis(axes, [row[key] for row in rows for key in y_keys if row[key]], y_label)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False)
