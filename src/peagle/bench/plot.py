"""Plots of sweeps: axes that can be read at any range, and values at the points that do not overlap.

The plot of an offline sweep shows throughput and speedup against concurrency.
"""

import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from peagle.bench.cells import PLAIN
from peagle.bench.report import check_output, title
from peagle.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLOT_SUFFIXES = (".pdf", ".png", ".svg")
# Color-blind safe: plain decoding in black, each method in one hue, anchors in gray.
COLORS = {
    PLAIN: ("black",),
    "p-eagle": ("#0072b2", "#56b4e9", "#00508a", "#8fd0f5", "#003a66"),
    "eagle3": ("#d55e00", "#e69f00", "#a04400", "#f0c266", "#7a3600"),
    "anchor": ("#6f6f6f", "#9a9a9a", "#bdbdbd"),
}
MARKERS = "os^Dv"
LOG_FROM = 8.0
"""A value axis is logarithmic if its largest value is this many times its smallest."""
MAX_TICKS = 8
ROOM = 1.15
"""A linear axis ends at the largest value times this: the value stands above its point."""
LABEL_POINTS = 7
# Where a value may stand, in points from its marker; the first free place is taken. Far ones get a line to the marker.
PLACES = tuple(
    (round(far * math.cos(turn * math.pi / 8)), round(far * math.sin(turn * math.pi / 8)))
    for far in (9, 14, 20, 28, 38, 50, 64)
    for turn in (4, 12, 2, 6, 14, 10, 3, 5, 13, 11, 1, 7, 15, 9)
)
FAR = 18


def check_plot(path: Path) -> None:
    check_output("--plot", path, PLOT_SUFFIXES)
    check_plot_library("--plot")


def check_plot_library(flag: str) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("matplotlib", "bench", flag)


def plot(document: dict[str, Any], path: Path) -> None:
    """Plot throughput against concurrency, one line per method and number of draft tokens, anchors dashed.

    If plain decoding was measured, a second panel shows the speedup over it.
    """
    save(*draw(document), path)


def draw(document: dict[str, Any]) -> tuple["Figure", list[Any]]:
    """The figure, and the values at its points."""
    from matplotlib.figure import Figure

    measured = [cell for cell in document["cells"] if cell["output_tokens_per_second"]]
    compared = [cell for cell in measured if cell["speedup"]]
    panels = 2 if any(cell["method"] != PLAIN for cell in compared) else 1
    figure = Figure(figsize=(6.5 * panels + 2, 6), layout="constrained")
    throughput, *others = figure.subplots(1, panels, squeeze=False)[0]
    labels = _draw(throughput, measured, "output_tokens_per_second", "output tokens/s")
    for speedup in others:
        speedup.axhline(1.0, color="black", linewidth=1.2, linestyle=":")
        drafted = [cell for cell in compared if cell["method"] != PLAIN]
        labels += _draw(speedup, drafted, "speedup", "speedup over plain decoding (dotted: 1.0x)", near=(1.0,))
    figure.suptitle(_heading(document), fontsize=9)
    figure.legend(*throughput.get_legend_handles_labels(), fontsize=8, frameon=False, loc="outside right center")
    return figure, labels


def _heading(document: dict[str, Any]) -> str:
    """What was measured, with which drafter, on which hardware."""
    names = document.get("drafters") or {}
    drafters = "; ".join(f"{method} drafter {name}" for method, name in names.items()) or "no drafter"
    return f"{title(document)}\n{drafters}; {hardware_of(document)}"


def hardware_of(document: Mapping[str, Any]) -> str:
    hardware = document["provenance"]["hardware"]
    return hardware["accelerator"] or f"{hardware['processor']}, {hardware['num_cores']} cores"


def _draw(
    axes: "Axes", cells: Sequence[dict[str, Any]], quantity: str, name: str, near: tuple[float, ...] = ()
) -> list[Any]:
    """Draw one curve per label; returns the values at their points, for `save`."""
    counts: dict[str, int] = {}
    labels = []
    for label in dict.fromkeys(cell["label"] for cell in cells):
        points = [cell for cell in cells if cell["label"] == label]
        style = _style(points[0]["method"], counts)
        x, y = [cell["concurrency"] for cell in points], [cell[quantity] for cell in points]
        axes.plot(x, y, label=label, linewidth=1.8, markersize=5.5, **style)
        labels += [value_at(axes, *point, style["color"]) for point in zip(x, y, strict=True)]
    log2_axis(axes, sorted({cell["concurrency"] for cell in cells}), "concurrent requests")
    value_axis(axes, [*(cell[quantity] for cell in cells), *near], name)
    return labels


def _style(method: str, counts: dict[str, int]) -> dict[str, Any]:
    """Color, line and marker of the next curve of a method; `counts` holds the number of curves so far."""
    family = method if method in COLORS else "anchor"
    index = counts[family] = counts.get(family, -1) + 1
    color, marker = COLORS[family][index % len(COLORS[family])], MARKERS[index % len(MARKERS)]
    return {"color": color, "marker": marker, "linestyle": "--" if family == "anchor" else "-"}


