"""A sweep as a document, as tables, and as a plot of throughput and speed-up against concurrency."""

import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from peagle.bench.cells import PLAIN, CellResult
from peagle.errors import ConfigError, MissingExtraError

PLOT_SUFFIXES = (".pdf", ".png", ".svg")
# Colors that remain apart for the color-blind: plain black, the methods from one palette, anchors in greys.
METHOD_COLORS = {
    "p-eagle": ("#0072b2", "#56b4e9", "#00508a", "#8fd0f5", "#003a66"),
    "eagle3": ("#d55e00", "#e69f00", "#a04400", "#f0c266", "#7a3600"),
}
ANCHOR_COLORS = ("#6f6f6f", "#9a9a9a", "#bdbdbd")
MARKERS = "os^Dv"


def document_of(results: Sequence[CellResult], **facts: Any) -> dict[str, Any]:
    """The JSON document of a run: `facts` about it as they are given, then the cells with their speed-up over plain.

    The speed-up is against plain decoding at the same concurrency, and None where that was not run. Beside it stands
    how many requests plain decoding answered there: an anchor may have run only the first of them.
    """
    cells = [result.report() for result in results]
    plain = {cell["concurrency"]: cell for cell in cells if cell["method"] == PLAIN}
    for cell in cells:
        base = plain.get(cell["concurrency"], {})
        ours, theirs = cell["output_tokens_per_second"], base.get("output_tokens_per_second")
        cell["speedup"] = round(ours / theirs, 3) if ours and theirs else None
        cell["speedup_plain_requests"] = base["num_requests"] if ours and theirs else None
    return facts | {"cells": cells}


def tables(document: dict[str, Any]) -> list[Table]:
    """The sweep, then what of it there is: acceptance by position, the limit of the memory, and failures."""
    found = [_sweep_table(document)]
    if any(cell["per_position"] for cell in document["cells"]):
        found.append(_position_table(document))
    if document.get("bandwidth"):
        found.append(_bandwidth_table(document["bandwidth"]))
    if any(cell["failure"] for cell in document["cells"]):
        found.append(_failure_table(document))
    return found


def _sweep_table(document: dict[str, Any]) -> Table:
    table = Table(title=_title(document), caption=_caption(document))
    table.add_column("method", no_wrap=True)
    columns = (
        "conc.",
        "requests\n(plain's)",
        "tokens/s",
        "while\nfull",
        "x plain",
        "TTFT ms\nmean p50 p95",
        "ms/token\nmean p50 p95",
        "AL",
    )
    for name in (*columns, "step ms\nwall", "verify", "draft", "host gap", "memory\nGiB", "differ\n(near ties)"):
        table.add_column(name, justify="right")
    for cell in document["cells"]:
        step = cell["step"] or {}
        table.add_row(
            cell["label"],
            str(cell["concurrency"]),
            _requests(cell),
            "failed" if cell["failure"] else _number(cell["output_tokens_per_second"], 1),
            _number(cell["steady_tokens_per_second"], 1),
            _number(cell["speedup"], 2),
            _spread(cell["ttft_ms"], 1),
            _spread(cell["time_per_output_token_ms"], 2),
            _number(cell["acceptance_length"], 2),
            _number(step.get("wall_ms"), 3),
            _number(step.get("verify_ms"), 3),
            _number(step.get("draft_ms"), 3),
            _gap(step),
            _number(None if cell["memory_bytes"] is None else cell["memory_bytes"] / 2**30, 1),
            _differing(cell),
        )
    return table


def _title(document: dict[str, Any]) -> str:
    target = f"{document['target']}, {document['dtype']} on {document['device']}"
    return f"{document['workload']}: {document['num_prompts']} prompts, up to {document['max_tokens']} tokens; {target}"


def _caption(document: dict[str, Any]) -> str | None:
    compared = [cell["num_compared"] for cell in document["cells"] if cell["num_compared"]]
    if not compared:
        return None
    limits = {cell["near_tie"] for cell in document["cells"] if cell["near_tie"]}
    largest = max((cell["largest_gap"] or 0.0 for cell in document["cells"]), default=0.0)
    return (
        "differ: answers that part from plain decoding's at the lowest concurrency (of them at a near tie: both tokens "
        f"at most {max(limits):g} below the target's best logit, as far as rounding moves it; largest {largest:g})"
    )


def _position_table(document: dict[str, Any]) -> Table:
    """One row for each method and depth, at its lowest concurrency: acceptance does not depend on the batch."""
    table = Table(title="accepted, by position in the draft")
    table.add_column("method")
    table.add_column("conc.", justify="right")
    drafted = list({cell["label"]: cell for cell in reversed(document["cells"]) if cell["per_position"]}.values())[::-1]
    for position in range(max(len(cell["per_position"]) for cell in drafted)):
        table.add_column(str(position + 1), justify="right")
    for cell in drafted:
        table.add_row(cell["label"], str(cell["concurrency"]), *(f"{share:.3f}" for share in cell["per_position"]))
    return table


def _bandwidth_table(bandwidth: dict[str, Any]) -> Table:
    speed = f"{bandwidth['bytes_per_second'] / 1e9:.0f} GB/s measured"
    table = Table(title=f"the limit of the memory: {speed}, {bandwidth['num_parameters'] / 1e9:.2f} billion parameters")
    for name in ("conc.", "weights GB", "limit ms", "step ms", "of the limit"):
        table.add_column(name, justify="right")
    for row in bandwidth["steps"]:
        fraction = row["fraction_of_limit"]
        table.add_row(
            str(row["concurrency"]),
            f"{row['weight_bytes'] / 1e9:.2f}",
            _number(row["limit_ms"], 3),
            _number(row["step_ms"], 3),
            "-" if fraction is None else f"{fraction:.1%}",
        )
    return table


