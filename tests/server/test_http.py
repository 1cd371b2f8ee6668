"""What the server does with requests that no well-behaved client sends, and with the headers around good ones."""

import json
import socket
import threading
import time

import httpx
import pytest

from harness.local_server import running, tiny_llm
from harness.model_families import trained_drafter
from harness.tiny_models import tiny_target
from peagle.decoding.reference import decode
from peagle.engine.llm import LLM
from peagle.sampling_params import SamplingParams
from peagle.server.protocol import NEUTRAL, SAMPLING_FIELDS, ChatBody, CompletionBody

CHAT = "/v1/chat/completions"


def message_of(response):
    body = response.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}
    return body["error"]["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is not valid JSON"),
        (b"{", "the body is not valid JSON"),
        (b"\xff\xfe\x00", "the body is not valid JSON"),
        (b"[" * 100_000, "the body is not valid JSON"),
        (b"[]", "the body must be a JSON object, got list"),
        (b"null", "the body must be a JSON object, got NoneType"),
        (b"{}", "'messages' is missing"),
        (b'{"messages": []}', "'messages' must not be empty"),
        (b'{"messages": [{"role": "usr", "content": "Hi."}]}', "unknown role 'usr'; did you mean 'user'?"),
        (b'{"messages": "hello"}', "'messages' must be a valid list, got 'hello'"),
        (b'{"messages": [{"content": "x"}]}', "'messages.0.role' is missing"),
        (b'{"messages": [{"role": "user", "content": 5}]}', "'messages.0.content'"),
        (
            b'{"messages": [{"role": "user", "content": "x"}], "n": 0}',
            "'n' must be at least 1, got 0",
        ),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": true}', "'n' must be a valid integer"),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 1e400}', "'n' must be a valid integer"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "'temperature'"),
        (
            b'{"messages": [{"role": "user", "content": "x"}], "n": 1000}',
            "1000 answers (prompts x n) exceed the limit of 128",
        ),
        (
            b'{"messages": [{"role": "user", "content": "x"}], "stop": [""]}',
            "'stop' must be a list of non-empty strings",
        ),
        (b'{"messages": [{"role": "user", "content": "x"}], "seed": 99999999999999999999}', "'seed' must be below"),
        (
            b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}',
            "'max_tokens' must be at least 1, got 0",
        ),
        (b'{"messages": [{"role": "user", "content": "x"}], "tempurature": 1}', "did you mean 'temperature'?"),
        (b'{"messages": [{"role": "user", "content": "x"}], "zzz": 1}', "unknown field 'zzz'; see /docs"),
        (b'{"messages": [{"role": "user", "content": "x"}], "speculation": {"k": 1}}', "unknown field 'speculation.k'"),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}',
            "'messages.0.content.0.type' must be 'text', got 'image_url'",
        ),
        (
            b'{"messages": [{"role": "user", "content": "x"}], "stream_options": {"include_usage": true}}',
            "'stream_options' requires 'stream'",
        ),
        (
            b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"chat_template": "y"}}',
            "the target's chat template has no variable 'chat_template'",
        ),
        (
            b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": []}}',
            "the target's chat template has no variable 'messages'",
        ),
        (
            b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
            "the body contains '\\ud83d', an unpaired surrogate",
        ),
        (
            b'{"messages": [{"role": "user"}], "speculation": {"enabled": false, "num_draft_tokens": 1}}',
            "cannot be combined with 'speculation.enabled': false",
        ),
    ],
)
def test_bad_body_is_a_400_that_says_why(served, body, message):
    response = served.http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400 and message in message_of(response)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "'prompt'"),
        ({"prompt": [-1]}, "'prompt"),
        ({"prompt": [5000]}, "prompt token ids must lie between 0 and 287"),
        ({"prompt": [2**40]}, "'prompt"),
        ({"prompt": ["the", 5]}, "'prompt"),
        ({"prompt": "the " * 400}, "leave no room for an answer"),
        ({"prompt": "the", "best_of": 2}, "'best_of' is not supported"),
        ({"prompt": "the", "suffix": "x"}, "'suffix' is not supported"),
        ({"prompt": "the", "max_tokens": 0}, "'max_tokens' must be at least 1, got 0; 0 requires 'echo'"),
        ({"prompt": "the", "logprobs": 21}, "'logprobs' must be at most 20, got 21"),
        ({"prompt": "the", "stop_token_ids": ["x"]}, "'stop_token_ids.0'"),
        ({"prompt": "the", "logit_bias": {"the": 1}}, "'logit_bias' must have token ids as keys, got 'the'"),
        ({"prompt": ["the"] * 100, "n": 2}, "200 answers (prompts x n) exceed the limit of 128"),
    ],
)
def test_bad_completion_is_a_400_that_says_why(served, body, message):
    response = served.http.post("/v1/completions", json=body)
    assert response.status_code == 400 and message in message_of(response)