def log2_axis(axes: "Axes", places: Sequence[float], label: str) -> None:
    """A logarithmic x axis with a tick at every place, unless they are too close for their names."""
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    width = math.log2(places[-1] / places[0])
    if width:
        axes.set_xlim(places[0] * 2 ** (-0.08 * width), places[-1] * 2 ** (0.08 * width))
    named = list(places[:1])
    for place in places[1:]:
        if math.log2(place / named[-1]) >= width / 14:
            named.append(place)
    axes.set_xticks(named, labels=[f"{place:,.12g}" for place in named])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(label)
    axes.grid(True, color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)


def value_axis(axes: "Axes", values: Iterable[float], label: str) -> None:
    """A y axis for positive values with ticks that have a name: logarithmic if their range asks for it, else from 0."""
    from matplotlib.ticker import NullLocator

    values = list(values) or [1.0]
    low, high, is_log = limits(min(values), max(values))
    if not is_log:
        low, high = 0.0, ROOM * max(values)
    axes.set_yscale("log" if is_log else "linear")
    axes.set_ylim(low, high)
    places = ticks(low, high, is_log)
    digits = decimals(places)
    axes.set_yticks(places, labels=[f"{place:,.{0 if place >= 1 and is_log else digits}f}" for place in places])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel(label)


def limits(smallest: float, largest: float) -> tuple[float, float, bool]:
    """Lower and upper end of an axis with room for the values at its points, and whether it is logarithmic."""
    if largest / smallest >= LOG_FROM:
        room = (largest / smallest) ** 0.1
        return smallest / room, largest * room, True
    room = 0.15 * (largest - smallest) or 0.1 * largest
    return max(0.0, smallest - room), largest + room, False


def ticks(low: float, high: float, is_log: bool) -> list[float]:
    """Round places between the ends.

    >>> ticks(0.87, 1.13, False)
    [0.9, 0.95, 1.0, 1.05, 1.1]
    >>> ticks(0.25, 6.75, False)
    [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    >>> ticks(1, 400_000, True)
    [1.0, 10.0, 100.0, 1000.0, 10000.0, 100000.0]
    >>> ticks(4, 90, True)
    [5.0, 10.0, 20.0, 50.0]
    """
    if is_log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for steps in ((1, 2, 5), (1, 3), (1,)):
            places = [float(f"{step}e{power}") for power in powers for step in steps]
            places = [place for place in places if low <= place <= high]
            if len(places) <= MAX_TICKS:
                return places
        return places[:: math.ceil(len(places) / MAX_TICKS)]
    exponent = math.floor(math.log10((high - low) / MAX_TICKS))
    candidates = (factor * 10.0**power for power in (exponent, exponent + 1) for factor in (1, 2, 5))
    step = next(each for each in candidates if (high - low) / each < MAX_TICKS)
    return [round(n * step, 12) for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def decimals(places: Sequence[float]) -> int:
    """Digits behind the point that tell all places apart.

    >>> decimals([0.9, 0.95, 1.0]), decimals([1.0, 2.0]), decimals([0.5, 1.0])
    (2, 0, 1)
    """
    return next(digits for digits in range(13) if all(round(each, digits) == round(each, 12) for each in places))


def value_at(axes: "Axes", x: float, y: float, color: str) -> Any:
    """The value at a point; `save` moves it where it is free."""
    digits = 0 if y >= 1000 else max(0, 2 - math.floor(math.log10(y)))
    return axes.annotate(
        f"{y:,.{digits}f}",
        (x, y),
        xytext=PLACES[0],
        textcoords="offset points",
        fontsize=LABEL_POINTS,
        color=color,
        ha="center",
        va="center",
        in_layout=False,
        zorder=5,
        bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 0.5},
        arrowprops={"arrowstyle": "-", "linewidth": 0.5, "color": color, "shrinkA": 0, "shrinkB": 3},
    )


def save(figure: "Figure", labels: Sequence[Any], path: Path | BinaryIO, **options: Any) -> None:
    """Write the figure, with every label at a place free of other labels and of markers.

    A label without a free place is left out: the table has its value.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # lays the panels out
    pixel = figure.dpi / 72
    points = [label.axes.transData.transform(label.xy) for label in labels]
    taken = [Bbox.from_bounds(x - 3 * pixel, y - 3 * pixel, 6 * pixel, 6 * pixel) for x, y in points]
    for label, (x, y) in zip(labels, points, strict=True):
        label.arrow_patch.set_visible(False)
        size = Text.get_window_extent(label, canvas.get_renderer()).padded(pixel)  # an annotation's has the line too
        for right, up in PLACES:
            middle = x + right * pixel, y + up * pixel
            box = Bbox.from_bounds(middle[0] - size.width / 2, middle[1] - size.height / 2, size.width, size.height)
            inside = label.axes.bbox
            is_inside = inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1
            if is_inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                label.set_position((right, up))
                label.arrow_patch.set_visible(math.hypot(right, up) > FAR)
                break
        else:
            label.set_visible(False)
    figure.set_layout_engine("none")
    figure.savefig(path, dpi=150, **options)
