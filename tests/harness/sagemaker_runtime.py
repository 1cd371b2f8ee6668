"""A stand-in for SageMaker's runtime: routes invocations to the container and re-chunks streams."""

import binascii
import contextlib
import json
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx

from peagle.sagemaker.conventions import container_flags

ACCOUNT, REGION = "123456789012", "us-east-1"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/service-role/Execution"
IMAGE = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/peagle"
SECRET = "wJalrXUtnFEMI-K7MDENG-this-is-secret"
"""The tests' secret access key. Nothing may ever print it."""
PIECE = 7
"""Bytes per payload part: the router splits streams anywhere, so clients must reassemble events."""
ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"


def vllm_arguments(environment: Mapping[str, str], model_directory: Path | None) -> list[str]:
    """The command line that AWS's vLLM container builds from the environment."""
    flags = container_flags(environment, model_directory)
    return [word for flag, values in flags.items() for word in (flag, *values)]


def frame(headers: dict[str, str], payload: bytes) -> bytes:
    """One message of AWS's event stream encoding."""
    encoded = b"".join(
        struct.pack("!B", len(name)) + name.encode() + b"\x07" + struct.pack("!H", len(value)) + value.encode()
        for name, value in headers.items()
    )
    prelude = struct.pack("!II", len(encoded) + len(payload) + 16, len(encoded))
    message = prelude + struct.pack("!I", binascii.crc32(prelude)) + encoded + payload
    return message + struct.pack("!I", binascii.crc32(message))


class Router(BaseHTTPRequestHandler):
    """Forwards invocations to an endpoint's container, streaming the answer."""

    @staticmethod
    def container_of(endpoint: str) -> str:
        """Address of an endpoint's container; LookupError if there is no such endpoint."""
        raise NotImplementedError

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        headers = {"Content-Type": self.headers["Content-Type"]}
        if self.headers.get(ATTRIBUTES):
            headers[ATTRIBUTES] = self.headers[ATTRIBUTES]
        _, _, endpoint, *rest = self.path.split("/")
        try:
            container = self.container_of(endpoint)
        except LookupError:
            self._refuse(400, "ValidationError", {"Message": f"Endpoint {endpoint} of account 123456789012 not found."})
            return
        url = f"{container}/invocations"
        with httpx.stream("POST", url, content=body, headers=headers, timeout=60, verify=False) as answer:
            if answer.status_code != 200:
                text = answer.read().decode()
                details = {"Message": text, "OriginalStatusCode": answer.status_code, "OriginalMessage": text}
                self._refuse(424, "ModelError", details)
            elif rest == ["invocations-response-stream"]:
                self._stream(answer)
            else:
                self._send(200, {"Content-Type": answer.headers["content-type"]}, answer.read())

    def _refuse(self, status: int, kind: str, details: dict[str, object]) -> None:
        self._send(status, {"x-amzn-ErrorType": kind, "Content-Type": "application/json"}, json.dumps(details).encode())

    def _send(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, answer: httpx.Response) -> None:
        self.send_response(200)
        self.send_header("X-Amzn-SageMaker-Content-Type", answer.headers["content-type"])
        self.end_headers()
        kind = {":event-type": "PayloadPart", ":message-type": "event"}
        try:
            for part in answer.iter_bytes(PIECE):
                self.wfile.write(frame(kind, part))
                self.wfile.flush()
        except httpx.HTTPError as error:
            kind = {":exception-type": "ModelStreamError", ":message-type": "exception"}
            details = {"Message": f"Your model container closed the stream: {error}", "ErrorCode": "StreamBroken"}
            self.wfile.write(frame(kind, json.dumps(details).encode()))


@contextlib.contextmanager
def routing(container_of: Callable[[str], str]) -> Iterator[str]:
    """A router on a port of its own; its address."""
    kind = type("OurRouter", (Router,), {"container_of": staticmethod(container_of)})
    router = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    router.daemon_threads = True
    thread = threading.Thread(target=router.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{router.server_port}"
    finally:
        router.shutdown()
        router.server_close()
        thread.join()
