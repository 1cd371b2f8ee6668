"""Load on a server: arrivals, figures and their report, and real requests to a real server."""

import asyncio
import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from harness.local_server import Running, running
from harness.stub_server import DONE, PROMPTS, page, piece, question, stream, stub
from peagle.bench.client import Connections, Outcome, Question
from peagle.bench.online import (
    Load,
    Result,
    apply,
    arrivals,
    peak_concurrency,
    peak_tokens,
    read_goals,
    spread,
    sweep,
    warm_up,
)
from peagle.bench.online_report import document_of, plot, tables
from peagle.bench.scrape import Scrape
from peagle.data.prompts import Prompt
from peagle.errors import ConfigError, ServerError
from peagle.provenance import provenance

VLLM_FIELDS = (
    "num_prompts request_rate max_concurrency duration completed failed total_input_tokens total_output_tokens "
    "request_throughput request_goodput output_throughput total_token_throughput max_output_tokens_per_s "
    "max_concurrent_requests"
)


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running() as found:
        yield found


def run_load(url: str, load: Load, num_requests: int, asked: Question | None = None, **options: Any) -> Result:
    result = Result(load, num_requests)

    async def run() -> None:
        async with Connections(url, seconds=10) as connections:
            await apply(connections, asked or question(), PROMPTS, result, **options)

    asyncio.run(run())
    return result


# Arrivals -----------------------------------------------------------------------------------------------------------


def test_arrivals_are_a_poisson_process_of_the_rate_asked_for():
    moments = arrivals(5.0, 4000, seed=1)
    gaps = [later - earlier for earlier, later in zip([0.0, *moments], moments, strict=False)]
    assert moments[-1] == pytest.approx(4000 / 5.0) and min(gaps) >= 0
    assert statistics.fmean(gaps) == pytest.approx(0.2)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.1), "exponential gaps deviate as much as they are long"


def test_arrivals_depend_on_the_seed_alone():
    assert arrivals(2.0, 50, seed=3) == arrivals(2.0, 50, seed=3) != arrivals(2.0, 50, seed=4)
    assert arrivals(2.0, 50, seed=3) == pytest.approx([2 * moment for moment in arrivals(4.0, 50, seed=3)])
    assert arrivals(math.inf, 3) == [0.0, 0.0, 0.0]


# Figures ------------------------------------------------------------------------------------------------------------


def outcome(index: int, sent: float, times: list[float], num_output: int, **more: Any) -> Outcome:
    ended = times[-1] if times else sent + 1.0
    return Outcome(index, sent, sent, ended, times, num_input=10, num_output=num_output, has_usage=True, **more)


def test_latencies_follow_vllms_definitions():
    one = outcome(0, 1.0, [1.2, 1.3, 1.7], 11)
    assert one.ttft == pytest.approx(0.2) and one.latency == pytest.approx(0.7)
    assert one.tpot == pytest.approx(0.05), "over all tokens but the first, not over pieces"
    assert one.itls == pytest.approx([0.1, 0.4])
    assert outcome(0, 1.0, [1.2], 1).tpot is None


def test_report_has_the_fields_of_vllm_bench_serve():
    good, slow = outcome(0, 0.0, [0.1, 0.2], 11), outcome(1, 0.0, [0.5, 2.5], 21)
    lost = outcome(2, 0.0, [], 0, error="HTTP 503: full")
    result = Result(Load(2), 4, [good, slow, lost], duration=2.5)
    report = result.report(goals=read_goals("ttft:200,tpot:20"))
    for name in VLLM_FIELDS.split():
        assert name in report
    for name in ("ttft", "tpot", "itl", "e2el"):
        for figure in ("mean", "median", "std", "p90", "p99"):
            assert report[f"{figure}_{name}_ms"] is not None
    assert report["completed"] == 2 and report["failed"] == 1 and report["num_unfinished"] == 1
    assert report["failures"] == {"HTTP 503: full": 1}
    assert report["request_throughput"] == 0.8 and report["request_goodput"] == 0.4, "one of the two was good"
    assert report["output_throughput"] == pytest.approx(32 / 2.5)
    assert report["total_token_throughput"] == pytest.approx(52 / 2.5)
    assert report["median_ttft_ms"] == 300 and report["mean_tpot_ms"] == pytest.approx(55.0)
    assert report["request_rate"] == "inf" and report["max_concurrency"] == 2
    assert not any(name.startswith("spec_decode") for name in report), "absent, not zero"
    assert report["share_within_goals"] == 0.3333, "of the two answers and the failure, one was good"
    assert result.report()["request_goodput"] is result.report()["share_within_goals"] is None
    json.dumps(report, allow_nan=False)


