"""The server in front of vLLM, whose part a stub process plays: what is forwarded, refused, counted and told."""

import json
import os
import signal
import threading
import time

import httpx
import openai
import pytest

from harness.running_proxy import CHAT, running
from harness.stub_vllm import stub_python
from peagle.server.metrics import MIN_WINDOW_DRAFTS
from peagle.vllm.process import find_vllm


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter that has the stub."""
    return find_vllm(str(stub_python(tmp_path_factory.mktemp("stub"))), {})


@pytest.fixture(scope="module")
def proxy(python):
    with running(python) as found:
        yield found


def test_the_openai_client_gets_whole_answers_with_speculation_figures(proxy):
    with openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model="mine", messages=CHAT["messages"], max_tokens=4)
        assert answer.choices[0].message.content == "the user asks what "
        assert answer.usage.metrics["speculative_decoding"]["mean_acceptance_length"] == 2.0
        assert answer._request_id.startswith("req-") and answer.id == f"cmpl-{answer._request_id}"
        assert client.completions.create(model="", prompt="x", max_tokens=2).choices[0].text == "the user "


def test_the_openai_client_gets_streams_with_usage_at_the_end(proxy):
    with openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0) as client:
        asked = {"model": "mine", "messages": CHAT["messages"], "max_tokens": 4, "stream": True}
        chunks = list(client.chat.completions.create(**asked, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content for chunk in chunks[:-1]) == "the user asks what "
    assert chunks[-1].usage.completion_tokens == 4
    assert chunks[-1].usage.metrics["speculative_decoding"]["mean_acceptance_length"] == 2.0


def test_a_request_id_goes_through_to_the_engine_and_back(proxy):
    response = proxy.http.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "abc"})
    assert response.headers["x-request-id"] == "abc" and response.json()["id"] == "cmpl-abc"


@pytest.mark.parametrize(
    "speculation", [None, {}, {"enabled": True}, {"num_draft_tokens": 5}, {"details": False, "enabled": True}]
)
def test_speculation_that_asks_for_what_the_engine_does_is_honoured(proxy, speculation):
    assert proxy.post(speculation=speculation).status_code == 200


@pytest.mark.parametrize(
    ("speculation", "param", "words"),
    [
        ({"enabled": False}, "speculation.enabled", "drafts for all requests or for none"),
        ({"num_draft_tokens": 3}, "speculation.num_draft_tokens", "drafts 5 tokens for all requests"),
        ({"tolerance": 0.9}, "speculation.tolerance", "accepts drafts exactly"),
        ({"details": True}, "speculation.details", "does not report how each token was produced"),
        ({"depth": 3}, "depth", "unknown field"),
    ],
)
def test_speculation_that_the_engine_cannot_vary_is_refused_by_name(proxy, speculation, param, words):
    response = proxy.post(speculation=speculation)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and words in error["message"]
    assert error["type"] == "invalid_request_error"


def test_a_field_that_the_engine_would_drop_in_silence_is_refused_with_the_nearest_one(proxy):
    error = proxy.post(temperatur=1).json()["error"]
    assert error["message"] == "unknown field 'temperatur'; did you mean 'temperature'?"
    assert error["code"] == "unknown_parameter" and error["param"] == "temperatur"
    assert proxy.post(temperature=None, safety_identifier="x", whatever=None).status_code == 200


def test_too_many_answers_at_once_are_refused(python):
    with running(python, max_choices=4) as proxy:
        assert proxy.post(n=4).status_code == 200
        assert "5 answers (prompts x n) exceed the limit of 4" in proxy.post(n=5).json()["error"]["message"]
        body = {"prompt": ["a", "b"], "n": 3}
        assert proxy.http.post("/v1/completions", json=body).status_code == 400


def test_the_engine_s_refusals_come_in_our_form(proxy):
    for stream in (False, True):
        response = proxy.http.post("/v1/completions", json={"prompt": "refuse", "stream": stream})
        assert response.status_code == 400 and response.headers["x-request-id"]
        assert response.json()["error"] == {
            "message": "the prompt is too long",
            "type": "invalid_request_error",
            "param": "prompt",
            "code": None,
        }


def test_bodies_that_are_none_are_refused_before_they_reach_the_engine(proxy):
    before = proxy.metric("vllm:spec_decode_num_drafts_total")
    for body in (b"{", b'{"prompt": "\\ud83d"}'):
        assert proxy.http.post("/v1/completions", content=body).status_code == 400
    assert proxy.http.post("/v1/completions", json=[1]).status_code == 400
    assert proxy.http.post("/v1/completions", content=b"x", headers={"Content-Type": "text/plain"}).status_code == 415
    assert proxy.metric("vllm:spec_decode_num_drafts_total") == before


def test_sagemaker_s_routes(proxy):
    assert proxy.http.get("/ping").status_code == 200 and proxy.http.post("/ping").status_code == 200
    assert "message" in proxy.http.post("/invocations", json=CHAT).json()["choices"][0]
    headers = {"X-Amzn-SageMaker-Custom-Attributes": "route=/tokenize"}
    assert proxy.http.post("/invocations", json={"prompt": "x"}, headers=headers).json()["count"] == 2
    assert proxy.http.post("/invocations", json={}).status_code == 400


def test_further_routes_of_the_engine_are_forwarded_and_others_are_not_there(proxy):
    assert proxy.http.post("/v1/responses", json={"input": "x"}).status_code == 200
    response = proxy.http.post("/v1/nothing", json={})
    assert response.status_code == 404 and "no route '/v1/nothing'" in response.text


def test_the_routes_are_described(proxy):
    paths = proxy.http.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/invocations", "/metrics", "/ping"} <= paths.keys()
    assert set(paths["/ping"]) == {"get", "post"}


def test_models_and_version_tell_what_runs(proxy):
    (entry,) = proxy.http.get("/v1/models").json()["data"]
    assert entry["id"] == "mine" and entry["max_model_len"] == 99
    assert entry["peagle"] == {
        "engine": "vLLM 0.32.0",
        "method": "p-eagle",
        "num_draft_tokens": 5,
        "max_num_draft_tokens": 5,
        "drafter": "head",
        "max_length": 99,
    }
    assert proxy.http.get("/v1/models/mine").json() == entry
    assert proxy.http.get("/v1/models/other").status_code == 404
    assert proxy.http.get("/version").json()["engine"] == "vLLM 0.32.0"


def test_one_exposition_has_the_engine_s_metrics_and_ours(python):
    from prometheus_client.parser import text_string_to_metric_families

    with running(python) as proxy:
        assert "peagle:acceptance_length{" not in proxy.http.get("/metrics").text, "the warm-up does not count"
        proxy.post(max_tokens=20)
        families = {family.name for family in text_string_to_metric_families(proxy.http.get("/metrics").text)}
        assert {"vllm:spec_decode_num_drafts", "peagle:acceptance_length", "peagle:acceptance_drift"} <= families
        assert proxy.metric("peagle:acceptance_length{") == 2.0
        assert proxy.metric("peagle:acceptance_length_baseline{") == 4.5
        assert proxy.metric("peagle:acceptance_window_drafts{") == 10
        assert proxy.metric("peagle:engine_up{") == 1 and proxy.metric("peagle:num_draft_tokens{") == 5
        assert proxy.metric('peagle:http_requests_total{route="/v1/chat/completions",status="200"}') == 1
        assert proxy.metric("peagle:acceptance_drift{") == 0, "too few drafts for an alarm"
        while proxy.metric("peagle:acceptance_window_drafts{") < MIN_WINDOW_DRAFTS:
            proxy.post(max_tokens=400)
        assert proxy.metric("peagle:acceptance_drift{") == 1, "2.0 is below 0.8 of the card's 4.5"


def test_keys_are_asked_for_on_every_route_that_answers(python):
    with running(python, keys=("secret",)) as proxy:
        for path in ("/v1/chat/completions", "/invocations", "/v1/responses", "/tokenize"):
            response = proxy.http.post(path, json=CHAT)
            assert response.status_code == 401 and response.json()["error"]["type"] == "authentication_error", path
        assert proxy.http.get("/v1/models").status_code == 401 and proxy.http.get("/ping").status_code == 200
        headers = {"Authorization": "Bearer secret"}
        assert proxy.http.post("/invocations", json=CHAT, headers=headers).status_code == 200


def test_a_full_queue_is_told_with_when_to_come_back(python):
    with running(python, served={"max_batch": 1, "max_waiting": 1}) as proxy:
        threads = [
            threading.Thread(
                target=httpx.post,
                args=(f"{proxy.url}/v1/completions",),
                kwargs={"json": {"prompt": "slow", "max_tokens": 8}, "timeout": 30},
            )
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        while proxy.lifecycle.service._num_open < 2:
            time.sleep(0.01)
        response = proxy.post()
        assert response.status_code == 503 and response.json()["error"]["code"] == "queue_full"
        assert response.headers["retry-after"] == "1" and proxy.metric("peagle:queue_full_total") == 1
        for thread in threads:
            thread.join()
        assert proxy.post().status_code == 200


def test_an_answer_that_takes_too_long_is_ended(python):
    with running(python, request_seconds=0.5) as proxy:
        response = proxy.http.post("/v1/completions", json={"prompt": "slow", "max_tokens": 50})
        assert response.status_code == 504 and response.json()["error"]["code"] == "timeout"
        with proxy.http.stream(
            "POST", "/v1/completions", json={"prompt": "slow", "stream": True, "max_tokens": 50}
        ) as r:
            events = [line for line in r.iter_lines() if line.startswith("data: ")]
        assert json.loads(events[-2][6:])["error"]["code"] == "timeout" and events[-1] == "data: [DONE]"


def test_the_engine_stops_working_for_a_client_that_has_gone(proxy):
    body = {"prompt": "slow", "stream": True, "max_tokens": 200}
    with proxy.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        assert proxy.lifecycle.service._num_open == 1
    deadline = time.monotonic() + 5
    while proxy.lifecycle.service._num_open and time.monotonic() < deadline:
        time.sleep(0.02)
    assert proxy.lifecycle.service._num_open == 0
    assert proxy.metric("peagle:clients_gone_total") == 1


def test_a_dead_engine_is_told_to_those_that_wait_and_to_those_that_come_and_is_logged(python, caplog):
    with running(python) as proxy:
        response = proxy.http.post("/v1/completions", json={"prompt": "die"})
        assert response.status_code == 503 and response.json()["error"]["code"] == "engine_dead"
        assert proxy.http.get("/ping").json()["error"]["code"] == "server_dead"
        assert proxy.post().status_code == 503
        text = proxy.http.get("/metrics").text
        assert "vllm:" not in text and proxy.metric("peagle:engine_up{") == 0
        deadline = time.monotonic() + 5
        while "its last lines" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.02)
    assert "vLLM 0.32.0 ended with status 3; its last lines:\n  loading the weights\n  serving" in caplog.text
    assert caplog.text.count("its last lines") == 1


def test_a_stream_that_breaks_off_ends_with_an_error_that_clients_see(python):
    with running(python) as proxy, openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="x", max_retries=0) as client:
        chunks = client.completions.create(model="", prompt="break", max_tokens=9, stream=True)
        assert [next(chunks).choices[0].text for _ in range(2)] == ["the ", "user "]
        with pytest.raises(openai.APIError) as caught:
            next(chunks)
        assert "the engine has stopped" in str(caught.value)


def test_an_engine_that_cannot_answer_its_first_request_never_gets_ready(python, monkeypatch):
    monkeypatch.setattr("peagle.vllm.proxy.WARMUP_TOKENS", "many")
    with pytest.raises(AssertionError, match=r"vLLM 0\.32\.0 failed its first request"):
        with running(python):
            pass


def test_a_process_that_no_longer_answers_its_health_check_is_not_ready(python, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr("peagle.vllm.proxy.HEALTH_SECONDS", 0.05)
    monkeypatch.setattr("peagle.vllm.proxy.WATCH_SECONDS", 0.05)
    monkeypatch.setenv("STUB_VLLM", json.dumps({"report": str(tmp_path / "report.json")}))
    caplog.set_level("INFO")

    def wait_for(status):
        deadline = time.monotonic() + 10
        while proxy.http.get("/ping").status_code != status:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    with running(python) as proxy:
        pid = json.loads((tmp_path / "report.json").read_text())["pids"][0]
        os.kill(pid, signal.SIGSTOP)
        wait_for(503)
        os.kill(pid, signal.SIGCONT)
        wait_for(200)
    assert "its health check fails" in caplog.text and "its health check passes again" in caplog.text


def test_a_failure_of_the_engine_is_told_in_general_words_and_logged(proxy, caplog):
    for stream in (False, True):
        response = proxy.http.post("/v1/completions", json={"prompt": "fail", "stream": stream})
        assert response.status_code == 500 and response.json()["error"]["code"] == "engine_error"
        assert "kernel" not in response.text
    assert caplog.text.count("the engine failed a request with 500: a kernel was lost") == 2


def test_the_last_answer_of_an_engine_that_dies_is_told_as_its_death(python):
    with running(python) as proxy:
        response = proxy.http.post("/v1/completions", json={"prompt": "fail and die"})
        assert response.status_code == 503 and response.json()["error"]["code"] == "engine_dead"
