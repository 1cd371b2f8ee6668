"""Curves of a run: what TensorBoard and the picture are given, and what happens where their packages are absent."""

import logging
import sys

import pytest

from peagle.objective.config import TrainConfig
from peagle.training.curves import drawn, plot, shown_on_tensorboard
from peagle.training.resume import RunState

LINES = [
    {"step": 20, "loss": 5.0, "accuracy_by_depth": [0.1, 0.0], "learning_rate": 1e-3, "steps_per_second": 3.0},
    {"step": 20, "replay": {"acceptance_length": 1.2, "per_position": [0.2, 0.0], "num_drafts": 10}},
    {"step": 40, "loss": 3.0, "accuracy_by_depth": [0.4, 0.2], "learning_rate": 5e-4, "steps_per_second": 3.0},
]


def logged(output, lines, first_step=0):
    """The run directory after these lines were logged to it."""
    run = RunState(TrainConfig(data=output, output=output))
    run.directory.mkdir(exist_ok=True)
    with shown_on_tensorboard(run, first_step):
        for line in lines:
            run.log(line)
    return run.directory


def scalars_in(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return {
        name: [(event.step, round(event.value, 4)) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def test_tensorboard_gets_every_number_of_a_line(tmp_path):
    found = scalars_in(logged(tmp_path, LINES))
    assert found["loss"] == [(20, 5.0), (40, 3.0)]
    assert found["accuracy_by_depth/1"] == [(20, 0.0), (40, 0.2)]
    assert found["replay/acceptance_length"] == [(20, 1.2)]
    assert "step" not in found


def test_what_a_killed_process_showed_of_steps_that_are_run_again_is_purged(tmp_path):
    logged(tmp_path, [LINES[0], LINES[2]])
    directory = logged(tmp_path, [{**LINES[2], "loss": 2.0}], first_step=20)
    assert scalars_in(directory)["loss"] == [(20, 5.0), (40, 2.0)]


@pytest.mark.parametrize("lines", [LINES, LINES[:1], LINES[1:]])
def test_the_picture_is_written(tmp_path, lines):
    assert plot(lines, tmp_path / "curves.png", "a drafter")
    written = (tmp_path / "curves.png").read_bytes()
    assert written.startswith(b"\x89PNG")
    assert int.from_bytes(written[16:20], "big") == 13 * 130, "as wide as three panels"


def curves_of(axes):
    """The points of each curve, by step."""
    return [list(zip(*line.get_data(), strict=True)) for line in axes.get_lines()]


def test_acceptance_by_length_has_a_panel_of_its_own():
    ranges = {
        "0-127": {"acceptance_length": 3.0, "num_drafts": 9},
        "512-1023": {"acceptance_length": 2.0, "num_drafts": 9},
    }
    by_length = {"prompt": ranges, "text": {"128-255": {"acceptance_length": 2.5, "num_drafts": 18}}}
    line = {"step": 40, "replay": {"acceptance_length": 2.5, "by_length": by_length}}
    *_, lengths = drawn([*LINES, line], "a drafter").axes
    assert lengths.get_title() == "acceptance length by tokens (last save)"
    assert curves_of(lengths) == [[(0, 3.0), (2, 2.0)], [(1, 2.5)]]
    assert [label.get_text() for label in lengths.get_xticklabels()] == ["0", "128", "512"]
    assert [text.get_text() for text in lengths.get_legend().get_texts()] == ["prompt", "text"]


def test_the_picture_has_the_curves_of_loss_accuracy_and_acceptance():
    later = {"step": 40, "replay": {"acceptance_length": 1.7, "per_position": [0.5, 0.2], "num_drafts": 10}}
    figure = drawn([*LINES, later], "a drafter")
    loss, accuracy, replay = figure.axes
    assert figure.get_suptitle() == "a drafter"
    assert [axes.get_title() for axes in figure.axes] == [
        "loss (mean over labels)",
        "accuracy by depth (vs. the target's argmax)",
        "acceptance length (replay on held-out answers)",
    ]
    assert {axes.get_xlabel() for axes in figure.axes} == {"optimizer step"}
    assert curves_of(loss) == [[(20, 5.0), (40, 3.0)]]
    assert curves_of(accuracy) == [[(20, 0.1), (40, 0.4)], [(20, 0.0), (40, 0.2)]]
    assert [text.get_text() for text in accuracy.get_legend().get_texts()] == ["0", "1"], "depths"
    assert curves_of(replay) == [[(20, 1.2), (40, 1.7)]]
    assert [text.get_text() for text in replay.texts] == ["1.70"], "the last one as a number"
    for axes in figure.axes:
        (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
        points = [point for curve in curves_of(axes) for point in curve]
        assert all(left <= step <= right and bottom <= value <= top for step, value in points), "nothing is cut off"


def test_a_single_line_is_drawn_as_points_that_can_be_seen():
    loss, accuracy, _ = drawn(LINES[:1], "a drafter").axes
    assert [line.get_marker() for axes in (loss, accuracy) for line in axes.get_lines()] == ["o"] * 3


def test_without_held_out_conversations_the_third_panel_says_so():
    *_, replay = drawn([LINES[0], LINES[2]], "a drafter").axes
    assert curves_of(replay) == []
    assert [text.get_text() for text in replay.texts] == ["no held-out conversations"]


def test_a_run_without_a_line_has_no_picture(tmp_path):
    assert not plot([], tmp_path / "curves.png", "a drafter")
    assert not (tmp_path / "curves.png").exists()


def test_an_absent_package_is_said_once_and_nothing_else_happens(tmp_path, monkeypatch, caplog):
    for package in ("tensorboard", "matplotlib"):
        monkeypatch.setitem(sys.modules, package, None)
    with caplog.at_level(logging.WARNING, logger="peagle"):
        directory = logged(tmp_path, LINES)
        assert not plot(LINES, tmp_path / "curves.png", "a drafter")
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "TensorBoard is off: package 'tensorboard' is not installed (pip install 'peagle[train]')",
        "no curves.png: package 'matplotlib' is not installed (pip install 'peagle[train]')",
    ]
    assert [path.name for path in directory.iterdir()] == ["metrics.jsonl"] and list(tmp_path.iterdir()) == [directory]
