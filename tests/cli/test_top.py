"""`peagle top`: figures of real scrapes, of made-up ones where a moment must be exact, and the live view."""

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from rich.console import Console

from harness.local_server import Running, running
from harness.stub_server import page, stub
from peagle.bench.scrape import Scrape
from peagle.console.live import view
from peagle.console.watch import Watch

LABELS = '{engine="0",model_name="m"}'


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running() as found:
        yield found


def moment(at: float, tokens: int = 0, accepted: int = 0, drafts: int = 0, more: str = "") -> Scrape:
    text = f"""
vllm:generation_tokens_total{LABELS} {tokens}
vllm:prompt_tokens_total{LABELS} {tokens}
vllm:num_requests_running{LABELS} 3
vllm:num_requests_waiting{LABELS} 2
vllm:kv_cache_usage_perc{LABELS} 0.25
vllm:num_preemptions_total{LABELS} 1
vllm:spec_decode_num_drafts_total{LABELS} {drafts}
vllm:spec_decode_num_draft_tokens_total{LABELS} {2 * drafts}
vllm:spec_decode_num_accepted_tokens_total{LABELS} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {accepted}
vllm:time_to_first_token_seconds_bucket{{le="0.1"}} {tokens}
vllm:time_to_first_token_seconds_bucket{{le="+Inf"}} {tokens}
{more}"""
    return Scrape.parse(text, at)


def watch_of(*scrapes: Scrape, seconds: float = 30.0) -> Watch:
    watch = Watch(seconds)
    for scrape in scrapes:
        watch.add(scrape)
    return watch


def shown(report: dict, **options: object) -> str:
    console = Console(width=100)
    with console.capture() as captured:
        console.print(view({"url": "http://h"} | report, **options))
    return captured.get()


