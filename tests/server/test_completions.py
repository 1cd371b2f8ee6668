"""POST /v1/completions: what an echoed prompt and the log-probabilities of one look like, whole and streamed."""

import json

import pytest
from tokenizers import processors

from harness.local_server import running, tiny_llm
from peagle.server.completions import _split

PATH = "/v1/completions"
START, START_ID = "<|im_start|>", 1


@pytest.fixture(scope="module")
def served_with_start():
    """A server whose tokenizer puts a special token before every text, as Llama's does."""

    def load():
        llm = tiny_llm()
        llm.target.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{START} $A", special_tokens=[(START, START_ID)]
        )
        return llm

    with running(load) as found:
        yield found


def events_of(served, body):
    with served.http.stream("POST", PATH, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        return [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]


def test_prompt_logprobs_of_a_stream_are_refused_and_not_computed_for_nobody(served):
    for extra in ({}, {"echo": True, "logprobs": 1}):
        body = {"prompt": "the user", "max_tokens": 2, "prompt_logprobs": 0, "stream": True} | extra
        response = served.http.post(PATH, json=body)
        assert response.status_code == 400, response.text[:200]
        error = response.json()["error"]
        assert error["param"] == "prompt_logprobs" and "do not stream" in error["message"]


@pytest.mark.parametrize("token_id", [2, 5])
def test_echo_of_the_prompt_alone_ends_by_length_streamed_or_not(served, token_id):
    """Whatever the one token is that is made to run the prompt, an end of the text too."""
    ask = {"prompt": "the user", "max_tokens": 0, "echo": True, "logit_bias": {str(token_id): 100}}
    whole = served.http.post(PATH, json=ask).json()["choices"][0]
    (streamed,) = [event["choices"][0] for event in events_of(served, ask)]
    assert whole["finish_reason"] == streamed["finish_reason"] == "length"
    assert whole["text"] == streamed["text"] == "the user"


def test_special_token_that_is_not_in_the_text_has_no_length(served_with_start):
    ask = {"prompt": "the user", "max_tokens": 2, "temperature": 0, "ignore_eos": True, "echo": True, "logprobs": 1}
    choice = served_with_start.http.post(PATH, json=ask).json()["choices"][0]
    found = choice["logprobs"]
    assert found["tokens"][:4] == [START, "the", " ", "user"] and choice["text"].startswith("the user")
    assert found["text_offset"][:5] == [0, 0, 3, 4, 8], "the answer begins behind the text that is shown"
    events = events_of(served_with_start, ask)
    streamed = [offset for event in events for offset in event["choices"][0]["logprobs"]["text_offset"]]
    assert streamed == found["text_offset"]


def test_special_token_that_is_in_the_text_has_its_length(served_with_start):
    ask = {"max_tokens": 0, "echo": True, "logprobs": 1}
    written = {"prompt": f"the{START}user", "add_special_tokens": False}
    ids = {"prompt": [START_ID, *served_with_start.service.encode("user", False)]}
    for prompt, offsets in ((written, [0, 3, 15]), (ids, [0, 12])):
        choice = served_with_start.http.post(PATH, json=ask | prompt).json()["choices"][0]
        assert choice["logprobs"]["text_offset"] == offsets


def test_a_special_token_that_ends_every_text_takes_nothing_from_it():
    assert _split("Hello world", ["<s>", "Hello", " world", "</s>"], {0, 3}) == ["", "Hello", " world", ""]


def test_more_prompts_than_can_run_and_wait_are_a_400_that_no_client_repeats():
    with running(lambda: tiny_llm(max_batch=2, max_waiting=1)) as served:
        ask = {"max_tokens": 2, "temperature": 0}
        for asked, param in (
            ({"prompt": ["the"] * 4}, "prompt"),
            ({"prompt": ["the"] * 2, "n": 2}, "prompt"),
            ({"prompt": "the", "n": 4}, "n"),
        ):
            for streams in (False, True):
                response = served.http.post(PATH, json=ask | asked | {"stream": streams})
                error = response.json()["error"]
                assert response.status_code == 400 and "retry-after" not in response.headers
                assert "4 answers (prompts x n) exceed capacity (batch + queue = 3)" in error["message"]
                assert (error["code"], error["param"]) == ("capacity", param)
        assert served.http.post(PATH, json=ask | {"prompt": ["the"] * 3}).status_code == 200
        assert served.metric("vllm:admission_rejections_total") == 0, "nobody was told to come back"
