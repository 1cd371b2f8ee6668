"""How the server in front of vLLM ends: what is in flight is answered, and the process goes last."""

import threading
import time

import httpx
import pytest

from harness.running_proxy import running
from harness.stub_vllm import stub_python
from peagle.vllm.process import find_vllm


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter that has the stub."""
    return find_vllm(str(stub_python(tmp_path_factory.mktemp("stub"))), {})


def ask_slowly(proxy, max_tokens):
    """Returns when the request is in flight; its answer is in the list when the thread has ended."""
    answers, body = [], {"prompt": "slow", "max_tokens": max_tokens}
    thread = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{proxy.url}/v1/completions", json=body, timeout=30))
    )
    thread.start()
    while not proxy.lifecycle.num_in_flight:
        time.sleep(0.01)
    return thread, answers


def test_drain_lets_answers_finish_and_then_ends_the_engine(python):
    with running(python) as proxy:
        thread, answers = ask_slowly(proxy, max_tokens=5)
        proxy.server.lifecycle.begin_drain()
        while not proxy.lifecycle.is_draining:
            time.sleep(0.01)
        assert proxy.post().json()["error"]["code"] == "server_draining"
        thread.join()
    assert answers[0].status_code == 200 and proxy.process.returncode == 0


def test_a_request_whose_body_comes_while_the_drain_begins_is_answered(python):
    with running(python) as proxy:

        def body():
            yield b'{"prompt": "a",'
            while not proxy.lifecycle.num_in_flight:
                time.sleep(0.01)
            proxy.server.lifecycle.begin_drain()
            while not proxy.lifecycle.is_draining:
                time.sleep(0.01)
            yield b'"max_tokens": 2}'

        headers = {"Content-Type": "application/json"}
        response = proxy.http.post("/v1/completions", content=body(), headers=headers)
    assert response.status_code == 200, response.text


def test_answers_that_outlast_the_drain_are_ended_with_an_error(python):
    with running(python, drain_seconds=0.3) as proxy:
        thread, answers = ask_slowly(proxy, max_tokens=100)
        proxy.server.lifecycle.begin_drain()
        thread.join()
    assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "aborted"