def test_rates_are_of_the_window_and_totals_since_the_start():
    report = watch_of(moment(0, 100, 10, 10), moment(4, 300, 40, 30)).report()
    recent, total = report["recent"], report["since_start"]
    assert recent["seconds"] == 4 and recent["output_tokens_per_second"] == 50 and recent["output_tokens"] == 200
    assert recent["speculation"]["acceptance_length"] == 2.5 and recent["speculation"]["per_position"] == [1.5]
    assert recent["ttft_ms"] == {"count": 200, "mean": 0.0, "p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert total["output_tokens"] == 300 and total["output_tokens_per_second"] is None
    assert total["speculation"]["num_drafts"] == 30
    assert report["now"]["running"] == 3 and report["now"]["kv_cache_usage"] == 0.25


def test_window_slides_and_keeps_two_scrapes():
    watch = watch_of(*(moment(at, 10 * at) for at in range(20)), seconds=5)
    assert watch.report()["recent"]["seconds"] == 5
    sparse = watch_of(moment(0), moment(100, 50), moment(200, 80), seconds=5)
    assert sparse.report()["recent"]["output_tokens"] == 30, "however far apart, there is something to compare with"


def test_restarted_server_begins_anew():
    watch = watch_of(moment(0, 100), moment(1, 200), moment(2, 5))
    assert watch.report()["recent"] is None and not watch.speeds
    watch.add(moment(3, 15))
    assert watch.report()["recent"]["output_tokens"] == 10


def test_drift_is_told_as_the_server_judges_it():
    lines = "peagle:acceptance_length 1.5\npeagle:acceptance_length_baseline 2.5\npeagle:acceptance_window_drafts 900\n"
    alarm = watch_of(moment(0, more=f"{lines}peagle:acceptance_drift 1")).report()
    assert alarm["drift"] == {
        "baseline": 2.5,
        "acceptance_length": 1.5,
        "share": 0.6,
        "num_drafts": 900,
        "has_drifted": True,
    }
    assert "DRIFT" in shown(alarm)
    quiet = watch_of(moment(0, more=f"{lines}peagle:acceptance_drift 0")).report()
    assert not quiet["drift"]["has_drifted"] and "DRIFT" not in shown(quiet) and "too few" in shown(quiet)
    waiting = watch_of(moment(0, more="peagle:acceptance_length_baseline 2.5\npeagle:acceptance_drift 0")).report()
    assert "no drafts yet" in shown(waiting)


def test_whether_the_server_drafts_is_shown_with_what_it_expects_of_it():
    lines = "peagle:drafting_pays {}\npeagle:drafting_gain {}\npeagle:draft_pauses_total {}"
    off = watch_of(moment(0, more=lines.format(0, 0.8123, 2))).report()
    assert off["drafting"] == {"pays": False, "gain": 0.8123, "num_pauses": 2}
    text = shown(off)
    assert "drafting: OFF, it did not pay; newest step: 0.81 times plain decoding expected; stops: 2" in text
    on = shown(watch_of(moment(0, more=lines.format(1, 1.5, 0))).report())
    assert "drafting: pays; newest step: 1.50 times" in on and "stops" not in on
    assert watch_of(moment(0)).report()["drafting"] is None, "vLLM does not choose"


def test_view_shows_what_there_is_and_dashes_for_the_rest():
    text = shown(watch_of(moment(0, 100, 10, 10), moment(4, 300, 40, 30)).report(), speeds=[0.0, 50.0])
    for word in ("m at http://h", "running", "3", "25.0%", "50.0", "acceptance length 2.50", "TTFT ms", "1 preempted"):
        assert word in text, word
    nothing = shown(watch_of(Scrape({}, 1.0)).report())
    assert "starting" in nothing and "no drafts" in nothing
    old_vllm = Scrape.parse("vllm:gpu_cache_usage_perc 0.5\nvllm:num_requests_running 1", 0.0)
    assert "50.0%" in shown(watch_of(old_vllm).report())


def test_document_of_a_real_server(peagle, served):
    ask = {"prompt": "the user", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    assert served.http.post("/v1/completions", json=ask).status_code == 200
    result = peagle("top", served.url, "--once", "--json", "--interval", 0.1)
    assert result.status == 0, result.err
    document = result.json
    assert document["models"] == ["tiny"] and document["now"]["running"] == 0 and document["now"]["max_batch"] == 8
    total = document["since_start"]
    assert total["output_tokens"] >= 20 and total["ttft_ms"]["count"] >= 1 and total["tpot_ms"]["p50"] > 0
    assert total["finished_by_reason"]["length"] >= 1 and total["preemptions"] == 0
    assert len(total["speculation"]["per_position"]) == 4
    assert document["recent"]["output_tokens"] == 0 and document["recent"]["seconds"] > 0.05


def test_one_look_without_a_terminal(peagle, served):
    result = peagle("top", f"{served.url}/metrics", "--once", "--interval", 0.05)
    assert result.status == 0 and "tiny at" in result.out and "acceptance length" in result.out


def test_addresses_without_metrics_are_explained(peagle):
    nobody = peagle("top", "http://127.0.0.1:9", "--once")
    assert nobody.status == 2 and "cannot read" in nobody.err and "peagle serve" in nobody.err
    with stub(page(200, b""), page(200, b"<html>hello</html>")) as url:
        other = peagle("top", url, "--once")
    assert other.status == 2 and "Prometheus" in other.err
    with stub(page(404, b""), page(404, b"")) as url:
        missing = peagle("top", url)
    assert missing.status == 2 and "HTTP 404" in missing.err


def test_options_that_contradict_each_other_are_refused(peagle):
    assert "needs --once" in peagle("top", "--json").err
    assert "--interval must be" in peagle("top", "--interval", 0).err


def test_live_view_runs_in_a_terminal_until_it_is_interrupted(served):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "peagle", "top", served.url, "--interval", "0.1"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"},
    )
    os.close(theirs)
    text, deadline = b"", time.monotonic() + 60
    while text.count(b"KV cache") < 3 and time.monotonic() < deadline:
        if select.select([ours], [], [], 0.1)[0]:
            text += os.read(ours, 65536)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):  # the other end is closed with the process
        while time.monotonic() < deadline and select.select([ours], [], [], 10)[0]:
            text += os.read(ours, 65536)
    if process.poll() is None and time.monotonic() >= deadline:
        process.kill()
    assert process.wait(30) == 0, text.decode(errors="replace")
    os.close(ours)
    assert text.count(b"KV cache") >= 3 and b"Traceback" not in text
