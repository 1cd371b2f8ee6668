"""boto3's SageMaker runtime against a stand-in for AWS's router that forwards to a real server, streams included.

boto3 wants an older dateutil than the one the other tests ran with, so it is not among the packages of `make setup`;
these tests run where it is installed.
"""

import binascii
import json
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

boto3 = pytest.importorskip("boto3")
Config = pytest.importorskip("botocore.config").Config
ClientError = pytest.importorskip("botocore.exceptions").ClientError

MESSAGES = [{"role": "user", "content": "the user asks"}]
PIECE = 7
"""Bytes of a payload part: the router cuts a stream anywhere, so clients must put lines together again."""


def frame(headers, payload):
    """One message of AWS's event stream encoding."""
    encoded = b"".join(
        struct.pack("!B", len(name)) + name.encode() + b"\x07" + struct.pack("!H", len(value)) + value.encode()
        for name, value in headers.items()
    )
    prelude = struct.pack("!II", len(encoded) + len(payload) + 16, len(encoded))
    message = prelude + struct.pack("!I", binascii.crc32(prelude)) + encoded + payload
    return message + struct.pack("!I", binascii.crc32(message))


class Router(BaseHTTPRequestHandler):
    """What SageMaker does between its public address and the container."""

    container = ""

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        headers = {"Content-Type": self.headers["Content-Type"]}
        attributes = "X-Amzn-SageMaker-Custom-Attributes"
        if self.headers.get(attributes):
            headers[attributes] = self.headers[attributes]
        answer = httpx.post(f"{self.container}/invocations", content=body, headers=headers, timeout=60)
        if answer.status_code != 200:
            error = {"Message": answer.text, "OriginalStatusCode": answer.status_code, "OriginalMessage": answer.text}
            content = json.dumps(error).encode()
            self.send_response(424)
            self.send_header("x-amzn-ErrorType", "ModelError")
        elif self.path.endswith("/invocations-response-stream"):
            pieces = [answer.content[at : at + PIECE] for at in range(0, len(answer.content), PIECE)]
            kind = {":event-type": "PayloadPart", ":message-type": "event"}
            content = b"".join(frame(kind, piece) for piece in pieces)
            self.send_response(200)
            self.send_header("X-Amzn-SageMaker-Content-Type", answer.headers["content-type"])
        else:
            content = answer.content
            self.send_response(200)
            self.send_header("Content-Type", answer.headers["content-type"])
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture(scope="module")
def runtime(served):
    router = ThreadingHTTPServer(("127.0.0.1", 0), type("OurRouter", (Router,), {"container": served.url}))
    thread = threading.Thread(target=router.serve_forever, daemon=True)
    thread.start()
    client = boto3.client(
        "sagemaker-runtime",
        endpoint_url=f"http://127.0.0.1:{router.server_port}",
        region_name="us-east-1",
        aws_access_key_id="none",
        aws_secret_access_key="none",
        config=Config(retries={"max_attempts": 1}),
    )
    yield client
    client.close()
    router.shutdown()
    router.server_close()
    thread.join()


def invoke(runtime, body, **options):
    answer = runtime.invoke_endpoint(
        EndpointName="mine", ContentType="application/json", Body=json.dumps(body), **options
    )
    with answer["Body"] as stream:
        return json.loads(stream.read())


def test_a_chat_and_a_completion_are_invoked(runtime, served):
    chat = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    expected = served.http.post("/v1/chat/completions", json=chat).json()
    assert invoke(runtime, chat)["choices"] == expected["choices"]
    text = {"prompt": "the", "max_tokens": 4, "temperature": 0}
    answer = invoke(runtime, text, CustomAttributes="route=/v1/completions")
    assert answer["object"] == "text_completion" and answer["usage"]["completion_tokens"] == 4


def test_a_stream_is_invoked(runtime, served):
    body = {"messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    expected = served.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    answer = runtime.invoke_endpoint_with_response_stream(
        EndpointName="mine", ContentType="application/json", Body=json.dumps(body | {"stream": True})
    )
    assert answer["ContentType"].startswith("text/event-stream")
    data = b"".join(event["PayloadPart"]["Bytes"] for event in answer["Body"])
    lines = [line for line in data.decode().split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == expected


def test_a_refusal_reaches_the_caller_with_its_words(runtime):
    with pytest.raises(ClientError) as caught:
        invoke(runtime, {"messages": MESSAGES, "temperature": -1})
    assert "temperature must be 0 or more, got -1" in str(caught.value)
