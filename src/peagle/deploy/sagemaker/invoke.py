"""Ask an endpoint, with the answer streamed.

SageMaker cuts the container's server-sent events into payload parts wherever it likes, inside a line and inside a
character; `Events` puts them together again.
"""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from peagle.deploy.sagemaker.aws import Aws
from peagle.deploy.sagemaker.plan import invocation
from peagle.errors import DeployError

DONE = "[DONE]"


class Events:
    """Bytes in, the `data` of whole events out.

    >>> events = Events()
    >>> events.add(b'data: {"a"'), events.add(b': 1}\\n'), events.add(b'\\n: waiting\\n\\ndata: [DONE]\\n\\n')
    ([], [], ['{"a": 1}', '[DONE]'])
    """

    def __init__(self) -> None:
        self._rest = b""

    def add(self, part: bytes) -> list[str]:
        *blocks, self._rest = (self._rest + part).replace(b"\r\n", b"\n").split(b"\n\n")
        found = []
        for block in blocks:
            lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
            if lines:
                found.append(b"\n".join(lines).decode())
        return found

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left over that never became a whole event."""
        return not self._rest.strip()


@dataclass(frozen=True)
class Answer:
    """What a streamed chat gave, and how fast."""

    text: str
    finish_reason: str | None
    usage: Mapping[str, Any] | None
    first_token_seconds: float | None
    total_seconds: float

    @property
    def acceptance_length(self) -> float | None:
        """Where the container tells it: ours does."""
        metrics = ((self.usage or {}).get("metrics") or {}).get("speculative_decoding") or {}
        return metrics.get("mean_acceptance_length")

    def figures(self) -> dict[str, Any]:
        """What was measured, without the text."""
        return {
            "finish_reason": self.finish_reason,
            "num_tokens": (self.usage or {}).get("completion_tokens"),
            "first_token_seconds": None if self.first_token_seconds is None else round(self.first_token_seconds, 3),
            "total_seconds": round(self.total_seconds, 3),
            "acceptance_length": self.acceptance_length,
        }


def stream(aws: Aws, endpoint: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The chunks of a streamed chat."""
    call = invocation(endpoint, body)
    answer = aws.call(call.service, call.operation, **call.parameters)
    events, is_done = Events(), False
    body_stream = answer["Body"]
    try:
        with aws.explained(call.operation):
            for event in body_stream:
                for data in events.add(event.get("PayloadPart", {}).get("Bytes", b"")):
                    if data == DONE:
                        is_done = True
                    else:
                        yield _chunk(endpoint, data)
    finally:
        body_stream.close()
    if not is_done or not events.is_empty:
        raise DeployError(
            f"the endpoint {endpoint} ended its stream in the middle", hint=f"its log: {log_group(endpoint)}"
        )


def _chunk(endpoint: str, data: str) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError:
        chunk = None
    if not isinstance(chunk, dict):
        raise DeployError(f"the endpoint {endpoint} streams what is not JSON: {data[:200]}")
    error = chunk.get("error")
    if error:
        told = error.get("message", error) if isinstance(error, dict) else error
        raise DeployError(f"the endpoint {endpoint} failed while it answered: {told}")
    return chunk


def ask(aws: Aws, endpoint: str, body: Mapping[str, Any], on_text: Any = None) -> Answer:
    """Stream one chat to its end; `on_text` gets each piece of text as it comes."""
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
            # A target that thinks first streams that under another name.
            text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
            if text:
                first = first if first is not None else time.monotonic() - start
                pieces.append(text)
                if on_text is not None:
                    on_text(text)
    if reason is None:
        raise DeployError(f"the endpoint {endpoint} did not finish its answer", hint=f"its log: {log_group(endpoint)}")
    return Answer("".join(pieces), reason, usage, first, time.monotonic() - start)


def log_group(endpoint: str) -> str:
    return f"/aws/sagemaker/Endpoints/{endpoint}"
