"""The document and the tables of a sweep."""

import pytest
from rich.console import Console

from peagle.bench.cells import Answer, Cell, CellResult, Comparison, StepSplit
from peagle.bench.report import TABLE_WIDTH, cell_line, document_of, tables
from peagle.compare.divergence import Divergence
from peagle.decoding.acceptance import Acceptance

FACTS = {
    "workload": "questions",
    "num_prompts": 2,
    "target": "tiny",
    "dtype": "float32",
    "device": "cpu",
    "max_tokens": 8,
}


def result(method, num_draft_tokens, concurrency, seconds):
    answers = [Answer(0, (1, 2, 3, 4), 0.010, 0.002), Answer(1, (1, 2, 3, 4), 0.030, 0.004)]
    drafted = Acceptance(4, (3, 1)[:num_draft_tokens]) if num_draft_tokens else None
    split = StepSplit(0.002, 0.0019, 0.0015, 0.0004)
    return CellResult(
        Cell(method, num_draft_tokens, concurrency), answers, seconds, 9 / seconds, drafted, split, 3 << 30,
        comparison=Comparison(2, (), 0.25),
    )  # fmt: skip


RESULTS = [
    result("none", 0, 1, 4.0),
    result("none", 0, 8, 2.0),
    result("p-eagle", 2, 1, 2.0),
    result("p-eagle", 2, 8, 1.6),
    result("transformers eager", 0, 1, 40.0),
    CellResult(Cell("transformers static compiled", 0, 1), failure="no compiler here"),
]


@pytest.fixture
def document():
    return document_of(RESULTS, **FACTS)


def shown(document):
    console = Console(width=TABLE_WIDTH, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(*tables(document), sep="\n")
    console.file.close()
    return console.export_text()


def test_speed_up_is_against_plain_at_the_same_concurrency(document):
    assert [cell["speedup"] for cell in document["cells"]] == [1.0, 1.0, 2.0, 1.25, 0.1, None]
    assert document["workload"] == "questions"


def test_categories_have_their_own_speedup_and_acceptance():
    def timed(method, depth, speeds):
        answers = [
            Answer(index, (1,) * 5, 0.01, 1 / speed, Acceptance(2, (2, index)) if depth else None)
            for index, speed in enumerate(speeds)
        ]
        return CellResult(Cell(method, depth, 1), answers, 1.0, acceptance=Acceptance(4, (4, 1)) if depth else None)

    results = [timed("none", 0, (10, 20)), timed("p-eagle", 2, (30, 30))]
    document = document_of(results, categories=["code", "chat"], **FACTS)
    assert "categories" not in document
    plain, drafted = (cell["by_category"] for cell in document["cells"])
    assert plain["code"]["tokens_per_second_per_request"] == 10 and plain["code"]["acceptance_length"] is None
    assert [drafted[name]["speedup"] for name in ("code", "chat")] == [3.0, 1.5]
    assert [drafted[name]["acceptance_length"] for name in ("code", "chat")] == [2.0, 2.5]
    text = shown(document)
    assert "by category" in text and "2.00 30.0 3.00x" in text and "2.50 30.0 1.50x" in text
    assert "by category" not in shown(document_of(results, categories=["chat", "chat"], **FACTS))


def test_speed_up_is_unknown_without_plain():
    assert document_of(RESULTS[2:3], **FACTS)["cells"][0]["speedup"] is None


def test_the_table_shows_every_measure(document):
    text = shown(document)
    row = next(line for line in text.splitlines() if "p-eagle K=2" in line)
    speeds, latencies = ("4.0", "4.5", "2.00"), ("20.0 20.0 29.0", "3.00 3.00 3.90")
    for value in (*speeds, *latencies, "2.00", "1.500", "0.400", "0.100 (5.0%)", "3.0"):
        assert f" {value} " in row, (value, row)
    assert "0 (0) of 2" in row
    assert "questions: 2 prompts, up to 8 tokens; tiny, float32 on cpu" in text


def test_the_number_of_requests_stands_beside_a_speed_up_over_other_requests():
    fewer = result("transformers eager", 0, 1, 40.0)
    fewer.answers = fewer.answers[:1]
    document = document_of([*RESULTS[:3], fewer, RESULTS[-1]], **FACTS)
    assert [cell["num_requests"] for cell in document["cells"]] == [2, 2, 2, 1, 0]
    assert [cell["speedup_plain_requests"] for cell in document["cells"]] == [2, 2, 2, 2, None]
    rows = shown(document).splitlines()
    assert " 1 (2) " in next(row for row in rows if "transformers eager" in row)
    assert " 2 (2) " not in next(row for row in rows if "p-eagle K=2" in row)


def test_a_finished_cell_is_a_line_with_its_speedup_as_far_as_plain_is_known():
    plain, drafted = RESULTS[1], result("p-eagle", None, 8, 1e-3)
    drafted.acceptance = Acceptance(4, (3, 1))
    assert cell_line(plain, [plain]) == "plain at concurrency 8: 4.0 tokens/s"
    said = "p-eagle K=auto at concurrency 8: 8,000.0 tokens/s"
    assert cell_line(drafted, [*RESULTS[:2], drafted]) == f"{said}, 2000.00x plain, acceptance length 2.00"
    assert cell_line(drafted, [RESULTS[0], drafted]) == f"{said}, acceptance length 2.00", "no plain cell at 8"
    assert cell_line(RESULTS[-1], RESULTS) == "transformers static compiled at concurrency 1: failed, no compiler here"


def test_a_run_that_ended_early_says_so_above_the_table():
    assert "incomplete" not in shown(document_of(RESULTS, **FACTS, is_interrupted=False, num_planned_cells=6))
    partial = document_of(RESULTS[:2], **FACTS, is_interrupted=True, num_planned_cells=6)
    assert "tiny, float32 on cpu; incomplete: 2 of 6 cells" in shown(partial)


def test_the_table_has_differences_whose_near_ties_are_unknown():
    drafted = result("p-eagle", 2, 1, 2.0)
    drafted.comparison = Comparison(2, (Divergence(0, None, False),), None)
    text = shown(document_of([RESULTS[0], drafted], **FACTS))
    assert "1 (-) of 2" in text and "None" not in text


def test_a_failure_is_a_row_with_its_reason(document):
    text = shown(document)
    assert "no compiler here" in text and "failed" in text


def test_acceptance_by_position_is_a_table_of_its_own(document):
    text = shown(document)
    assert "acceptance by position" in text and "0.750" in text and "0.250" in text
    plain = shown(document_of(RESULTS[:2], **FACTS))
    assert "by position" not in plain and "failed" not in plain


def test_the_limit_of_the_memory_is_shown_where_it_was_measured(document):
    step = {"concurrency": 1, "weight_bytes": 16 * 10**9, "limit_ms": 4.0, "step_ms": 5.0, "fraction_of_limit": 0.8}
    document["bandwidth"] = {"bytes_per_second": 4e12, "num_parameters": 8.03e9, "steps": [step]}
    text = shown(document)
    assert "80.0%" in text and "4000 GB/s" in text and "16.00" in text
