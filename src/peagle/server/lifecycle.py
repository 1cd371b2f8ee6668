"""From loading to the last answer: readiness, the requests in flight, and the ordered end.

    starting --> ready --> draining --> (process ends)
        '--> failed            a target that could not be loaded ends the process with its error

SIGTERM and SIGINT begin the drain: new requests get 503, accepted ones have `drain_seconds` to finish. A second signal
ends the process without waiting.
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
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

import uvicorn

from peagle.errors import ConfigError
from peagle.server.errors import HttpError, unavailable
from peagle.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prometheus_client import Counter
    from starlette.applications import Starlette

log = logging.getLogger(__name__)

State = Literal["starting", "ready", "draining", "dead", "failed"]
LAST_WORDS_SECONDS = 2.0
"""After the drain: for the errors of aborted requests to be written."""
CLOSE_SECONDS = 3
KEEP_ALIVE_SECONDS = 75
"""For idle connections: longer than load balancers keep theirs, which would otherwise send into a closing one."""
BACKLOG = 2048


class Books(Protocol):
    """What the gate counts of every request."""

    @property
    def http(self) -> "Counter": ...

    @property
    def gone(self) -> "Counter": ...


class Backend(Protocol):
    """What answers: our own engine in this process, or another server behind this one."""

    @property
    def names(self) -> "Sequence[str]": ...

    @property
    def metrics(self) -> Books: ...

    @property
    def is_alive(self) -> bool: ...

    def describe(self) -> str: ...

    def check_model(self, name: str) -> None: ...

    def model_entry(self, name: str) -> dict[str, Any]: ...

    async def metrics_text(self) -> bytes: ...

    async def warm_up(self) -> None: ...

    async def abort_all(self) -> None: ...

    async def close(self) -> None: ...


S = TypeVar("S", bound=Backend)
L = TypeVar("L")


class Lifecycle(Generic[S]):
    """What state the server is in. It belongs to the event loop; `begin_drain` may be called from signal handlers.

    `load` runs in a thread of its own and `make` turns what it returns into the service, in the event loop. `cancel`
    is called if the server ends before there is a service.
    """

    def __init__(
        self,
        settings: ServerSettings,
        load: Callable[[], L],
        make: Callable[[L], S],
        cancel: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = settings
        self.service: S | None = None
        """set when it is warm"""
        self.failure: BaseException | None = None
        self.num_in_flight = 0
        self.is_draining = False
        self.on_end: Callable[[], None] = lambda: None
        """called in the event loop when there is nothing left to wait for"""
        self._load: Callable[[], Any] = load
        self._make: Callable[[Any], S] = make
        self._cancel = cancel
        self._made: S | None = None
        """the service from its first moment on: what the end closes"""
        self._loader: threading.Thread | None = None
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

    def ready_service(self) -> S:
        """The service, or a 503 that says why there is none."""
        if self.state == "ready" and self.service is not None:
            return self.service
        raise self.refusal()

    def refusal(self) -> HttpError:
        why = {
            "starting": "the target is still being loaded",
            "draining": "the server is shutting down",
            "dead": "the engine has stopped and serves nobody any more",
            "failed": "the target could not be loaded",
        }
        error = unavailable(why.get(self.state, "the server is not ready"), f"server_{self.state}")
        if self.state == "draining":
            error.headers["Connection"] = "close"
        return error

    @contextlib.asynccontextmanager
    async def lifespan(self, _: "Starlette") -> AsyncIterator[None]:
        """Load in the background, so that health checks are answered meanwhile; close at the end."""
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

    def begin_drain(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_soon_threadsafe(lambda: self._spawn(self._drain()))

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[Any] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if loaded.cancelled():
                return
            if error is None:
                loaded.set_result(result)
            else:
                loaded.set_exception(error)

        def run() -> None:
            result, failure = None, None
            try:
                result = self._load()
            except BaseException as error:
                failure = error
            with contextlib.suppress(RuntimeError):  # the event loop has ended meanwhile
                loop.call_soon_threadsafe(settle, result, failure)

        self._loader = threading.Thread(target=run, name="peagle-loader", daemon=True)
        self._loader.start()
        try:
            self._made = service = self._make(await loaded)
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
        deadline = time.monotonic() + self.settings.drain_seconds
        if self.num_in_flight:
            log.info("draining: %d requests have %g s to finish", self.num_in_flight, self.settings.drain_seconds)
        while self.num_in_flight and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self.num_in_flight and self.service is not None:
            log.warning("%d requests did not finish in time and are ended", self.num_in_flight)
            await self.service.abort_all()
            deadline = time.monotonic() + LAST_WORDS_SECONDS
            while self.num_in_flight and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
        self.on_end()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Server(uvicorn.Server):
    """uvicorn, ended by the drain of a lifecycle instead of at once."""

    def __init__(self, app: "Starlette", lifecycle: Lifecycle[Any]) -> None:
        config = uvicorn.Config(
            app,
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
        """the signal that ended it without waiting"""
        self._num_signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        lifecycle.on_end = self._end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        if self._num_signals == 1 and self._loop is not None:
            self.lifecycle.begin_drain(self._loop)
            return
        self.forced_by, self.should_exit, self.force_exit = sig, True, True
        logging.getLogger("uvicorn.error").disabled = True  # that requests are cut off now is what was asked for

    def stop(self) -> None:
        """Begin the drain, from any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended already
                self.lifecycle.begin_drain(self._loop)

    def _end(self) -> None:
        self.should_exit = True


def bind(settings: ServerSettings) -> socket.socket:
    """Take the port before anything is loaded, so that a busy one is found out at once."""
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
            hint="another program may have the port: give another one with --port, or 0 for a free one",
        ) from error
    return listener


def serve(app: "Starlette", lifecycle: Lifecycle[Any], listener: socket.socket) -> int:
    """Serve until a signal ends it, and return the process's exit status."""
    server = Server(app, lifecycle)
    server.run(sockets=[listener])
    if lifecycle.failure is not None:
        raise lifecycle.failure
    if server.forced_by or lifecycle.is_loading:
        # The thread that loads, or the engine's, may be inside a kernel that nobody can interrupt.
        log.warning("ended without waiting" if server.forced_by else "ended while the target was being loaded")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + server.forced_by if server.forced_by else 0)
    log.info("ended: every accepted request was answered" if not lifecycle.num_in_flight else "ended")
    return 0
