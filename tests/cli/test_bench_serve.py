"""`peagle bench serve` against a real server over a tiny target."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.local_server import Running, running

KEY = "sk-tiny-secret"


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running() as found:
        yield found


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "asked.jsonl"
    path.write_text('{"prompt": "the user asks"}\n{"turns": ["as the user", "and then"]}\n{"question": "the the?"}\n')
    return path


SMALL = ("--max-tokens", 8, "--ignore-eos")


def test_sweep_prints_one_document(peagle, served, prompts, tmp_path):
    plot = tmp_path / "plot.svg"
    options = ("--concurrency", "1,2", "--goodput", "ttft:60000,tpot:60000", "--plot", plot)
    result = peagle("bench", "serve", served.url, "--prompts", prompts, *options, *SMALL, "--json", "--detailed")
    assert result.status == 0, result.err
    document = result.json
    assert document["model_id"] == "tiny" and document["workload"] == "asked" and not document["is_interrupted"]
    assert [row["max_concurrency"] for row in document["results"]] == [1, 2]
    assert [row["num_prompts"] for row in document["results"]] == [4, 16], (
        "each turn, and each of several places eight times"
    )
    for row in document["results"]:
        assert row["completed"] == row["num_prompts"] and row["failed"] == 0
        assert row["request_goodput"] == row["request_throughput"], "goals so low are met by all"
        assert row["share_within_goals"] == 1 and row["by_category"].keys() == {"asked"}
        assert row["output_lens"] == [8] * row["num_prompts"] and row["label"] is None
        assert row["endpoint_type"] == "openai-chat" and row["burstiness"] == 1.0
    assert plot.read_text().lstrip().startswith("<?xml")


def test_table_and_request_rates(peagle, served, prompts):
    options = ("--endpoint", "completions", "--request-rate", "50,inf", "--num-requests", 3, "--temperature", 1)
    result = peagle("bench", "serve", f"{served.url}/v1", "--prompts", prompts, *options, *SMALL)
    assert result.status == 0, result.err
    for word in ("rate", "50.0", "inf", "3 of 3", "TPOT ms", "acceptance by position"):
        assert word in result.out, word


def test_fields_of_extra_body_reach_the_server(peagle, served, prompts):
    plain = '{"speculation": {"enabled": false}}'
    asked = ("bench", "serve", served.url, "--prompts", prompts, "--concurrency", 1, *SMALL, "--json", "--extra-body")
    (row,) = peagle(*asked, plain, "--max-turns", 1).json["results"]
    assert row["completed"] == 3 and "spec_decode_num_drafts" not in row
    failed = peagle(*asked, '{"gadgets": 3}')
    assert failed.status == 2 and "gadgets" in failed.err, "the warm-up shows what the server rejects"


def test_key_comes_from_a_file_or_the_environment_and_is_not_told(peagle, prompts, tmp_path, monkeypatch):
    file = tmp_path / "keys.txt"
    file.write_text(f"# ours\n{KEY}\nother\n")
    with running(keys=(KEY,)) as served:
        asked = ("bench", "serve", served.url, "--prompts", prompts, "--concurrency", 1, *SMALL, "--json")
        without = peagle(*asked)
        assert without.status == 2 and "HTTP 401" in without.err and "--api-key-file" in without.err
        with_file = peagle(*asked, "--api-key-file", file)
        monkeypatch.setenv("PEAGLE_API_KEY", KEY)
        with_variable = peagle(*asked)
    for result in (with_file, with_variable):
        assert result.status == 0 and result.json["results"][0]["completed"] == 4
        assert KEY not in result.out + result.err


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ((), "no prompts"),
        (("--prompts", "p", "--concurrency", "0"), "--concurrency must be at least 1"),
        (("--prompts", "p", "--request-rate", "-1"), "--request-rate must be above 0"),
        (("--prompts", "p", "--goodput", "speed:1"), "no metric 'speed'"),
        (("--prompts", "p", "--extra-body", "[1]"), "must be a JSON object"),
        (("--prompts", "p", "--extra-body", '{"stream": false}'), "every request streams one answer"),
        (("--prompts", "p", "--detailed"), "--detailed needs --json"),
        (("--prompts", "p", "--plot", "plot.gif"), "must end in"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_sent(peagle, prompts, options, complaint):
    words = [str(prompts) if word == "p" else word for word in options]
    result = peagle("bench", "serve", "http://127.0.0.1:9", *words)
    assert result.status == 2 and complaint in result.err and "hint: " in result.err


def test_server_that_is_not_there_is_explained(peagle, prompts):
    result = peagle("bench", "serve", "http://127.0.0.1:9", "--prompts", prompts)
    assert result.status == 2 and "http://127.0.0.1:9" in result.err and "--ready-seconds" in result.err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_process_reports_what_was_measured(served, prompts, number):
    words = ["bench", "serve", served.url, "--prompts", str(prompts), "--concurrency", "2", "--num-requests", "100000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "peagle", *words, *map(str, SMALL), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"COLUMNS": "200"},
    )
    before = served.metric("vllm:generation_tokens_total")
    deadline = time.monotonic() + 60
    while served.metric("vllm:generation_tokens_total") < before + 200:
        assert time.monotonic() < deadline and process.poll() is None, "no load came"
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    word = "terminated" if number == signal.SIGTERM else "interrupted"
    assert process.returncode == 128 + number and word in err and "Traceback" not in err
    document = json.loads(out.splitlines()[-1])
    (row,) = document["results"]
    assert document["is_interrupted"] and row["is_interrupted"]
    assert row["completed"] > 5 and row["failed"] == 0 and row["output_throughput"] > 0
    assert row["num_unfinished"] == 100000 - row["completed"]


def test_files_of_other_benchmarks_a_report_and_the_cost(peagle, served, prompts, tmp_path):
    report, exports = tmp_path / "report.md", tmp_path / "exports"
    options = ("--concurrency", "1,2", "--num-requests", 4, "--price-per-hour", 3.6, "--goodput", "ttft:60000")
    words = ("bench", "serve", served.url, "--prompts", prompts, *options, *SMALL, "--report", report)
    result = peagle(*words, "--export", exports, "--json")
    assert result.status == 0, result.err
    for row in result.json["results"]:
        directory = exports / f"concurrency{row['max_concurrency']}"
        assert json.loads((directory / "vllm.json").read_text()) == row
        found = json.loads((directory / "profile_export_aiperf.json").read_text())
        assert found["schema_version"] == "1.4" and found["request_count"] == {"unit": "requests", "avg": 4}
        assert found["output_token_throughput"]["avg"] == pytest.approx(row["output_throughput"], abs=1e-3)
        for ours, theirs in (
            ("ttft", "time_to_first_token"),
            ("tpot", "inter_token_latency"),
            ("e2el", "request_latency"),
        ):
            metric = found[theirs]
            assert metric["unit"] == "ms" and metric["count"] == 4 and metric["min"] <= metric["p1"] <= metric["max"]
            assert metric["avg"] == pytest.approx(row[f"mean_{ours}_ms"], abs=1e-3)
            assert metric["p99"] == pytest.approx(row[f"p99_{ours}_ms"], abs=1e-3)
        assert found["output_sequence_length"]["sum"] == 32 == found["total_osl"]["avg"]
        length = found["spec_decode_token_weighted_acceptance_length"]["avg"]
        assert length == pytest.approx(row["spec_decode_acceptance_length"], abs=1e-3)
        assert found["good_request_count"]["avg"] == 4 and "error_request_count" not in found
    text, cost = report.read_text(), result.json["cost"]
    assert "## Throughput of the server" in text and "at $3.60 per hour" in text
    for cell, row in zip(cost["cells"], result.json["results"], strict=True):
        assert cell["usd_per_million"] == pytest.approx(3.6 / 3600 / row["output_throughput"] * 1e6, rel=1e-3)
    taken = peagle(*words[:-2], "--export", prompts)
    assert taken.status == 2 and "is a file, not a directory" in taken.err
