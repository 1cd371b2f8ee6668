"""Our own engine as a backend: tokenizer, limits, jobs and metrics around an AsyncEngine."""

import asyncio
import contextlib
import copy
import logging
import math
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from peagle.checkpoint.card import baseline_of
from peagle.dialects.dialect import dialect_of
from peagle.engine.recorder import WARM_UP
from peagle.errors import PeagleError
from peagle.sampling_params import Grammar, SamplingParams
from peagle.server.backend import Backend
from peagle.server.errors import HttpError, invalid, unavailable
from peagle.server.jobs import Job
from peagle.server.metrics import ServerMetrics
from peagle.server.protocol import Body
from peagle.server.settings import ServerSettings
from peagle.server.streaming import EventStream, JsonResponse, unless_gone
from peagle.server.tokens import ControlTokens, TokenTexts
from peagle.targets.near_tie import near_tie

if TYPE_CHECKING:
    from peagle.engine.llm import LLM
    from peagle.server.writer import Writer
    from peagle.targets.hf import HFTarget

T = TypeVar("T")

log = logging.getLogger(__name__)

WARMUP_TOKENS = 4
MAX_COMPILING = 4
"""Grammars that compile at the same time, abandoned ones included; further requests wait."""
END_TOKENS = 16
"""Tokens at the end of a prompt that say whether it opens a block of thinking."""
STATS_SECONDS = 5.0
"""A scrape waits this long for the engine's counters, then shows those of the scrape before."""


class Compiler:
    """Compiles grammars in a few daemon threads. One that takes too long is abandoned: nothing can interrupt it."""

    def __init__(self, target: "HFTarget") -> None:
        self._target = target
        self.places = asyncio.Semaphore(MAX_COMPILING)

    async def compile(self, grammar: Grammar) -> None:
        """The caller has acquired a place, which is released when the thread ends."""
        from peagle.decoding.grammar import make_guide

        loop = asyncio.get_running_loop()
        compiled: asyncio.Future[None] = loop.create_future()

        def end(error: Exception | None) -> None:
            self.places.release()
            if compiled.done():
                return
            if error is None:
                compiled.set_result(None)
            else:
                compiled.set_exception(error)

        def run() -> None:
            failure: Exception | None = None
            try:
                make_guide(self._target, grammar)
            except Exception as error:
                failure = error
            with contextlib.suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(end, failure)

        threading.Thread(target=run, name="peagle-grammar", daemon=True).start()
        await compiled


