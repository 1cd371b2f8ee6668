"""/tokenize and /detokenize: what they tell, and that no text in them holds up the other clients."""

import threading

import pytest

from harness.local_server import running

CHAT = "/v1/chat/completions"
TEXTS = [
    ("/tokenize", {"prompt": "the"}),
    ("/detokenize", {"tokens": [5]}),
    ("/v1/completions", {"prompt": "the", "max_tokens": 2}),
    (CHAT, {"messages": [{"role": "user", "content": "the"}], "max_tokens": 2}),
]


def message_of(response):
    return response.json()["error"]["message"]


def test_tokenize_and_detokenize_are_inverse(served, chat_body):
    text = "the user \U0001f600"
    found = served.http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) and found["max_model_len"] == 256
    assert served.http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}
    chat = served.http.post("/tokenize", json={"messages": chat_body["messages"]}).json()
    assert chat["count"] == served.http.post(CHAT, json=chat_body).json()["usage"]["prompt_tokens"]
    response = served.http.post("/detokenize", json={"tokens": [9999]})
    assert response.status_code == 400 and "between 0 and 287, got 9999" in message_of(response)
    response = served.http.post("/tokenize", json={})
    assert response.status_code == 400 and message_of(response) == "exactly one of 'prompt' and 'messages' is required"


def test_texts_and_tokens_that_are_far_too_long_are_refused_before_they_are_worked_on(served):
    response = served.http.post("/tokenize", json={"prompt": "x" * 8_000_000})
    assert response.status_code == 400 and "characters exceed the context of 256 tokens" in message_of(response)
    response = served.http.post("/detokenize", json={"tokens": [5] * 257})
    assert response.status_code == 400 and "'tokens' has 257 elements, which exceeds the limit" in message_of(response)
    assert served.http.post("/detokenize", json={"tokens": [5] * 256}).status_code == 200
    longer = served.http.post("/tokenize", json={"prompt": "the " * 300}).json()
    assert longer["count"] > 256, "how far a text is too long can be asked"


def test_texts_of_tokens_are_looked_up_beside_the_event_loop(served, monkeypatch):
    threads = set()

    class Texts:
        def __getitem__(self, token_id):
            threads.add(threading.current_thread().name)
            return texts[token_id]

    texts = served.service.token_texts
    monkeypatch.setattr(served.service, "token_texts", Texts())
    assert served.http.post("/tokenize", json={"prompt": "the user", "return_token_strs": True}).status_code == 200
    assert threads == {"peagle-tokenizer_0"}


def test_a_text_that_waits_too_long_for_its_turn_is_ended():
    with running(request_seconds=0.2) as served:
        release = threading.Event()
        served.service._texts.submit(release.wait)
        try:
            for path, body in TEXTS:
                response = served.http.post(path, json=body)
                assert response.status_code == 504 and response.json()["error"]["code"] == "timeout", path
            assert served.lifecycle.num_in_flight == 0
        finally:
            release.set()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", b'{"prompt": "\\ud83d"}'),
        ("/v1/completions", b'{"prompt": "a\\ude00b"}'),
        ("/v1/completions", b'{"prompt": "\xed\xa0\xbd"}'),
    ],
)
def test_half_a_character_is_the_client_s_mistake(served, path, body):
    response = served.http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400 and "an unpaired surrogate" in message_of(response)
    whole = b'{"prompt": "\\ud83d\\ude00"}'
    assert served.http.post("/tokenize", content=whole, headers={"Content-Type": "application/json"}).status_code == 200
