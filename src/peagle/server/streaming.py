"""Responses that stop the work when their client disconnects."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Self, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from peagle.server.errors import as_http_error
from peagle.server.settings import ServerSettings
from peagle.server.sse import DONE, KEEP_ALIVE, dumps, event

T = TypeVar("T")

LAST_EVENT_SECONDS = 5.0
CLIENT_GONE = 499
"""The status in the log for a request whose client disconnected."""


class ClientGoneError(Exception):
    """The client closed the connection."""


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content)


async def unless_gone(request: Request, work: Awaitable[T], seconds: float) -> T:
    """The result of `work`, which is cancelled when the client disconnects or the time is up."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(disconnected(request.receive))
    try:
        done, _ = await asyncio.wait({task, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            return task.result()
        raise ClientGoneError if gone in done else TimeoutError
    finally:
        await _end(task, gone)


async def disconnected(receive: Receive) -> None:
    """Return when the client has closed the connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: "asyncio.Future[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Server-sent events from a generator, which is closed when the client disconnects.

    Nothing is sent before the first event or the first keep-alive, so that a refused request gets its error status.
    A later error is sent as an event.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], settings: ServerSettings) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._keep_alive, self._seconds = settings.keep_alive_seconds, settings.request_seconds
        self._sent_at = 0.0

    def translated(self, translate: Callable[[AsyncGenerator[bytes, None]], AsyncGenerator[bytes, None]]) -> Self:
        """This stream with its events translated. The new generator closes the old one."""
        self._events = translate(self._events)
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        first = asyncio.ensure_future(anext(self._events, None))
        gone = asyncio.create_task(disconnected(receive))
        pump: asyncio.Task[None] | None = None
        try:
            done, _ = await asyncio.wait({first, gone}, timeout=self._keep_alive, return_when=asyncio.FIRST_COMPLETED)
            if first in done and first.exception() is not None:
                await first  # nothing sent yet: the error becomes the response
            if gone in done:
                raise ClientGoneError
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            pump = asyncio.create_task(self._pump(first, send))
            done, _ = await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
            if pump not in done:
                raise ClientGoneError
            await pump
        finally:
            await _end(*filter(None, (pump, first, gone)))
            await self._events.aclose()

    async def _pump(self, first: "asyncio.Future[bytes | None]", send: Send) -> None:
        now = asyncio.get_running_loop().time
        beat, deadline, last_event = asyncio.create_task(self._beat(send)), now() + self._seconds, b""
        try:
            async with asyncio.timeout_at(deadline):
                chunk = await first
                while chunk is not None:
                    await self._send(send, chunk)
                    chunk = await anext(self._events, None)
        except Exception as error:
            last_event = event(as_http_error(error).body()) + DONE
        finally:
            await _end(beat)
            await self._events.aclose()  # first: a client that does not read must not hold the engine
        try:
            async with asyncio.timeout_at(max(deadline, now() + LAST_EVENT_SECONDS)):
                await send({"type": "http.response.body", "body": last_event, "more_body": False})
        except TimeoutError:
            raise ClientGoneError from None

    async def _send(self, send: Send, chunk: bytes) -> None:
        self._sent_at = time.monotonic()
        await send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def _beat(self, send: Send) -> None:
        """Send a comment after a long silence. Chunks are written whole, so it never splits one."""
        with contextlib.suppress(OSError):
            while True:
                silence = time.monotonic() - self._sent_at
                if silence >= self._keep_alive:
                    await self._send(send, KEEP_ALIVE)
                    silence = 0.0
                await asyncio.sleep(self._keep_alive - silence)
