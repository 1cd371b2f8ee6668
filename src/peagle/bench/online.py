"""Load-test a server at several concurrencies or request rates and measure what clients see.

Fields and definitions are those of `vllm bench serve`. Compare servers by TPOT: ITL is the time between chunks, and
with speculation a chunk holds several tokens.
"""

import asyncio
import math
import random
import signal
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

from peagle.bench.cells import percentile
from peagle.bench.client import Connections, Outcome, Question, ask, model_of, scrape
from peagle.bench.conversations import planned
from peagle.bench.scrape import Scrape, Speculation, prefix_cache_hit_rate
from peagle.data.prompts import Prompt
from peagle.errors import ConfigError, ServerError, Terminated, nearest

PERCENTILES = (5, 25, 75, 90, 95, 99)
NUM_WARMUPS = 2
GOALS = ("ttft", "tpot", "e2el")
BUSY_CLIENT = 0.8
"""Share of one core above which the client may be the bottleneck."""
MAX_PREPARED = 1024
"""Connections to open ahead if concurrency is unlimited."""


@dataclass(frozen=True)
class Load:
    """Concurrency limit and request rate."""

    concurrency: int | None = None
    """None: unlimited"""
    request_rate: float = math.inf
    """average requests per second, or conversations; infinite: send as soon as the concurrency limit allows"""

    @property
    def label(self) -> str:
        places = "unlimited concurrency" if self.concurrency is None else f"concurrency {self.concurrency}"
        return places if math.isinf(self.request_rate) else f"{self.request_rate:g} requests/s, {places}"


def arrivals(rate: float, num_requests: int, *, seed: int = 0) -> list[float]:
    """Seconds after the start at which requests are due: a Poisson process.

    Scaled so that the last request is due at `num_requests / rate`, so that even few requests have the given rate.
    """
    if math.isinf(rate):
        return [0.0] * num_requests
    draws = random.Random(seed)
    moments = list(accumulate(draws.expovariate(1.0) for _ in range(num_requests)))
    return [moment / moments[-1] * num_requests / rate for moment in moments]


