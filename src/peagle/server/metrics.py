"""Prometheus metrics: vLLM's names, so that existing dashboards work, and our own under `peagle:`.

Engine counters are read at each scrape. Latencies and statuses are recorded as requests end. Acceptance length
includes the recovered or bonus token: 1 + accepted / drafts.
"""

import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from peagle.checkpoint.card import Baseline

if TYPE_CHECKING:
    from peagle.engine.outputs import EngineStats
    from peagle.server.jobs import Job

log = logging.getLogger(__name__)

LABELS = ("model_name", "engine")

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

WINDOW = 256
"""Requests in the acceptance window."""
MIN_WINDOW_DRAFTS = 500
"""The drift alarm needs at least this many drafts in the window."""
DRIFT_SHARE = 0.8
"""The drift alarm fires below this share of the card's acceptance length."""
DEEP = 20
DEEP_THRESHOLD = 0.75


class Metrics(Collector):
    """What every backend reports: HTTP statuses, sizes, and acceptance against the drafter card."""

    def __init__(self, model_name: str, num_draft_tokens: int, max_batch: int, baseline: Baseline | None) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call, unused-ignore]
        self.registry = CollectorRegistry()
        self.model_name, self.num_draft_tokens = model_name, num_draft_tokens
        self.max_batch, self.baseline = max_batch, baseline
        self._labels = (model_name, "0")
        self._is_drift_logged = False
        self.http = Counter("peagle:http_requests", "HTTP requests", ("route", "status"), registry=self.registry)
        self.cut = Counter("peagle:requests_cut", "Requests that the shutdown cut", registry=self.registry)
        self.gone = Counter("peagle:clients_gone", "Clients that disconnected early", registry=self.registry)

    @abstractmethod
    def acceptance_length(self) -> tuple[float | None, int]:
        """Acceptance length over the window, and the number of drafts in it."""

    def expected(self) -> Baseline | None:
        """The acceptance length to compare the window with; None if the card has no figure."""
        return self.baseline

    def has_drifted(self) -> bool:
        """Whether acceptance is below the card's; logs when that changes."""
        (length, num_drafts), baseline = self.acceptance_length(), self.expected()
        if length is None or baseline is None or num_drafts < MIN_WINDOW_DRAFTS:
            return False
        has_drifted = length < DRIFT_SHARE * baseline.length
        if has_drifted != self._is_drift_logged:
            self._is_drift_logged = has_drifted
            level, now = (logging.WARNING, "below") if has_drifted else (logging.INFO, "no longer below")
            what = f"acceptance length {length:.2f} over the last {num_drafts:,} drafts is {now}"
            card = f"{DRIFT_SHARE:.0%} of the card's {baseline.length:.2f} (measured by {baseline.source})"
            log.log(level, "%s %s", what, card)
        return has_drifted

    def _shared(self, num_accepted: int, window: str) -> Iterator[Metric]:
        """What every backend shows at a scrape; `window` names the acceptance window."""
        what = "Target forward passes saved by accepted drafts"
        yield self._counter("peagle:tokens_saved", what, num_accepted)
        yield self._gauge("peagle:num_draft_tokens", "Draft tokens per step", self.num_draft_tokens)
        yield self._gauge("peagle:max_batch", "Answers that run at the same time", self.max_batch)
        length, num_drafts = self.acceptance_length()
        if length is not None:
            yield self._gauge("peagle:acceptance_length", f"Over the last {window}", length)
            yield self._gauge("peagle:acceptance_window_drafts", "Drafts in that window", num_drafts)
        if (baseline := self.expected()) is not None:
            what = f"Acceptance length on the drafter card, measured by {baseline.source}"
            yield self._gauge("peagle:acceptance_length_baseline", what, baseline.length)
            what = f"1 while the acceptance length is below {DRIFT_SHARE} of the baseline ({baseline.source})"
            yield self._gauge("peagle:acceptance_drift", what, int(self.has_drifted()))

    def _counter(self, name: str, what: str, value: float) -> Metric:
        family = CounterMetricFamily(name, what, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _gauge(self, name: str, what: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, what, labels=LABELS)
        family.add_metric(self._labels, value)
        return family


class ServerMetrics(Metrics):
    """The metrics of our own engine: the server's latencies, and the engine's counters at the scrape.

    Greedy requests are compared with `baseline`, those with a temperature with `sampled`.
    """

    def __init__(
        self,
        model_name: str,
        num_draft_tokens: int = 0,
        max_batch: int = 0,
        baseline: Baseline | None = None,
        sampled: Baseline | None = None,
    ) -> None:
        super().__init__(model_name, num_draft_tokens, max_batch, baseline)
        self.sampled = sampled
        self.stats: EngineStats | None = None
        self.window: deque[tuple[int, int, Baseline | None]] = deque(maxlen=WINDOW)
        """(drafts, accepted tokens, baseline) of the last requests"""
        self.registry.register(self)

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(name, what, LABELS, registry=self.registry, buckets=buckets)
            return made.labels(*self._labels)

        seconds, tokens, per_token = SECONDS, TOKENS, TOKEN_SECONDS
        self.ttft = histogram("vllm:time_to_first_token_seconds", "Time to first token", seconds)
        self.itl = histogram("vllm:inter_token_latency_seconds", "Time between updates of an answer", per_token)
        self.tpot = histogram("vllm:request_time_per_output_token_seconds", "Time per token of an answer", per_token)
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "Whole request", seconds)
        self.queue = histogram("vllm:request_queue_time_seconds", "Time in the queue", seconds)
        self.inference = histogram("vllm:request_inference_time_seconds", "Prefill and decode", seconds)
        self.prefill = histogram("vllm:request_prefill_time_seconds", "From the queue to the first token", seconds)
        self.decode = histogram("vllm:request_decode_time_seconds", "From the first token to the last", seconds)
        self.prompt_tokens = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request", tokens)
        self.generation_tokens = histogram("vllm:request_generation_tokens", "Answer tokens of a request", tokens)
        self.max_tokens = histogram("vllm:request_params_max_tokens", "max_tokens of a request", tokens)
        self.n = histogram("vllm:request_params_n", "n of a request", (1, 2, 5, 10, 20, 50, 100))
        what = "Time per token of an answer, of requests that ended while the batch was full"
        self.full_load = histogram("peagle:full_load_time_per_output_token_seconds", what, per_token)
        reasons = (*LABELS, "finished_reason")
        self.success = Counter("vllm:request_success", "Finished answers", reasons, registry=self.registry)

    def finished(self, job: "Job", *, is_full: bool) -> None:
        """Record a finished job."""
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
        # The baseline was measured with chains. A step that verifies n drafts, the likeliest of a tree, should accept
        # at least what a chain of n does. Requests that the card has no figure for are not compared: other logits,
        # tolerated drafts, or no figure for their temperature.
        params, usual = job.params, self.sampled if job.params.temperature else self.baseline
        is_known = usual is not None or (self.baseline is None and self.sampled is None)
        is_plain = is_known and params.tolerance == 1 and not params.adjusts_logits
        if job.num_steps and is_plain and job.num_drafted >= job.num_steps:
            usual = usual and usual.of_chain(job.num_drafted // job.num_steps)
            self.window.append((job.num_steps, sum(n * drafts for n, drafts in enumerate(job.histogram)), usual))

    def acceptance_length(self) -> tuple[float | None, int]:
        num_drafts = sum(drafts for drafts, _, _ in self.window)
        if not num_drafts:
            return None, 0
        return 1 + sum(accepted for _, accepted, _ in self.window) / num_drafts, num_drafts

    def expected(self) -> Baseline | None:
        """The mean of the baselines of the window's requests, weighted by their drafts."""
        entries = [(drafts, usual) for drafts, _, usual in self.window if usual is not None]
        if not entries:
            return self.baseline or self.sampled
        length = sum(drafts * usual.length for drafts, usual in entries) / sum(drafts for drafts, _ in entries)
        return Baseline(round(length, 4), ", ".join(sorted({usual.source for _, usual in entries})))

    def text(self) -> bytes:
        return prometheus_client.generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        if stats is None:
            return
        acceptance = stats.acceptance
        yield self._counter("vllm:spec_decode_num_drafts", "Verified drafts", acceptance.num_drafts)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens", stats.num_draft_tokens)
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens", acceptance.num_accepted)
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        by_position = CounterMetricFamily(name, "Accepted draft tokens by position", labels=(*LABELS, "position"))
        for position, count in enumerate(acceptance.accepted_per_position):
            by_position.add_metric((*self._labels, str(position)), count)
        yield by_position
        what = "Answer tokens that a request's tolerance kept: drafts that are not the target's own choice"
        yield self._counter("peagle:tolerated_tokens", what, stats.num_tolerated_tokens)
        yield self._counter("vllm:prompt_tokens", "Prompt tokens of finished requests", stats.num_prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Answer tokens", stats.num_output_tokens)
        yield self._counter("vllm:num_preemptions", "Preempted requests", stats.num_preemptions)
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up", stats.num_prompt_tokens)
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache", stats.num_cached_tokens)
        what = "Requests refused because the queue was full"
        rejections = CounterMetricFamily("vllm:admission_rejections", what, labels=("model_name", "reason"))
        rejections.add_metric((self.model_name, "max_num_queued_reqs"), stats.num_refused)
        yield rejections
        yield self._gauge("vllm:num_requests_running", "Running answers", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Waiting answers", stats.num_waiting)
        usage = stats.num_pages_used / max(1, stats.num_pages)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1", usage)
        yield self._counter("peagle:requests_aborted", "Requests aborted before their end", stats.num_aborted)
        yield from self._shared(acceptance.num_accepted, f"{WINDOW} requests")
        if stats.drafting_pays is not None:
            what = "0 while drafts cost more than they bring, so that requests are decoded without"
            yield self._gauge("peagle:drafting_pays", what, stats.drafting_pays)
            yield self._counter("peagle:draft_pauses", "Times drafting stopped paying", stats.num_draft_pauses)
        if stats.drafting_gain is not None:
            what = "Expected tokens per second with drafts, as a multiple of those without"
            yield self._gauge("peagle:drafting_gain", what, stats.drafting_gain)
        if len(stats.accepted_per_position) > DEEP:
            rate = deep_acceptance(stats.accepted_per_position)
            what = f"Acceptance rate of draft tokens beyond depth {DEEP}, given that the one before was accepted"
            yield self._gauge("peagle:deep_acceptance_rate", what, rate)
            what = "Below it drafts that deep do not pay"
            yield self._gauge("peagle:deep_acceptance_threshold", what, DEEP_THRESHOLD)


def deep_acceptance(accepted_per_position: list[int]) -> float:
    """Acceptance rate of draft tokens beyond depth 20 after an accepted one; 0 if none was reached.

    >>> deep_acceptance([9] * 19 + [8, 6, 3])
    0.6428571428571429
    """
    reached = sum(accepted_per_position[DEEP - 1 : -1])
    return sum(accepted_per_position[DEEP:]) / reached if reached else 0.0
