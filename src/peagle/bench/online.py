"""Load a server as its users would, at several concurrencies or request rates, and measure what they see.

Fields and definitions are those of `vllm bench serve`. Time per output token is the figure to compare: the gap between
pieces of a stream (ITL) grows with speculation, because a piece then holds several tokens.
"""

import asyncio
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from peagle.bench.cells import percentile
from peagle.bench.client import Connections, Outcome, Question, ask, scrape
from peagle.bench.scrape import Scrape, Speculation, gained
from peagle.bench.workloads import Prompt
from peagle.errors import ConfigError, ServerError, nearest

PERCENTILES = (90, 95, 99)
GOALS = ("ttft", "tpot", "e2el")
BUSY_CLIENT = 0.8
"""Share of one core above which the client itself may be what is measured."""
MOST_PREPARED = 1024
"""Connections that are made ready for a load without a limit."""

OnDone = Callable[[Outcome], None]
OnResult = Callable[["Result"], None]


@dataclass(frozen=True)
class Load:
    """How requests come: so many at a time, so many a second, or both."""

    concurrency: int | None = None
    """most requests in flight; None for no limit"""
    request_rate: float = math.inf
    """requests a second on average; infinite: as soon as there is a place"""

    @property
    def label(self) -> str:
        places = "no limit" if self.concurrency is None else f"concurrency {self.concurrency}"
        return places if math.isinf(self.request_rate) else f"{self.request_rate:g} requests/s, {places}"


def arrivals(rate: float, num_requests: int, *, seed: int = 0, burstiness: float = 1.0) -> list[float]:
    """Seconds after the start at which requests are due: a Poisson process, or, by gamma gaps, a burstier one.

    A burstiness below 1 bunches requests, one above 1 spaces them out. The gaps are scaled so that the last request is
    due at `num_requests / rate`: the rate offered is the rate asked for, however few requests there are.
    """
    if math.isinf(rate):
        return [0.0] * num_requests
    draws = random.Random(seed)
    moments, now = [], 0.0
    for _ in range(num_requests):
        now += draws.gammavariate(burstiness, 1.0)
        moments.append(now)
    scale = num_requests / rate / now if now else 0.0
    return [moment * scale for moment in moments]


