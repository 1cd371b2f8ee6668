"""What a server's /metrics says: samples, differences of two scrapes, percentiles of histograms, and acceptance.

Samples of several engines or models behind one address are added up.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Labels = Mapping[str, str]

SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?[ \t]+(\S+)")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


@dataclass(frozen=True)
class Scrape:
    """Samples by name, and when they were taken, in seconds of any clock that goes forward."""

    samples: Mapping[str, Sequence[tuple[Labels, float]]] = field(default_factory=dict)
    at: float = 0.0

    @classmethod
    def parse(cls, text: str, at: float = 0.0) -> "Scrape":
        """Read Prometheus' text format. Lines that are none of it are passed over.

        >>> Scrape.parse('# HELP a what\\na{x="1"} 2\\na{x="2"} 3').total("a")
        5.0
        """
        samples: dict[str, list[tuple[Labels, float]]] = {}
        for line in text.splitlines():
            found = SAMPLE.match(line)
            if found is None:
                continue
            try:
                value = float(found[3])
            except ValueError:
                continue
            samples.setdefault(found[1], []).append((dict(_labels(found[2] or "")), value))
        return cls(samples, at)

    def __bool__(self) -> bool:
        return bool(self.samples)

    def total(self, *names: str) -> float | None:
        """The sum over the labels of the first of these names that there is; None where there is none."""
        for name in names:
            if self.samples.get(name):
                return sum(value for _, value in self.samples[name])
        return None

    def largest(self, *names: str) -> float | None:
        for name in names:
            if self.samples.get(name):
                return max(value for _, value in self.samples[name])
        return None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Sums by the value of one label."""
        sums: dict[str, float] = {}
        for labels, value in self.samples.get(name, ()):
            key = labels.get(label, "")
            sums[key] = sums.get(key, 0.0) + value
        return sums

    def histogram(self, *names: str) -> "Histogram | None":
        """The first of these histograms that there is."""
        for name in names:
            buckets = self.by_label(f"{name}_bucket", "le")
            if buckets:
                limits = sorted((float(limit), count) for limit, count in buckets.items())
                return Histogram(tuple(limits), self.total(f"{name}_sum") or 0.0)
        return None

    def label_values(self, name: str, label: str) -> list[str]:
        return sorted(self.by_label(name, label))


def _labels(text: str) -> Iterator[tuple[str, str]]:
    for name, value in LABEL.findall(text):
        yield name, re.sub(r"\\.", lambda found: ESCAPES.get(found[0], found[0]), value)


@dataclass(frozen=True)
class Histogram:
    """Cumulative counts by upper limit, the last of which is infinite."""

    buckets: tuple[tuple[float, float], ...]
    sum: float

    @property
    def count(self) -> float:
        return self.buckets[-1][1]

    @property
    def mean(self) -> float | None:
        return self.sum / self.count if self.count else None

    def minus(self, before: "Histogram | None") -> "Histogram":
        """What was added since `before`; everything where there was nothing, or other buckets."""
        if before is None or [limit for limit, _ in before.buckets] != [limit for limit, _ in self.buckets]:
            return self
        rows = zip(self.buckets, before.buckets, strict=True)
        return Histogram(tuple((limit, now - then) for (limit, now), (_, then) in rows), self.sum - before.sum)

    def percentile(self, percent: float) -> float | None:
        """As Prometheus' histogram_quantile: straight lines within a bucket; None where nothing was counted.

        Values above the last finite limit are told as that limit.

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
    """Drafts between two scrapes. Acceptance length counts the recovered or bonus token: 1 + accepted / drafts."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted: int
    per_position: tuple[float, ...]
    """accepted at this position, of all drafts"""

    @classmethod
    def between(cls, before: Scrape, after: Scrape) -> "Speculation | None":
        """From the counters that vLLM named; None where the server has none or drafted nothing in between."""
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
        """Share of the draft tokens that were accepted."""
        return self.num_accepted / self.num_draft_tokens if self.num_draft_tokens else 0.0

    def report(self) -> dict[str, Any]:
        """The fields of `vllm bench serve`, whose acceptance rate is in percent and whose rates by position are not."""
        return {
            "spec_decode_acceptance_rate": round(100 * self.acceptance_rate, 4),
            "spec_decode_acceptance_length": round(self.acceptance_length, 4),
            "spec_decode_num_drafts": self.num_drafts,
            "spec_decode_draft_tokens": self.num_draft_tokens,
            "spec_decode_accepted_tokens": self.num_accepted,
            "spec_decode_per_position_acceptance_rates": [round(rate, 4) for rate in self.per_position],
        }


def gained(before: Scrape, after: Scrape, *names: str) -> float | None:
    """By how much the first of these counters grew; None where the server does not have it.

    From an empty scrape on this is what it counted since its start. Where an empty one means that a scrape failed, the
    caller must not ask.
    """
    now = after.total(*names)
    return None if now is None else now - (before.total(*names) or 0.0)
