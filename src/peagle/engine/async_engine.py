"""An engine for servers: a thread of its own runs the steps, callers await their answers as they grow.

    engine = AsyncEngine(Engine(target, drafter, 7))
    async for update in engine.stream(prompt_ids, params):
        print(update.text, end="")

Leaving the loop early, or cancelling the task it runs in, aborts the request and frees its memory.
"""

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from peagle.engine.engine import Engine
from peagle.engine.outputs import EngineStats, Update
from peagle.errors import PeagleError
from peagle.sampling_params import SamplingParams

log = logging.getLogger(__name__)


class EngineDeadError(PeagleError):
    """The engine's thread has ended, by `close` or by an error that is no request's fault."""


class AsyncEngine:
    """Owns an engine and the one thread that touches it. Its methods may be called from any event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._error: BaseException | None = None
        self._listeners: dict[str, Callable[[Update | BaseException], None]] = {}
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="peagle-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._is_closed

    async def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncIterator[Update]:
        """Updates of one request until all its answers are finished. A refused request raises here."""
        params = params or SamplingParams()
        request_id = f"stream-{next(self._numbers)}" if request_id is None else request_id
        updates: asyncio.Queue[Update | BaseException] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def listen(update: Update | BaseException) -> None:
            loop.call_soon_threadsafe(updates.put_nowait, update)

        def add() -> None:
            try:
                self._engine.add(prompt_ids, params, request_id=request_id, on_update=listen)
                self._listeners[request_id] = listen
            except Exception as error:  # a refusal, or a mistake of ours: either is this caller's to see
                listen(error)

        self._call(add)
        num_open = params.n
        try:
            while num_open:
                update = await updates.get()
                if isinstance(update, BaseException):
                    num_open = 0
                    raise update
                num_open -= update.finish_reason is not None
                yield update
        finally:
            if num_open and self.is_alive:
                self._call(lambda: self._abort(request_id))

    async def abort(self, request_id: str) -> None:
        """End a request; its stream ends with an update that has no finish reason and no tokens."""
        self._call(lambda: self._abort(request_id))

    async def stats(self) -> EngineStats:
        return await self._ask(self._engine.stats)

    async def close(self) -> None:
        """End the thread after the step it is in; open streams raise EngineDeadError. The engine is closed too."""
        if not self._is_closed:
            self._is_closed = True
            self._calls.put(None)
        await asyncio.to_thread(self._thread.join)

    async def _ask(self, function: Callable[[], Any]) -> Any:
        loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def answer() -> None:
            result = function()
            loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(result))

        self._call(answer)
        return await future

    def _call(self, function: Callable[[], None]) -> None:
        if not self.is_alive:
            reason = f": {self._error}" if self._error is not None else ""
            raise EngineDeadError(f"the engine has stopped{reason}", hint="start a new one")
        self._calls.put(function)

    def _abort(self, request_id: str) -> None:
        self._listeners.pop(request_id, None)
        self._engine.abort(request_id)

    def _run(self) -> None:
        try:
            while self._take_calls():
                for output in self._engine.step():
                    self._listeners.pop(output.request_id, None)
        except BaseException as error:
            self._error = error
            log.exception("the engine has stopped")
        finally:
            self._is_closed = True
            dead = EngineDeadError("the engine has stopped", hint="start a new one")
            for listen in self._listeners.values():
                listen(self._error or dead)
            self._engine.close()

    def _take_calls(self) -> bool:
        """Do what was asked of the engine meanwhile; with nothing to run, wait for more. False: close."""
        while True:
            try:
                call = self._calls.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            if call is None:
                return False
            call()
