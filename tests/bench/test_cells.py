"""What a cell reports: percentiles, the split of a step, and the comparison with plain decoding."""

import pytest

from harness.tiny_models import tiny_target
from peagle.bench.cells import (
    Answer,
    Cell,
    CellResult,
    Comparison,
    StepSplit,
    compare_with_plain,
    percentile,
    spread_ms,
)
from peagle.compare.divergence import Divergence
from peagle.decoding.acceptance import Acceptance
from peagle.sampling_params import SamplingParams

GREEDY = SamplingParams(max_tokens=4)


def result(method, concurrency, *answers, num_draft_tokens=0, **fields):
    given = [Answer(prompt, tuple(token_ids)) for prompt, token_ids in answers]
    return CellResult(Cell(method, num_draft_tokens, concurrency), given, seconds=2.0, **fields)


@pytest.mark.parametrize(("percent", "expected"), [(0, 1), (50, 3), (95, 4.8), (100, 5), (25, 2), (10, 1.4)])
def test_percentiles_lie_between_neighbors(percent, expected):
    assert percentile([5, 3, 1, 4, 2], percent) == pytest.approx(expected)


def test_a_single_value_is_all_its_percentiles():
    assert spread_ms([0.25]) == dict.fromkeys(("mean", "p5", "p25", "p50", "p75", "p95", "p99"), 250.0)


def test_a_spread_leaves_out_what_was_not_measured():
    found = spread_ms([None, 1.0, None, 3.0])
    assert [found[name] for name in ("mean", "p5", "p25", "p50", "p75", "p95", "p99")] == [
        2000.0, 1100.0, 1500.0, 2000.0, 2500.0, 2900.0, 2980.0,
    ]  # fmt: skip
    assert spread_ms([None]) is None and spread_ms([]) is None


def test_the_host_gap_is_what_the_device_does_not_explain():
    split = StepSplit(wall=0.0020, device=0.0019, verify=0.0012, draft=0.0007).report()
    assert split["host_gap_ms"] == pytest.approx(0.1) and split["host_gap_share"] == pytest.approx(0.05)
    assert StepSplit(0.001, 0.0011).host_gap == 0, "timer noise is no negative gap"
    unknown = StepSplit(0.001).report()
    assert unknown["host_gap_ms"] is None and unknown["host_gap_share"] is None and unknown["wall_ms"] == 1.0


def test_labels_name_curves():
    assert Cell("none", 0, 1).label == "plain"
    assert Cell("p-eagle", 5, 8).label == "p-eagle K=5"
    assert Cell("transformers eager", 0, 8).label == "transformers eager"


def test_throughput_counts_the_tokens_of_finished_answers():
    cell = result("p-eagle", 1, (0, [1, 2, 3]), (1, [4]), num_draft_tokens=2, acceptance=Acceptance(4, (2, 1)))
    report = cell.report()
    assert report["num_output_tokens"] == 4 and report["output_tokens_per_second"] == 2.0
    assert report["acceptance_length"] == 1.75 and report["per_position"] == [0.5, 0.25]
    assert report["ttft_ms"] is None and report["num_divergences"] is None and report["failure"] is None


def test_a_failed_cell_reports_its_reason_and_no_numbers():
    report = CellResult(Cell("none", 0, 8), failure="no room").report()
    assert report["failure"] == "no room" and report["output_tokens_per_second"] is None and report["num_requests"] == 0


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_layers=2)


def test_all_cells_are_held_against_plain_decoding_at_the_lowest_concurrency(target):
    results = [
        result("none", 8, (0, [5, 6, 7]), (1, [9, 9])),
        result("none", 1, (0, [5, 6, 7]), (1, [9, 8]), (0, [5, 6, 7])),
        result("p-eagle", 1, (0, [5, 6, 7]), (1, [9, 8]), num_draft_tokens=3),
        result("transformers eager", 1, (1, [9, 8, 7])),
    ]
    compare_with_plain(target, [[1, 2], [3, 4]], results, GREEDY)
    assert [each.comparison.num_compared for each in results] == [2, 3, 2, 1]
    assert [len(each.comparison.divergences) for each in results] == [1, 0, 0, 1]
    assert results[0].comparison.divergences[0].token == 1
    assert results[3].comparison.divergences[0].token == 2, "longer than the plain answer"


def test_one_divergence_of_many_cells_is_looked_at_once(target, monkeypatch):
    asked = []
    monkeypatch.setattr("peagle.compare.divergence.gap_to_best", lambda *arguments: asked.append(arguments[1:]) or 0.0)
    results = [
        result("none", 1, (0, [5, 6, 7])),
        result("none", 2, (0, [5, 1, 1]), (0, [5, 1, 2])),
        result("none", 4, (0, [5, 1, 3])),
    ]
    compare_with_plain(target, [[1, 2]], results, GREEDY)
    assert asked == [([1, 2, 5], [6, 1])]
    assert [each.comparison.num_at_near_ties for each in results] == [0, 2, 1]


def test_nothing_is_compared_without_plain_decoding_or_with_samples(target):
    drafted, plain = result("p-eagle", 1, (0, [5]), num_draft_tokens=1), result("none", 1, (0, [6]))
    compare_with_plain(target, [[1]], [drafted], GREEDY)
    compare_with_plain(target, [[1]], [drafted, plain], SamplingParams(temperature=1.0))
    assert drafted.comparison is None and plain.comparison is None


def test_without_the_target_answers_are_compared_but_no_near_ties_are_known():
    results = [result("none", 1, (0, [5, 6, 7])), result("p-eagle", 1, (0, [5, 6, 7]), (0, [5, 1]), num_draft_tokens=1)]
    compare_with_plain(None, [[1, 2]], results, GREEDY)
    plain, drafted = (each.report() for each in results)
    names = ("num_compared", "num_divergences", "num_divergences_at_near_ties", "near_tie", "largest_gap")
    assert [plain[name] for name in names] == [1, 0, 0, None, None]
    assert [drafted[name] for name in names] == [2, 1, None, None, None]


def test_the_report_counts_divergences_and_near_ties_among_them():
    found = (Divergence(0, 0.0, True), Divergence(1, 2.0, False))
    report = result("none", 2, (0, [1]), comparison=Comparison(9, found, 0.25)).report()
    assert (report["num_compared"], report["num_divergences"], report["num_divergences_at_near_ties"]) == (9, 2, 1)
