"""Answers by schema, pattern or choice, penalties and biases, as clients ask for them."""

import json
import threading
import time

import httpx
import openai
import pytest

import peagle.decoding.grammar as grammar_module
from harness.local_server import running
from peagle.decoding.grammar import make_guide
from peagle.server.service import MAX_COMPILING

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "is_new": {"type": "boolean"},
    },
    "required": ["color", "count", "is_new"],
    "additionalProperties": False,
}


def check(text):
    found = json.loads(text)
    assert found.keys() == {"color", "count", "is_new"}
    assert (
        found["color"] in ("red", "green", "blue") and isinstance(found["is_new"], bool) and 0 <= found["count"] <= 99
    )


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_schema_beside_the_type_is_followed(served, chat_body, kind):
    form = {"type": kind, "schema": SCHEMA}
    body = chat_body | {"response_format": form, "max_tokens": 80}
    check(served.http.post(CHAT, json=body).json()["choices"][0]["message"]["content"])
    body["response_format"] = form | {"json_schema": {"name": "other", "schema": {"type": "object"}}}
    assert "differ; omit one" in served.http.post(CHAT, json=body).json()["error"]["message"]


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_json_schema_always_parses_and_validates(served, chat_body, temperature):
    answer = served.client().chat.completions.create(
        model="tiny",
        messages=chat_body["messages"],
        max_tokens=100,
        temperature=temperature,
        n=4,
        response_format={"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}},
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        check(choice.message.content)


def test_schema_is_kept_in_streams_and_without_drafts(served, chat_body):
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    texts = []
    for speculation in ({"enabled": True}, {"enabled": False}):
        stream = served.client().chat.completions.create(
            model="tiny",
            messages=chat_body["messages"],
            max_tokens=100,
            temperature=0,
            stream=True,
            response_format=form,
            extra_body={"speculation": speculation},
        )
        texts.append("".join(chunk.choices[0].delta.content or "" for chunk in stream))
    check(texts[0])
    assert texts[0] == texts[1], "drafts change nothing"


def test_choice_and_pattern_of_vllm(served):
    ask = {"prompt": "the", "max_tokens": 20, "temperature": 1.0}
    for seed in range(4):
        body = ask | {"seed": seed, "structured_outputs": {"choice": ["yes", "no"]}}
        assert served.http.post("/v1/completions", json=body).json()["choices"][0]["text"] in ("yes", "no")
        body = ask | {"seed": seed, "structured_outputs": {"regex": "[ab]{3}"}}
        text = served.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert len(text) == 3 and set(text) <= {"a", "b"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"response_format": {"type": "json_schema"}}, "'response_format.json_schema' is missing"),
        ({"response_format": {"type": "xml"}}, "'response_format.type'"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "cannot be combined"),
        ({"structured_outputs": {}}, "exactly one of json, regex and choice, got 0"),
        ({"structured_outputs": {"regex": "("}}, "unclosed group"),
        ({"structured_outputs": {"choice": [""]}}, "non-empty strings"),
        ({"structured_outputs": {"json": "{"}}, "'structured_outputs.json' is not valid JSON"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}}, "schema"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 3}, "'min_tokens' must be 0 with a grammar"),
        ({"guided_json": {}}, "'guided_json' is not supported"),
    ],
)
def test_bad_structure_is_refused(served, chat_body, more, message):
    response = served.http.post(CHAT, json=chat_body | more)
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


