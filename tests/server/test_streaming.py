"""A stream over a connection that a test plays, without a server."""

import asyncio

import pytest

from peagle.server import streaming
from peagle.server.settings import ServerSettings
from peagle.server.streaming import ClientGoneError, EventStream


def test_a_client_that_stops_reading_holds_its_stream_no_longer_than_a_request_may_take(monkeypatch):
    monkeypatch.setattr(streaming, "LAST_EVENT_SECONDS", 0.05)
    seen = []

    async def events():
        try:
            while True:
                yield b"data: {}\n\n"
        finally:
            seen.append("closed")

    async def send(message):
        if message["type"] == "http.response.body":
            seen.append("last" if not message["more_body"] else "chunk")
            await asyncio.Event().wait()

    async def main():
        async with asyncio.timeout(30):
            settings = ServerSettings(keep_alive_seconds=10, request_seconds=0.05)
            await EventStream(events(), settings)({}, asyncio.Event().wait, send)

    with pytest.raises(ClientGoneError):
        asyncio.run(main())
    assert seen[-2:] == ["closed", "last"], "what the stream holds is free before the last words are tried"
