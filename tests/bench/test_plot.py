"""The plot of a sweep: its curves, axes, title and values."""

import importlib.util
import itertools

import pytest
from matplotlib.text import Text

from peagle.bench.plot import MAX_TICKS, check_plot, draw, plot, save
from peagle.bench.report import document_of
from peagle.errors import ConfigError, MissingExtraError
from peagle.provenance import provenance

FACTS = {
    "workload": "questions",
    "num_prompts": 2,
    "target": "tiny",
    "dtype": "float32",
    "device": "cpu",
    "max_tokens": 8,
    "drafters": {"p-eagle": "my-drafter"},
    "provenance": provenance("Some GPU"),
}
METHODS = {"plain": "none", "p-eagle K=2": "p-eagle", "p-eagle K=4": "p-eagle", "transformers eager": "transformers"}


def document(speeds, **facts):
    """Of curves by their label: tokens/s by concurrency."""
    cells = [
        {"method": METHODS[label], "label": label, "concurrency": places, "output_tokens_per_second": speed}
        | {"speedup": speed / speeds["plain"][places] if places in speeds.get("plain", ()) else None}
        for label, curve in speeds.items()
        for places, speed in curve.items()
    ]
    return document_of([], **(FACTS | facts)) | {"cells": cells}


SPEEDS = {"plain": {1: 2.0, 8: 4.0}, "p-eagle K=2": {1: 4.0, 8: 5.0}, "transformers eager": {1: 0.2}}


def texts_of(path):
    return [line.split("<!-- ")[1].split(" -->")[0] for line in path.read_text().splitlines() if "<!-- " in line]


def test_the_plot_has_a_line_for_each_method_that_was_measured(tmp_path):
    path = tmp_path / "plot.svg"
    plot(document(SPEEDS), path)
    texts = texts_of(path)
    for label in ("plain", "p-eagle K=2", "transformers eager", "concurrent requests", "output tokens/s"):
        assert label in texts, label
    unmeasured = document(SPEEDS)
    unmeasured["cells"][-1]["output_tokens_per_second"] = None
    plot(unmeasured, path)
    assert "transformers eager" not in texts_of(path)


def test_the_plot_shows_the_speed_up_where_there_is_something_to_compare_with(tmp_path):
    name = "speedup over plain decoding (dotted: 1.0x)"
    only_plain, only_drafts = {"plain": SPEEDS["plain"]}, {"p-eagle K=2": SPEEDS["p-eagle K=2"]}
    for speeds, is_shown in ((SPEEDS, True), (only_plain, False), (only_drafts, False)):
        plot(document(speeds), tmp_path / "plot.svg")
        assert (name in texts_of(tmp_path / "plot.svg")) is is_shown


def test_the_title_names_the_drafter_and_the_hardware(tmp_path):
    for hardware, words in ((provenance("Some GPU"), "Some GPU"), (provenance(), "cores")):
        plot(document(SPEEDS, provenance=hardware), tmp_path / "plot.svg")
        heading = " ".join(texts_of(tmp_path / "plot.svg"))
        assert "p-eagle drafter my-drafter" in heading and words in heading and "tiny, float32" in heading


def boxes_of(labels):
    return [Text.get_window_extent(label) for label in labels if label.get_visible()]


@pytest.mark.parametrize(
    ("slow", "fast"),
    [
        *((0.9, 1.1), (3, 140_000), (41, 41)),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((1, 6), (0.0021, 0.0022), (0.5, 90), (99_950, 100_050))
        ),
    ],
)
def test_axes_and_values_can_be_read_at_any_range(tmp_path, slow, fast):
    middle = (slow * fast) ** 0.5
    speeds = {
        "plain": {1: slow, 8: middle, 128: fast},
        "p-eagle K=2": {1: middle, 8: middle * 1.001, 128: fast},
        "p-eagle K=4": {1: middle * 1.002, 8: fast, 128: fast * 0.999},
    }
    figure, labels = draw(document(speeds))
    save(figure, labels, tmp_path / "plot.png")
    figure.canvas.draw()  # extents in its own resolution
    panels = figure.axes
    assert len(panels) == 2
    for axes in panels:
        low, high = axes.get_ylim()
        assert low == 0 or axes.get_yscale() == "log", "a linear axis that starts higher exaggerates"
        places, names = axes.get_yticks(), [name.get_text() for name in axes.get_yticklabels()]
        assert 3 <= len(places) <= MAX_TICKS and all(low <= place <= high for place in places), names
        assert len(set(names)) == len(names), names
        assert [float(name.replace(",", "")) for name in names] == pytest.approx(list(places))
        assert not overlaps([name.get_window_extent() for name in axes.get_yticklabels()])
    low, high = panels[1].get_ylim()
    dotted = [line for line in panels[1].lines if list(line.get_ydata()) == [1.0, 1.0]]
    assert dotted and low < 1.0 < high
    assert all(label.get_visible() for label in labels) and len(labels) == 9 + 6
    boxes = boxes_of(labels)
    assert not overlaps(boxes)
    for label, box in zip(labels, boxes, strict=True):
        frame = label.axes.bbox
        assert frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
        assert float(label.get_text().replace(",", "")) == pytest.approx(label.xy[1], rel=6e-3)


def overlaps(boxes):
    return [(str(one), str(other)) for one, other in itertools.combinations(boxes, 2) if one.overlaps(other)]


@pytest.mark.slow
def test_many_concurrencies_leave_room_between_their_names(tmp_path):
    figure, labels = draw(document({"plain": {places: 10.0 * places for places in range(1, 65)}}))
    save(figure, labels, tmp_path / "plot.png")
    figure.canvas.draw()  # extents in its own resolution
    names = figure.axes[0].get_xticklabels()
    assert len(names) > 4 and not overlaps([name.get_window_extent() for name in names])
    assert not overlaps(boxes_of(labels))


def test_a_plot_may_be_a_png(tmp_path):
    plot(document(SPEEDS), tmp_path / "plot.PNG")
    assert (tmp_path / "plot.PNG").read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"must end in \.pdf, \.png, \.svg"):
        check_plot(tmp_path / "plot.txt")
    with pytest.raises(ConfigError, match="no directory"):
        check_plot(tmp_path / "none" / "plot.png")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="--plot needs the package 'matplotlib'") as caught:
        check_plot(tmp_path / "plot.png")
    assert caught.value.hint == "pip install 'peagle[bench]'"
