"""An engine for servers: a thread of its own runs the steps, callers await their answers as they grow.

    async with AsyncEngine(llm.engine) as engine:
        async for update in engine.stream(prompt_ids, params):
            print(update.text, end="")

Leaving the loop early, or cancelling the task it runs in, aborts the request and frees its memory. The thread is the
only one that touches the engine: everything else is a call put into its queue, done between two steps.
"""

import asyncio
import atexit
import itertools
import logging
import queue
import threading
import traceback
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import NamedTuple, TypeVar

from peagle.engine.engine import Engine
from peagle.engine.outputs import EngineStats, Update
from peagle.errors import EngineDeadError
from peagle.sampling_params import SamplingParams

log = logging.getLogger(__name__)

T = TypeVar("T")

EXIT_SECONDS = 10.0
"""How long the end of the program waits for the step in progress, where nobody closed the engine."""


class _Call(NamedTuple):
    """What the thread is asked to do between two steps, and whom to tell if it ends before it comes to it."""

    run: Callable[[], None]
    fail: Callable[[EngineDeadError], None]


class AsyncEngine:
    """Takes over an engine; from here on nobody else may use it. Methods may be called from any event loop.

    An error inside the engine ends it: open streams and later calls raise EngineDeadError with that error as cause.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        """held to look at `_is_closed` and act on it: no call may enter the queue after it was last emptied"""
        self._is_closed = False
        self._error: BaseException | None = None
        self._numbers = itertools.count()
        self._listeners: dict[str, Callable[[Update | EngineDeadError], None]] = {}
        """of the requests that the engine serves; only the thread touches it"""
        self._thread = threading.Thread(target=self._run, name="peagle-engine", daemon=True)
        atexit.register(self._end_with_the_program)
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
        """Updates of one request until all its answers have ended. It is queued when the first one is awaited.

        A request that cannot be served raises here and nowhere else. One that `abort` ends gives a last update for each
        unfinished answer, without tokens and with the finish reason "abort".
        """
        params = params or SamplingParams()
        request_id = f"stream-{next(self._numbers)}" if request_id is None else request_id
        updates: asyncio.Queue[Update | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def listen(update: Update | Exception) -> None:
            try:
                loop.call_soon_threadsafe(updates.put_nowait, update)
            except RuntimeError:  # the event loop was closed over an open stream: nobody listens any more
                self._put(_Call(leave, lambda _: None))

        def add() -> None:
            try:
                self._engine.add(prompt_ids, params, request_id=request_id, on_update=listen)
            except Exception as error:  # a refusal, or a prompt that is none: either is this caller's to see
                listen(error)
            else:
                self._listeners[request_id] = listen

        def leave() -> None:
            if self._listeners.get(request_id) is listen:  # a refused namesake must not end the request it met
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
                self._put(_Call(leave, lambda _: None))

    async def abort(self, request_id: str) -> bool:
        """End a request now; its stream ends with updates that say so. False if there is none of that id."""
        return await self._ask(lambda: self._abort(request_id))

    async def stats(self) -> EngineStats:
        """Counts so far, taken between two steps."""
        return await self._ask(self._engine.stats)

    async def close(self) -> None:
        """End the thread after the step it is in, and close the engine; open streams raise EngineDeadError."""
        self._stop()
        await asyncio.to_thread(self._thread.join)

    # Towards the thread -----------------------------------------------------------------------------------------------

    async def _ask(self, function: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: Exception | None) -> None:
            if future.done():  # the caller was cancelled meanwhile
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def tell(result: T | None, error: Exception | None) -> None:
            try:
                loop.call_soon_threadsafe(settle, result, error)
            except RuntimeError:
                log.debug("nobody waits for the answer any more: the event loop is closed")

        def run() -> None:
            try:
                result = function()
            except Exception as error:
                tell(None, error)
            else:
                tell(result, None)

        self._call(_Call(run, lambda error: tell(None, error)))
        return await future

    def _call(self, call: _Call) -> None:
        if not self._put(call):
            raise self._death()

    def _put(self, call: _Call) -> bool:
        """Queue a call; False if the thread will not come to it."""
        with self._lock:
            if not self._is_closed:
                self._calls.put(call)
            return not self._is_closed

    def _stop(self) -> None:
        with self._lock:
            self._is_closed = True
            self._calls.put(None)

    def _end_with_the_program(self) -> None:
        """A thread that is cut off inside a kernel may bring the whole process down."""
        self._stop()
        self._thread.join(EXIT_SECONDS)

    def _death(self) -> EngineDeadError:
        if self._error is None:
            return EngineDeadError("the engine has been closed", hint="start a new one")
        error = EngineDeadError(f"the engine has stopped: {self._error!r}", hint="start a new one, and report this")
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
            log.exception("the engine has stopped")
            traceback.clear_frames(error.__traceback__)  # what it is raised with later must not hold the pages
        finally:
            self._end()

    def _take_calls(self) -> bool:
        """Do what was asked of the engine meanwhile; with nothing to run, wait for more. False: close."""
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
        """Tell everybody who waits for something, now or in the queue, then give the memory back."""
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
            log.exception("the engine could not be closed")
        atexit.unregister(self._end_with_the_program)
