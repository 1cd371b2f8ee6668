"""boto3's SageMaker runtime against a stand-in for AWS's router that forwards to a real server, streams included."""

import json

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from harness.sagemaker_runtime import routing

MESSAGES = [{"role": "user", "content": "the user asks"}]


@pytest.fixture(scope="module")
def runtime(served):
    with routing(lambda endpoint: served.url) as url:
        client = boto3.client(
            "sagemaker-runtime",
            endpoint_url=url,
            region_name="us-east-1",
            aws_access_key_id="none",
            aws_secret_access_key="none",
            config=Config(retries={"max_attempts": 1}),
        )
        yield client
        client.close()


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
    assert "'temperature' must be 0 or more, got -1" in str(caught.value)
