"""Training curves: TensorBoard during the run, curves.png at the end.

Both show the lines of metrics.jsonl and need packages of the extra `train`. Without them a warning is logged.
"""

import contextlib
import importlib.util
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.training.resume import RunState

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

PLOT_NAME = "curves.png"
EVENTS_NAME = "tensorboard"
Line = Mapping[str, Any]


@contextlib.contextmanager
def shown_on_tensorboard(run: RunState, first_step: int) -> Iterator[None]:
    """Send every metrics line of `run` to TensorBoard, in the main process.

    Purges events past `first_step` from an interrupted process.
    """
    if not run.world.is_main or not _has("tensorboard", "TensorBoard is off"):
        yield
        return
    from torch.utils.tensorboard import SummaryWriter

    directory = run.directory / EVENTS_NAME
    with SummaryWriter(str(directory), purge_step=first_step + 1) as writer:

        def show(line: Line) -> None:
            for name, value in scalars(line).items():
                writer.add_scalar(name, value, line["step"])

        run.listeners.append(show)
        yield
        run.listeners.remove(show)


def scalars(line: Line) -> dict[str, float]:
    """The numbers of a metrics line by name, without the step. List entries are numbered from 0.

    >>> scalars({"step": 20, "loss": 2.5, "accuracy_by_depth": [0.5, 0.25], "replay": {"acceptance_length": 1.5}})
    {'loss': 2.5, 'accuracy_by_depth/0': 0.5, 'accuracy_by_depth/1': 0.25, 'replay/acceptance_length': 1.5}
    """
    found: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{key}": number for key, number in scalars(value).items()}
        elif isinstance(value, list):
            found |= {f"{name}/{index}": float(number) for index, number in enumerate(value)}
        elif name != "step" and isinstance(value, int | float):
            found[name] = float(value)
    return found


def plot(lines: Sequence[Line], path: Path, title: str) -> bool:
    """Save a plot of loss, accuracy by depth and acceptance length by step. Returns False if nothing was drawn."""
    if not any("loss" in line for line in lines) or not _has("matplotlib", f"no {path.name}"):
        return False
    drawn(lines, title).savefig(path, dpi=130)
    return True


def drawn(lines: Sequence[Line], title: str) -> "Figure":
    """The figure: three panels, and a fourth if acceptance was measured by length. At least one line has a loss."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    losses = [line for line in lines if "loss" in line]
    replays = [line for line in lines if "replay" in line]
    by_length = replays[-1]["replay"].get("by_length") if replays else None
    figure = Figure(figsize=(13 if by_length is None else 17, 4), layout="constrained")
    loss_axes, accuracy_axes, replay_axes, *length_axes = figure.subplots(1, 3 if by_length is None else 4)
    steps = [line["step"] for line in losses]
    marker = "o" if len(steps) == 1 else None
    loss_axes.plot(steps, [line["loss"] for line in losses], color="black", linewidth=1.5, marker=marker)
    loss_axes.set_title("loss (mean over labels)", fontsize=10)
    num_depths = len(losses[0]["accuracy_by_depth"])
    for depth in range(num_depths):
        values = [line["accuracy_by_depth"][depth] for line in losses]
        color = colormaps["viridis"](0.9 * depth / max(1, num_depths - 1))
        accuracy_axes.plot(steps, values, color=color, linewidth=1.5, marker=marker, label=str(depth))
    accuracy_axes.set_title("accuracy by depth (vs. the target's argmax)", fontsize=10)
    accuracy_axes.set_ylim(0, 1)
    accuracy_axes.legend(title="depth", fontsize=8, title_fontsize=8, frameon=False, ncols=2, loc="best")
    if replays:
        values = [line["replay"]["acceptance_length"] for line in replays]
        replay_axes.plot([line["step"] for line in replays], values, color="#1f6f8b", linewidth=1.5, marker="o")
        last = (replays[-1]["step"], values[-1])
        replay_axes.annotate(f"{values[-1]:.2f}", last, (0, 7), textcoords="offset points", ha="right")
        replay_axes.set_ylim(1, 1 + 1.2 * max(0.1, max(values) - 1))
    else:
        replay_axes.text(0.5, 0.5, "no held-out conversations", ha="center", transform=replay_axes.transAxes)
        replay_axes.set_yticks([])
    replay_axes.set_title("acceptance length (replay on held-out answers)", fontsize=10)
    for axes in (loss_axes, accuracy_axes, replay_axes):
        axes.set_xlabel("optimizer step")
        axes.set_xlim(0, max(line["step"] for line in lines) * 1.03)
    for axes in length_axes:
        _draw_lengths(axes, by_length or {})
    for axes in figure.axes:
        axes.grid(True, color="#e4e4e4", linewidth=0.6)
        axes.set_axisbelow(True)
    figure.suptitle(title, fontsize=10)
    return figure


def _draw_lengths(axes: "Axes", by_length: Mapping[str, Mapping[str, Any]]) -> None:
    """Acceptance length at the last save, by where in the text a draft was made."""
    names = sorted({name for ranges in by_length.values() for name in ranges}, key=lambda name: int(name.split("-")[0]))
    for of, ranges in by_length.items():
        points = [(names.index(name), found["acceptance_length"]) for name, found in ranges.items()]
        axes.plot(*zip(*points, strict=True), linewidth=1.5, marker="o", label=of)
    axes.set_xticks(range(len(names)), [name.split("-")[0] for name in names], fontsize=8)
    axes.set_xlabel("from this many tokens")
    axes.set_ylim(bottom=1)
    axes.set_title("acceptance length by tokens (last save)", fontsize=10)
    axes.legend(title="tokens of the", fontsize=8, title_fontsize=8, frameon=False, loc="best")


def _has(package: str, otherwise: str) -> bool:
    if importlib.util.find_spec(package) is not None:
        return True
    log.warning("%s: package %r is not installed (pip install 'peagle[train]')", otherwise, package)
    return False