def test_a_prompt_that_can_never_fit_says_how_much_does(served):
    response = served.http.post("/v1/completions", json={"prompt": "the " * 400})
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "no room for an answer in the context of 256" in message_of(response)


def test_a_prompt_that_is_far_too_long_is_refused_before_it_is_tokenized(served):
    for path, body in (
        ("/v1/completions", {"prompt": "x" * 8_000_000}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 8_000_000}]}),
    ):
        response = served.http.post(path, json=body)
        assert response.status_code == 400 and "characters exceed the context of 256 tokens" in message_of(response)


LONG = "\x01" * 700_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {LONG: 1}),
        (CHAT, {"messages": [{"role": LONG, "content": "x"}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "speculation": {LONG: 1}}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "model": LONG}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "logit_bias": {LONG: LONG}}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "stop": [LONG[:9999]] * 65}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "structured_outputs": {"regex": "(" + "x" * 15_000}}),
        ("/v1/completions", {"prompt": {LONG: LONG}}),
        (
            "/v1/completions",
            {"prompt": "x", "response_format": {"type": "json_object", "schema": {"type": LONG[:9999]}}},
        ),
        ("/" + "a" * 50_000, {}),
    ],
)
def test_an_error_does_not_repeat_what_was_sent(served, path, body):
    response = served.http.post(path, json=body)
    assert 400 <= response.status_code < 500 and len(response.content) < 4096
    assert response.json()["error"]["message"]


def test_refused_stream_still_has_its_status(served):
    response = served.http.post("/v1/completions", json={"prompt": [5000], "stream": True})
    assert response.status_code == 400 and "prompt token ids" in message_of(response)


def test_every_sampling_field_can_be_reached_over_http():
    """A field that the engine gains must be mapped here, or a client's wish for it would be refused for ever."""
    mapped = {"grammar", "num_draft_tokens", "tolerance", "shown_token_ids"}
    assert CompletionBody.model_fields.keys() | mapped >= SAMPLING_FIELDS


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_fields_we_do_not_have_are_refused_unless_they_ask_for_nothing(served, chat_body, name):
    if name in ChatBody.model_fields:
        path, body = "/v1/completions", {"prompt": "the", "max_tokens": 2}
    else:
        path, body = CHAT, chat_body
    assert name not in CompletionBody.model_fields or path == CHAT
    assert served.http.post(path, json=body | {name: None}).status_code == 200, "null is the same as leaving it out"
    for value in NEUTRAL[name][0]:
        assert served.http.post(path, json=body | {name: value}).status_code == 200
    response = served.http.post(path, json=body | {name: {"some": "thing"}})
    assert response.status_code == 400 and response.json()["error"]["param"] == name


def test_unknown_paths_and_methods_have_the_error_form(served):
    response = served.http.get("/v2/chat")
    assert response.status_code == 404 and message_of(response) == "no route '/v2/chat'"
    response = served.http.get(CHAT)
    assert response.status_code == 405 and message_of(response) == f"GET is not allowed for {CHAT!r}"


