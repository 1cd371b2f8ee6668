"""What a scrape shows: vLLM's names with the right values, and our own."""

import asyncio
import re

import pytest

from peagle.checkpoint.card import Baseline, baseline_of
from peagle.engine.outputs import EngineStats
from peagle.sampling_params import Grammar, SamplingParams
from peagle.server.jobs import Job
from peagle.server.metrics import DRIFT_SHARE, MIN_WINDOW_DRAFTS, ServerMetrics, deep_acceptance

VLLM_COUNTERS = {
    "spec_decode": ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos"),
    "prefix_cache": ("queries", "hits"),
    "request": ("success",),
    "": ("prompt_tokens", "generation_tokens", "num_preemptions", "admission_rejections"),
}
VLLM_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
VLLM_HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_max_tokens",
    "request_params_n",
)
VLLM_NAMES = [
    *(f"vllm:{group}_{name}_total".replace(":_", ":") for group, names in VLLM_COUNTERS.items() for name in names),
    *(f"vllm:{name}" for name in VLLM_GAUGES),
    *(f"vllm:{name}_count" for name in VLLM_HISTOGRAMS),
]


def test_names_that_existing_tools_read_are_there(served):
    served.http.post("/v1/completions", json={"prompt": "the", "max_tokens": 4})
    text = served.http.get("/metrics").text
    missing = [name for name in VLLM_NAMES if not re.search(rf"^{name}(\{{| )", text, flags=re.MULTILINE)]
    assert not missing
    assert "_created" not in text


def test_counts_are_those_of_the_answers(served):
    ask = {"prompt": "the user", "max_tokens": 20, "temperature": 0, "n": 2}
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")

    def counts():
        found = {name: served.metric(f"vllm:spec_decode_{name}_total") for name in names}
        return found | {"tokens": served.metric("vllm:generation_tokens_total")}

    before = counts()
    figures = served.http.post("/v1/completions", json=ask).json()["metrics"]["speculative_decoding"]
    gained = {name: value - before[name] for name, value in counts().items()}
    assert gained == {
        "num_drafts": figures["num_spec_steps"],
        "num_draft_tokens": figures["num_draft_tokens"],
        "num_accepted_tokens": figures["num_accepted_draft_tokens"],
        "tokens": 40,
    }
    assert (
        served.metric('vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="tiny",position="3"}')
        >= 0
    )
    assert served.metric("vllm:num_requests_running") == 0 and served.metric("vllm:kv_cache_usage_perc") == 0
    assert served.metric("peagle:tokens_saved_total") == served.metric("vllm:spec_decode_num_accepted_tokens_total")


def test_requests_are_counted_by_route_and_status(served):
    served.http.get("/some/where")
    served.http.post("/v1/completions", json={})
    assert served.metric('peagle:http_requests_total{route="other",status="404"}') == 1
    assert served.metric('peagle:http_requests_total{route="/v1/completions",status="400"}') >= 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_times_begin_when_the_request_is_there_and_not_when_it_is_tokenized(served, chat_body, monkeypatch, path):
    """One thread tokenizes for all, and a grammar is compiled first: the client waits for both."""
    names = ("vllm:time_to_first_token_seconds_sum", "vllm:e2e_request_latency_seconds_sum")
    in_thread = served.service.in_thread

    async def in_busy_thread(request, function):
        await asyncio.sleep(0.4)
        return await in_thread(request, function)

    monkeypatch.setattr(served.service, "in_thread", in_busy_thread)
    before = [served.metric(name) for name in names]
    body = {"prompt": "the", "max_tokens": 2} if path == "/v1/completions" else chat_body
    answer = served.http.post(path, json=body).json()
    assert answer["metrics"]["time_to_first_token_ms"] >= 400
    assert all(served.metric(name) - earlier >= 0.4 for name, earlier in zip(names, before, strict=True))


def job_with(histogram, num_left_out=0, **params):
    """With so many drafts by the number of their tokens that were accepted, of which some were not verified whole."""
    job = Job(None, "x", [[1]], SamplingParams(max_tokens=10, **params), len(histogram) - 1)
    job.num_steps, job.histogram, job.finished_at = sum(histogram), histogram, job.started + 1
    job.num_drafted = (len(histogram) - 1) * sum(histogram) - num_left_out
    return job


