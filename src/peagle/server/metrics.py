"""Prometheus metrics: vLLM's names, so that dashboards and benchmarks read them, and our own under `peagle:`.

What the engine counts is read from it at each scrape; what only the server sees (latencies, statuses) is recorded
as requests end. Acceptance length counts the recovered or bonus token: 1 + accepted / drafts.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from peagle.decoding.acceptance import Acceptance

if TYPE_CHECKING:
    from peagle.engine.outputs import EngineStats
    from peagle.server.jobs import Job

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
LABELS = ("model_name", "engine")

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

WINDOW = 256
"""Requests over which the acceptance of the moment is taken."""
MIN_WINDOW_DRAFTS = 500
"""Drafts below which it says too little to raise an alarm."""
DRIFT_SHARE = 0.8
"""Share of the card's acceptance length below which the drafter no longer fits what it is asked."""
DEEP = 20
DEEP_THRESHOLD = 0.75


class Metrics(Collector):
    """What is told of a drafter by whoever answers with it, in a registry of its own."""

    def __init__(self, model_name: str, num_draft_tokens: int, max_batch: int, baseline: float | None) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call, unused-ignore]
        self.registry = CollectorRegistry()
        self.model_name, self.num_draft_tokens = model_name, num_draft_tokens
        self.max_batch, self.baseline = max_batch, baseline
        self._labels = (model_name, "0")

    @abstractmethod
    def acceptance_length(self) -> tuple[float | None, int]:
        """Over the window, and the number of drafts that it is taken from."""

    def has_drifted(self) -> bool:
        length, num_drafts = self.acceptance_length()
        if length is None or self.baseline is None or num_drafts < MIN_WINDOW_DRAFTS:
            return False
        return length < DRIFT_SHARE * self.baseline

    def _acceptance(self, window: str) -> Iterator[Metric]:
        """The acceptance of the moment beside what the card promises; `window` says what it is taken over."""
        length, num_drafts = self.acceptance_length()
        if length is not None:
            yield self._gauge("peagle:acceptance_length", f"Of the last {window}", length)
            yield self._gauge("peagle:acceptance_window_drafts", "Drafts that it is taken from", num_drafts)
        if self.baseline is not None:
            what = "What the drafter card says for this number of draft tokens"
            yield self._gauge("peagle:acceptance_length_baseline", what, self.baseline)
            what = f"1 while the acceptance length is below {DRIFT_SHARE} of the baseline"
            yield self._gauge("peagle:acceptance_drift", what, int(self.has_drifted()))

    def _sizes(self) -> Iterator[Metric]:
        yield self._gauge("peagle:num_draft_tokens", "Draft tokens a step", self.num_draft_tokens)
        yield self._gauge("peagle:max_batch", "Answers that can run at the same time", self.max_batch)

    def _saved(self, num_accepted: int) -> Metric:
        what = "Target forwards that accepted drafts made unnecessary"
        return self._counter("peagle:tokens_saved", what, num_accepted)

    def _counter(self, name: str, what: str, value: float) -> Metric:
        family = CounterMetricFamily(name, what, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _gauge(self, name: str, what: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, what, labels=LABELS)
        family.add_metric(self._labels, value)
        return family


class ServerMetrics(Metrics):
    """Everything `/metrics` shows: what the server saw, and the engine's own counts as they were at the scrape."""

    def __init__(
        self, model_name: str, num_draft_tokens: int = 0, max_batch: int = 0, baseline: float | None = None
    ) -> None:
        super().__init__(model_name, num_draft_tokens, max_batch, baseline)
        self.stats: EngineStats | None = None
        self.window: deque[tuple[int, int]] = deque(maxlen=WINDOW)
        """(drafts, accepted tokens) of the last requests"""
        self._make()
        self.registry.register(self)

    def _make(self) -> None:
        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(name, what, LABELS, registry=self.registry, buckets=buckets)
            return made.labels(*self._labels)

        seconds, tokens = SECONDS, TOKENS
        self.ttft = histogram("vllm:time_to_first_token_seconds", "Time to first token", seconds)
        self.itl = histogram("vllm:inter_token_latency_seconds", "Time between updates of an answer", TOKEN_SECONDS)
        self.tpot = histogram(
            "vllm:request_time_per_output_token_seconds", "Time per token of an answer", TOKEN_SECONDS
        )
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "Whole request", seconds)
        self.queue = histogram("vllm:request_queue_time_seconds", "Waiting for a place in the batch", seconds)
        self.inference = histogram("vllm:request_inference_time_seconds", "Prefill and decode", seconds)
        self.prefill = histogram("vllm:request_prefill_time_seconds", "From the queue to the first token", seconds)
        self.decode = histogram("vllm:request_decode_time_seconds", "From the first token to the last", seconds)
        self.prompt_tokens = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request", tokens)
        self.generation_tokens = histogram("vllm:request_generation_tokens", "Answer tokens of a request", tokens)
        self.max_tokens = histogram("vllm:request_params_max_tokens", "max_tokens asked for", tokens)
        self.n = histogram("vllm:request_params_n", "Answers asked for", (1, 2, 5, 10, 20, 50, 100))
        self.full_load = histogram(
            "peagle:full_load_time_per_output_token_seconds",
            "Time per token of an answer, of requests that ended while the batch was full",
            TOKEN_SECONDS,
        )
        reasons = (*LABELS, "finished_reason")
        self.success = Counter("vllm:request_success", "Finished answers", reasons, registry=self.registry)
        self.http = Counter("peagle:http_requests", "HTTP requests", ("route", "status"), registry=self.registry)
        self.gone = Counter("peagle:clients_gone", "Clients that left early", registry=self.registry)

    def finished(self, job: "Job", *, is_full: bool) -> None:
        """A job all of whose answers ended."""
        end = job.finished_at or job.started
        for choice in job.choices:
            self.success.labels(*self._labels, choice.finish_reason).inc()
        self.e2e.observe(end - job.started)
        self.prompt_tokens.observe(job.num_prompt_tokens)
        self.generation_tokens.observe(job.num_answer_tokens)
        self.max_tokens.observe(job.params.max_tokens)
        self.n.observe(job.params.n)
        for each in job.metrics:
            started, first, last = each.started_at, each.first_token_at, each.finished_at
            if started is None or first is None or last is None:
                continue
            self.queue.observe(started - each.arrived)
            self.inference.observe(last - started)
            self.prefill.observe(first - started)
            self.decode.observe(last - first)
        for per_token in filter(None, (choice.seconds_per_token for choice in job.choices)):
            self.tpot.observe(per_token)
            if is_full:
                self.full_load.observe(per_token)
        # Where a full batch had drafts left out, the rest says nothing about the drafter.
        if job.num_steps and job.num_drafted == job.num_steps * self.num_draft_tokens:
            self.window.append((job.num_steps, sum(n * drafts for n, drafts in enumerate(job.histogram))))

    def acceptance_length(self) -> tuple[float | None, int]:
        num_drafts = sum(drafts for drafts, _ in self.window)
        if not num_drafts:
            return None, 0
        return 1 + sum(accepted for _, accepted in self.window) / num_drafts, num_drafts

    def text(self) -> bytes:
        return prometheus_client.generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        if stats is not None:
            yield from self._vllm(stats)
            yield from self._own(stats)

    def _vllm(self, stats: "EngineStats") -> Iterator[Metric]:
        acceptance: Acceptance = stats.acceptance
        yield self._counter("vllm:spec_decode_num_drafts", "Verified drafts", acceptance.num_drafts)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens", stats.num_draft_tokens)
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens", acceptance.num_accepted)
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        by_position = CounterMetricFamily(name, "Accepted draft tokens by position", labels=(*LABELS, "position"))
        for position, count in enumerate(acceptance.accepted_per_position):
            by_position.add_metric((*self._labels, str(position)), count)
        yield by_position
        yield self._counter("vllm:prompt_tokens", "Prompt tokens of finished requests", stats.num_prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Answer tokens", stats.num_output_tokens)
        yield self._counter("vllm:num_preemptions", "Preempted requests", stats.num_preemptions)
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up", stats.num_prompt_tokens)
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens that were there", stats.num_cached_tokens)
        rejections = CounterMetricFamily(
            "vllm:admission_rejections", "Refused because too many waited", labels=("model_name", "reason")
        )
        rejections.add_metric((self.model_name, "max_num_queued_reqs"), stats.num_refused)
        yield rejections
        yield self._gauge("vllm:num_requests_running", "Answers that run", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Answers that wait", stats.num_waiting)
        usage = stats.num_pages_used / max(1, stats.num_pages)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the pages in use, 0 to 1", usage)

    def _own(self, stats: "EngineStats") -> Iterator[Metric]:
        yield self._saved(stats.acceptance.num_accepted)
        yield self._counter("peagle:requests_aborted", "Requests ended before their answer was", stats.num_aborted)
        yield from self._sizes()
        yield from self._acceptance(f"{WINDOW} requests")
        if len(stats.accepted_per_position) > DEEP:
            rate = deep_acceptance(stats.accepted_per_position)
            what = f"Share of draft tokens beyond depth {DEEP} that were accepted when the one before them was"
            yield self._gauge("peagle:deep_acceptance_rate", what, rate)
            yield self._gauge("peagle:deep_acceptance_threshold", "Below it so deep drafts do not pay", DEEP_THRESHOLD)


def deep_acceptance(accepted_per_position: list[int]) -> float:
    """Share of tokens beyond depth 20 that were accepted where their predecessor was; 0 where none was reached.

    >>> deep_acceptance([9] * 19 + [8, 6, 3])
    0.6428571428571429
    """
    reached = sum(accepted_per_position[DEEP - 1 : -1])
    return sum(accepted_per_position[DEEP:]) / reached if reached else 0.0


def baseline_of(acceptance: Mapping[str, Any], num_draft_tokens: int) -> float | None:
    """Acceptance length that a drafter card promises with so many draft tokens, the mean over its prompt sets.

    Rates of positions do not depend on how many more positions are drafted, so a shorter draft's are known too.

    >>> baseline_of({"one": {"per_position": [0.6, 0.4, 0.2]}, "two": {"per_position": [0.8, 0.6, 0.4]}}, 2)
    2.2
    """
    lengths = [
        1 + sum(rates[:num_draft_tokens])
        for each in acceptance.values()
        if isinstance(each, dict) and len(rates := each.get("per_position") or []) >= num_draft_tokens > 0
    ]
    return round(sum(lengths) / len(lengths), 4) if lengths else None
