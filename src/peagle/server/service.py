"""A target that is ready to be asked: the engine, the tokenizer, its names and limits, and the books."""

import asyncio
import copy
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from peagle.errors import PeagleError
from peagle.sampling_params import Grammar, SamplingParams
from peagle.server.errors import HttpError, unknown_model
from peagle.server.jobs import Job
from peagle.server.metrics import ServerMetrics, baseline_of
from peagle.server.settings import ServerSettings
from peagle.server.streaming import EventStream, JsonResponse, unless_gone
from peagle.server.tokens import TokenTexts

if TYPE_CHECKING:
    from peagle.engine.llm import LLM
    from peagle.server.writer import Writer

T = TypeVar("T")

log = logging.getLogger(__name__)

WARMUP_TOKENS = 4
STATS_SECONDS = 5.0
"""How long a scrape waits for the engine's step to end before it shows the counts of the scrape before."""


class Service:
    """Owns the engine of an LLM from here on. All methods belong to the event loop it was made for."""

    def __init__(self, llm: "LLM", settings: ServerSettings, drafter_name: str | None = None) -> None:
        from peagle.engine.async_engine import AsyncEngine

        engine, target = llm.engine, llm.target
        self.settings = settings
        self.names = settings.served_model_name or (target.name,)
        self.max_length, self.num_draft_tokens = engine.max_length, engine.num_draft_tokens
        self.max_batch = engine.scheduler.config.max_batch
        self._max_waiting = engine.runner.config.max_waiting
        self.vocab_size, self.target_name = target.vocab_size, target.name
        self.tokenizer = copy.deepcopy(target.tokenizer)  # the engine's thread uses the other one
        self.token_texts = TokenTexts(self.tokenizer)
        self._max_characters = self.max_length * max(map(len, self.tokenizer.get_vocab()), default=1)
        self.created = int(time.time())
        drafter = engine.drafter
        self.method = None if drafter is None else drafter.config.method
        shipped = target.shipped_drafter_name
        self.drafter_name = None if drafter is None else drafter_name or shipped or drafter.config.method
        baseline = baseline_of(_card_acceptance(llm), self.num_draft_tokens)
        self.metrics = ServerMetrics(self.names[0], self.num_draft_tokens, self.max_batch, baseline)
        self.jobs: set[Job] = set()
        self._target = target
        self._texts = ThreadPoolExecutor(1, thread_name_prefix="peagle-tokenizer")
        self._grammars = ThreadPoolExecutor(1, thread_name_prefix="peagle-grammars")
        self.engine = AsyncEngine(engine)

    async def warm_up(self) -> None:
        """Answer once, so that what happens only the first time has happened."""
        params = SamplingParams(max_tokens=min(WARMUP_TOKENS, self.max_length - 1), ignore_eos=True)
        async for _ in self.engine.stream([0], params, request_id="warm-up"):
            pass
        try:
            await self.prepare(Grammar("json_object"))
        except PeagleError as error:
            log.info("no answers by grammar: %s", error.message)
        await self.refresh_stats()

    async def close(self) -> None:
        self._texts.shutdown(wait=False, cancel_futures=True)
        self._grammars.shutdown(wait=False, cancel_futures=True)
        await self.engine.close()

    @property
    def is_alive(self) -> bool:
        return self.engine.is_alive

    def describe(self) -> str:
        """How it decodes, in a few words for the log."""
        if self.method is None:
            return f"plain decoding, at most {self.max_length} tokens a text"
        return f"{self.method} with {self.num_draft_tokens} draft tokens, at most {self.max_length} tokens a text"

    def check_model(self, name: str | None) -> None:
        """Refuse a name that is not ours; no name means the one target there is."""
        if name and name not in self.names:
            raise unknown_model(name, self.names)

    async def in_thread(self, request: Request, function: Callable[[], T]) -> T:
        """Run what works on text in the one thread for it: long prompts must not hold up the streams.

        What waits for the thread is dropped when its client goes away or its time is up.
        """
        work = asyncio.get_running_loop().run_in_executor(self._texts, function)
        return await unless_gone(request, work, self.settings.request_seconds)

    async def prepare(self, grammar: Grammar) -> None:
        """Compile a grammar in a thread of its own, or refuse it; the engine then finds it compiled."""
        from peagle.decoding.grammar import make_guide

        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._grammars, lambda: make_guide(self._target, grammar))

    def check_length(self, text: str) -> str:
        """Refuse a text that cannot fit whatever its tokens are, before time is spent on finding them."""
        if len(text) > self._max_characters:
            message = f"the prompt has {len(text)} characters, more than the {self.max_length} tokens that fit can hold"
            raise HttpError(400, message, param="prompt", code="context_length_exceeded")
        return text

    def encode(self, text: str, add_special_tokens: bool | None) -> list[int]:
        """Token ids of a text that is not far too long; special tokens are added unless they are refused."""
        self.check_length(text)
        return list(
            self.tokenizer(text, add_special_tokens=add_special_tokens is not False, verbose=False)["input_ids"]
        )

    def room(self, prompts: Sequence[Sequence[int]], asked: int | None, param: str) -> int:
        """Tokens an answer may have: what is asked for, or all that fits behind the longest prompt."""
        longest = max(map(len, prompts))
        room = self.max_length - longest
        if room < 1:
            message = f"the prompt has {longest} tokens, but at most {self.max_length} fit with the answer; shorten it"
            raise HttpError(400, message, param="prompt", code="context_length_exceeded")
        if asked is None:
            return room
        if asked > room:
            message = (
                f"{param} is {asked}, but behind the prompt's {longest} tokens only {room} fit of {self.max_length}; "
                f"ask for at most {room}, or leave it out"
            )
            raise HttpError(400, message, param=param, code="context_length_exceeded")
        return asked

    def new_job(self, kind: str, prompts: list[list[int]], params: SamplingParams, arrived: float) -> Job:
        """A job for a request that arrived at `arrived`, or a refusal of one that could never be served."""
        self._check_choices(len(prompts), params.n)
        asked = params.num_draft_tokens
        if asked is not None and asked > self.num_draft_tokens:
            param = "speculation.num_draft_tokens"
            message = f"{param} must be at most the engine's {self.num_draft_tokens}, got {asked}"
            raise HttpError(400, f"{message}; start the server with more, or leave it out", param=param)
        name = f"{kind}-{uuid.uuid4().hex}"
        return Job(self.engine, name, prompts, params, self.num_draft_tokens, self.metrics.itl.observe, arrived)

    def _check_choices(self, num_prompts: int, n: int) -> None:
        """The engine is given prompts one by one, so it cannot tell that all of them together never find room."""
        num_choices, param = num_prompts * n, "prompt" if num_prompts > 1 else "n"
        if num_choices > self.settings.max_choices:
            message = f"{num_choices} answers are asked for, at most {self.settings.max_choices} are given at a time"
            raise HttpError(400, message, param=param)
        if self._max_waiting is not None and num_choices > self._max_waiting + self.max_batch:
            most = self._max_waiting + self.max_batch
            message = f"{num_choices} answers are more than run and wait at the same time, {most}; ask for fewer"
            raise HttpError(400, message, param=param, code="capacity")

    def begin(self, job: Job) -> None:
        self.jobs.add(job)

    def end(self, job: Job) -> None:
        """Take a job off the books, whether it was finished or not."""
        self.jobs.discard(job)
        if job.first_token_at is not None:
            self.metrics.ttft.observe(job.first_token_at - job.started)
        if job.finished_at is not None:
            self.metrics.finished(job, is_full=sum(len(each.choices) for each in self.jobs) + 1 >= self.max_batch)

    async def respond(self, request: Request, job: Job, writer: "Writer", *, streams: bool) -> Response:
        """Run a job and answer with what `writer` makes of it: events as it grows, or one document."""
        settings = self.settings
        if streams:
            return EventStream(
                writer.events(), keep_alive_seconds=settings.keep_alive_seconds, seconds=settings.request_seconds
            )
        self.begin(job)
        try:
            await unless_gone(request, job.run(), settings.request_seconds)
        finally:
            self.end(job)
        return JsonResponse(writer.whole())

    async def abort_all(self) -> None:
        """End every open job with an error its client is told."""
        names = [f"{job.job_id}/{prompt}" for job in self.jobs for prompt in range(len(job.prompts))]
        await asyncio.gather(*(self.engine.abort(name) for name in names), return_exceptions=True)

    async def refresh_stats(self) -> None:
        if not self.is_alive:
            return
        try:
            async with asyncio.timeout(STATS_SECONDS):
                self.metrics.stats = await self.engine.stats()
        except TimeoutError:
            log.warning("the engine did not tell its counts in %g s; /metrics shows older ones", STATS_SECONDS)

    async def metrics_text(self) -> bytes:
        await self.refresh_stats()
        return self.metrics.text()

    def model_entry(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "peagle",
            "root": self.target_name,
            "parent": None,
            "max_model_len": self.max_length,
            "permission": [],
            "peagle": {
                "method": self.method,
                "num_draft_tokens": self.num_draft_tokens,
                "max_num_draft_tokens": self.num_draft_tokens,
                "drafter": self.drafter_name,
                "max_length": self.max_length,
            },
        }


def _card_acceptance(llm: "LLM") -> dict[str, Any]:
    card = getattr(llm.engine.drafter, "card", None)
    return card.acceptance if card is not None else {}