class Service(Backend):
    """Takes over the engine of an LLM. All methods belong to one event loop."""

    metrics: ServerMetrics
    max_length: int

    def __init__(self, llm: "LLM", settings: ServerSettings, drafter_name: str | None = None) -> None:
        from peagle.engine.async_engine import AsyncEngine

        engine, target = llm.engine, llm.target
        self.settings, self.max_batch = settings, engine.scheduler.config.max_batch
        self.max_length, self.num_draft_tokens = engine.max_length, engine.num_draft_tokens
        names = settings.served_model_name or (target.name,)
        card = getattr(engine.drafter, "card", None)
        acceptance = card.acceptance if card else {}
        baselines = (baseline_of(acceptance, self.num_draft_tokens, is_sampled) for is_sampled in (False, True))
        metrics = ServerMetrics(names[0], self.num_draft_tokens, self.max_batch, *baselines)
        super().__init__(names, target.name, metrics)
        max_waiting = engine.runner.config.max_waiting
        self._capacity = math.inf if max_waiting is None else max_waiting + self.max_batch
        self.vocab_size, self.near_tie, self.precision = target.vocab_size, near_tie(target), target.precision
        self.tokenizer = copy.deepcopy(target.tokenizer)  # the engine's thread uses the other one
        self.token_texts = TokenTexts(self.tokenizer)
        template = self.tokenizer.chat_template or ""
        self.chat_template = template if isinstance(template, str) else "\n".join(template.values())
        """source of the target's chat template, or of all of them joined"""
        self.control_tokens = ControlTokens(self.tokenizer, self.chat_template)
        self.dialect = dialect_of(self.chat_template)
        self._max_characters = self.max_length * max(map(len, self.tokenizer.get_vocab()), default=1)
        self.method = None if engine.drafter is None else engine.drafter.config.method
        self.drafter_name = self.method and (drafter_name or target.shipped_drafter_name or self.method)
        self.jobs: set[Job] = set()
        self._texts = ThreadPoolExecutor(1, thread_name_prefix="peagle-tokenizer")
        self._compiler = Compiler(target)
        self.engine = AsyncEngine(engine)

    async def warm_up(self) -> None:
        params = SamplingParams(max_tokens=min(WARMUP_TOKENS, self.max_length - 1), ignore_eos=True)
        async for _ in self.engine.stream([0], params, request_id=WARM_UP):
            pass
        try:
            await self._compiler.places.acquire()
            await self._compiler.compile(Grammar("json_object"))
        except PeagleError as error:
            log.info("structured outputs are not available: %s", error.message)
        await self.metrics_text()

    async def close(self) -> None:
        self._texts.shutdown(wait=False, cancel_futures=True)
        await self.engine.close()

    @property
    def is_alive(self) -> bool:
        return self.engine.is_alive

    async def in_thread(self, request: Request, function: Callable[[], T]) -> T:
        """Run `function` in the tokenizer's thread, so that a long prompt does not stall the streams.

        Work still in the queue is dropped when its client disconnects or its time is up.
        """
        work = asyncio.get_running_loop().run_in_executor(self._texts, function)
        return await unless_gone(request, work, self.settings.request_seconds)

    async def prepare(self, request: Request, grammar: Grammar) -> None:
        """Compile a grammar in a thread, or refuse it. The engine then finds it in the cache."""
        seconds = self.settings.grammar_seconds
        try:
            await unless_gone(request, self._compiler.places.acquire(), seconds)
        except TimeoutError:
            raise unavailable(f"{MAX_COMPILING} other grammars are still compiling", "compiling") from None
        try:
            await unless_gone(request, self._compiler.compile(grammar), seconds)
        except TimeoutError:
            message = f"the {grammar.kind} grammar did not compile within {seconds:g} s; simplify it"
            raise HttpError(400, message, code="grammar_timeout") from None

    def check_length(self, text: str) -> str:
        """Refuse a text that is too long however it is tokenized, before tokenizing it."""
        if len(text) > self._max_characters:
            message = f"the prompt's {len(text)} characters exceed the context of {self.max_length} tokens"
            raise HttpError(400, message, param="prompt", code="context_length_exceeded")
        return text

    def encode(self, text: str, add_special_tokens: bool | None) -> list[int]:
        """Token ids of a text, with special tokens unless `add_special_tokens` is False."""
        is_special = add_special_tokens is not False
        return list(self.tokenizer(self.check_length(text), add_special_tokens=is_special, verbose=False)["input_ids"])

    def end_of(self, prompt: list[int]) -> str:
        """The last characters of a prompt, with special tokens."""
        return str(self.tokenizer.decode(prompt[-END_TOKENS:], clean_up_tokenization_spaces=False))

    def token_ids(self, texts: Collection[str]) -> frozenset[int]:
        """The special tokens among these."""
        added = self.tokenizer.added_tokens_decoder
        return frozenset(token_id for token_id, each in added.items() if each.special and each.content in texts)

    def room(self, prompts: Sequence[Sequence[int]], asked: int | None, param: str) -> int:
        """The max_tokens of a request: `asked`, or all that fits after the longest prompt."""
        longest = max(map(len, prompts))
        room = self.max_length - longest
        if room < 1:
            message = f"the prompt's {longest} tokens leave no room for an answer in the context of {self.max_length}"
            raise HttpError(400, message, param="prompt", code="context_length_exceeded")
        if asked is not None and asked > room:
            message = (
                f"{param}={asked} and the prompt's {longest} tokens exceed the context of {self.max_length}; "
                f"set {param!r} to at most {room}, or omit it"
            )
            raise HttpError(400, message, param=param, code="context_length_exceeded")
        return room if asked is None else asked

    def new_job(self, kind: str, prompts: list[list[int]], params: SamplingParams, arrived: float) -> Job:
        """A job for a request that arrived at `arrived`; refuses one that could never be served.

        The engine gets the prompts one by one, so it cannot tell that they are too many.
        """
        num_choices, param = len(prompts) * params.n, "prompt" if len(prompts) > 1 else "n"
        if num_choices > self.settings.max_choices:
            message = f"{num_choices} answers (prompts x n) exceed the limit of {self.settings.max_choices}"
            raise HttpError(400, message, param=param)
        if num_choices > self._capacity:
            message = f"{num_choices} answers (prompts x n) exceed capacity (batch + queue = {self._capacity})"
            raise HttpError(400, message, param=param, code="capacity")
        asked = params.num_draft_tokens
        if asked is not None and asked > self.num_draft_tokens:
            why = f"must be at most the engine's {self.num_draft_tokens}, got {asked}"
            raise invalid("speculation.num_draft_tokens", why)
        name = f"{kind}-{uuid.uuid4().hex}"
        return Job(self.engine, name, prompts, params, self.num_draft_tokens, self.metrics.itl.observe, arrived)

    @contextlib.contextmanager
    def running(self, job: Job) -> Iterator[None]:
        """Keep track of a job, and record its metrics at the end, finished or not."""
        self.jobs.add(job)
        try:
            yield
        finally:
            self.jobs.discard(job)
            if job.first_token_at is not None:
                self.metrics.ttft.observe(job.first_token_at - job.started)
            if job.finished_at is not None:
                is_full = sum(len(each.choices) for each in self.jobs) + 1 >= self.max_batch
                self.metrics.finished(job, is_full=is_full)

    async def respond(self, request: Request, body: Body, writer: "Writer") -> Response:
        """Run the writer's job and send what it makes of it: a stream of events, or one document."""
        job, settings = writer.job, self.settings
        if body.stream_options is not None and not body.stream:
            raise invalid("stream_options", "requires 'stream'")
        if job.params.grammar is not None:
            await self.prepare(request, job.params.grammar)
        request.state.job, request.state.user = job, body.user
        if body.stream:
            return EventStream(writer.events(), settings)
        with self.running(job):
            await unless_gone(request, job.run(), settings.request_seconds)
        return JsonResponse(writer.whole())

    async def metrics_text(self) -> bytes:
        try:
            if self.is_alive:
                self.metrics.stats = await asyncio.wait_for(self.engine.stats(), STATS_SECONDS)
        except TimeoutError:
            log.warning("the engine did not report its counters within %g s; /metrics shows old ones", STATS_SECONDS)
        return self.metrics.text()
