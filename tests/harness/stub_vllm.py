"""A small program that plays `vllm serve` as a real process, and the interpreter that has it.

`stub_python` makes a directory with a package `vllm` (this file is its command) and an executable to be given as
--vllm-python. Its behaviour is set by a prompt ("die", "refuse", "fail", "break", "slow") or by the variable STUB_VLLM:

    fail              write these lines and end with status 1
    start_seconds     seconds before it listens
    deaf              ignore SIGTERM
    stuck             listen, but never be healthy
    report            a file that gets its arguments, environment and process ids
"""

import json
import os
import signal
import socketserver
import stat
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

WORDS = ["the ", "user ", "asks ", "what ", "the ", "target ", "says ", "again "]


def stub_python(directory: Path, version: str = "0.32.0", distribution: str = "vllm") -> Path:
    """An executable that behaves as the python of an environment with this vLLM."""
    site = directory / "site"
    package = site / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for each in (package, package.parent, package.parent.parent):
        (each / "__init__.py").touch()
    (package / "main.py").write_text(Path(__file__).read_text())
    metadata = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    python = directory / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return python


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has asked about yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def are_gone(pids: list[int], seconds: float = 10.0) -> bool:
    """Whether all of the processes end within the time."""
    deadline = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_alive, pids))


class State:
    num_drafts = 0
    num_accepted = 0
    num_requests = 0
    options: dict = {}
    flags: dict = {}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def address_string(self):
        return "unix"

    def do_GET(self):
        if self.path == "/health":
            self._send(503 if State.options.get("stuck") else 200, b"", "text/plain")
        elif self.path == "/v1/models":
            self._json(
                200, {"object": "list", "data": [{"id": State.flags["--served-model-name"], "max_model_len": 99}]}
            )
        elif self.path == "/openapi.json":
            self._json(200, openapi())
        elif self.path == "/metrics":
            self._send(200, metrics().encode(), "text/plain; version=0.0.4")
        else:
            self._json(404, {"detail": "Not Found"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        State.num_requests += 1
        if self.path == "/tokenize":
            return self._json(200, {"count": 2, "tokens": [1, 2], "max_model_len": 99, "token_strs": None})
        text = body.get("prompt") or body.get("input") or body["messages"][-1]["content"]
        if text == "refuse":
            error = {"message": "the prompt is too long", "type": "BadRequestError", "param": "prompt", "code": 400}
            return self._json(400, {"error": error})
        if text in ("fail", "fail and die"):
            if text == "fail and die":
                threading.Timer(0.2, os._exit, [5]).start()
            return self._json(
                500, {"error": {"message": "a kernel was lost", "type": "InternalServerError", "code": 500}}
            )
        if text == "die":
            os._exit(3)
        num_tokens = body.get("max_tokens") or 4
        State.num_drafts += num_tokens // 2
        State.num_accepted += num_tokens - num_tokens // 2
        pause = 0.1 if text == "slow" else 0.0
        identity = f"cmpl-{self.headers['X-Request-Id']}"
        if body.get("stream"):
            return self._stream(identity, body, num_tokens, pause, breaks=text == "break")
        time.sleep(pause * num_tokens)
        document = {
            "id": identity,
            "choices": [choice(body, "".join(WORDS[i % 8] for i in range(num_tokens)), "length")],
        }
        self._json(200, document | figures(num_tokens))

    def _stream(self, identity, body, num_tokens, pause, breaks):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for index in range(num_tokens):
            time.sleep(pause)
            self._event({"id": identity, "choices": [choice(body, WORDS[index % 8], None)]})
            if breaks and index == 1:
                os._exit(4)
        if (body.get("stream_options") or {}).get("include_usage"):
            self._event({"id": identity, "choices": []} | figures(num_tokens))
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, document):
        self._chunk(b"data: " + json.dumps(document).encode() + b"\n\n")

    def _chunk(self, data):
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _json(self, status, document):
        self._send(status, json.dumps(document).encode(), "application/json")

    def _send(self, status, data, kind):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def choice(body, text, finish_reason):
    if "messages" not in body:
        return {"index": 0, "text": text, "finish_reason": finish_reason}
    key = "delta" if body.get("stream") else "message"
    return {"index": 0, key: {"role": "assistant", "content": text}, "finish_reason": finish_reason}


def figures(num_tokens):
    usage = {"prompt_tokens": 3, "completion_tokens": num_tokens, "total_tokens": 3 + num_tokens}
    return {"usage": usage, "metrics": {"speculative_decoding": {"mean_acceptance_length": 2.0}}}


def openapi():
    names = ["model", "prompt", "messages", "max_tokens", "temperature", "stream", "stream_options", "n", "ignore_eos"]
    schema = {"$ref": "#/components/schemas/Request"}
    operation = {"post": {"requestBody": {"content": {"application/json": {"schema": schema}}}}}
    paths = dict.fromkeys(["/v1/completions", "/v1/chat/completions"], operation)
    other = {"post": {"requestBody": {"content": {"application/json": {"schema": {"properties": {"input": {}}}}}}}}
    request = {"properties": {name: {} for name in names}}
    return {"paths": paths | {"/v1/responses": other}, "components": {"schemas": {"Request": request}}}


def metrics():
    labels = f'{{engine="0",model_name="{State.flags["--served-model-name"]}"}}'
    lines = []
    for name, value in (("num_drafts", State.num_drafts), ("num_accepted_tokens", State.num_accepted)):
        lines += [f"# TYPE vllm:spec_decode_{name}_total counter", f"vllm:spec_decode_{name}_total{labels} {value}.0"]
    return "\n".join(lines)


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True

    def handle_error(self, *_):
        """A client that did not wait for its answer is nothing to write about."""


def main():
    State.options = json.loads(os.environ.get("STUB_VLLM", "{}"))
    words = sys.argv[1:]
    assert words[0] == "serve", words
    State.flags = {word: words[at + 1] for at, word in enumerate(words[:-1]) if word.startswith("--")}
    if State.options.get("fail"):
        print(State.options["fail"], file=sys.stderr)
        sys.exit(1)
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    if State.options.get("report"):
        report = {"words": words, "environment": dict(os.environ), "pids": [os.getpid(), worker.pid]}
        Path(State.options["report"]).write_text(json.dumps(report))
    if State.options.get("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    print("loading the weights", flush=True)
    time.sleep(State.options.get("start_seconds", 0))
    server = Server(State.flags["--uds"], Handler)
    print("serving", flush=True)
    server.serve_forever(poll_interval=0.02)


if __name__ == "__main__":
    main()