def test_report_of_nothing_answered_has_no_figures_and_no_error():
    report = Result(Load(1), 3).report()
    assert report["mean_ttft_ms"] is None and report["output_throughput"] == 0 and report["num_unfinished"] == 3
    json.dumps(report, allow_nan=False)


def test_details_are_in_the_order_of_the_requests():
    later, earlier = outcome(1, 5.0, [5.5], 2), outcome(0, 4.0, [6.0], 3)
    report = Result(Load(2), 2, [later, earlier], duration=2.0).report(is_detailed=True)
    assert report["output_lens"] == [3, 2] and report["start_times"] == [0.0, 1.0] and report["errors"] == ["", ""]


def test_spread_of_one_value_and_of_none():
    assert spread([0.1], "ttft") == {
        "mean_ttft_ms": 100.0,
        "median_ttft_ms": 100.0,
        "std_ttft_ms": 0.0,
        **{f"p{percent}_ttft_ms": 100.0 for percent in (5, 25, 75)},
        "p90_ttft_ms": 100.0,
        "p95_ttft_ms": 100.0,
        "p99_ttft_ms": 100.0,
    }
    assert set(spread([], "itl").values()) == {None}


def test_peaks():
    outcomes = [outcome(0, 0.0, [0.5, 1.5], 10), outcome(1, 1.0, [1.9], 4), outcome(2, 2.0, [2.5], 1)]
    assert peak_tokens(outcomes) == 9.0 and peak_concurrency(outcomes) == 2
    assert peak_tokens([]) == 0.0 and peak_concurrency([]) == 0
    back_to_back = [outcome(0, 0.0, [1.0], 1), outcome(1, 1.0, [2.0], 1)]
    assert peak_concurrency(back_to_back) == 1, "one begins when the other ends"


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "speed:3", "", "tpot:-1", "tpot:nan", "ttft:inf"])
def test_goals_that_mean_nothing_are_refused(text):
    with pytest.raises(ConfigError) as refused:
        read_goals(text)
    assert "goodput" in str(refused.value)


# A real server -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_chat", [True, False])
def test_closed_loop_over_a_real_server(served, is_chat):
    result = run_load(served.url, Load(2), 7, question(is_chat=is_chat))
    report = result.report()
    assert report["completed"] == 7 and report["failures"] == {} and report["output_tokens_from_usage"]
    assert report["total_output_tokens"] == 7 * 12, "ignore_eos: every answer has its full length"
    assert report["max_concurrent_requests"] == 2
    assert 1.0 <= report["spec_decode_acceptance_length"] <= 5.0
    assert report["spec_decode_draft_tokens"] > report["spec_decode_accepted_tokens"] >= 0
    assert len(report["spec_decode_per_position_acceptance_rates"]) == 4
    for one in result.outcomes:
        assert 0 < one.ttft <= one.latency <= one.ended - one.sent
        assert len(one.times) <= one.num_output, "a piece holds at least one token"


def test_acceptance_is_that_of_the_measured_requests_alone(served):
    served.http.post("/v1/completions", json={"prompt": "before", "max_tokens": 20})
    before = served.metric("vllm:spec_decode_num_drafts_total")
    report = run_load(served.url, Load(1), 2).report()
    assert report["spec_decode_num_drafts"] == served.metric("vllm:spec_decode_num_drafts_total") - before


def test_counters_of_the_servers_whole_life_are_not_told_as_those_of_a_load(served):
    served.http.post("/v1/completions", json={"prompt": "before", "max_tokens": 20})
    result = run_load(served.url, Load(1), 2)
    assert result.report()["prefix_cache_hit_rate"] is not None and result.speculation is not None
    result.before = Scrape()
    report = result.report()
    assert report["prefix_cache_hit_rate"] is None and result.speculation is None, "the scrape before it failed"
    assert not [name for name in report if name.startswith("spec_decode")]


