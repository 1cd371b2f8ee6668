"""The server's life: loading, ready, draining, exit.

    starting --> ready --> draining --> (process ends with status 0)
        '--> failed            loading failed: the process ends with that error

SIGTERM and SIGINT begin the drain: new requests get a 503, accepted ones have `drain_seconds` to finish. Then they are
cut: each client gets an error that says why. A second signal cuts at once, with status 128 + its number. Whatever
hangs, the process ends within TEARDOWN_SECONDS after the drain.
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from http import HTTPStatus
from types import FrameType
from typing import Any, Generic, Literal, NoReturn, TypeVar

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from peagle.errors import ConfigError
from peagle.server.backend import Backend
from peagle.server.errors import HttpError, unavailable
from peagle.server.settings import ServerSettings
from peagle.server.sse import dumps

log = logging.getLogger(__name__)

State = Literal["starting", "ready", "draining", "dead", "failed"]
REFUSALS: dict[State, str] = {
    "starting": "the target is still loading",
    "ready": "the server is not ready",
    "draining": "the server is shutting down",
    "dead": "the engine has stopped",
    "failed": "the target could not be loaded",
}
CUT_SECONDS = 1.0
"""Time to send requests that were cut their errors."""
CLOSE_SECONDS = 1
"""Time for connections to close after that."""
TEARDOWN_SECONDS = 2.5
"""From the end of the drain to the end of the process, with all of the above."""
KEEP_ALIVE_SECONDS = 75
"""Idle connections stay open longer than load balancers keep theirs, so that none sends into a closing one."""
MAX_HEADER_BYTES = 64 * 2**10
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""Clients skip any number of these."""
FIRST_PROBE_SECONDS, MAX_PROBE_SECONDS = 0.1, 5.0
BACKLOG = 2048

S = TypeVar("S", bound=Backend)


