"""Charts as inline SVG whose colors follow the page: `bench/plot.py` draws, this sets them into a document."""

import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Literal

from peagle.bench.plot import MARKERS, decimals, limits, log2_axis, save, ticks, value_at, value_axis
from peagle.report.parts import Chart

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (4.7, 3.5)
"""In inches: about as wide as a phone, so that the text is readable there; a desktop shows two side by side."""
# Series in order. The page's style sheet gives each name a light and a dark color.
INK, PAPER, GRID = "#000000", "#ffffff", "#e4e4e4"
SERIES = ("#101010", "#0a66b0", "#b04a00", "#0b7a53", "#8a3d8f", "#7a6100", "#a3263f", "#4f5bd5")
VARIABLES = {INK: "currentColor", PAPER: "var(--paper)", GRID: "var(--grid)"} | {
    color: f"var(--series-{index})" for index, color in enumerate(SERIES)
}
LEGEND_WIDTH = 36
"""characters of four names that stand in a line"""
Points = Sequence[tuple[float, float]]
XAxis = Literal["doubling", "whole", "values"]


def svg_of(chart: Chart, key: str) -> str:
    """The chart as an SVG element, the same for the same numbers. `key` makes its ids unique in the document."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: Any = {"svg.fonttype": "none", "svg.hashsalt": key, "font.size": 9, "legend.fontsize": 8}
    with mpl.rc_context(style):
        figure = Figure(figsize=SIZE, layout="constrained")
        figure.patch.set_visible(False)
        axes = figure.subplots()
        axes.patch.set_visible(False)
        axes.spines[["top", "right"]].set_visible(False)
        labels = chart.draw(axes)
        stream = io.BytesIO()
        save(figure, labels, stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue().decode()
    text = text[text.index("<svg") :]
    for color, variable in VARIABLES.items():
        text = text.replace(color, variable)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' id="(?:figure|axes|patch|line2d|text|legend|matplotlib|xtick|ytick|FillBetween)[^"]*"', "", text)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px var(--sans)", text)
    head = f'<svg role="img" aria-labelledby="title-{key} text-{key}"'
    names = f'<title id="title-{key}">{escape(chart.title)}</title><desc id="text-{key}">{escape(chart.description)}'
    return re.sub(r"<svg ([^>]*)>", rf"{head} \1>{_literal(names)}</desc>", text, count=1)


def _literal(text: str) -> str:
    return text.replace("\\", "\\\\")


def lines(
    axes: "Axes", curves: Mapping[str, Points], x_label: str, y_label: str, *, x_axis: XAxis = "doubling"
) -> list[Any]:
    """One curve per name. The x axis is log2, has one tick per integer, or is scaled like the y axis.

    Plain decoding has the page's own ink in every chart. Of more than two curves, only the first two show their values.
    """
    from matplotlib.ticker import NullLocator

    labels = []
    for index, (name, points) in enumerate(curves.items(), start=0 if "plain" in curves else 1):
        color = SERIES[index % len(SERIES)]
        x, y = [point[0] for point in points], [point[1] for point in points]
        marker = MARKERS[index % len(MARKERS)]
        axes.plot(x, y, label=name, color=color, marker=marker, linewidth=1.8, markersize=5)
        if len(curves) <= 2 or index <= 1:
            labels += [value_at(axes, *point, color) for point in points]
    places = sorted({point[0] for points in curves.values() for point in points})
    log2_axis(axes, places, x_label)
    if x_axis != "doubling":
        low, high, is_log = limits(places[0], places[-1]) if x_axis == "values" else (0.5, places[-1] + 0.5, False)
        named = ticks(low, high, is_log) if x_axis == "values" else places
        axes.set_xscale("log" if is_log else "linear")
        axes.set_xlim(low, high)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticks(named, labels=[f"{place:,.{decimals(named)}f}" for place in named])
    value_axis(axes, [point[1] for points in curves.values() for point in points], y_label)
    if len(curves) > 1:
        _legend(axes, 4 if len(curves) == 4 and sum(map(len, curves)) <= LEGEND_WIDTH else 3)
    return labels


def _legend(axes: "Axes", num_columns: int) -> None:
    """Above the axes, where it covers nothing."""
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        borderaxespad=0.3,
        frameon=False,
        ncols=num_columns,
        handlelength=1.5,
        columnspacing=1.2,
    )


def bars(axes: "Axes", groups: Mapping[str, Mapping[str, float]], parts: Sequence[str], x_label: str) -> list[Any]:
    """Stacked bars from left to right, one per group, with its parts."""
    start = dict.fromkeys(groups, 0.0)
    for index, part in enumerate(parts, start=1):
        lengths = {name: own.get(part, 0.0) for name, own in groups.items()}
        axes.barh(
            list(groups),
            list(lengths.values()),
            min(0.6, 0.15 * len(groups)),
            left=list(start.values()),
            color=SERIES[index],
            label=part,
        )
        start = {name: start[name] + length for name, length in lengths.items()}
    axes.invert_yaxis()
    axes.set_xlabel(x_label)
    axes.grid(True, axis="x", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    if len(parts) > 1:
        _legend(axes, len(parts))
    return []


def spreads(axes: "Axes", groups: Mapping[str, Mapping[str, float]], x_label: str) -> list[Any]:
    """One box per group: a line from the 5th to the 99th percentile, a bar over the middle half, the median marked.

    Groups that begin with the same name, up to a comma, have one color.
    """
    kinds = list(dict.fromkeys(name.partition(", ")[0] for name in groups))
    first = 0 if "plain" in kinds else 1
    for row, (name, found) in enumerate(groups.items()):
        color = SERIES[(first + kinds.index(name.partition(", ")[0])) % len(SERIES)]
        axes.plot([found["p5"], found["p99"]], [row, row], color=color, linewidth=1.4)
        axes.barh(name, found["p75"] - found["p25"], 0.45, left=found["p25"], color=color)
        axes.plot([found["p50"]] * 2, [row - 0.32, row + 0.32], color=color, linewidth=3)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.05 * max(found["p99"] for found in groups.values()))
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_xlabel(x_label)
    axes.grid(True, axis="x", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    return []
