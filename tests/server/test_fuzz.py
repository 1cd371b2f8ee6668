"""Bodies that nobody meant: whatever is sent, the server answers with a status below 500 and goes on."""

import json

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from harness.local_server import running, tiny_llm
from peagle.server.protocol import NEUTRAL, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

PATHS = {
    "/v1/chat/completions": (ChatBody, {"messages": [{"role": "user", "content": "the"}], "max_tokens": 2}),
    "/v1/completions": (CompletionBody, {"prompt": "the", "max_tokens": 2}),
    "/tokenize": (TokenizeBody, {"prompt": "the"}),
    "/detokenize": (DetokenizeBody, {"tokens": [5]}),
    "/invocations": (CompletionBody, {"prompt": "the", "max_tokens": 2}),
}
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["user", "json_object", "json_schema", "auto", "required", "text", "function", "\x00", "\ud800"]),
)
VALUES = st.recursive(
    ODD,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "role", "content", "name", "function", "json_schema", "schema", "regex", "choice", "1"]
            )
            | st.text(max_size=4),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
HEADERS = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def target():
    with running(lambda: tiny_llm(max_length=64), max_choices=8) as found:
        yield found
        stats = found.wait_until_idle()
        assert (stats.num_running, stats.num_waiting, stats.num_pages_used) == (0, 0, 0)
        assert found.http.get("/ping").status_code == 200


def check(target, path, content):
    response = target.http.post(path, content=content, headers=HEADERS)
    assert response.status_code < 500, (path, content, response.text)
    if response.status_code >= 400:
        error = response.json()["error"]
        assert error["message"] and error["type"] in ("invalid_request_error", "not_found_error")


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(sorted(PATHS)), data=st.data())
def test_a_good_body_with_odd_fields(target, path, data):
    kind, good = PATHS[path]
    names = st.sampled_from([*kind.model_fields, *NEUTRAL, "zzz"])
    changes = data.draw(st.dictionaries(names, VALUES, min_size=1, max_size=3))
    check(target, path, json.dumps(good | changes).encode("utf-8", "surrogatepass"))


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    path=st.sampled_from(sorted(PATHS)), content=st.binary(max_size=60) | VALUES.map(lambda v: json.dumps(v).encode())
)
def test_any_bytes(target, path, content):
    check(target, path, content)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(messages=st.lists(VALUES, max_size=3), stream=st.booleans())
def test_odd_messages(target, messages, stream):
    body = {"messages": messages, "max_tokens": 2, "stream": stream}
    check(target, "/v1/chat/completions", json.dumps(body).encode())
