"""One /metrics for vLLM and the proxy: vLLM's families unchanged, then ours, some derived from its counters."""

import time
from collections import deque
from collections.abc import Iterator

import prometheus_client
from prometheus_client import Counter
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from peagle.checkpoint.card import Baseline
from peagle.server.metrics import Metrics

WINDOW_DRAFTS = 5000
"""Drafts in the acceptance window."""
SAMPLE_SECONDS = 1.0
NUM_DRAFTS = "vllm:spec_decode_num_drafts_total"
NUM_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


class ProxyMetrics(Metrics):
    """The proxy's own counters, and what it derives from vLLM's at each scrape."""

    def __init__(
        self, model_name: str, num_draft_tokens: int = 0, max_batch: int = 0, baseline: Baseline | None = None
    ) -> None:
        super().__init__(model_name, num_draft_tokens, max_batch, baseline)
        self.is_up = False
        self.samples: deque[tuple[float, int, int]] = deque([(float("-inf"), 0, 0)])
        """the acceptance window: (time, drafts, accepted tokens), oldest first"""
        self.refused = Counter(
            "peagle:queue_full", "Requests refused because the queue was full", registry=self.registry
        )
        self.registry.register(self)

    def begin(self) -> None:
        """Start the window now, without the warm-up."""
        self.samples = deque([self.samples[-1]])

    def take(self, text: str, now: float | None = None) -> None:
        """Read vLLM's counters from its metrics text."""
        totals = {NUM_DRAFTS: 0.0, NUM_ACCEPTED: 0.0}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in totals:  # one per data-parallel engine
                    totals[sample.name] += sample.value
        self.add(time.monotonic() if now is None else now, int(totals[NUM_DRAFTS]), int(totals[NUM_ACCEPTED]))

    def add(self, at: float, num_drafts: int, num_accepted: int) -> None:
        """Add a sample, and drop the oldest ones while the rest still spans the window."""
        if num_drafts < self.samples[-1][1]:
            self.samples.clear()  # a new process counts from 0
        if len(self.samples) > 1 and at - self.samples[-1][0] < SAMPLE_SECONDS:
            self.samples.pop()
        self.samples.append((at, num_drafts, num_accepted))
        while len(self.samples) > 2 and num_drafts - self.samples[1][1] >= WINDOW_DRAFTS:
            self.samples.popleft()

    def acceptance_length(self) -> tuple[float | None, int]:
        (_, first_drafts, first_accepted), (_, drafts, accepted) = self.samples[0], self.samples[-1]
        num_drafts = drafts - first_drafts
        return (1 + (accepted - first_accepted) / num_drafts if num_drafts else None), num_drafts

    def text(self, upstream: str) -> bytes:
        """vLLM's metrics text followed by ours; only ours if vLLM does not answer."""
        self.is_up = bool(upstream)
        if upstream:
            self.take(upstream)
            upstream = upstream.rstrip("\n") + "\n"
        return upstream.encode() + prometheus_client.generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        yield self._gauge("peagle:engine_up", "1 while vLLM answers", int(self.is_up))
        yield from self._shared(self.samples[-1][2], f"{WINDOW_DRAFTS} drafts")
