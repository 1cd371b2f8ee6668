"""What hostile clients send before the body: slow or huge headers, and paths that forge lines of the log."""

import json
import logging
import socket
import time

import pytest

from harness.local_server import running
from peagle.server.lifecycle import CONTINUE, MAX_HEADER_BYTES


@pytest.fixture(scope="module")
def impatient():
    with running(header_seconds=0.5, log_format="text") as found:
        yield found


def connected(served):
    return socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])), timeout=20)


def read_all(connection):
    data = b""
    while chunk := connection.recv(65536):
        data += chunk
    return data


def message_of(answer):
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_headers_that_trickle_are_ended_and_others_are_served(impatient):
    started = time.monotonic()
    slow = [connected(impatient) for _ in range(20)]
    for each in slow:
        each.sendall(b"GET /health HTTP/1.1\r\nX-A: b")
    for _ in range(3):
        time.sleep(0.1)
        for each in slow:
            each.sendall(b"b")
    assert impatient.http.get("/health").status_code == 200
    for each in slow:
        answer = read_all(each)
        assert answer.startswith(b"HTTP/1.1 408 "), answer
        assert message_of(answer) == "the headers did not arrive within 0.5 s"
        each.close()
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("is_complete", [True, False])
@pytest.mark.parametrize("name", [b"X-A: ", b"Cookie: a=b\r\nX-A: "])
def test_huge_headers_are_refused(impatient, name, is_complete):
    with connected(impatient) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n" + name + b"b" * (MAX_HEADER_BYTES + 1))
        if is_complete:
            client.sendall(b"\r\n\r\n")
        answer = client.recv(4096)
    assert answer.startswith(b"HTTP/1.1 431 "), answer
    assert message_of(answer) == f"the headers exceed the limit of {MAX_HEADER_BYTES} bytes"


def test_many_small_headers_are_refused(impatient):
    with connected(impatient) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n" + b"X-A: bbbbbbbbbb\r\n" * 10_000 + b"\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 431 ")


def test_what_is_no_http_is_a_400(impatient):
    with connected(impatient) as client:
        client.sendall(b"nonsense\r\n\r\n")
        assert read_all(client).startswith(b"HTTP/1.1 400 ")


def test_large_headers_bodies_and_idle_connections_are_served(impatient):
    large = {"X-A": "b" * (MAX_HEADER_BYTES - 1000)}
    body = {"prompt": "the", "max_tokens": 1, "user": "u" * 200_000}
    for _ in range(2):
        assert impatient.http.post("/v1/completions", json=body, headers=large).status_code == 200
        time.sleep(0.7)
    with connected(impatient) as client:
        time.sleep(0.7)
        client.sendall(b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n")
        assert read_all(client).startswith(b"HTTP/1.1 200 ")


@pytest.mark.slow
def test_a_next_request_that_trickles_does_not_cut_the_answer_before_it(impatient):
    body = json.dumps({"prompt": "the", "max_tokens": 200, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with connected(impatient) as client:
        client.sendall(head.encode() + body)
        client.sendall(b"GET /health HT")
        assert client.recv(4096).startswith(b"HTTP/1.1 200 ")


def post(**body):
    data = json.dumps({"prompt": "the", "ignore_eos": True} | body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_closes_its_side_after_the_request_gets_the_answer(impatient, is_stream):
    with connected(impatient) as client:
        client.sendall(post(max_tokens=200, stream=is_stream))
        client.shutdown(socket.SHUT_WR)
        answer = read_all(client)
    while answer.startswith(CONTINUE):
        answer = answer.removeprefix(CONTINUE)
    assert answer.startswith(b"HTTP/1.1 200 ") and b'"finish_reason":"length"' in answer
    assert not is_stream or b"data: [DONE]" in answer


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_closes_both_sides_is_aborted(impatient, is_stream):
    num_aborted = impatient.stats().num_aborted
    with connected(impatient) as client:
        client.sendall(post(max_tokens=240, n=100, stream=is_stream))
        while not impatient.stats().num_running:
            time.sleep(0.01)
    deadline = time.monotonic() + 20
    while impatient.stats().num_running and time.monotonic() < deadline:
        time.sleep(0.02)
    assert impatient.stats().num_aborted > num_aborted and impatient.stats().num_pages_used == 0


@pytest.mark.parametrize("data", [b"", post()[:60], post()[:-3]])
def test_a_client_that_closes_its_side_in_a_request_is_not_kept(impatient, data):
    with connected(impatient) as client:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        assert read_all(client) == b""


def test_a_path_cannot_forge_a_line_of_the_log(impatient, caplog):
    def logged():
        return [each.getMessage() for each in caplog.records if each.getMessage().startswith("GET /a")]

    with caplog.at_level(logging.INFO, logger="peagle.server.requests"):
        impatient.http.get("/a%0astopped;%20all%20is%20lost%1b%5b2J%e2%80%ae%c3%a9")
        deadline = time.monotonic() + 10
        while not logged() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(logged()) == 1
    assert logged()[0].startswith("GET /a\\nstopped; all is lost\\x1b[2J\\u202e\u00e9 404 ")
