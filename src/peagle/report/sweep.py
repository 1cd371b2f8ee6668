"""The parts of a report that come from a document of `peagle bench`."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from peagle.bench.cells import PLAIN
from peagle.bench.plot import hardware_of
from peagle.bench.report import category_rows, incomplete, number
from peagle.cost import cost_lines, dollars
from peagle.report.charts import Points, XAxis, bars, lines, spreads
from peagle.report.parts import Chart, Section, Table
from peagle.report.tuned import tuned_section

MAX_CURVES = 6
"""More curves than this cannot be told apart: of each method only its best number of draft tokens is drawn."""
MAX_BARS = 12
USERS = "concurrent requests"
Document = Mapping[str, Any]
Cell = Mapping[str, Any]


def measured(document: Document) -> list[Cell]:
    return [cell for cell in document["cells"] if cell["output_tokens_per_second"]]


def drawn(cells: Sequence[Cell]) -> list[str]:
    """The labels to draw."""
    labels = list(dict.fromkeys(cell["label"] for cell in cells))
    if len(labels) <= MAX_CURVES:
        return labels
    best: dict[str, Cell] = {}
    for cell in cells:
        if (speed := cell["output_tokens_per_second"]) and speed > best.get(cell["method"], {}).get(
            "output_tokens_per_second", 0
        ):
            best[cell["method"]] = cell
    return [cell["label"] for cell in best.values()][:MAX_CURVES]


def curves(cells: Sequence[Cell], x: Any, y: Any) -> dict[str, Points]:
    """Points by label, where both coordinates are known."""
    found: dict[str, Points] = {}
    for label in drawn(cells):
        own = [cell for cell in cells if cell["label"] == label]
        if points := [(x(cell), y(cell)) for cell in own if x(cell) and y(cell)]:
            found[label] = points
    return found


def chart(title: str, of: Mapping[str, Points], x: str, y: str, x_axis: XAxis = "doubling") -> list[Chart]:
    """A chart with its numbers in words; none without points."""
    if not of:
        return []
    words = "; ".join(f"{name}: " + ", ".join(f"{b:.4g} at {a:.4g}" for a, b in each) for name, each in of.items())
    return [Chart(title, f"{y} by {x}. {words}.", partial(lines, curves=of, x_label=x, y_label=y, x_axis=x_axis))]


def _concurrency(cell: Cell) -> float:
    return float(cell["concurrency"])


def _tpot(cell: Cell, which: str = "p50") -> float | None:
    return (cell["time_per_output_token_ms"] or {}).get(which)


def per_user(milliseconds: float | None) -> float | None:
    return 1e3 / milliseconds if milliseconds else None


def sweep_sections(document: Document) -> list[Section]:
    cells = measured(document)
    tuned = [tuned_section(document)] if document.get("tuned") else []
    sections = [*tuned, _speed(document, cells), _latency(cells), _acceptance(cells), _step(cells)]
    if document.get("cost"):
        sections.append(cost_section(document["cost"]))
    return [section for section in sections if section.charts or section.tables]


def _speed(document: Document, cells: Sequence[Cell]) -> Section:
    drafted = [cell for cell in cells if cell["method"] != PLAIN]
    speedups = curves([cell for cell in drafted if cell["speedup"]], _concurrency, lambda cell: cell["speedup"])
    by_user = curves(cells, lambda cell: per_user(_tpot(cell)), lambda cell: cell["output_tokens_per_second"])
    charts = [
        *chart("Throughput", curves(cells, _concurrency, _throughput), USERS, "output tokens/s"),
        *chart("Speedup over plain decoding", speedups, USERS, "times plain decoding"),
        *chart("Throughput against speed per user", by_user, "tokens/s per user", "output tokens/s", "values"),
    ]
    rows = [
        (
            cell["label"],
            number(cell["concurrency"]),
            number(cell["num_requests"]),
            number(cell["output_tokens_per_second"], 1),
            number(cell["speedup"], 2),
            number(per_user(_tpot(cell)), 1),
            number(cell["acceptance_length"], 2),
            _differing(cell),
        )
        for cell in cells
    ]
    heads = ["method", "concurrency", "requests", "output tokens/s", "speedup", "tokens/s per user"]
    heads += ["acceptance length", "differ"]
    verdict = None if document.get("tuned") else document.get("verdict")
    text = [each[:1].upper() + each[1:] + "." for each in (incomplete(document), verdict) if each]
    caption = "Every measured setting; differ: answers that differ from plain decoding at the lowest concurrency"
    return Section("Throughput and speedup", text, charts, [Table(caption, heads, rows)])


def _throughput(cell: Cell) -> float | None:
    return cell["output_tokens_per_second"]


def _differing(cell: Cell) -> str:
    if cell["num_compared"] is None:
        return "-"
    near = cell["num_divergences_at_near_ties"]
    return f"{cell['num_divergences']} of {cell['num_compared']}" + (f" ({near} near ties)" if near else "")


def _latency(cells: Sequence[Cell]) -> Section:
    slow = partial(_tpot, which="p95")
    charts = [
        *chart("Time to first token, median", curves(cells, _concurrency, partial(_ttft, which="p50")), USERS, "ms"),
        *chart("Time per output token, median", curves(cells, _concurrency, _tpot), USERS, "ms"),
        *chart("Time per output token, 95th percentile", curves(cells, _concurrency, slow), USERS, "ms"),
        *_spread("Time to first token", "ttft_ms", cells),
        *_spread("Time per output token", "time_per_output_token_ms", cells),
    ]
    rows = [
        (
            cell["label"],
            number(cell["concurrency"]),
            *(number(_ttft(cell, which), 1) for which in ("mean", "p50", "p95", "p99")),
            *(number(_tpot(cell, which), 2) for which in ("mean", "p50", "p95", "p99")),
        )
        for cell in cells
    ]
    figures = ("mean", "median", "p95", "p99")
    heads = ("method", "concurrency", "TTFT mean", *figures[1:], "time per token mean", *figures[1:])
    return Section("Latency", (), charts, [Table("Milliseconds, over the requests of each setting", heads, rows)])


def _spread(what: str, key: str, cells: Sequence[Cell]) -> list[Chart]:
    """How a latency is spread over the requests at the highest load; older results lack the quartiles."""
    most = max((cell["concurrency"] for cell in cells), default=0)
    here = [cell for cell in cells if cell["concurrency"] == most and cell["label"] in drawn(cells)]
    groups = {cell["label"]: cell[key] for cell in here if "p25" in (cell[key] or {})}
    return spread_chart(f"{what}, spread at concurrency {most}", groups)


def spread_chart(title: str, groups: Mapping[str, Mapping[str, float]]) -> list[Chart]:
    """A box per group from its percentiles; none without groups."""
    if not groups:
        return []
    words = "; ".join(
        f"{name}: " + ", ".join(f"{each} {found[each]:.4g}" for each in ("p5", "p25", "p50", "p75", "p99"))
        for name, found in groups.items()
    )
    draw = partial(spreads, groups=groups, x_label="ms; line: percentiles 5 to 99, bar: 25 to 75")
    return [Chart(title, f"Milliseconds. {words}.", draw)]


def _ttft(cell: Cell, which: str) -> float | None:
    return (cell["ttft_ms"] or {}).get(which)


def _acceptance(cells: Sequence[Cell]) -> Section:
    """One row per label, at its lowest concurrency: acceptance does not depend on the batch."""
    drafted = {cell["label"]: cell["per_position"] for cell in reversed(cells) if cell["per_position"]}
    by_category = category_rows(cells)
    caption = "By category, at the lowest concurrency: acceptance length, tokens/s of one request, its speedup"
    more = [] if by_category is None else [Table(caption, *by_category)]
    by_length = {cell["label"]: cell.get("by_length") for cell in reversed(cells)}
    more += length_tables("drafts of", dict(reversed(by_length.items())))
    best = max(cells, key=lambda cell: cell["acceptance_length"] or 0.0, default={})
    lengths = {name: own["acceptance_length"] for name, own in (best.get("by_category") or {}).items()}
    return acceptance_section(dict(reversed(drafted.items())), more, lengths)


def length_tables(what: str, by_length: Mapping[str, Mapping[str, Any] | None]) -> list[Table]:
    """Acceptance length by tokens of the prompt, the answer so far, and both; older results do not have it."""
    tables = []
    for name in ("prompt", "answer", "text"):
        found = {label: own[name] for label, own in by_length.items() if own and own.get(name)}
        spans = sorted({span for own in found.values() for span in own}, key=lambda span: int(span.partition("-")[0]))
        rows = [
            (label, *(f"{own[span]['acceptance_length']:.2f}" if span in own else "-" for span in spans))
            for label, own in found.items()
        ]
        tables.append(Table(f"Acceptance length by tokens of the {name}", (what, *spans), rows))
    return [table for table in tables if table.rows]


def acceptance_section(
    per_position: Mapping[str, Sequence[float]],
    more: Sequence[Table] = (),
    by_category: Mapping[str, float | None] | None = None,
) -> Section:
    """Acceptance by position of each label, and the acceptance length by category."""
    shown = list(per_position)[:MAX_CURVES]
    of: dict[str, Points] = {
        label: [(float(place), rate) for place, rate in enumerate(per_position[label], start=1) if rate > 0]
        for label in shown
    }
    depth = max(map(len, per_position.values()), default=0)
    rows = [(label, *(f"{rate:.3f}" for rate in rates)) for label, rates in per_position.items()]
    rows = [(*row, *([""] * (depth + 1 - len(row)))) for row in rows]
    caption = "Share of drafts whose token at this position was accepted"
    tables = [Table(caption, ("drafts of", *map(str, range(1, depth + 1))), rows)] if rows else []
    known = {label: points for label, points in of.items() if points}
    charts = chart("Acceptance by position", known, "position in the draft", "share accepted", "whole")
    lengths = {name: {"acceptance length": length} for name, length in (by_category or {}).items() if length}
    if len(lengths) > 1:
        words = ", ".join(f"{name} {own['acceptance length']:.2f}" for name, own in lengths.items())
        draw = partial(bars, groups=lengths, parts=["acceptance length"], x_label="tokens per step")
        charts.append(Chart("Acceptance length by category", f"{words}.", draw))
    return Section("Acceptance", (), charts, [*tables, *more])


def _step(cells: Sequence[Cell]) -> Section:
    parts = {"verify": "verify_ms", "draft": "draft_ms", "host gap": "host_gap_ms"}
    drafted = [cell for cell in cells if cell["per_position"]]
    best = max(drafted, key=lambda cell: cell["speedup"] or 0.0, default={"label": None})
    groups = {
        f"{cell['label']}, {cell['concurrency']}": {
            name: cell["step"][key] for name, key in parts.items() if cell["step"].get(key) is not None
        }
        for cell in cells
        if cell["step"] and cell["step"].get("device_ms") is not None and cell["label"] in ("plain", best["label"])
    }
    groups = dict(list(groups.items())[:MAX_BARS])
    words = "; ".join(
        f"{name}: " + ", ".join(f"{part} {value:.3f} ms" for part, value in own.items()) for name, own in groups.items()
    )
    draw = partial(bars, groups=groups, parts=list(parts), x_label="ms")
    charts = [Chart("One step, by method and concurrency", f"{words}.", draw)] if groups else []
    names = {"wall": "step", "device": "device", "verify": "verify", "draft": "draft", "host_gap": "host gap"}
    timed = [cell for cell in cells if cell["step"]]
    known = [name for name in names if any(cell["step"].get(f"{name}_ms") is not None for cell in timed)]
    rows = [
        (
            cell["label"],
            number(cell["concurrency"]),
            *(number(cell["step"].get(f"{name}_ms"), 3) for name in known),
        )
        for cell in timed
    ]
    heads = ("method", "concurrency", *(names[name] for name in known))
    tables = [Table("Milliseconds per step at full batch, without prefill", heads, rows)] if rows else []
    return Section("Where a step's time goes", (), charts, tables)


def cost_section(cost: Mapping[str, Any]) -> Section:
    of: dict[str, Points] = {}
    for label in drawn([{**cell, "output_tokens_per_second": 1 / cell["usd_per_million"]} for cell in cost["cells"]]):
        own = [cell for cell in cost["cells"] if cell["label"] == label and cell["concurrency"]]
        if own:
            of[label] = [(float(cell["concurrency"]), cell["usd_per_million"]) for cell in own]
    rows = [
        (
            number(row["concurrency"]),
            dollars(row["plain_usd_per_million"]),
            dollars(row["drafted_usd_per_million"]),
            row["label"],
            f"{row['saving']:.1%}",
            f"{row['break_even_acceptance_length']:.2f}",
            f"{row['acceptance_length']:.2f}",
        )
        for row in cost["by_concurrency"]
    ]
    heads = ("concurrency", "plain", "with drafts", "by", "saving", "break-even acceptance length", "measured")
    price = cost["price"]
    caption = f"US dollars per million output tokens, at ${price['charged_usd_per_hour']:,.2f} per hour"
    caption += f" ({price['date']})"
    tables = [Table(caption, heads, rows)] if rows else []
    if not rows:
        each = [
            (cell["label"], number(cell["concurrency"]), dollars(cell["usd_per_million"])) for cell in cost["cells"]
        ]
        tables = [Table(caption, ("measured", "concurrency", "US dollars"), each)]
    first, *others = cost_lines(cost)
    text = [
        f"{line[:1].upper()}{line[1:]}." for line in (first, *others[len(cost["by_concurrency"] or cost["cells"]) :])
    ]
    charts = chart("Cost of a million output tokens", of, USERS, "US dollars")
    return Section("Cost", text, charts, tables)


def sweep_summary(document: Document) -> list[str]:
    """Three sentences: how fast, at what acceptance and with which answers, at what cost or latency."""
    cells, hardware = measured(document), hardware_of(document)
    best = document.get("recommended") or []
    if not best:
        top = max(cells, key=lambda cell: cell["output_tokens_per_second"])
        speed = f"{top['output_tokens_per_second']:,.0f} output tokens/s at concurrency {top['concurrency']}"
        return [f"On {hardware}, {document['target']} reaches {speed} with {_called(top['label'])}."]
    ends = [best[0], best[-1]] if len(best) > 1 else best[:1]
    speeds = " and ".join(f"{each['speedup']:.2f} times at concurrency {each['concurrency']}" for each in ends)
    speeds = speeds.replace(" times ", " times as fast as plain decoding ", 1)
    said = [f"With drafts, {document['target']} decodes {speeds}, on {hardware}."]
    cell = next(
        each for each in cells if (each["label"], each["concurrency"]) == (ends[0]["label"], ends[0]["concurrency"])
    )
    answers = ""
    if cell["num_compared"]:
        same = cell["num_compared"] - cell["num_divergences"]
        answers = f", and {same} of {cell['num_compared']} answers equal those of plain decoding"
        if near := cell["num_divergences_at_near_ties"]:
            answers += f" ({near} differ at near ties)"
    said.append(f"{cell['label']} emits {cell['acceptance_length']:.2f} tokens per step on average{answers}.")
    rows = (document.get("cost") or {}).get("by_concurrency")
    if rows:
        row, price = rows[-1], document["cost"]["price"]
        said.append(
            f"At concurrency {row['concurrency']} a million output tokens cost "
            f"{dollars(row['drafted_usd_per_million'])} instead of {dollars(row['plain_usd_per_million'])}, "
            f"at ${price['charged_usd_per_hour']:,.2f} per hour on {price['date']}."
        )
        return said
    plain = next((each for each in cells if each["method"] == PLAIN and each["concurrency"] == cell["concurrency"]), {})
    if plain and _tpot(plain) and _tpot(cell):
        change = f"from {_tpot(plain):.2f} to {_tpot(cell):.2f} ms"
        said.append(f"The median time per output token at concurrency {cell['concurrency']} goes {change}.")
    return said


def _called(label: str) -> str:
    return "plain decoding" if label == "plain" else label
