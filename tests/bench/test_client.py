"""What is read of a stream, whichever server it comes from, and how failures are told."""

import asyncio
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from harness.stub_server import DONE, PROMPTS, event, page, piece, question, stream, stub
from peagle.bench.client import Connections, Outcome, ask, model_of, root_of
from peagle.errors import ConfigError, ServerError


def ask_stub(answer: Callable[[BaseHTTPRequestHandler], None], **changes: Any) -> Outcome:
    found = Outcome(0, 0.0)

    async def run(url: str) -> None:
        async with Connections(url, seconds=5) as connections:
            await ask(connections, question(**changes), PROMPTS[0], found)

    with stub(answer) as url:
        asyncio.run(run(url))
    return found


def test_role_is_not_the_first_token_and_usage_counts_tokens():
    usage = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 9})
    answer = stream(piece("", role="assistant"), piece("ab"), piece("cd", "length"), usage, DONE, pause=0.05)
    found = ask_stub(answer)
    assert found.error is None and found.pieces == ["ab", "cd"] and len(found.times) == 2
    assert (found.num_input, found.num_output, found.has_usage) == (7, 9, True)
    assert found.ttft > 0.04 and found.itls[0] > 0.04 and found.latency < found.ended - found.sent - 0.05


def test_events_cut_at_any_byte_are_put_together():
    whole = piece("\u00e9\u4e2d") + b": keep-alive\r\n\r\n" + piece("b", "stop").replace(b"\n\n", b"\r\n\r\n") + DONE
    for size in (1, 7, 100):
        blocks = [whole[start : start + size] for start in range(0, len(whole), size)]
        found = ask_stub(stream(*blocks))
        assert found.error is None and "".join(found.pieces) == "\u00e9\u4e2db", f"cut every {size} bytes"


def test_without_usage_pieces_are_counted():
    found = ask_stub(stream(piece("a"), piece("b"), piece("c", "stop"), DONE))
    assert found.num_output == 3 and not found.has_usage


def test_answer_with_nothing_to_show_has_a_first_token_all_the_same():
    found = ask_stub(stream(piece("", "stop"), DONE))
    assert found.error is None and found.ttft is not None


def test_text_of_completions_and_reasoning_count_as_pieces():
    found = ask_stub(stream(event(choices=[{"text": "a", "finish_reason": "stop"}]), DONE), is_chat=False)
    assert found.pieces == ["a"]
    assert ask_stub(stream(piece(None, reasoning_content="hm"), piece("a", "stop"), DONE)).pieces == ["hm", "a"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (page(503, b'{"error": {"message": "too many\\n wait", "code": 503}}'), "HTTP 503: too many wait"),
        (page(404, b'{"detail": "Not Found"}'), "HTTP 404: Not Found"),
        (page(500, b"<html>oh</html>"), "HTTP 500: <html>oh</html>"),
        (page(502, b""), "HTTP 502"),
        (stream(piece("a"), event(error={"message": "the engine died"}), DONE), "in the stream: the engine died"),
        (stream(piece("a")), "the stream ended early"),
        (stream(b"data: {broken\n\n"), "not an OpenAI-compatible response"),
        (stream(b"data: [1]\n\n"), "not an OpenAI-compatible response"),
    ],
)
def test_failures_have_reasons(answer, reason):
    assert ask_stub(answer).error.startswith(reason)


def test_answers_that_take_too_long_are_failures():
    started = time.perf_counter()
    found = ask_stub(stream(piece("a"), piece("b"), pause=1.0), seconds=0.3)
    assert found.error == "timeout after 0.3 s" and found.ended - started < 1.5


def test_server_that_is_not_there_is_told():
    async def run() -> str:
        async with Connections("http://127.0.0.1:9", seconds=2) as connections:
            return await model_of(connections, "http://127.0.0.1:9")

    with pytest.raises(ServerError) as refused:
        asyncio.run(run())
    assert "http://127.0.0.1:9" in refused.value.message and "--ready-seconds" in refused.value.hint


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("http://h:1", "http://h:1"),
        ("h:8000/v1/", "http://h:8000"),
        ("https://h/some/where/v1", "https://h/some/where"),
        ("http://[::1]:80/metrics", "http://[::1]:80"),
    ],
)
def test_root_of(url, root):
    assert root_of(url) == root


@pytest.mark.parametrize("url", ["", "ftp://h", "http://", "http://h:99999", "http://h?x=1", "http://user:word@h"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ConfigError):
        root_of(url)
