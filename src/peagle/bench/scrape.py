"""A server's /metrics: samples, differences between scrapes, histogram percentiles, acceptance.

Samples of several engines or models behind one address are summed.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from peagle.errors import MissingExtraError

Labels = Mapping[str, str]


@dataclass(frozen=True)
class Scrape:
    """Samples by name, and when they were taken, in seconds of any monotonic clock."""

    samples: Mapping[str, Sequence[tuple[Labels, float]]] = field(default_factory=dict)
    at: float = 0.0

    @classmethod
    def parse(cls, text: str, at: float = 0.0) -> "Scrape":
        """Parse Prometheus' text format; anything else gives an empty scrape.

        >>> Scrape.parse('# HELP a what\\na{x="1"} 2\\na{x="2"} 3').total("a")
        5.0
        """
        try:
            from prometheus_client.parser import text_string_to_metric_families
        except ModuleNotFoundError as error:
            raise MissingExtraError("prometheus_client", "bench", "reading /metrics") from error
        samples: dict[str, list[tuple[Labels, float]]] = defaultdict(list)
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    samples[sample.name].append((sample.labels, float(sample.value)))
        except ValueError:
            return cls({}, at)
        return cls(samples, at)

    def __bool__(self) -> bool:
        return bool(self.samples)

    def total(self, *names: str) -> float | None:
        """Sum over all labels of the first of these names that exists; None if none does."""
        return sum(values) if (values := self._values(names)) else None

    def largest(self, *names: str) -> float | None:
        return max(self._values(names), default=None)

    def _values(self, names: Sequence[str]) -> list[float]:
        found = next((self.samples[name] for name in names if self.samples.get(name)), ())
        return [value for _, value in found]

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Sums by the value of one label."""
        sums: dict[str, float] = defaultdict(float)
        for labels, value in self.samples.get(name, ()):
            sums[labels.get(label, "")] += value
        return sums

    def histogram(self, *names: str) -> "Histogram | None":
        """The first of these histograms that exists."""
        for name in names:
            buckets = self.by_label(f"{name}_bucket", "le")
            if buckets:
                limits = sorted((float(limit), count) for limit, count in buckets.items())
                return Histogram(tuple(limits), self.total(f"{name}_sum") or 0.0)
        return None


@dataclass(frozen=True)
class Histogram:
    """Cumulative counts by upper limit; the last limit is infinite."""

    buckets: tuple[tuple[float, float], ...]
    sum: float

    @property
    def count(self) -> float:
        return self.buckets[-1][1]

    def minus(self, before: "Histogram | None") -> "Histogram":
        """What was added since `before`; everything if there was no histogram or its buckets differ."""
        if before is None or [limit for limit, _ in before.buckets] != [limit for limit, _ in self.buckets]:
            return self
        rows = zip(self.buckets, before.buckets, strict=True)
        return Histogram(tuple((limit, now - then) for (limit, now), (_, then) in rows), self.sum - before.sum)

    def percentile(self, percent: float) -> float | None:
        """Like Prometheus' histogram_quantile: linear within a bucket, at most the last finite limit; None if empty.

        >>> Histogram(((1.0, 0.0), (2.0, 10.0), (math.inf, 10.0)), 15.0).percentile(50)
        1.5
        """
        if self.count <= 0:
            return None
        rank, low, below = self.count * percent / 100, 0.0, 0.0
        for limit, count in self.buckets:
            if count >= rank and count > below:
                if math.isinf(limit):
                    return low
                return low + (limit - low) * max(0.0, rank - below) / (count - below)
            if not math.isinf(limit):
                low = limit
            below = count
        return low


@dataclass(frozen=True)
class Speculation:
    """Drafts between two scrapes. Acceptance length includes the recovered or bonus token: 1 + accepted / drafts."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted: int
    per_position: tuple[float, ...]
    """share of all drafts accepted at each position"""

    @classmethod
    def between(cls, before: Scrape, after: Scrape) -> "Speculation | None":
        """From vLLM's counters; None if the server has none or drafted nothing in between."""
        name = "vllm:spec_decode_num_{}_total"
        num_drafts, num_tokens, num_accepted = (
            gained(before, after, name.format(each)) or 0.0 for each in ("drafts", "draft_tokens", "accepted_tokens")
        )
        if num_drafts <= 0:
            return None
        by_position = name.format("accepted_tokens_per_pos")
        then, now = (scrape.by_label(by_position, "position") for scrape in (before, after))
        positions = sorted((position for position in now if position.isdigit()), key=int)
        rates = tuple((now[position] - then.get(position, 0.0)) / num_drafts for position in positions)
        return cls(int(num_drafts), int(num_tokens), int(num_accepted), rates)

    @property
    def acceptance_length(self) -> float:
        return 1 + self.num_accepted / self.num_drafts

    @property
    def acceptance_rate(self) -> float:
        """Share of draft tokens accepted."""
        return self.num_accepted / self.num_draft_tokens if self.num_draft_tokens else 0.0

    def report(self) -> dict[str, Any]:
        """The fields of `vllm bench serve`. Its acceptance rate is in percent, its rates by position are not."""
        return {
            "spec_decode_acceptance_rate": round(100 * self.acceptance_rate, 4),
            "spec_decode_acceptance_length": round(self.acceptance_length, 4),
            "spec_decode_num_drafts": self.num_drafts,
            "spec_decode_draft_tokens": self.num_draft_tokens,
            "spec_decode_accepted_tokens": self.num_accepted,
            "spec_decode_per_position_acceptance_rates": [round(rate, 4) for rate in self.per_position],
        }


def gained(before: Scrape, after: Scrape, *names: str) -> float | None:
    """How much the first of these counters grew; None if the server does not have it.

    With an empty `before` this is the count since the server started, so do not pass a scrape that failed.
    """
    now = after.total(*names)
    return None if now is None else now - (before.total(*names) or 0.0)


def prefix_cache_hit_rate(before: Scrape, after: Scrape) -> float | None:
    queries = gained(before, after, "vllm:prefix_cache_queries_total")
    hits = gained(before, after, "vllm:prefix_cache_hits_total")
    return round(hits / queries, 4) if queries and hits is not None else None