@pytest.mark.parametrize(
    ("structured", "message"),
    [
        ({"json": nested(125)}, "the json_schema grammar is not supported: recursion limit exceeded"),
        ({"json": {"$ref": "#"}}, "the json_schema grammar is not supported: no text matches it"),
        ({"regex": "a[^\\s\\S]"}, "the regex grammar is not supported: no text matches it"),
        ({"regex": "a" * 20_001}, "the regex has 20001 characters, which exceeds the limit of 20000"),
        ({"choice": ["a", "b"] * 2_501}, "5002 choices exceed the limit of 5000"),
        ({"choice": ["a" * 100_000, "b" * 100_001]}, "the choice has 200001 characters, which exceeds the limit of"),
        ({"json": {"enum": ["a" * 200_001]}}, "the json_schema has 200015 characters, which exceeds the limit of"),
    ],
    ids=["nested", "circle", "nothing", "long regex", "many choices", "long choices", "long schema"],
)
def test_a_grammar_that_cannot_be_followed_is_refused_with_the_reason(served, structured, message):
    body = {"prompt": "the", "max_tokens": 2, "structured_outputs": structured}
    response = served.http.post("/v1/completions", json=body)
    assert response.status_code == 400 and message in response.json()["error"]["message"], response.text


def test_a_grammar_that_compiles_for_too_long_is_refused_and_holds_up_nobody(monkeypatch):
    release, started = threading.Event(), threading.Semaphore(0)

    def slow_or_not(target, grammar):
        if grammar.value == "slow":
            started.release()
            release.wait(30)
        return make_guide(target, grammar)

    monkeypatch.setattr(grammar_module, "make_guide", slow_or_not)
    slow, quick = ({"prompt": "the", "max_tokens": 4, "structured_outputs": {"regex": each}} for each in ("slow", "a"))
    try:
        with running(grammar_seconds=0.3) as served:
            for _ in range(MAX_COMPILING - 1):
                response = served.http.post("/v1/completions", json=slow)
                assert response.status_code == 400 and response.json()["error"]["code"] == "grammar_timeout"
                assert "did not compile within 0.3 s" in response.json()["error"]["message"]
                assert served.http.post("/v1/completions", json=quick).json()["choices"][0]["text"] == "a"
            with pytest.raises(httpx.ReadTimeout):
                served.http.post("/v1/completions", json=slow, timeout=0.1)
            assert all(started.acquire(timeout=10) for _ in range(MAX_COMPILING))
            response = served.http.post("/v1/completions", json=quick)
            assert response.status_code == 503 and response.json()["error"]["code"] == "compiling"
            before = time.monotonic()
        assert time.monotonic() - before < 5, "shutting down waits for no grammar"
    finally:
        release.set()


def test_logit_bias_and_penalties_reach_the_engine(served):
    ask = {"prompt": "the", "max_tokens": 12, "temperature": 0, "return_token_ids": True, "ignore_eos": True}

    def ids(**more):
        response = served.http.post("/v1/completions", json=ask | more)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["token_ids"]

    assert ids(logit_bias={"70": 100}) == [70] * 12
    plain = ids()
    assert ids(logit_bias={str(plain[0]): -100})[0] != plain[0]
    assert len(set(ids(frequency_penalty=2.0, logit_bias={"70": 50, "71": 50}))) == 2
    assert ids(repetition_penalty=1.0, presence_penalty=0, frequency_penalty=0, min_tokens=0) == plain


def test_min_tokens_keeps_the_answer_going(served):
    ask = {"prompt": "the", "max_tokens": 12, "temperature": 0, "logit_bias": {"2": 100}, "return_token_ids": True}
    short = served.http.post("/v1/completions", json=ask).json()["choices"][0]
    assert short["token_ids"] == [2] and short["finish_reason"] == "stop" and short["text"] == ""
    longer = served.http.post("/v1/completions", json=ask | {"min_tokens": 5}).json()["choices"][0]
    assert len(longer["token_ids"]) == 6 and longer["token_ids"][-1] == 2


def test_penalty_out_of_range_is_explained(served, chat_body):
    with pytest.raises(openai.BadRequestError) as caught:
        served.client().chat.completions.create(model="tiny", messages=chat_body["messages"], frequency_penalty=3)
    assert "'frequency_penalty' must be between -2 and 2, got 3" in caught.value.message
    assert caught.value.param == "frequency_penalty"
