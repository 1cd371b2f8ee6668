"""Loads of a server as tables, and as a plot of throughput and time per output token."""

from pathlib import Path
from typing import Any

from rich.table import Table

from peagle.bench.online import BUSY_CLIENT
from peagle.bench.report import check_plot
from peagle.errors import ConfigError

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
MARKERS = "os^Dv"


def tables(document: dict[str, Any]) -> list[Table]:
    """The loads, then what of it there is: acceptance by position and failures."""
    found = [_load_table(document)]
    if any(_positions(row) for row in document["results"]):
        found.append(_position_table(document))
    if any(row["failures"] for row in document["results"]):
        found.append(_failure_table(document))
    return found


def _load_table(document: dict[str, Any]) -> Table:
    rows = document["results"]
    tail = f"p{max(document['percentiles'], default=50)}"
    spreads = {"TTFT ms": "ttft", "TPOT ms": "tpot", "ITL ms": "itl", "E2E ms": "e2el"}
    table = Table(title=_title(document), caption=_caption(document))
    has_rates = any(row["request_rate"] != "inf" for row in rows)
    has_goals = document["goodput"] is not None
    names = ["conc.", *(["rate/s"] if has_rates else []), "answered", "failed", "requests/s"]
    names += [*(["good/s"] if has_goals else []), "tokens/s"]
    last = tail if tail != "p50" else "p50"
    names += [f"{name}\nmean p50 {last}" for name in spreads]
    for name in (*names, "AL", "accepted"):
        table.add_column(name, justify="right")
    for row in rows:
        cells = ["-" if row["max_concurrency"] is None else str(row["max_concurrency"])]
        cells += [str(row["request_rate"])] if has_rates else []
        cells += [f"{row['completed']} of {row['num_prompts']}", str(row["failed"])]
        cells.append(_number(row["request_throughput"], 2))
        cells += [_number(row["request_goodput"], 2)] if has_goals else []
        cells.append(_number(row["output_throughput"], 1))
        cells += [_spread(row, key, last) for key in spreads.values()]
        cells.append(_number(row.get("spec_decode_acceptance_length"), 2))
        rate = row.get("spec_decode_acceptance_rate")
        cells.append("-" if rate is None else f"{rate:.1f}%")
        table.add_row(*cells)
    return table


def _title(document: dict[str, Any]) -> str:
    asked = f"up to {document['max_tokens']} tokens, temperature {document['temperature']:g}"
    what = f"{document['label']}: " if document["label"] else ""
    return f"{what}{document['model_id']} at {document['base_url']}; {document['workload']}, {asked}"


def _caption(document: dict[str, Any]) -> str | None:
    """What a reader must know before believing the figures."""
    rows, notes = document["results"], []
    if any(row["is_interrupted"] for row in rows):
        notes.append("interrupted: the last row has what had ended by then")
    if any(not row["output_tokens_from_usage"] and row["completed"] for row in rows):
        notes.append("the server does not tell the number of tokens: pieces of the stream are counted instead")
    if (share := max((row["prefix_cache_hit_rate"] or 0.0 for row in rows), default=0.0)) >= 0.01:
        notes.append(f"up to {share:.0%} of the prompt tokens were in the server's prefix cache, which shortens TTFT")
    if (busy := max((row["client_busy"] for row in rows), default=0.0)) > BUSY_CLIENT:
        notes.append(f"this client used up to {busy:.0%} of a core: it may be slower than the server")
    return "\n".join(notes) or None


def _positions(row: dict[str, Any]) -> list[float]:
    return row.get("spec_decode_per_position_acceptance_rates") or []


def _load_name(row: dict[str, Any]) -> str:
    words = [] if row["max_concurrency"] is None else [f"concurrency {row['max_concurrency']}"]
    words += [] if row["request_rate"] == "inf" else [f"{row['request_rate']:g} requests/s"]
    return ", ".join(words) or "all at once"


