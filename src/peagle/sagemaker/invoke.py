"""Stream a chat from an endpoint. SageMaker splits the container's server-sent events at arbitrary bytes."""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from peagle.errors import DeployError
from peagle.sagemaker.aws import Aws
from peagle.sagemaker.plan import invocation
from peagle.server.sse import EventSplitter, data_of


@dataclass(frozen=True)
class Answer:
    """A streamed chat and its timing."""

    text: str
    finish_reason: str | None
    usage: Mapping[str, Any] | None
    first_token_seconds: float | None
    total_seconds: float

    @property
    def acceptance_length(self) -> float | None:
        """None if the container does not report it; peagle's does."""
        metrics = ((self.usage or {}).get("metrics") or {}).get("speculative_decoding") or {}
        return metrics.get("mean_acceptance_length")

    def figures(self) -> dict[str, Any]:
        """The measurements, without the text."""
        return {
            "finish_reason": self.finish_reason,
            "num_tokens": (self.usage or {}).get("completion_tokens"),
            "first_token_seconds": None if self.first_token_seconds is None else round(self.first_token_seconds, 3),
            "total_seconds": round(self.total_seconds, 3),
            "acceptance_length": self.acceptance_length,
        }


def stream(aws: Aws, endpoint: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a streamed chat."""
    call = invocation(endpoint, body)
    body_stream = aws.run(call)["Body"]
    splitter, is_done = EventSplitter(), False
    try:
        with aws.explained(call.operation):
            for event in body_stream:
                for each in splitter.feed(event.get("PayloadPart", {}).get("Bytes", b"")):
                    data = data_of(each)
                    if data == b"[DONE]":
                        is_done = True
                    elif data is not None:
                        yield _chunk(endpoint, data.decode())
    finally:
        body_stream.close()
    if not is_done or splitter.rest.strip():
        raise DeployError(f"the stream of endpoint {endpoint} ended early", hint=f"see its log: {log_group(endpoint)}")


def _chunk(endpoint: str, data: str) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError:
        chunk = None
    if not isinstance(chunk, dict):
        raise DeployError(f"the endpoint {endpoint} sent invalid JSON: {data[:200]}")
    error = chunk.get("error")
    if error:
        message = error.get("message", error) if isinstance(error, dict) else error
        raise DeployError(f"the endpoint {endpoint} failed during the answer: {message}")
    return chunk


def ask(aws: Aws, endpoint: str, body: Mapping[str, Any], on_text: Any = None) -> Answer:
    """Stream one chat to its end; `on_text` gets each piece of text."""
    start = time.monotonic()
    first: float | None = None
    pieces: list[str] = []
    reason: str | None = None
    usage: Mapping[str, Any] | None = None
    for chunk in stream(aws, endpoint, body):
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices") or ():
            reason = choice.get("finish_reason") or reason
            delta = choice.get("delta") or {}
            # Reasoning models stream their reasoning under another key.
            text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
            if text:
                first = first if first is not None else time.monotonic() - start
                pieces.append(text)
                if on_text is not None:
                    on_text(text)
    if reason is None:
        raise DeployError(
            f"the endpoint {endpoint} did not finish its answer", hint=f"see its log: {log_group(endpoint)}"
        )
    return Answer("".join(pieces), reason, usage, first, time.monotonic() - start)


def log_group(endpoint: str) -> str:
    return f"/aws/sagemaker/Endpoints/{endpoint}"
