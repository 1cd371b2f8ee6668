"""Servers that answer as ours does not, and the question that tests of the client ask them."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from peagle.bench.client import Question
from peagle.data.prompts import Prompt

PROMPTS = [
    Prompt(str(index), ({"role": "user", "content": text},), "text")
    for index, text in enumerate(["the user", "as the user", "the user the user"])
]
Answer = Callable[[BaseHTTPRequestHandler], None]
DONE = b"data: [DONE]\n\n"


def question(**changes: Any) -> Question:
    settings = {"is_chat": True, "max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "seed": 0, "seconds": 60.0}
    return Question(**({"model": "tiny"} | settings | changes))


@contextlib.contextmanager
def stub(answer: Answer, answer_get: Answer | None = None) -> Iterator[str]:
    """A server that answers every POST by `answer` and every GET by `answer_get`: for what our own does not do."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                answer(self)

        def do_GET(self) -> None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                (answer_get or page(404, b""))(self)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def stream(*blocks: bytes, pause: float = 0.0) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.end_headers()
        for block in blocks:
            handler.wfile.write(block)
            handler.wfile.flush()
            time.sleep(pause)

    return answer


def event(**document: Any) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def piece(content: str | None, finish_reason: str | None = None, **more: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": content} | more, "finish_reason": finish_reason}])


def page(status: int, body: bytes) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.end_headers()
        handler.wfile.write(body)

    return answer
