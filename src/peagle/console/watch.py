"""Figures of a running server from its /metrics: now, over a window, and since it started.

Metrics that a server does not export are None; vLLM, for example, has no acceptance baseline.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from peagle.bench.cells import rounded
from peagle.bench.scrape import Scrape, Speculation, gained, prefix_cache_hit_rate

LATENCIES = {
    "ttft": ("vllm:time_to_first_token_seconds",),
    "tpot": ("vllm:request_time_per_output_token_seconds", "vllm:time_per_output_token_seconds"),
    "itl": ("vllm:inter_token_latency_seconds",),
    "e2el": ("vllm:e2e_request_latency_seconds",),
    "queue": ("vllm:request_queue_time_seconds",),
}
"""Histograms by report name; vLLM's older names come second."""
PERCENTILES = (50, 95, 99)
COUNTERS = {
    "prompt_tokens": "vllm:prompt_tokens_total",
    "output_tokens": "vllm:generation_tokens_total",
    "preemptions": "vllm:num_preemptions_total",
    "finished": "vllm:request_success_total",
    "rejected": "vllm:admission_rejections_total",
    "aborted": "peagle:requests_aborted_total",
    "tokens_saved": "peagle:tokens_saved_total",
}
DRIFT_SHARE = 0.8
"""Acceptance below this share of the baseline is drift, if the server does not export its own alarm."""


@dataclass
class Watch:
    """Scrapes of the last `seconds`, oldest first. A server restart clears them."""

    seconds: float = 30.0
    scrapes: deque[Scrape] = field(default_factory=deque)
    speeds: deque[float] = field(default_factory=lambda: deque(maxlen=60))
    """output tokens per second between consecutive scrapes"""

    def add(self, scrape: Scrape) -> None:
        if self.scrapes and has_restarted(self.scrapes[-1], scrape):
            self.scrapes.clear()
            self.speeds.clear()
        if self.scrapes:
            tokens = gained(self.scrapes[-1], scrape, COUNTERS["output_tokens"]) or 0.0
            self.speeds.append(tokens / max(1e-9, scrape.at - self.scrapes[-1].at))
        self.scrapes.append(scrape)
        while len(self.scrapes) > 2 and scrape.at - self.scrapes[1].at >= self.seconds:
            self.scrapes.popleft()

    def report(self) -> dict[str, Any]:
        newest = self.scrapes[-1]
        return {
            "models": sorted(newest.by_label(COUNTERS["output_tokens"], "model_name")),
            "now": present(newest),
            "recent": between(self.scrapes[0], newest) if len(self.scrapes) > 1 else None,
            "since_start": between(Scrape(), newest),
            "drift": drift(newest),
            "drafting": drafting(newest),
        }


def has_restarted(before: Scrape, after: Scrape) -> bool:
    """Whether a counter decreased, which only a restart does."""
    return any((gained(before, after, name) or 0.0) < 0 for name in COUNTERS.values())


def present(scrape: Scrape) -> dict[str, float | None]:
    return {
        "running": scrape.total("vllm:num_requests_running"),
        "waiting": scrape.total("vllm:num_requests_waiting"),
        "max_batch": scrape.total("peagle:max_batch"),
        "kv_cache_usage": scrape.largest("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        "num_draft_tokens": scrape.largest("peagle:num_draft_tokens"),
    }


def between(before: Scrape, after: Scrape) -> dict[str, Any]:
    """What happened between two scrapes. With an empty `before`: since the start, without rates."""
    seconds = after.at - before.at if before else None
    figures: dict[str, Any] = {"seconds": rounded(seconds, 3)}
    for name, counter in COUNTERS.items():
        amount = gained(before, after, counter)
        figures[name] = None if amount is None else int(amount)
    then, now = (scrape.by_label(COUNTERS["finished"], "finished_reason") for scrape in (before, after))
    counts = {reason: int(count - then.get(reason, 0.0)) for reason, count in now.items()}
    figures["finished_by_reason"] = {reason: count for reason, count in counts.items() if count}
    for name in ("prompt_tokens", "output_tokens"):
        figures[f"{name}_per_second"] = rounded(figures[name], 2, 1 / seconds) if seconds else None
    for name, histograms in LATENCIES.items():
        figures[f"{name}_ms"] = latency(before, after, *histograms)
    figures["prefix_cache_hit_rate"] = prefix_cache_hit_rate(before, after)
    figures["speculation"] = _speculation(before, after, seconds)
    return figures


def latency(before: Scrape, after: Scrape, *names: str) -> dict[str, float] | None:
    """Count, mean and percentiles in milliseconds of what a histogram gained; None if nothing."""
    now = after.histogram(*names)
    added = now and now.minus(before.histogram(*names))
    if added is None or added.count <= 0:
        return None
    seconds = {"mean": added.sum / added.count} | {f"p{percent}": added.percentile(percent) for percent in PERCENTILES}
    return {"count": int(added.count)} | {name: round(1e3 * (value or 0.0), 3) for name, value in seconds.items()}


def drift(scrape: Scrape) -> dict[str, Any] | None:
    """Acceptance of recent requests against the drafter card's baseline; None if there is no baseline."""
    baseline = scrape.largest("peagle:acceptance_length_baseline")
    if not baseline:
        return None
    length = scrape.largest("peagle:acceptance_length")
    alarm = scrape.largest("peagle:acceptance_drift")
    return {
        "baseline": baseline,
        "acceptance_length": rounded(length, 4),
        "share": rounded(length, 4, 1 / baseline),
        "num_drafts": int(scrape.largest("peagle:acceptance_window_drafts") or 0),
        "has_drifted": bool(alarm) if alarm is not None else bool(length and length < DRIFT_SHARE * baseline),
    }


def drafting(scrape: Scrape) -> dict[str, Any] | None:
    """Whether the server drafts, by its own judgment of what drafts cost and bring; None if it does not choose."""
    pays = scrape.largest("peagle:drafting_pays")
    if pays is None:
        return None
    return {
        "pays": bool(pays),
        "gain": rounded(scrape.largest("peagle:drafting_gain"), 4),
        "num_pauses": int(scrape.total("peagle:draft_pauses_total") or 0),
    }


def _speculation(before: Scrape, after: Scrape, seconds: float | None) -> dict[str, Any] | None:
    found = Speculation.between(before, after)
    if found is None:
        return None
    return {
        "acceptance_length": round(found.acceptance_length, 4),
        "acceptance_rate": round(found.acceptance_rate, 4),
        "num_drafts": found.num_drafts,
        "num_draft_tokens": found.num_draft_tokens,
        "num_accepted_tokens": found.num_accepted,
        "drafted_per_second": round(found.num_draft_tokens / seconds, 2) if seconds else None,
        "accepted_per_second": round(found.num_accepted / seconds, 2) if seconds else None,
        "per_position": [round(rate, 4) for rate in found.per_position],
    }