def test_other_content_types_are_a_415(served):
    response = served.http.post(CHAT, content=b"{}", headers={"Content-Type": "application/x-www-form-urlencoded"})
    assert response.status_code == 415 and "send 'Content-Type: application/json'" in message_of(response)


def test_request_id_is_echoed_or_made(served):
    own = served.http.get("/version", headers={"X-Request-Id": "abc-1"})
    assert own.headers["x-request-id"] == "abc-1"
    made = served.http.get("/version", headers={"X-Request-Id": "x" * 500})
    assert made.headers["x-request-id"].startswith("req-"), "an id that could break a log is replaced"


def test_stop_string_that_is_split_over_tokens_is_cut_right_in_a_stream(served):
    ask = {"prompt": "the", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    text = served.http.post("/v1/completions", json=ask).json()["choices"][0]["text"]
    for start in (3, 11, 24):
        stop = text[start : start + 4]
        expected = text[: text.index(stop)]
        whole = served.http.post("/v1/completions", json=ask | {"stop": stop}).json()["choices"][0]
        assert (whole["text"], whole["finish_reason"]) == (expected, "stop")
        assert "".join(stream_texts(served, ask | {"stop": [stop]})) == expected


def well_drafted_llm():
    """Its drafter has learned the answer to "the" by heart, so that most of the drafts there are accepted."""
    target = tiny_target()
    prompt_ids, params = target.tokenizer.encode("the"), SamplingParams(max_tokens=60, ignore_eos=True)
    answer = [token for step in decode(target, prompt_ids, params) for token in step.token_ids]
    drafter = trained_drafter(target, [[*prompt_ids, *answer]])
    return LLM(target, drafter, 4, max_batch=8, max_length=256, page_size=16, verify_tokens=0)


def test_end_token_inside_an_accepted_draft_ends_the_stream_there():
    ask = {"prompt": "the", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with running(well_drafted_llm) as served:
        tokenizer = served.service.tokenizer
        detailed = ask | {"speculation": {"details": True}}
        whole = served.http.post("/v1/completions", json=detailed).json()["choices"][0]
        token_ids, kinds = whole["token_ids"], [token["kind"] for token in whole["speculation"]["tokens"]]
        first_places = [index for index, token in enumerate(token_ids) if token not in token_ids[:index]]
        inside = [index for index in first_places if kinds[index : index + 2] == ["accepted", "accepted"]]
        assert len(inside) >= 3, kinds
        for first in inside[:8]:
            stopped = ask | {"stop_token_ids": [token_ids[first]]}
            shorter = served.http.post("/v1/completions", json=stopped).json()["choices"][0]
            assert shorter["token_ids"] == token_ids[: first + 1] and shorter["finish_reason"] == "stop"
            streamed = "".join(stream_texts(served, stopped))
            assert streamed == shorter["text"] == tokenizer.decode(token_ids[:first], skip_special_tokens=True)


def stream_texts(served, body):
    with served.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]]


def test_echo_puts_the_prompt_before_the_answer(served):
    ask = {"prompt": ["the user", "the"], "max_tokens": 5, "temperature": 0}
    plain = served.http.post("/v1/completions", json=ask).json()["choices"]
    echoed = served.http.post("/v1/completions", json=ask | {"echo": True}).json()["choices"]
    assert [each["text"] for each in echoed] == ["the user" + plain[0]["text"], "the" + plain[1]["text"]]
    alone = served.http.post("/v1/completions", json=ask | {"echo": True, "max_tokens": 0}).json()
    assert [each["text"] for each in alone["choices"]] == ["the user", "the"]
    assert alone["usage"]["completion_tokens"] == 0 and alone["choices"][0]["finish_reason"] == "length"
    assert "".join(stream_texts(served, ask | {"echo": True, "prompt": "the"})) == "the" + plain[1]["text"]


