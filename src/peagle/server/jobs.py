"""One client request in progress: its prompts in the engine, the answers so far, and their usage and timings."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from peagle.sampling_params import SamplingParams
from peagle.server.errors import unavailable

if TYPE_CHECKING:
    from peagle.engine.async_engine import AsyncEngine
    from peagle.engine.outputs import RequestMetrics, Update
    from peagle.scheduling.request import TokenLogprobs


@dataclass
class Choice:
    """One answer so far."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    logprobs: "list[TokenLogprobs]" = field(default_factory=list)
    finish_reason: str | None = None
    first_at: float | None = None
    last_at: float | None = None
    """when the first and the latest tokens arrived"""

    @property
    def seconds(self) -> float:
        """From the first tokens to the latest."""
        return 0.0 if self.first_at is None or self.last_at is None else self.last_at - self.first_at

    @property
    def seconds_per_token(self) -> float | None:
        """Mean over the tokens after the first; None if there are none."""
        return self.seconds / (len(self.token_ids) - 1) if self.seconds else None

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Job:
    """The prompts of one request. Choice i * n + j is answer j to prompt i."""

    def __init__(
        self,
        engine: "AsyncEngine",
        job_id: str,
        prompts: list[list[int]],
        params: SamplingParams,
        num_draft_tokens: int,
        on_gap: Callable[[float], None] = lambda _: None,
        started: float | None = None,
    ) -> None:
        """`on_gap` receives the seconds between updates of an answer.

        `started` is the arrival time by `time.perf_counter`; default: now.
        """
        self.job_id, self.prompts, self.params = job_id, prompts, params
        self.created = int(time.time())
        self.choices = [Choice() for _ in range(len(prompts) * params.n)]
        self.prompt_logprobs: list[Sequence[TokenLogprobs | None] | None] = [None] * len(prompts)
        self.started = time.perf_counter() if started is None else started
        self.finished_at: float | None = None
        self.num_steps = 0
        self.num_drafted = 0
        self.histogram = [0] * (num_draft_tokens + 1)
        """number of drafts by their accepted tokens"""
        self.metrics: list[RequestMetrics] = []
        """the engine's metrics of each finished prompt"""
        self._engine, self._on_gap = engine, on_gap

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_answer_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def first_token_at(self) -> float | None:
        return min((choice.first_at for choice in self.choices if choice.first_at is not None), default=None)

    async def updates(self) -> "AsyncGenerator[tuple[int, Update], None]":
        """Each update with the index of its choice. Closing the generator aborts the job in the engine."""
        merged = self._updates_of(0) if len(self.prompts) == 1 else self._merged()
        async with aclosing(merged) as updates:
            async for index, update in updates:
                if update.finish_reason == "abort":
                    raise unavailable("the server stopped before this answer was finished", "aborted")
                self._take(index, update)
                yield index, update
        self.finished_at = time.perf_counter()

    async def run(self) -> None:
        """Wait for all answers."""
        async with aclosing(self.updates()) as updates:
            async for _ in updates:
                pass

    def _take(self, index: int, update: "Update") -> None:
        choice, now = self.choices[index], time.perf_counter()
        if update.token_ids:
            if choice.first_at is None or choice.last_at is None:
                choice.first_at = now
            else:
                self._on_gap(now - choice.last_at)
            choice.last_at = now
        if update.num_drafts:
            self.num_steps += 1
            self.num_drafted += update.num_drafts
            self.histogram[update.num_accepted] += 1
        if update.prompt_logprobs is not None:
            self.prompt_logprobs[index // self.params.n] = update.prompt_logprobs
        if update.metrics is not None:
            self.metrics.append(update.metrics)
        choice.texts += update.texts
        choice.token_ids += update.token_ids
        choice.kinds += update.kinds
        choice.logprobs += update.logprobs or ()
        choice.finish_reason = update.finish_reason or choice.finish_reason

    async def _updates_of(self, prompt: int) -> "AsyncGenerator[tuple[int, Update], None]":
        stream = self._engine.stream(self.prompts[prompt], self.params, request_id=f"{self.job_id}/{prompt}")
        async with aclosing(stream) as updates:
            async for update in updates:
                yield prompt * self.params.n + update.index, update

    async def _merged(self) -> "AsyncGenerator[tuple[int, Update], None]":
        queue: asyncio.Queue[tuple[int, Update] | Exception | None] = asyncio.Queue()

        async def feed(prompt: int) -> None:
            try:
                async with aclosing(self._updates_of(prompt)) as updates:
                    async for item in updates:
                        queue.put_nowait(item)
                queue.put_nowait(None)
            except Exception as error:
                queue.put_nowait(error)

        tasks = [asyncio.create_task(feed(prompt)) for prompt in range(len(self.prompts))]
        num_open = len(tasks)
        try:
            while num_open:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    num_open -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def usage(self) -> dict[str, Any]:
        num_prompt, num_answer = self.num_prompt_tokens, self.num_answer_tokens
        counts = {"prompt_tokens": num_prompt, "completion_tokens": num_answer, "total_tokens": num_prompt + num_answer}
        if not self.metrics:
            return counts
        num_cached = sum(metrics.num_cached_tokens for metrics in self.metrics)
        return counts | {"prompt_tokens_details": {"cached_tokens": num_cached}}

    @property
    def num_tolerated(self) -> int:
        """Answer tokens that are not the target's own choice."""
        return sum(choice.kinds.count("tolerated") for choice in self.choices)

    def speculative_decoding(self) -> dict[str, Any]:
        """vLLM's speculation summary of a request, and whether it is lossless; zeros if nothing was drafted."""
        num_accepted = sum(count * drafts for count, drafts in enumerate(self.histogram))
        return {
            "mean_acceptance_length": round(1 + num_accepted / max(1, self.num_steps), 4),
            "draft_acceptance_rate": round(num_accepted / max(1, self.num_drafted), 4),
            "acceptance_histogram": list(self.histogram),
            "num_spec_steps": self.num_steps,
            "num_accepted_draft_tokens": num_accepted,
            "num_draft_tokens": self.num_drafted,
            "num_spec_tokens": len(self.histogram) - 1,
            "num_tolerated_tokens": self.num_tolerated,
            "is_lossless": self.num_tolerated == 0,
        }

    def timings(self) -> dict[str, Any]:
        """Latencies and rates under vLLM's names; null if there is nothing to measure.

        mean_itl_ms is within an answer; tokens_per_second is over all answers together.
        """
        first = self.first_token_at
        generation = None if first is None else max(choice.last_at or first for choice in self.choices) - first
        queued = max((metrics.queue_seconds or 0.0 for metrics in self.metrics), default=None)
        begun = [choice for choice in self.choices if choice.token_ids]
        num_later = self.num_answer_tokens - len(begun)
        return {
            "time_to_first_token_ms": _milliseconds(None if first is None else first - self.started),
            "generation_time_ms": _milliseconds(generation),
            "queue_time_ms": _milliseconds(queued),
            "mean_itl_ms": _milliseconds(sum(each.seconds for each in begun) / num_later if num_later else None),
            "tokens_per_second": round(num_later / generation, 2) if generation and num_later else None,
        }

    def metrics_block(self) -> dict[str, Any]:
        return {"speculative_decoding": self.speculative_decoding(), **self.timings()}


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