def read_goals(text: str) -> dict[str, float]:
    """Service levels in milliseconds.

    >>> read_goals("ttft:200,tpot:20")
    {'ttft': 200.0, 'tpot': 20.0}
    """
    goals: dict[str, float] = {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        name, _, limit = word.partition(":")
        if name not in GOALS:
            raise ConfigError(f"--goodput {text}: no figure {name!r}", hint=nearest(name, GOALS))
        try:
            goals[name] = float(limit)
        except ValueError:
            raise ConfigError(f"--goodput {text}: {limit!r} is no number of milliseconds") from None
        if not 0 < goals[name] < math.inf:
            raise ConfigError(f"--goodput {text}: {name} must be above 0 milliseconds")
    if not goals:
        raise ConfigError("--goodput names nothing", hint="for example --goodput ttft:200,tpot:20")
    return goals


@dataclass
class Result:
    """One load and the requests that ended under it."""

    load: Load
    num_requests: int
    outcomes: list[Outcome] = field(default_factory=list)
    duration: float = 0.0
    before: Scrape = field(default_factory=Scrape)
    after: Scrape = field(default_factory=Scrape)
    client_busy: float = 0.0
    """share of one core that the client itself used"""
    is_interrupted: bool = False

    @property
    def answered(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.error is None]

    @property
    def speculation(self) -> Speculation | None:
        """None also where the first scrape failed: what the server counted before is not told from this load's."""
        return Speculation.between(self.before, self.after) if self.before else None

    @property
    def failures(self) -> dict[str, int]:
        """Reasons, the most frequent first."""
        return dict(Counter(outcome.error for outcome in self.outcomes if outcome.error is not None).most_common())

    def num_good(self, goals: Mapping[str, float]) -> int:
        """Answers that meet every goal; one without a second token meets any goal about those."""

        def meets(outcome: Outcome) -> bool:
            seconds = {"ttft": outcome.ttft, "tpot": outcome.tpot, "e2el": outcome.latency}
            return all(1e3 * (seconds[name] or 0.0) <= limit for name, limit in goals.items())

        return sum(map(meets, self.answered))

    def report(
        self,
        *,
        percentiles: Sequence[int] = PERCENTILES,
        goals: Mapping[str, float] | None = None,
        is_detailed: bool = False,
    ) -> dict[str, Any]:
        """The fields of `vllm bench serve`; None where there is nothing to measure. Then our own."""
        answered, seconds = self.answered, self.duration or math.inf
        num_input = sum(outcome.num_input for outcome in answered)
        num_output = sum(outcome.num_output for outcome in answered)
        rate = self.load.request_rate
        document: dict[str, Any] = {
            "num_prompts": self.num_requests,
            "request_rate": "inf" if math.isinf(rate) else rate,
            "max_concurrency": self.load.concurrency,
            "duration": round(self.duration, 4),
            "completed": len(answered),
            "failed": len(self.outcomes) - len(answered),
            "total_input_tokens": num_input,
            "total_output_tokens": num_output,
            "request_throughput": round(len(answered) / seconds, 4),
            "request_goodput": None if goals is None else round(self.num_good(goals) / seconds, 4),
            "output_throughput": round(num_output / seconds, 4),
            "total_token_throughput": round((num_input + num_output) / seconds, 4),
            "max_output_tokens_per_s": peak_tokens(answered),
            "max_concurrent_requests": peak_concurrency(self.outcomes),
        }
        spreads: dict[str, list[float | None]] = {
            "ttft": [outcome.ttft for outcome in answered],
            "tpot": [outcome.tpot for outcome in answered],
            "itl": [gap for outcome in answered for gap in outcome.itls],
            "e2el": [outcome.latency for outcome in answered],
        }
        for name, values in spreads.items():
            document |= spread([value for value in values if value is not None], name, percentiles)
        if (speculation := self.speculation) is not None:
            document |= speculation.report()
        document |= {
            "is_interrupted": self.is_interrupted,
            "num_unfinished": self.num_requests - len(self.outcomes),
            "failures": self.failures,
            "output_tokens_from_usage": all(outcome.has_usage for outcome in answered),
            "prefix_cache_hit_rate": _hit_rate(self.before, self.after),
            "client_busy": round(self.client_busy, 3),
        }
        return document | (self._details() if is_detailed else {})

    def _details(self) -> dict[str, Any]:
        ordered = sorted(self.outcomes, key=lambda outcome: outcome.index)
        start = min((outcome.sent for outcome in ordered), default=0.0)
        return {
            "input_lens": [outcome.num_input for outcome in ordered],
            "output_lens": [outcome.num_output for outcome in ordered],
            "ttfts": [outcome.ttft or 0.0 for outcome in ordered],
            "itls": [outcome.itls for outcome in ordered],
            "latencies": [outcome.latency for outcome in ordered],
            "start_times": [outcome.sent - start for outcome in ordered],
            "queue_times": [max(0.0, outcome.sent - outcome.due) for outcome in ordered],
            "generated_texts": ["".join(outcome.pieces) for outcome in ordered],
            "errors": [outcome.error or "" for outcome in ordered],
        }


def spread(seconds: Sequence[float], name: str, percentiles: Sequence[int]) -> dict[str, float | None]:
    """Mean, median, deviation and percentiles in milliseconds, all None where there are no values."""
    figures: dict[str, float | None] = dict.fromkeys(("mean", "median", "std", *(f"p{each}" for each in percentiles)))
    if seconds:
        figures["mean"], figures["median"] = statistics.fmean(seconds), percentile(seconds, 50)
        figures["std"] = statistics.pstdev(seconds)
        figures |= {f"p{each}": percentile(seconds, each) for each in percentiles}
    return {f"{key}_{name}_ms": None if value is None else round(1e3 * value, 4) for key, value in figures.items()}


def peak_tokens(outcomes: Sequence[Outcome]) -> float:
    """Most tokens in one second of the run; the tokens of an answer are spread evenly over its pieces."""
    start = min((outcome.sent for outcome in outcomes), default=0.0)
    buckets: dict[int, float] = {}
    for outcome in outcomes:
        for moment in outcome.times:
            second = int(moment - start)
            buckets[second] = buckets.get(second, 0.0) + outcome.num_output / len(outcome.times)
    return round(max(buckets.values(), default=0.0), 4)


def peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    """Most requests that were in flight at the same moment."""
    moments = [(outcome.sent, 1) for outcome in outcomes] + [(outcome.ended, -1) for outcome in outcomes]
    most = now = 0
    for _, change in sorted(moments):
        now += change
        most = max(most, now)
    return most


def _hit_rate(before: Scrape, after: Scrape) -> float | None:
    if not before:
        return None
    queries = gained(before, after, "vllm:prefix_cache_queries_total")
    hits = gained(before, after, "vllm:prefix_cache_hits_total")
    return round(hits / queries, 4) if queries and hits is not None else None


async def warm_up(connections: Connections, question: Question, prompt: Prompt, num_requests: int) -> None:
    """Ask a few times without measuring; a server that answers none of these is not measured at all."""
    outcomes = [Outcome(index, time.perf_counter()) for index in range(num_requests)]
    await asyncio.gather(*(ask(connections, question, prompt, outcome) for outcome in outcomes))
    if outcomes and all(outcome.error is not None for outcome in outcomes):
        raise ServerError(
            f"the server failed all of {num_requests} warm-up requests: {outcomes[0].error}",
            hint="--num-warmups 0 measures it nevertheless",
        )


async def apply(
    connections: Connections,
    question: Question,
    prompts: Sequence[Prompt],
    result: Result,
    *,
    seed: int = 0,
    burstiness: float = 1.0,
    on_done: OnDone | None = None,
) -> None:
    """Send the requests of one load and write into `result` what came of them, also when it is cancelled."""
    load = result.load
    places = None if load.concurrency is None else asyncio.Semaphore(load.concurrency)

    async def one(index: int, due: float) -> None:
        outcome = Outcome(index, due)
        try:
            await ask(connections, question, prompts[index % len(prompts)], outcome)
        finally:
            if places is not None:
                places.release()
        result.outcomes.append(outcome)
        if on_done is not None:
            on_done(outcome)

    connections.prepare(min(result.num_requests, load.concurrency or MOST_PREPARED))
    result.before = await scrape(connections)
    due_after = arrivals(load.request_rate, result.num_requests, seed=seed, burstiness=burstiness)
    start, busy = time.perf_counter(), time.process_time()
    try:
        async with asyncio.TaskGroup() as tasks:
            for index, after in enumerate(due_after):
                if (wait := start + after - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                if places is not None:
                    await places.acquire()
                tasks.create_task(one(index, start + after))
    except asyncio.CancelledError:
        result.is_interrupted = True
        raise
    finally:
        result.duration = time.perf_counter() - start
        result.client_busy = (time.process_time() - busy) / result.duration
        result.after = await scrape(connections)


async def sweep(
    connections: Connections,
    question: Question,
    prompts: Sequence[Prompt],
    planned: Sequence[Result],
    results: list[Result],
    *,
    on_result: OnResult | None = None,
    **options: Any,
) -> bool:
    """Run the planned loads one after the other. False where it was cancelled, which it then does not pass on.

    `results` gets every load that was begun, the interrupted one too, with what had ended of it.
    """
    for result in planned:
        results.append(result)
        try:
            await apply(connections, question, prompts, result, **options)
        except asyncio.CancelledError:
            return False
        if on_result is not None:
            on_result(result)
    return True


def now_as_vllm() -> str:
    return datetime.now().strftime("%Y%m%d-%H%M%S")
