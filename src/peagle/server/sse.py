"""Server-sent events: how to write one, and how to split a byte stream into whole events."""

import json
from typing import Any

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def dumps(data: Any) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def event(data: Any) -> bytes:
    return b"data: " + dumps(data) + b"\n\n"


def data_of(text: bytes) -> bytes | None:
    """The `data` of one event; None for a comment.

    >>> data_of(b"event: x\\ndata: 1\\ndata: 2"), data_of(b": keep-alive")
    (b'1\\n2', None)
    """
    lines = [line[5:].removeprefix(b" ") for line in text.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


class EventSplitter:
    """Bytes in, whole events out, without the blank line that ends them.

    Chunks may be cut anywhere, inside a line or a character.

    >>> splitter = EventSplitter()
    >>> splitter.feed(b'data: {"a"'), splitter.feed(b': 1}\\r\\n'), splitter.feed(b'\\r\\n: waiting\\n\\ndata: [DONE]')
    ([], [], [b'data: {"a": 1}', b': waiting'])
    >>> splitter.rest
    b'data: [DONE]'
    """

    def __init__(self) -> None:
        self.rest = b""
        """the start of an event whose end has not arrived"""

    def feed(self, chunk: bytes) -> list[bytes]:
        *events, self.rest = (self.rest + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
        return events