def test_texts_are_those_that_the_server_gives_others(served):
    result = run_load(served.url, Load(3), 3)
    expected = served.client().chat.completions.create(
        model="tiny",
        messages=list(PROMPTS[1].messages),
        max_tokens=12,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert result.report(is_detailed=True)["generated_texts"][1] == expected.choices[0].message.content


CHAT = Prompt("1", ({"role": "user", "content": "the user"},), "turns", category="chat")
TURNS = replace(CHAT, category="writing", later=({"role": "user", "content": "and then"},) * 2)


def test_turns_are_sent_with_the_answers_before_them_and_figures_are_kept_by_category(served):
    result, sent = Result(Load(2), 8), list[list[dict[str, Any]]]()

    class Recorded(Question):
        def body(self, prompt: Prompt, index: int) -> dict[str, Any]:
            sent.append(list(prompt.messages))
            return super().body(prompt, index)

    async def run() -> None:
        async with Connections(served.url, seconds=10) as connections:
            await apply(connections, Recorded(**vars(question())), [TURNS, CHAT], result)

    asyncio.run(run())
    report = result.report(is_detailed=True)
    assert report["completed"] == 8 and report["categories"] == ["writing"] * 3 + ["chat"] + ["writing"] * 3 + ["chat"]
    texts = report["generated_texts"]
    second = next(messages for messages in sent if len(messages) == 5)
    assert [message["content"] for message in second] == ["the user", texts[0], "and then", texts[1], "and then"]
    assert [message["role"] for message in second] == ["user", "assistant"] * 2 + ["user"]
    by_category = report["by_category"]
    assert {name: each["completed"] for name, each in by_category.items()} == {"writing": 6, "chat": 2}
    assert sum(each["num_drafts"] for each in by_category.values()) == report["spec_decode_num_drafts"]
    drafted = sum((each["acceptance_length"] - 1) * each["num_drafts"] for each in by_category.values())
    assert drafted == pytest.approx(report["spec_decode_accepted_tokens"], abs=0.01)
    assert all(each["tokens_per_second_per_request"] > 0 for each in by_category.values())


def test_turns_behind_a_failed_one_fail_too():
    with stub(page(503, b'{"error": {"message": "full"}}')) as url:
        result = Result(Load(1), 3)

        async def run() -> None:
            async with Connections(url, seconds=5) as connections:
                await apply(connections, question(), [TURNS], result)

        asyncio.run(run())
    assert result.report()["failures"] == {"an earlier turn failed": 2, "HTTP 503: full": 1}


def test_document_of_one_load_is_one_of_vllm_bench_serve():
    result = Result(Load(2), 1, [outcome(0, 0.0, [0.1, 0.2], 11)], duration=2.5)
    facts = {"workload": "w", "base_url": "http://h:1"}
    found = document_of([result], question(), goals=None, is_detailed=False, **facts)
    head = "date endpoint_type backend label model_id tokenizer_id burstiness"
    for name in (*head.split(), *VLLM_FIELDS.split(), "mean_ttft_ms", "p99_tpot_ms", "median_itl_ms", "std_e2el_ms"):
        assert name in found and found[name] == found["results"][0][name], name
    both = document_of([result, result], question(), goals=None, is_detailed=False, **facts)
    assert "completed" not in both and len(both["results"]) == 2


def test_open_loop_sends_when_due_however_slow_the_answers_are():
    with stub(stream(piece("a"), piece("b", "stop"), DONE, pause=0.2)) as url:
        result = run_load(url, Load(None, 20.0), 10, seed=3)
    assert all(outcome.error is None for outcome in result.outcomes)
    lateness = [outcome.sent - outcome.due for outcome in result.outcomes]
    assert max(lateness) < 0.2 and result.report()["max_concurrent_requests"] > 2
    due = sorted(outcome.due for outcome in result.outcomes)
    assert due[-1] - due[0] == pytest.approx(arrivals(20.0, 10, seed=3)[-1] - arrivals(20.0, 10, seed=3)[0])


def test_limit_on_concurrency_holds_at_any_rate():
    with stub(stream(piece("a", "stop"), DONE, pause=0.05)) as url:
        result = run_load(url, Load(2, 200.0), 8)
    report = result.report(is_detailed=True)
    assert report["max_concurrent_requests"] == 2 and max(report["queue_times"]) > 0.1
    assert report["prefix_cache_hit_rate"] is None and "spec_decode_num_drafts" not in report, "there is no /metrics"


def test_refused_requests_are_counted_with_the_servers_reason(served):
    report = run_load(served.url, Load(2), 3, question(model="other")).report()
    assert report["completed"] == 0 and report["failed"] == 3
    ((reason, count),) = report["failures"].items()
    assert reason.startswith("HTTP 404: ") and "other" in reason and count == 3
    too_long = run_load(served.url, Load(1), 1, question(max_tokens=10_000)).report()
    assert next(iter(too_long["failures"])).startswith("HTTP 400: ")


def test_interrupted_sweep_keeps_what_was_measured(served):
    planned = [Result(Load(1), 2), Result(Load(1), 1000), Result(Load(1), 2)]
    results: list[Result] = []

    async def run() -> None:
        async with Connections(served.url, seconds=10) as connections:
            work = asyncio.create_task(sweep(connections, question(), PROMPTS, planned, results))
            while len(results) < 2 or len(results[1].outcomes) < 3:
                await asyncio.sleep(0.01)
            work.cancel()
            await work

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    assert [result.is_interrupted for result in results] == [False, True], "the third was not begun"
    report = results[1].report()
    assert report["completed"] >= 3 and report["failed"] == 0 and report["num_unfinished"] > 900
    assert report["output_throughput"] > 0 and report["spec_decode_num_drafts"] > 0
    assert served.wait_until_idle().num_running == 0, "what was in flight was given up"


def test_warm_up_that_fails_ends_the_run_with_its_reason():
    async def run(url: str) -> None:
        async with Connections(url, seconds=5) as connections:
            await warm_up(connections, question(), PROMPTS[0])

    with stub(page(401, b'{"error": {"message": "no key"}}')) as url, pytest.raises(ServerError) as refused:
        asyncio.run(run(url))
    assert "HTTP 401: no key" in refused.value.message


# Reports -----------------------------------------------------------------------------------------------------------


def document(rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    facts = {"model_id": "m", "base_url": "http://h:1", "workload": "w", "max_tokens": 8}
    facts |= {"temperature": 0.0, "goodput": None, "provenance": provenance()}
    return facts | {"results": rows} | more


def measured(load: Load, speed: int) -> dict[str, Any]:
    times = [0.1 * step / speed for step in range(1, 6)]
    return Result(load, 1, [outcome(0, 0.0, times, 10)], duration=1.0 / speed).report()


def text_of(document: dict[str, Any]) -> str:
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as captured:
        console.print(*tables(document))
    return captured.get()


def test_tables_tell_figures_failures_and_doubts():
    row = measured(Load(4), 1) | {"failures": {"HTTP 503: full": 2}, "client_busy": 0.95, "prefix_cache_hit_rate": 0.5}
    row |= {"spec_decode_acceptance_length": 2.5, "spec_decode_acceptance_rate": 50.0, "request_goodput": 0.25}
    row |= {"spec_decode_per_position_acceptance_rates": [0.9, 0.6], "share_within_goals": 0.125}
    chat = row["by_category"][""]
    row["by_category"] = {"chat": chat, "code": chat | {"acceptance_length": 3.25}}
    text = text_of(document([row], goodput={"ttft": 200}))
    for word in (
        "HTTP 503: full",
        "2.50",
        "50.0%",
        "0.900",
        "95% of a core",
        "50% of prompt tokens",
        "0.25",
        "goodput",
        "12.5%",
        "by category",
        "3.25",
    ):
        assert word in text, word
    assert "2.0" not in text.split("requests/s")[0] and " request " in text_of(document([measured(Load(None, 2.0), 1)]))


@pytest.mark.parametrize(
    "loads",
    [
        [Load(1), Load(8), Load(32)],
        [Load(None, 1.0), Load(None, 4.0)],
        [Load(1, 2.0), Load(4, 2.0), Load(1), Load(4)],
        [Load(2)],
        [Load(None)],
    ],
)
def test_plot_is_drawn_for_every_kind_of_sweep(tmp_path, loads):
    rows = [measured(load, index + 1) for index, load in enumerate(loads)]
    plot(document(rows), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
