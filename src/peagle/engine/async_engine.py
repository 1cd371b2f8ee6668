"""An engine for servers: a thread runs the steps, and callers await the updates of their requests.

    async with AsyncEngine(llm.engine) as engine:
        async for update in engine.stream(prompt_ids, params):
            print(update.text, end="")

Leaving the loop early, or cancelling its task, aborts the request and frees its memory. Only the thread touches the
engine: other threads put calls into its queue, and it runs them between two steps.
"""

import asyncio
import atexit
import itertools
import logging
import queue
import threading
import traceback
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from peagle.checkpoint.card import DrafterCard
from peagle.checkpoint.replacement import read_drafter_files
from peagle.engine.engine import Engine
from peagle.engine.outputs import EngineStats, Update
from peagle.errors import EngineDeadError
from peagle.sampling_params import SamplingParams

log = logging.getLogger(__name__)

T = TypeVar("T")

EXIT_SECONDS = 10.0
"""How long the interpreter's exit waits for the current step, if the engine was not closed."""


class _Call(NamedTuple):
    """A call for the thread to run between two steps, and what to do if the thread ends first."""

    run: Callable[[], None]
    fail: Callable[[EngineDeadError], None]


class AsyncEngine:
    """Takes ownership of an engine: do not use the engine directly any more. Callable from any event loop.

    An error inside the engine stops it: open streams and later calls raise EngineDeadError with that error as cause.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        """guards `_is_closed`: no call may enter the queue after it was emptied for the last time"""
        self._is_closed = False
        self._error: BaseException | None = None
        self._numbers = itertools.count()
        self._listeners: dict[str, Callable[[Update | EngineDeadError], None]] = {}
        """by request id; only the thread touches it"""
        self._thread = threading.Thread(target=self._run, name="peagle-engine", daemon=True)
        atexit.register(self._close_at_exit)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return not self._is_closed

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncGenerator[Update, None]:
        """Yield the updates of one request until all its completions are finished.

        The request is queued when the first update is awaited. A refused request raises here. If `abort` ends the
        request, each unfinished completion yields a last update without tokens and with finish reason "abort".
        """
        params = params or SamplingParams()
        request_id = f"stream-{next(self._numbers)}" if request_id is None else request_id
        updates: asyncio.Queue[Update | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def listen(update: Update | Exception) -> None:
            try:
                loop.call_soon_threadsafe(updates.put_nowait, update)
            except RuntimeError:  # the event loop was closed while the stream was open
                self._put(_Call(drop, lambda _: None))

        def add() -> None:
            try:
                self._engine.add(prompt_ids, params, request_id=request_id, on_update=listen)
            except Exception as error:  # a refused or malformed request: report it to its caller
                listen(error)
            else:
                self._listeners[request_id] = listen

        def drop() -> None:
            if self._listeners.get(request_id) is listen:  # a refused duplicate must not abort the original
                self._abort(request_id)

        self._call(_Call(add, listen))
        num_open = params.n
        try:
            while num_open:
                update = await updates.get()
                if isinstance(update, Exception):
                    num_open = 0
                    raise update
                num_open -= update.finish_reason is not None
                yield update
        finally:
            if num_open:
                self._put(_Call(drop, lambda _: None))

    async def abort(self, request_id: str) -> bool:
        """End a request now. Its stream yields "abort" updates. False if there is no such request."""
        return await self._ask(lambda: self._abort(request_id))

    async def stats(self) -> EngineStats:
        """A copy of the counters, taken between two steps."""
        return await self._ask(self._engine.stats)

    async def swap_drafter(self, directory: Path) -> DrafterCard:
        """Serve the weights of another drafter directory. A thread reads it; `Engine.swap_drafter` has the rest."""
        files = await asyncio.to_thread(read_drafter_files, directory)
        return await self._ask(lambda: self._engine.swap_drafter(files))

    async def close(self) -> None:
        """Stop the thread after the current step and close the engine. Open streams raise EngineDeadError."""
        self._stop()
        await asyncio.to_thread(self._thread.join)

    # Calls to the thread ----------------------------------------------------------------------------------------------

    async def _ask(self, function: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def resolve(result: T | None, error: Exception | None) -> None:
            if future.done():  # the caller was cancelled
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def send(result: T | None, error: Exception | None) -> None:
            try:
                loop.call_soon_threadsafe(resolve, result, error)
            except RuntimeError:
                log.debug("result discarded: the event loop is closed")

        def run() -> None:
            try:
                result = function()
            except Exception as error:
                send(None, error)
            else:
                send(result, None)

        self._call(_Call(run, lambda error: send(None, error)))
        return await future

    def _call(self, call: _Call) -> None:
        if not self._put(call):
            raise self._death()

    def _put(self, call: _Call) -> bool:
        """Queue a call; False if the thread will not run it."""
        with self._lock:
            if not self._is_closed:
                self._calls.put(call)
            return not self._is_closed

    def _stop(self) -> None:
        with self._lock:
            self._is_closed = True
            self._calls.put(None)

    def _close_at_exit(self) -> None:
        """At exit: wait for the step. Killing the thread inside a kernel may crash the process."""
        self._stop()
        self._thread.join(EXIT_SECONDS)

    def _death(self) -> EngineDeadError:
        if self._error is None:
            return EngineDeadError("the engine is closed", hint="start a new one")
        error = EngineDeadError(f"the engine stopped: {self._error!r}", hint="restart it, and report this")
        error.__cause__ = self._error
        return error

    # The thread -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_calls():
                for output in self._engine.step():
                    self._listeners.pop(output.request_id, None)
        except BaseException as error:
            self._error = error
            log.exception("the engine stopped")
            traceback.clear_frames(error.__traceback__)  # the stored error must not keep the KV cache alive
        finally:
            self._end()

    def _take_calls(self) -> bool:
        """Run the queued calls; wait for one if the engine is idle. False: close the engine."""
        while True:
            if not self._engine.has_work and self._calls.empty():
                self._engine.scheduler.check_idle()
            try:
                call = self._calls.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            if call is None:
                return False
            call.run()

    def _abort(self, request_id: str) -> bool:
        self._listeners.pop(request_id, None)
        return self._engine.abort(request_id)

    def _end(self) -> None:
        """Fail open streams and queued calls, then close the engine."""
        with self._lock:
            self._is_closed = True
        for listen in self._listeners.values():
            listen(self._death())
        self._listeners.clear()
        while not self._calls.empty():
            call = self._calls.get()
            if call is not None:
                call.fail(self._death())
        try:
            self._engine.close()
        except Exception:
            log.exception("closing the engine failed")
        atexit.unregister(self._close_at_exit)