def _position_table(document: dict[str, Any]) -> Table:
    table = Table(title="accepted, by position in the draft (share of all drafts)")
    table.add_column("load")
    rows = [row for row in document["results"] if _positions(row)]
    width = max(len(_positions(row)) for row in rows)
    for position in range(width):
        table.add_column(str(position + 1), justify="right")
    for row in rows:
        table.add_row(_load_name(row), *(f"{rate:.3f}" for rate in _positions(row)))
    return table


def _failure_table(document: dict[str, Any]) -> Table:
    table = Table(title="failed requests")
    for name in ("load", "requests", "reason"):
        table.add_column(name, justify="right" if name == "requests" else "left")
    for row in document["results"]:
        for reason, count in row["failures"].items():
            table.add_row(_load_name(row), str(count), reason)
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _spread(row: dict[str, Any], name: str, last: str) -> str:
    keys = ("mean", "median", "median" if last == "p50" else last)
    values = [row[f"{key}_{name}_ms"] for key in keys]
    return "-" if values[0] is None else " ".join(_number(value, 1) for value in values)


def plot(document: dict[str, Any], path: Path) -> None:
    """Draw output tokens/s and time per output token (median, and a band to the highest percentile).

    Against concurrency, with a curve for each request rate; against the request rate where concurrency has no limit.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    rows = [row for row in document["results"] if row["output_throughput"]]
    if not rows:
        raise ConfigError(f"--plot {path}: no request was answered, so there is nothing to draw")
    by_rate = all(row["max_concurrency"] is None for row in rows)
    x_key, curve_key = ("request_rate", "max_concurrency") if by_rate else ("max_concurrency", "request_rate")
    curves: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        curves.setdefault(row[curve_key], []).append(row)
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    speed, wait = figure.subplots(1, 2)
    tail = f"p{max(document['percentiles'], default=50)}"
    for number, (value, points) in enumerate(curves.items()):
        style = {"color": COLORS[number % len(COLORS)], "marker": MARKERS[number % len(MARKERS)], "linewidth": 1.8}
        x = [_place(point[x_key]) for point in points]
        label = None if len(curves) == 1 else "as fast as answered" if value == "inf" else f"{value:g} requests/s"
        speed.plot(x, [point["output_throughput"] for point in points], label=label, **style)
        if len(curves) == 1:
            _label_acceptance(speed, x, points)
        timed = [(place, point) for place, point in zip(x, points, strict=True) if point["median_tpot_ms"] is not None]
        places = [place for place, _ in timed]
        median = [point["median_tpot_ms"] for _, point in timed]
        wait.plot(places, median, label=label or "median", **style)
        if tail != "p50":
            worst = [point[f"{tail}_tpot_ms"] for _, point in timed]
            name = tail if len(curves) == 1 else None
            wait.fill_between(places, median, worst, color=style["color"], alpha=0.15, linewidth=0, label=name)
    _finish(speed, "output tokens/s", rows, x_key)
    _finish(wait, "time per output token, ms", rows, x_key)
    figure.suptitle(_title(document), fontsize=9)
    figure.savefig(path, dpi=150)


def _place(value: Any) -> float:
    return 0.0 if value in (None, "inf") else float(value)


def _label_acceptance(axes: Any, x: list[float], points: list[dict[str, Any]]) -> None:
    for place, point in zip(x, points, strict=True):
        length = point.get("spec_decode_acceptance_length")
        if length is not None:
            axes.annotate(
                f"AL {length:.2f}",
                (place, point["output_throughput"]),
                xytext=(0, 9),
                textcoords="offset points",
                fontsize=7,
                color="#555555",
                ha="center",
                bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
            )


def _finish(axes: Any, y_label: str, rows: list[dict[str, Any]], x_key: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    places = sorted({_place(row[x_key]) for row in rows if _place(row[x_key]) > 0})
    if places:
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, labels=[f"{place:g}" for place in places])
        axes.xaxis.set_minor_locator(NullLocator())
        if len(places) > 1:
            axes.set_xlim(places[0] / 1.2, places[-1] * 1.2)
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_xlabel("concurrent requests" if x_key == "max_concurrency" else "requests/s offered")
    axes.set_ylabel(y_label)
    axes.grid(True, color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False)