def read_goals(text: str) -> dict[str, float]:
    """Parse latency goals in milliseconds.

    >>> read_goals("ttft:200,tpot:20")
    {'ttft': 200.0, 'tpot': 20.0}
    """
    goals: dict[str, float] = {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        name, _, limit = word.partition(":")
        if name not in GOALS:
            raise ConfigError(f"--goodput {text}: no metric {name!r}", hint=nearest(name, GOALS))
        try:
            goals[name] = float(limit)
        except ValueError:
            goals[name] = math.nan
        if not 0 < goals[name] < math.inf:
            raise ConfigError(f"--goodput {text}: {name} needs a number of milliseconds above 0, got {limit!r}")
    if not goals:
        raise ConfigError("--goodput is empty", hint="for example --goodput ttft:200,tpot:20")
    return goals


@dataclass
class Result:
    """One load and the requests that finished under it."""

    load: Load
    num_requests: int
    outcomes: list[Outcome] = field(default_factory=list)
    duration: float = 0.0
    before: Scrape = field(default_factory=Scrape)
    after: Scrape = field(default_factory=Scrape)
    client_busy: float = 0.0
    """share of one core that this client used"""
    is_interrupted: bool = False

    @property
    def answered(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.error is None]

    @property
    def speculation(self) -> Speculation | None:
        """None also if the first scrape failed: earlier counts would be included."""
        return Speculation.between(self.before, self.after) if self.before else None

    def num_good(self, goals: Mapping[str, float]) -> int:
        """Answers that meet every goal; an answer of one token meets any TPOT goal."""

        def meets(outcome: Outcome) -> bool:
            seconds = {"ttft": outcome.ttft, "tpot": outcome.tpot, "e2el": outcome.latency}
            return all(1e3 * (seconds[name] or 0.0) <= limit for name, limit in goals.items())

        return sum(map(meets, self.answered))

    def share_good(self, goals: Mapping[str, float] | None) -> float | None:
        """Share of the finished requests that meet every goal; a failed request meets none."""
        return None if goals is None or not self.outcomes else round(self.num_good(goals) / len(self.outcomes), 4)

    def by_category(self) -> dict[str, dict[str, Any]]:
        """Speed and acceptance by category. Acceptance is None if the server does not report it by request."""
        found: dict[str, list[Outcome]] = defaultdict(list)
        for outcome in sorted(self.answered, key=lambda outcome: outcome.index):
            found[outcome.category].append(outcome)
        return {name: _category(outcomes) for name, outcomes in found.items()}

    def report(self, *, goals: Mapping[str, float] | None = None, is_detailed: bool = False) -> dict[str, Any]:
        """The fields of `vllm bench serve` (None if there is nothing to measure), then peagle's own."""
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
            "share_within_goals": self.share_good(goals),
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
            document |= spread([value for value in values if value is not None], name)
        if (speculation := self.speculation) is not None:
            document |= speculation.report()
        document |= {
            "is_interrupted": self.is_interrupted,
            "num_unfinished": self.num_requests - len(self.outcomes),
            "failures": dict(Counter(outcome.error for outcome in self.outcomes if outcome.error).most_common()),
            "output_tokens_from_usage": all(outcome.has_usage for outcome in answered),
            "prefix_cache_hit_rate": prefix_cache_hit_rate(self.before, self.after) if self.before else None,
            "client_busy": round(self.client_busy, 3),
            "by_category": self.by_category(),
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
            "categories": [outcome.category for outcome in ordered],
        }


def _category(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    timed = [(outcome.num_output - 1, outcome.tpot) for outcome in outcomes if outcome.tpot]
    seconds = sum(num_tokens * tpot for num_tokens, tpot in timed)
    ttfts = [outcome.ttft for outcome in outcomes if outcome.ttft is not None]
    told = [outcome.speculation for outcome in outcomes if outcome.speculation is not None]
    num_drafts, num_accepted = (
        sum(each.get(key) or 0 for each in told) for key in ("num_spec_steps", "num_accepted_draft_tokens")
    )
    return {
        "completed": len(outcomes),
        "total_output_tokens": sum(outcome.num_output for outcome in outcomes),
        "median_ttft_ms": round(1e3 * statistics.median(ttfts), 4) if ttfts else None,
        "median_tpot_ms": round(1e3 * statistics.median(tpot for _, tpot in timed), 4) if timed else None,
        "tokens_per_second_per_request": round(sum(count for count, _ in timed) / seconds, 2) if seconds else None,
        "acceptance_length": round(1 + num_accepted / num_drafts, 4) if num_drafts else None,
        "num_drafts": num_drafts if told else None,
    }


def spread(seconds: Sequence[float], name: str) -> dict[str, float | None]:
    """Mean, median, standard deviation and percentiles in milliseconds; None without values."""
    of: dict[str, Callable[[Sequence[float]], float]]
    of = {"mean": statistics.fmean, "median": statistics.median, "std": statistics.pstdev}
    of |= {f"p{percent}": partial(percentile, percent=percent) for percent in PERCENTILES}
    return {f"{key}_{name}_ms": round(1e3 * figure(seconds), 4) if seconds else None for key, figure in of.items()}


def peak_tokens(outcomes: Sequence[Outcome]) -> float:
    """Most tokens in any second of the run; an answer's tokens are spread evenly over its chunks."""
    start = min((outcome.sent for outcome in outcomes), default=0.0)
    buckets: dict[int, float] = defaultdict(float)
    for outcome in outcomes:
        for moment in outcome.times:
            buckets[int(moment - start)] += outcome.num_output / len(outcome.times)
    return round(max(buckets.values(), default=0.0), 4)


def peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    """Most requests in flight at once."""
    moments = [(outcome.sent, 1) for outcome in outcomes] + [(outcome.ended, -1) for outcome in outcomes]
    return max(accumulate(change for _, change in sorted(moments)), default=0)


async def warm_up(connections: Connections, question: Question, prompt: Prompt) -> None:
    """Send a few unmeasured requests; stop if all of them fail."""
    outcomes = [Outcome(index, time.perf_counter()) for index in range(NUM_WARMUPS)]
    await asyncio.gather(*(ask(connections, question, prompt, outcome) for outcome in outcomes))
    if all(outcome.error is not None for outcome in outcomes):
        raise ServerError(
            f"all {NUM_WARMUPS} warm-up requests failed: {outcomes[0].error}",
            hint="fix the request or the server first",
        )


async def apply(
    connections: Connections,
    question: Question,
    prompts: Sequence[Prompt],
    result: Result,
    *,
    seed: int = 0,
    on_done: Callable[[Outcome], None] = lambda _: None,
) -> None:
    """Send the requests of one load and record them in `result`, even if cancelled.

    A conversation holds its place until its last turn is answered. Each turn repeats the answers before it.
    """
    load = result.load
    places = None if load.concurrency is None else asyncio.Semaphore(load.concurrency)
    plan = planned([prompt.num_turns for prompt in prompts], result.num_requests)
    starts = accumulate((turns for _, turns in plan), initial=0)

    async def converse(prompt: Prompt, indices: range, due: float) -> None:
        following: Prompt | None = prompt
        error: str | None = None
        try:
            for index in indices:
                outcome = Outcome(index, due, category=prompt.category)
                if error is None and following is not None:
                    await ask(connections, question, following, outcome)
                    following, error = following.following("".join(outcome.said)), outcome.error
                else:
                    outcome.sent = outcome.ended = due
                    outcome.error = "an earlier turn failed"
                result.outcomes.append(outcome)
                on_done(outcome)
                due = time.perf_counter()
        finally:
            if places is not None:
                places.release()

    connections.prepare(min(len(plan), load.concurrency or MAX_PREPARED))
    result.before = await scrape(connections)
    due_after = arrivals(load.request_rate, len(plan), seed=seed)
    start, busy = time.perf_counter(), time.process_time()
    try:
        async with asyncio.TaskGroup() as tasks:
            for (which, turns), first, after in zip(plan, starts, due_after, strict=False):
                if (wait := start + after - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                if places is not None:
                    await places.acquire()
                tasks.create_task(converse(prompts[which], range(first, first + turns), start + after))
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
    on_result: Callable[[Result], None] = lambda _: None,
    **options: Any,
) -> None:
    """Run the loads one after another. `results` gets every load that was started, including a cancelled one."""
    for result in planned:
        results.append(result)
        await apply(connections, question, prompts, result, **options)
        on_result(result)


def measure(
    root: str,
    api_key: str | None,
    question: Question,
    prompts: Sequence[Prompt],
    planned: Sequence[Result],
    results: list[Result],
    *,
    ready_seconds: float = 0.0,
    **options: Any,
) -> tuple[str, KeyboardInterrupt | None]:
    """Warm up and sweep; returns the model's name, and the Ctrl-C or SIGTERM that ended it early.

    If `question` names no model, uses the first one that the server lists.
    """
    interrupt, model = KeyboardInterrupt(), question.model

    async def run() -> None:
        nonlocal model
        own = asyncio.current_task()
        assert own is not None

        def on_sigterm() -> None:
            nonlocal interrupt
            interrupt = Terminated()
            own.cancel()  # what asyncio does on Ctrl-C; an exception would hit whichever task happens to run

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_sigterm)
        async with Connections(root, api_key, seconds=question.seconds) as connections:
            if not model or ready_seconds:
                found = await model_of(connections, root, ready_seconds=ready_seconds)
                model = model or found
            asked = replace(question, model=model)
            await warm_up(connections, asked, prompts[0])
            await sweep(connections, asked, prompts, planned, results, **options)

    try:
        asyncio.run(run())  # sets `model`
    except (KeyboardInterrupt, asyncio.CancelledError):
        return model, interrupt
    return model, None