def test_echo_with_log_probabilities_tells_those_of_the_prompt(served):
    ask = {"prompt": "the user", "max_tokens": 6, "temperature": 0, "logprobs": 2, "ignore_eos": True}
    plain = served.http.post("/v1/completions", json=ask | {"return_token_ids": True}).json()["choices"][0]
    prompt = plain["prompt_token_ids"]
    body = ask | {"prompt": prompt + plain["token_ids"], "echo": True, "max_tokens": 0}
    choice = served.http.post("/v1/completions", json=body).json()["choices"][0]
    found = choice["logprobs"]
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None, "nothing comes before it"
    assert found["token_logprobs"][len(prompt) :] == pytest.approx(plain["logprobs"]["token_logprobs"], abs=1e-3)
    assert {len(found[key]) for key in found} == {len(prompt) + 6} and found["text_offset"][:3] == [0, 3, 4]
    echoed = served.http.post("/v1/completions", json=ask | {"echo": True}).json()["choices"][0]["logprobs"]
    assert echoed["tokens"][len(prompt) :] == plain["logprobs"]["tokens"]
    assert echoed["text_offset"][len(prompt) :] == [each + len("the user") for each in plain["logprobs"]["text_offset"]]
    with served.http.stream("POST", "/v1/completions", json=ask | {"echo": True, "stream": True}) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    streamed = {key: [each for event in events for each in event["choices"][0]["logprobs"][key]] for key in echoed}
    assert streamed["tokens"] == echoed["tokens"] and streamed["text_offset"] == echoed["text_offset"]
    response = served.http.post("/v1/completions", json=ask | {"echo": True, "stream": True, "n": 2})
    assert response.status_code == 400 and "streams one answer per prompt" in message_of(response)
    rows = served.http.post("/v1/completions", json=ask | {"prompt_logprobs": 1}).json()["choices"][0][
        "prompt_logprobs"
    ]
    assert len(rows) == len(prompt) and rows[0] is None and str(prompt[1]) in rows[1]