def test_time_per_token_is_that_of_each_answer_however_many_there_are():
    job = Job(None, "x", [[1], [1]], SamplingParams(max_tokens=10), 0)
    for choice, seconds in zip(job.choices, (2.0, 8.0), strict=True):
        choice.token_ids, choice.first_at, choice.last_at = [5] * 5, job.started + 1, job.started + 1 + seconds
    job.finished_at = job.started + 9
    timings = job.timings()
    assert timings["time_to_first_token_ms"] == pytest.approx(1000) and timings["mean_itl_ms"] == pytest.approx(1250)
    assert timings["generation_time_ms"] == pytest.approx(8000) and timings["tokens_per_second"] == 1.0
    metrics = ServerMetrics("m")
    metrics.finished(job, is_full=True)
    for histogram in (metrics.tpot, metrics.full_load):
        values = {sample.name: sample.value for sample in histogram._child_samples() if not sample.labels}
        assert values["_count"] == 2 and values["_sum"] == pytest.approx(0.5 + 2.0)


def test_drift_is_told_when_acceptance_falls_below_the_card():
    metrics = ServerMetrics("m", 2, baseline=Baseline(2.0, "card"))
    assert not metrics.has_drifted(), "nothing is known yet"
    few = MIN_WINDOW_DRAFTS - 1
    metrics.finished(job_with([few, 0, 0]), is_full=False)
    assert not metrics.has_drifted(), "too little is known"
    metrics.finished(job_with([1, 0, 0]), is_full=True)
    assert metrics.acceptance_length() == (1.0, MIN_WINDOW_DRAFTS) and metrics.has_drifted()
    metrics.finished(job_with([0, 0, 2 * MIN_WINDOW_DRAFTS]), is_full=False)
    assert metrics.acceptance_length()[0] > DRIFT_SHARE * 2.0 and not metrics.has_drifted()
    assert b'finished_reason="None"' in metrics.text() or b"request_success" in metrics.text()


def test_steps_with_fewer_drafts_are_compared_with_a_shorter_chain():
    metrics = ServerMetrics("m", 2, baseline=baseline_of({"card": {"per_position": [0.8, 0.7]}}, 2))
    half = MIN_WINDOW_DRAFTS // 2
    metrics.finished(job_with([half, half, 0], num_left_out=half), is_full=True)
    assert metrics.expected() == Baseline(1.8, "card"), "one draft per step, and a half"
    metrics.finished(job_with([half, half, 0], num_left_out=half), is_full=True)
    assert metrics.acceptance_length()[0] == 1.5 and not metrics.has_drifted(), "above 80% of 1.8"
    metrics.finished(job_with([2 * half, 0, 0], num_left_out=2 * half), is_full=True)
    assert metrics.acceptance_length()[0] == 1.3333333333333333 and metrics.has_drifted()


def test_a_baseline_measured_by_decoding_goes_before_a_replay_and_the_alarm_names_it():
    decoded = {"kind": "decoded", "prompts": "mixed_prompts", "temperature": 0.0, "per_position": [0.5, 0.25]}
    found = baseline_of({"held_out_replay": {"per_position": [0.8, 0.6]}, "baseline": decoded}, 2)
    assert found == Baseline(1.75, "decoding mixed_prompts at temperature 0")
    metrics = ServerMetrics("m", 2, baseline=found)
    metrics.finished(job_with([MIN_WINDOW_DRAFTS, 0, 0]), is_full=True)
    shown = {family.name: family.documentation for family in metrics._shared(0, "requests")}
    assert "decoding mixed_prompts at temperature 0" in shown["peagle:acceptance_drift"]
    assert "decoding mixed_prompts at temperature 0" in shown["peagle:acceptance_length_baseline"]


def card_of(greedy, sampled=None):
    """Rates per position, measured by decoding."""
    rates = {"baseline": (0.0, greedy), "baseline_sampled": (1.0, sampled)}
    return {
        name: {"kind": "decoded", "prompts": "p", "temperature": temperature, "per_position": each}
        for name, (temperature, each) in rates.items()
        if each
    }