def _failure_table(document: dict[str, Any]) -> Table:
    table = Table(title="could not be run")
    for name in ("method", "conc.", "reason"):
        table.add_column(name)
    for cell in document["cells"]:
        if cell["failure"]:
            table.add_row(cell["label"], str(cell["concurrency"]), cell["failure"])
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _spread(spread: dict[str, float] | None, digits: int) -> str:
    return "-" if spread is None else " ".join(_number(spread[name], digits) for name in ("mean", "p50", "p95"))


def _requests(cell: dict[str, Any]) -> str:
    """How many were answered, and of how many where plain decoding, which the speed-up is against, had others."""
    ours, plain = cell["num_requests"], cell["speedup_plain_requests"]
    return str(ours) if plain in (None, ours) else f"{ours} ({plain})"


def _gap(step: dict[str, float | None]) -> str:
    gap, share = step.get("host_gap_ms"), step.get("host_gap_share")
    return "-" if gap is None or share is None else f"{gap:.3f} ({share:.1%})"


def _differing(cell: dict[str, Any]) -> str:
    if cell["num_compared"] is None:
        return "-"
    return f"{cell['num_divergences']} ({cell['num_divergences_at_near_ties']}) of {cell['num_compared']}"


def print_report(document: dict[str, Any], as_json: bool, tables_of: Callable[..., list[Table]], width: int) -> None:
    """To stdout. Tables for a file or a pipe may have `width` columns, instead of a terminal's usual 80."""
    if as_json:
        print(json.dumps(document))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, width))
    console.print(*tables_of(document), sep="\n")


def check_plot(path: Path) -> None:
    """Refuse, before anything is measured, a plot that could not be written."""
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise ConfigError(f"--plot {path}: the name must end in {', '.join(PLOT_SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no directory {path.parent}", hint="make it first")
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("matplotlib", "bench", "--plot")


def plot(document: dict[str, Any], path: Path) -> None:
    """Draw throughput against concurrency, a line for each method and number of draft tokens, anchors dashed.

    Where plain decoding was measured too, a second panel has the speed-up over it: below its line drafts do not pay.
    """
    check_plot(path)
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    measured = [cell for cell in document["cells"] if cell["output_tokens_per_second"]]
    if not measured:
        raise ConfigError(f"--plot {path}: no cell was measured, so there is nothing to draw")
    compared = [cell for cell in measured if cell["speedup"]]
    panels = 2 if any(cell["method"] != PLAIN for cell in compared) else 1
    figure = Figure(figsize=(5.5 * panels + 2, 5.5), layout="constrained")
    throughput, *others = figure.subplots(1, panels, squeeze=False)[0]
    _draw(throughput, measured, "output_tokens_per_second")
    throughput.set_yscale("log")
    thousands = FuncFormatter(lambda value, _: f"{value:,.0f}")
    throughput.yaxis.set_major_formatter(thousands)
    throughput.yaxis.set_minor_formatter(
        FuncFormatter(lambda value, _: thousands(value) if _leads(value, (2, 5)) else "")
    )
    throughput.set_ylabel("output tokens/s")
    for speedup in others:
        _draw(speedup, compared, "speedup")
        speedup.set_ylim(bottom=0)
        speedup.set_ylabel("times plain decoding")
    figure.suptitle(_title(document), fontsize=9)
    figure.legend(*throughput.get_legend_handles_labels(), fontsize=8, frameon=False, loc="outside right center")
    figure.savefig(path, dpi=150)


def _draw(axes: Any, cells: Sequence[dict[str, Any]], quantity: str) -> None:
    from matplotlib.ticker import NullLocator

    curves: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        curves.setdefault(cell["label"], []).append(cell)
    counts: dict[str, int] = {}
    for label, points in curves.items():
        style = _style(points[0]["method"], counts)
        places = [cell["concurrency"] for cell in points]
        axes.plot(places, [cell[quantity] for cell in points], label=label, linewidth=1.8, markersize=5.5, **style)
    concurrency = sorted({cell["concurrency"] for cell in cells})
    axes.set_xscale("log", base=2)
    axes.set_xticks(concurrency, labels=[str(places) for places in concurrency])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("concurrent requests")
    axes.grid(True, which="both", color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)


def _style(method: str, counts: dict[str, int]) -> dict[str, Any]:
    """Color, line and marker of the next curve of a method; `counts` remembers how many there were."""
    family = method if method in METHOD_COLORS or method == PLAIN else "anchor"
    number = counts.setdefault(family, 0)
    counts[family] += 1
    marker = MARKERS[number % len(MARKERS)]
    if family == PLAIN:
        return {"color": "black", "marker": "o", "linestyle": "-"}
    if family == "anchor":
        return {"color": ANCHOR_COLORS[number % len(ANCHOR_COLORS)], "marker": marker, "linestyle": "--"}
    return {"color": METHOD_COLORS[method][number % len(METHOD_COLORS[method])], "marker": marker, "linestyle": "-"}


def _leads(value: float, digits: tuple[int, ...]) -> bool:
    """Whether a tick's first digit is one of those that are written out."""
    return int(f"{value:.0e}"[0]) in digits