class Lifecycle(Generic[S]):
    """The state of the server. It belongs to the event loop; signal handlers may call `begin_drain`.

    `load` runs in a thread, and `make` turns its result into the service in the event loop. `cancel` is called if the
    server ends before there is a service.
    """

    def __init__(
        self,
        settings: ServerSettings,
        load: Callable[[], Any],
        make: Callable[[Any], S],
        cancel: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = settings
        self.service: S | None = None
        """set when it is warmed up"""
        self.failure: BaseException | None = None
        self.in_flight: set[asyncio.Task[Any]] = set()
        self.is_draining = False
        self.cut_reason: str | None = None
        """set when open requests are cut"""
        self.num_cut = 0
        self.on_end: Callable[[], None] = lambda: None
        """called in the event loop when the drain is over"""
        self._load, self._make, self._cancel = load, make, cancel
        self._made: S | None = None
        """the service as soon as it exists, warm or not: closed at the end"""
        self._loader: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def state(self) -> State:
        if self.failure is not None:
            return "failed"
        if self.is_draining:
            return "draining"
        if self.service is None:
            return "starting"
        return "ready" if self.service.is_alive else "dead"

    @property
    def is_loading(self) -> bool:
        return self._loader is not None and self._loader.is_alive()

    def answering(self) -> S:
        """The service for a request that passed the gate, even if the server began to drain while its body arrived."""
        if self.service is None or not self.service.is_alive:
            raise self.refusal()
        return self.service

    def refusal(self) -> HttpError:
        error = unavailable(REFUSALS[self.state], f"server_{self.state}")
        if self.state == "draining":
            error.headers["Connection"] = "close"
        return error

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Load in the background, so that health checks are answered meanwhile. Close at the end."""
        self._loop = asyncio.get_running_loop()
        self._spawn(self._start())
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            if self._made is not None:
                await self._made.close()
            else:
                await asyncio.to_thread(self._cancel)

    @property
    def num_in_flight(self) -> int:
        return len(self.in_flight)

    def begin_drain(self) -> bool:
        """Begin the drain, from any thread or a signal handler. False if the server does not run."""
        return self._begin(self._drain)

    def begin_cut(self) -> bool:
        """The same, without time for open requests."""
        return self._begin(lambda: self._cut("the server was stopped before this answer was finished"))

    def _begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(lambda: self._spawn(work()))
                return True
        return False

    async def _start(self) -> None:
        loaded: Future[Any] = Future()
        loaded.set_running_or_notify_cancel()

        def run() -> None:
            try:
                loaded.set_result(self._load())
            except BaseException as error:
                loaded.set_exception(error)

        self._loader = threading.Thread(target=run, name="peagle-loader", daemon=True)
        self._loader.start()
        try:
            self._made = service = self._make(await asyncio.wrap_future(loaded))
            await service.warm_up()
        except Exception as error:
            self.failure = error
            self.on_end()
            return
        self.service = service
        log.info("ready: %s, %s", service.names[0], service.describe())

    async def _drain(self) -> None:
        if self.is_draining:
            return
        self.is_draining = True
        if self.num_in_flight:
            log.info("draining: %d requests have %g s to finish", self.num_in_flight, self.settings.drain_seconds)
        seconds = self.settings.drain_seconds
        await self._settle(seconds)
        await self._cut(f"the server is shutting down, and this answer did not finish within {seconds:g} s")

    async def _cut(self, reason: str) -> None:
        """End open requests without the engine, which may be in a long step."""
        self.is_draining = True
        if self.num_in_flight and self.cut_reason is None:
            self.cut_reason = reason
            log.warning("cutting %d requests that have not finished", self.num_in_flight)
            for task in self.in_flight:
                task.cancel()
            await self._settle(CUT_SECONDS)
        self.on_end()

    async def _settle(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.num_in_flight and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class LimitedHttp(HttpToolsProtocol):
    """uvicorn's connection, with limits on the headers of a request: their size, and how long they may take."""

    def __init__(self, *, header_seconds: float, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._seconds = header_seconds
        self._timer: asyncio.TimerHandle | None = None
        self._num_header_bytes = self._num_requests = 0
        self._is_in_headers, self._is_too_large = True, False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch(KEEP_ALIVE_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_in_headers, num_requests = self._is_in_headers, self._num_requests
        if was_in_headers and not self._num_header_bytes:
            self._watch(self._seconds)
        super().data_received(data)
        if was_in_headers and num_requests == self._num_requests and not self.transport.is_closing():
            self._num_header_bytes += len(data)
            if self._num_header_bytes > MAX_HEADER_BYTES:
                self._is_too_large = True
                self.send_400_response("")

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether to keep the connection: a client may close its side after the request and read the answer."""
        if not self._num_requests or self.cycle.more_body or self.cycle.response_complete:
            return False
        self.cycle.keep_alive = False
        self._probe(FIRST_PROBE_SECONDS)
        return True

    def _probe(self, seconds: float) -> None:
        """Write something: only that shows whether a client has closed both sides. A response that began does too."""
        if self.transport.is_closing() or self.cycle.response_started or self.pipeline:
            return
        self.transport.write(CONTINUE)
        self.loop.call_later(seconds, self._probe, min(2 * seconds, MAX_PROBE_SECONDS))

    def on_headers_complete(self) -> None:
        self._watch(None)
        self._num_requests += 1
        self._num_header_bytes, self._is_in_headers = 0, False
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEADER_BYTES:
            self._is_too_large = True
            raise ValueError("the headers are too large")  # the parser stops, and `send_400_response` is called
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_headers = True

    def send_400_response(self, msg: str) -> None:
        status, message = 400, msg
        if self._is_too_large:
            status, message = 431, f"the headers exceed the limit of {MAX_HEADER_BYTES} bytes"
        self._refuse(HttpError(status, message))

    def _watch(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        if not self._num_header_bytes:
            self.transport.close()
        elif not self._num_requests or self.cycle.response_complete:
            self._refuse(HttpError(408, f"the headers did not arrive within {self._seconds:g} s"))

    def _refuse(self, error: HttpError) -> None:
        body = dumps(error.body())
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nContent-Type: application/json\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        self.transport.close()


class Server(uvicorn.Server):
    """uvicorn, which drains on the first signal and stops on the second."""

    def __init__(self, app: Starlette, lifecycle: Lifecycle[Any]) -> None:
        config = uvicorn.Config(
            app,
            http=partial(LimitedHttp, header_seconds=lifecycle.settings.header_seconds),  # type: ignore[arg-type]
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=CLOSE_SECONDS,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            server_header=False,
            backlog=BACKLOG,
        )
        super().__init__(config)
        self.lifecycle = lifecycle
        self.forced_by: int | None = None
        """the second signal, if there was one"""
        self._num_signals = 0
        lifecycle.on_end = self._end

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        if self._num_signals == 1 and self.lifecycle.begin_drain():
            self._exit_after(self.lifecycle.settings.drain_seconds + TEARDOWN_SECONDS, 0)
            return
        self.forced_by = sig
        logging.getLogger("uvicorn.error").disabled = True  # cutting requests off is intended here
        if self._num_signals == 2 and self.lifecycle.begin_cut():
            self._exit_after(TEARDOWN_SECONDS, 128 + sig)
        else:
            self.should_exit = self.force_exit = True

    def _end(self) -> None:
        if self.forced_by is not None:
            stop_at_once(self.forced_by)
        self.should_exit = True

    def _exit_after(self, seconds: float, status: int) -> None:
        """End the process after `seconds`, even if it still waits for the engine, a thread or a connection."""

        def end() -> None:
            log.warning("stopped before all was closed; %d requests were cut", self.lifecycle.num_cut)
            exit_now(status)

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()


def stop_at_once(signal_number: int) -> NoReturn:
    log.warning("stopped without draining")
    exit_now(128 + signal_number)


def exit_now(status: int) -> NoReturn:
    """End without waiting for threads: the loader's or the engine's may be in a kernel, which cannot be interrupted."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def bind(settings: ServerSettings) -> socket.socket:
    """Bind the port before the target loads, so that a busy port fails at once."""
    host = settings.host or "127.0.0.1"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, settings.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{settings.port}: {error.strerror or error}",
            hint="another program may use the port: pass another --port, or 0 for a free one",
        ) from error
    return listener


def serve(app: Starlette, lifecycle: Lifecycle[Any], listener: socket.socket) -> int:
    """Serve until a signal, and return the exit status."""
    server = Server(app, lifecycle)
    server.run(sockets=[listener])
    if lifecycle.failure is not None:
        raise lifecycle.failure
    if server.forced_by is not None:
        stop_at_once(server.forced_by)
    if lifecycle.is_loading:
        log.warning("stopped while the target was loading")
        exit_now(0)
    num_cut = lifecycle.num_cut
    log.info("stopped; %s", f"{num_cut} requests were cut" if num_cut else "every accepted request was answered")
    return 0