def test_the_baseline_of_sampled_requests_is_one_of_its_own():
    card = card_of([0.8, 0.6], [0.4, 0.2])
    assert baseline_of(card, 2) == Baseline(2.4, "decoding p at temperature 0")
    assert baseline_of(card, 2, is_sampled=True) == Baseline(1.6, "decoding p at temperature 1")
    assert baseline_of(card_of([0.8, 0.6]), 2, is_sampled=True) is None
    replay = {"held_out_replay": {"per_position": [0.8, 0.6]}}
    assert baseline_of(replay, 2, is_sampled=True) == Baseline(2.4, "held_out_replay"), "nothing tells them apart"


def test_requests_are_compared_with_the_baseline_of_their_temperature():
    card = card_of([0.8, 0.7], [0.3, 0.2])
    metrics = ServerMetrics("m", 2, 1, baseline_of(card, 2), baseline_of(card, 2, is_sampled=True))
    assert metrics.expected().length == 2.5, "no request yet"
    metrics.finished(job_with([MIN_WINDOW_DRAFTS, MIN_WINDOW_DRAFTS, 0], temperature=0.7), is_full=False)
    assert metrics.expected() == Baseline(1.5, "decoding p at temperature 1") and not metrics.has_drifted()
    metrics.finished(job_with([2 * MIN_WINDOW_DRAFTS, 0, 0]), is_full=False)
    assert metrics.expected() == Baseline(2.0, "decoding p at temperature 0, decoding p at temperature 1")
    assert metrics.acceptance_length()[0] == 1.25 and metrics.has_drifted()


@pytest.mark.parametrize(
    "params", [{"temperature": 1.0}, {"grammar": Grammar("json_object")}, {"logit_bias": {3: 1.0}}]
)
def test_requests_that_the_card_says_nothing_about_are_not_compared(params):
    metrics = ServerMetrics("m", 2, 1, baseline_of(card_of([0.8, 0.7]), 2))
    metrics.finished(job_with([MIN_WINDOW_DRAFTS, 0, 0], **params), is_full=False)
    assert metrics.acceptance_length() == (None, 0) and not metrics.has_drifted()


def test_baseline_is_what_the_card_says_for_this_number_of_draft_tokens():
    card = {"a": {"per_position": [0.8, 0.5, 0.25]}, "b": {"per_position": [0.6, 0.3, 0.15]}, "c": {"speed": 3}}
    assert baseline_of(card, 3) == Baseline(2.3, "a, b")
    assert baseline_of(card, 1) == Baseline(1.7, "a, b")
    assert baseline_of(card, 4) is None and baseline_of(card, 0) is None and baseline_of({}, 2) is None


def test_deep_acceptance_is_of_tokens_whose_predecessor_was_accepted():
    assert deep_acceptance([10] * 20 + [5]) == 0.5
    assert deep_acceptance([10] * 19 + [0, 0]) == 0.0


def test_a_server_that_stopped_drafting_says_so_with_the_gain_that_it_expects():
    metrics = ServerMetrics("m", 2)
    metrics.stats = EngineStats(drafting_pays=False, drafting_gain=0.8, num_draft_pauses=3)
    values = dict(line.rsplit(" ", 1) for line in metrics.text().decode().splitlines() if line.startswith("peagle:dra"))
    labels = '{engine="0",model_name="m"}'
    assert values == {
        f"peagle:drafting_pays{labels}": "0.0",
        f"peagle:draft_pauses_total{labels}": "3.0",
        f"peagle:drafting_gain{labels}": "0.8",
    }
    metrics.stats = EngineStats()
    assert b"peagle:draft" not in metrics.text(), "a fixed number of drafts is not judged"


def test_the_drift_alarm_is_logged_once_and_names_its_baseline(caplog):
    caplog.set_level("INFO")
    metrics = ServerMetrics("m", 2, baseline=Baseline(3.4, "decoding mixed_prompts at temperature 0"))
    metrics.finished(job_with([MIN_WINDOW_DRAFTS, MIN_WINDOW_DRAFTS, 0]), is_full=False)
    for _ in range(2):
        assert metrics.has_drifted()
    assert [record.message for record in caplog.records] == [
        f"acceptance length 1.50 over the last {2 * MIN_WINDOW_DRAFTS:,} drafts is below 80% of the card's 3.40 "
        "(measured by decoding mixed_prompts at temperature 0)"
    ]
    metrics.window.clear()
    metrics.finished(job_with([0, 0, 9 * MIN_WINDOW_DRAFTS]), is_full=False)
    assert not metrics.has_drifted() and "is no longer below 80% of the card's 3.40" in caplog.records[-1].message
