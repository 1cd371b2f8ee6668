"""`peagle bench`: the document's keys, the sweep's cells, and where tables, documents and plots go."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from peagle.bench import cells, offline
from peagle.bench.offline import shipped_eagle3_drafter
from peagle.errors import Terminated


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "arithmetic.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("the user", "another", "a third one")))
    return path


@pytest.fixture
def bench(peagle, on_models, prompts):
    def call(*argv):
        result = peagle("bench", "--prompts", prompts, "--max-tokens", 4, "--concurrency", "1,2", *on_models, *argv)
        assert result.status == 0, result.err
        return result

    return call


def test_the_document_is_the_last_line_of_stdout_and_has_every_cell(bench):
    result = bench("--json", "--num-draft-tokens", "2,4")
    document = result.json
    assert result.out.count("\n") == 1, "stdout is data"
    cells = document["cells"]
    assert [(cell["method"], cell["num_draft_tokens"], cell["concurrency"]) for cell in cells] == [
        (method, depth, places) for method, depth in (("none", 0), ("p-eagle", 2), ("p-eagle", 4)) for places in (1, 2)
    ]
    for cell in cells:
        assert cell["failure"] is None and cell["num_divergences"] == 0
        assert cell["num_requests"] == cell["num_compared"] == (3 if cell["concurrency"] == 1 else 16)
        assert cell["output_tokens_per_second"] > 0 and cell["speedup"] > 0 and cell["ttft_ms"]["p95"] > 0
        if cell["method"] == "p-eagle":
            assert len(cell["per_position"]) == cell["num_draft_tokens"] and cell["acceptance_length"] >= 1
        else:
            assert cell["acceptance_length"] is None
    assert document["num_prompts"] == 3 and document["workload"] == "arithmetic"
    assert {"target", "dtype", "device", "max_tokens", "temperature", "is_interrupted"} <= document.keys()
    assert document["drafters"] == {"p-eagle": "drafter"}
    assert {"command", "commit", "versions", "hardware"} <= document["provenance"].keys()


@pytest.mark.parametrize(("given", "measured"), [((), [0, None]), (("--num-draft-tokens", "auto,2"), [0, None, 2])])
def test_the_engine_decides_how_many_drafts_to_verify_beside_fixed_numbers(bench, given, measured):
    cells = bench("--json", "--concurrency", 1, *given).json["cells"]
    assert [cell["num_draft_tokens"] for cell in cells] == measured
    assert all(cell["acceptance_length"] >= 1 and cell["num_divergences"] == 0 for cell in cells[1:])


def test_a_price_adds_the_cost_and_a_report_is_written(bench, peagle, on_models, prompts, tmp_path):
    words = ("--concurrency", 1, "--num-draft-tokens", 2)
    result = bench(*words, "--json", "--price-per-hour", 0.36, "--report", tmp_path / "report.md")
    cells, cost = result.json["cells"], result.json["cost"]
    for cell, priced in zip(cells, cost["cells"], strict=True):
        by_hand = 0.36 / 3600 / cell["output_tokens_per_second"] * 1e6  # 0.36 dollars per hour: 100 per million seconds
        assert priced["usd_per_million"] == pytest.approx(by_hand, abs=1e-6)
    assert cost["price"]["source"] == "given with --price-per-hour" and cost["price"]["date"]
    text = (tmp_path / "report.md").read_text()
    assert "## Cost" in text and f"{cells[1]['output_tokens_per_second']:,.1f}" in text
    assert bench(*words, "--json").json["cost"] is None
    command = ("bench", "--prompts", prompts, *on_models)
    for more, message in (
        (("--price-per-hour", 0), "--price-per-hour must be above 0, got 0"),
        (("--instance", "ml.p9.huge"), "no price of the instance 'ml.p9.huge' is known"),
        (("--instance", "ml.g6.xlarge"), "ml.g6.xlarge has L4 GPUs, but this was measured on a CPU"),
        (("--report", tmp_path / "report.pdf"), "the name must end in .html, .md"),
    ):
        refused = peagle(*command, *more)
        assert refused.status == 2 and message in refused.err, refused.err


def test_depths_beyond_a_drafters_training_are_left_out_and_said(bench, peagle, on_models, prompts):
    result = bench("--json", "--num-draft-tokens", "2,99", "--methods", "p-eagle", "--concurrency", 1)
    assert [cell["num_draft_tokens"] for cell in result.json["cells"]] == [2]
    assert "skipping p-eagle at 99 draft tokens" in result.err
    refused = peagle("bench", "--prompts", prompts, "--num-draft-tokens", 99, *on_models)
    assert refused.status == 2 and "the depth it was trained for" in refused.err


def test_several_prompt_files_are_one_workload(bench, prompts, tmp_path):
    (tmp_path / "more.txt").write_text("one more\n")
    document = bench("--json", "--prompts", f"{prompts},{tmp_path / 'more.txt'}", "--limit", 2).json
    assert document["num_prompts"] == 3 and document["workload"] == "arithmetic+more"


@pytest.fixture
def conversations(tmp_path):
    rows = [
        {"category": "chat", "turns": ["the user", "and then", "the end"]},
        {"category": "code", "turns": ["another"]},
        {"category": "chat", "turns": ["a third one", "the user"]},
    ]
    path = tmp_path / "question.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_every_turn_is_asked_and_figures_are_kept_by_category(bench, conversations, tmp_path):
    report = tmp_path / "report.md"
    result = bench("--json", "--prompts", conversations, "--limit", 3, "--report", report)
    document = result.json
    assert document["num_prompts"] == 3 and document["num_turns"] == 6 and "categories" not in document
    for cell in document["cells"]:
        assert cell["num_requests"] == cell["num_compared"] == 6 and cell["num_divergences"] == 0, "also later turns"
        assert {name: own["num_requests"] for name, own in cell["by_category"].items()} == {"chat": 5, "code": 1}
        drafted = [own["num_drafts"] for own in cell["by_category"].values()]
        assert drafted == [None, None] if cell["method"] == "none" else sum(drafted) == cell["num_drafts"]
    assert "By category, at the lowest concurrency" in report.read_text() and "| code | 1 | " in report.read_text()
    chosen = bench("--json", "--prompts", conversations, "--categories", "chat", "--limit", 1, "--max-turns", 2).json
    both = bench("--json", "--prompts", conversations, "--categories", "code,chat", "--limit", 1).json
    assert both["num_prompts"] == 2 and both["num_turns"] == 4, "a limit counts by category"
    assert chosen["num_prompts"] == 1 and {cell["num_requests"] for cell in chosen["cells"]} == {2}


def test_categories_and_turns_that_cannot_be_measured_are_refused(peagle, on_models, conversations):
    command = ("bench", "--prompts", conversations, *on_models)
    for more, message, hint in (
        (("--categories", "chatt"), "no prompt has the category 'chatt'", "did you mean 'chat'?"),
        (("--anchors",), "--anchors answer one turn of each prompt", "add --max-turns 1"),
        (("--max-turns", 0), "max_turns must be at least 1, got 0", ""),
    ):
        refused = peagle(*command, *more)
        assert refused.status == 2 and message in refused.err and hint in refused.err, refused.err


def test_a_limit_runs_that_many_prompts_once_and_leaves_out_batches_they_cannot_fill(bench):
    result = bench("--json", "--limit", 2, "--concurrency", "1,2,8")
    assert {(cell["concurrency"], cell["num_requests"]) for cell in result.json["cells"]} == {(1, 2), (2, 2)}
    assert "concurrency 1,2 instead of 1,2,8: --limit leaves 2 requests" in result.err


def test_a_limit_below_every_concurrency_still_runs(bench):
    result = bench("--json", "--limit", 2, "--concurrency", "8")
    assert {(cell["concurrency"], cell["num_requests"]) for cell in result.json["cells"]} == {(2, 2)}


def test_the_tables_end_with_a_verdict(bench):
    result = bench("--num-draft-tokens", 2, "--concurrency", 1)
    assert result.out.splitlines()[-1].startswith("drafting ")
    document = bench("--json", "--num-draft-tokens", 2, "--concurrency", 1).json
    assert document["verdict"].startswith("drafting ") and document["recommended"][0]["num_draft_tokens"] == 2


def test_every_finished_cell_is_a_line_on_stderr(bench):
    lines = [line for line in bench("--json").err.splitlines() if " at concurrency " in line]
    speed = r"at concurrency [12]: [0-9,]+\.\d tokens/s"
    assert len(lines) == 4 and all(re.fullmatch(f"plain {speed}", line) for line in lines[:2])
    drafted = rf"p-eagle K=auto {speed}, \d+\.\d\dx plain, acceptance length \d\.\d\d"
    assert all(re.fullmatch(drafted, line) for line in lines[2:])


@pytest.fixture
def stop(monkeypatch):
    """Have the cell of this number raise something."""

    def at(number, raised):
        measured, begun = offline.run_cell, []

        def stopped(llm, cell, *words, **options):
            begun.append(cell)
            if len(begun) == number:
                raised()
            return measured(llm, cell, *words, **options)

        monkeypatch.setattr(offline, "run_cell", stopped)

    return at


def interrupt():
    raise KeyboardInterrupt


def terminate():
    raise Terminated


def terminate_in_a_capture():
    """What ends a capture of CUDA graphs: an error that hides the signal."""
    try:
        raise Terminated
    finally:
        raise RuntimeError("the capture was invalidated")


def fail():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize(
    ("raised", "status"),
    [(interrupt, 130), pytest.param(terminate, 143, marks=pytest.mark.slow), (terminate_in_a_capture, 143)],
)
def test_an_interrupted_run_reports_the_cells_that_finished(peagle, on_models, prompts, stop, tmp_path, raised, status):
    stop(4, raised)
    out = {flag: tmp_path / name for flag, name in (("--plot", "plot.png"), ("--report", "report.md"))}
    options = ("--max-tokens", 4, "--concurrency", "1,2", "--num-draft-tokens", 2, *on_models)
    result = peagle("bench", "--prompts", prompts, *options, "--json", *(word for pair in out.items() for word in pair))
    assert result.status == status and "stopped: 3 of 4 cells finished" in result.err, result.err
    document = result.json
    assert document["is_interrupted"] and document["num_planned_cells"] == 4
    assert [(cell["label"], cell["num_compared"], cell["num_divergences"]) for cell in document["cells"]] == [
        ("plain", 3, 0), ("plain", 16, 0), ("p-eagle K=2", 3, 0),
    ]  # fmt: skip
    assert out["--plot"].read_bytes().startswith(b"\x89PNG")
    assert "Incomplete: 3 of 4 cells." in out["--report"].read_text()


def test_a_run_that_is_interrupted_before_its_first_cell_has_nothing_to_report(peagle, on_models, prompts, stop):
    stop(1, interrupt)
    result = peagle("bench", "--prompts", prompts, "--concurrency", 1, *on_models)
    assert (result.status, result.out) == (130, "") and "stopped: 0 of 2 cells finished" in result.err


def test_an_error_in_a_cell_reports_the_cells_before_it_and_keeps_its_traceback(
    peagle, on_models, prompts, stop, capsys
):
    stop(2, fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        peagle("bench", "--prompts", prompts, "--max-tokens", 4, "--concurrency", 1, *on_models, "--json")
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document["is_interrupted"] and [cell["label"] for cell in document["cells"]] == ["plain"]
    assert document["verdict"] is None and document["cells"][0]["near_tie"] > 0, "the target still answers"
    assert "stopped: 1 of 2 cells finished" in printed.err


@pytest.mark.parametrize(("raised", "ended"), [(interrupt, None), (fail, RuntimeError)])
def test_what_goes_wrong_in_the_comparison_with_plain_decoding_loses_no_cell(
    peagle, on_models, prompts, monkeypatch, capsys, raised, ended
):
    monkeypatch.setattr(cells, "measured_near_tie", lambda *_: raised())
    command = ("bench", "--prompts", prompts, "--max-tokens", 4, "--concurrency", 1, *on_models, "--json")
    if ended is None:
        result = peagle(*command)
        assert result.status == 130
        document = result.json
    else:
        with pytest.raises(ended):
            peagle(*command)
        document = json.loads(capsys.readouterr().out)
    assert document["is_interrupted"] and len(document["cells"]) == document["num_planned_cells"] == 2
    assert all((cell["num_compared"], cell["num_divergences"]) == (3, 0) for cell in document["cells"])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_process_prints_its_document(on_models, prompts, number):
    words = ("--prompts", str(prompts), "--max-tokens", "64", "--concurrency", "1,2,4,8", "--num-requests", "16")
    process = subprocess.Popen(
        [sys.executable, "-m", "peagle", "bench", *words, *on_models, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"COLUMNS": "200"},
    )
    assert any(" at concurrency 1: " in line for line in process.stderr), "a finished cell"
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number and re.search(r"stopped: \d of 8 cells finished", err), err
    assert "Traceback" not in err and json.loads(out)["is_interrupted"]


@pytest.mark.slow
def test_the_table_and_the_plot_show_the_methods(bench, tmp_path):
    result = bench("--num-draft-tokens", 2, "--plot", tmp_path / "plot.png")
    assert "plain" in result.out and "p-eagle K=2" in result.out and "acceptance by position" in result.out
    assert "\u2501" not in result.err and "\x1b" not in result.err, "no progress bar where stderr is no terminal"
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_samples_are_not_compared(bench):
    cells = bench("--json", "--temperature", 1, "--concurrency", 2).json["cells"]
    assert all(cell["num_compared"] is None for cell in cells)


def test_a_dummy_run_reports_the_fraction_of_the_limit(peagle, models):
    config = models / "target" / "config.json"
    result = peagle("bench", "--dummy", config, "--max-tokens", 16, "--concurrency", "1,2", "--device", "cpu", "--json")
    assert result.status == 0, result.err
    bandwidth = result.json["bandwidth"]
    assert bandwidth["bytes_per_second"] > 1e8 and [row["concurrency"] for row in bandwidth["steps"]] == [1, 2]
    assert all(row["fraction_of_limit"] > 0 and row["weight_bytes"] > 0 for row in bandwidth["steps"])


def test_a_dummy_run_drafts_with_an_assumed_acceptance(peagle, models):
    config = models / "target" / "config.json"
    options = ("--max-tokens", 32, "--concurrency", "2", "--device", "cpu", "--num-draft-tokens", "2,3")
    result = peagle("bench", "--dummy", config, *options, "--assume-acceptance", "1,0.5,0", "--json")
    assert result.status == 0, result.err
    assert [cell["label"] for cell in result.json["cells"]] == ["plain", "p-eagle K=2", "p-eagle K=3"]
    assert result.json["assumed_acceptance"] == [1.0, 0.5, 0.0]
    plain, _, drafted = result.json["bandwidth"]["steps"]
    assert drafted["weight_bytes"] > plain["weight_bytes"] and drafted["label"] == "p-eagle K=3"
    first, second, third = result.json["cells"][2]["per_position"]
    assert first > 0.85 and 0.1 < second < 0.9 and third == 0, "the last step of an answer has no room for all drafts"


@pytest.mark.slow
def test_a_dummy_drafter_may_be_slimmer(peagle, models):
    config = models / "target" / "config.json"
    options = ("--max-tokens", 16, "--concurrency", "1", "--device", "cpu", "--assume-acceptance", "0.5", "--json")
    slim = ("--drafter-layers", 1, "--draft-vocab", 20)
    (_, usual), (_, slimmer) = (
        peagle("bench", "--dummy", config, *options, *own).json["bandwidth"]["steps"] for own in ((), slim)
    )
    assert slimmer["weight_bytes"] < usual["weight_bytes"]


def test_the_shipped_control_is_found_as_soon_as_it_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr("peagle.bench.offline.ASSETS", tmp_path)
    assert shipped_eagle3_drafter(None) is None
    (tmp_path / "smollm2-135m-instruct-eagle3").mkdir()
    assert shipped_eagle3_drafter(None) == str(tmp_path / "smollm2-135m-instruct-eagle3")
    assert shipped_eagle3_drafter("some/model") is None, "it belongs to the built-in target only"