def test_the_page_and_its_files_are_served_and_nothing_else(served):
    page = served.http.get("/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert page.headers["cache-control"] == "no-cache"
    assert served.http.get("/static/page.js").headers["content-type"].startswith("text/javascript")
    for path in ("/static/..%2fapp.py", "/static/app.py", "/static/", "/static/%2e%2e/app.py", "/static/none.js"):
        assert served.http.get(path).status_code == 404, path


def test_details_say_of_every_token_how_it_came_about(served, chat_body):
    body = chat_body | {"max_tokens": 20, "speculation": {"details": True}, "stream": True}
    with served.http.stream("POST", CHAT, json=body) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    steps = [event for event in events if "speculation" in event]
    assert steps[0]["speculation"]["tokens"][0]["kind"] == "prefill"
    for step in steps:
        found = step["speculation"]
        assert "".join(token["text"] for token in found["tokens"]) == step["choices"][0]["delta"]["content"]
        assert [token["kind"] for token in found["tokens"]].count("accepted") == found["num_accepted"]
        assert found["num_drafted"] in (0, 4)
    assert sum(len(step["speculation"]["tokens"]) for step in steps) == 20
    assert steps[-1]["metrics"]["speculative_decoding"]["num_spec_steps"] == len(steps) - 1
    assert steps[-1]["metrics"]["time_to_first_token_ms"] > 0
    whole = served.http.post(CHAT, json=body | {"stream": False}).json()
    assert [token["kind"] for token in whole["choices"][0]["speculation"]["tokens"]] == [
        token["kind"] for step in steps for token in step["speculation"]["tokens"]
    ]


def test_running_usage_is_told_with_every_chunk_when_asked_for(served, chat_body):
    options = {"include_usage": True, "continuous_usage_stats": True}
    with served.http.stream("POST", CHAT, json=chat_body | {"stream": True, "stream_options": options}) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 8


def test_openapi_document_describes_the_bodies(served):
    document = served.http.get("/openapi.json").json()
    schema = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/ChatBody"}
    text = json.dumps(document)
    assert '"#/$defs' not in text and "messages" in document["components"]["schemas"]["ChatBody"]["properties"]


def test_body_limits_of_size_and_time():
    with running(max_body_bytes=2000, body_seconds=0.3) as served:
        response = served.http.post(CHAT, json={"messages": [{"role": "user", "content": "x" * 3000}]})
        assert response.status_code == 413 and "exceeds the limit of 2000 bytes" in message_of(response)

        def pieces():
            for _ in range(100):
                yield b" " * 100

        response = served.http.post(CHAT, content=pieces(), headers={"Content-Type": "application/json"})
        assert response.status_code == 413, "a body without a length is counted as it comes"
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            slow.settimeout(10)
            answer = slow.recv(65536)
        assert b" 408 " in answer.split(b"\r\n")[0] and b"did not arrive within 0.3 s" in answer
        assert served.lifecycle.num_in_flight == 0


def test_request_that_takes_too_long_is_ended():
    with running(lambda: tiny_llm(with_drafter=False), request_seconds=0.05) as served:
        ask = {"prompt": "the", "max_tokens": 250, "ignore_eos": True}
        response = served.http.post("/v1/completions", json=ask)
        assert response.status_code == 504 and response.headers["x-should-retry"] == "false"
        assert "exceeded the server's time limit" in message_of(response)
        with served.http.stream("POST", "/v1/completions", json=ask | {"stream": True}) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert json.loads(lines[-2][6:])["error"]["code"] == "timeout" and lines[-1] == "data: [DONE]"
        assert served.wait_until_idle().num_pages_used == 0


@pytest.mark.slow
def test_full_queue_is_a_503_with_retry_after_and_clients_retry():
    with running(lambda: tiny_llm(max_batch=1, max_waiting=1)) as served:
        ask = {"prompt": "the", "max_tokens": 120, "ignore_eos": True}
        answers = []
        threads = [
            threading.Thread(
                target=lambda: answers.append(httpx.post(f"{served.url}/v1/completions", json=ask, timeout=60))
            )
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        statuses = sorted(answer.status_code for answer in answers)
        assert set(statuses) == {200, 503}, statuses
        refused = next(answer for answer in answers if answer.status_code == 503)
        assert refused.headers["retry-after"] == "1" and refused.json()["error"]["code"] == "queue_full"
        assert served.metric("vllm:admission_rejections_total") == statuses.count(503)
        texts = []
        retrying = served.client(max_retries=20)
        threads = [
            threading.Thread(
                target=lambda: texts.append(
                    retrying.completions.create(model="tiny", prompt="the", max_tokens=40, temperature=0)
                    .choices[0]
                    .text
                )
            )
            for _ in range(5)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(texts) == 5 and len(set(texts)) == 1, "the SDK waits and tries again"


@pytest.mark.slow
def test_streams_that_wait_are_kept_alive():
    with running(lambda: tiny_llm(max_batch=1, with_drafter=False), keep_alive_seconds=0.05) as served:
        ask = {"prompt": "the", "max_tokens": 250, "ignore_eos": True}
        first = threading.Thread(target=lambda: httpx.post(f"{served.url}/v1/completions", json=ask, timeout=60))
        first.start()
        while served.stats().num_running == 0:
            time.sleep(0.005)
        with served.http.stream("POST", "/v1/completions", json=ask | {"stream": True, "max_tokens": 3}) as response:
            lines = [line for line in response.iter_lines() if line]
        first.join()
        assert lines[0] == ": keep-alive" and lines[-1] == "data: [DONE]"
        assert all(line == ": keep-alive" or line.startswith("data: ") for line in lines)


def test_cors_is_off_unless_asked_for(served):
    headers = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in served.http.get("/version", headers=headers).headers
    with running(cors_origins=("https://app.example",), keys=("secret",)) as open_to_web:
        answer = open_to_web.http.options(CHAT, headers=headers)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://app.example"
        refused = open_to_web.http.post(CHAT, json={}, headers=headers)
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://app.example"
