"""Schedulers with small limits, requests for them, and plans in a form that tests compare."""

from collections.abc import Iterable
from zlib import crc32

from peagle.sampling_params import SamplingParams
from peagle.scheduling.config import SchedulerConfig
from peagle.scheduling.pages import PagePool
from peagle.scheduling.plan import Plan
from peagle.scheduling.request import Request
from peagle.scheduling.scheduler import Scheduler

MAX_LENGTH = 200


def make(num_pages: int = 101, page_size: int = 4, reuse: bool = True, **limits: int) -> Scheduler:
    limits = {"max_batch": 8, "max_length": MAX_LENGTH, "prefill_tokens": 64, "max_chunks": 8} | limits
    return Scheduler(SchedulerConfig(**limits), PagePool(num_pages, page_size, reuse))


def add(
    scheduler: Scheduler, name: str, prompt: int | Iterable[int], max_tokens: int = 50, num_draft_tokens: int = 0
) -> Request:
    """Queue a request. An int `prompt` is a length: the prompt shares no prefix with other requests."""
    tokens = [crc32(name.encode()), *range(prompt - 1)] if isinstance(prompt, int) else list(prompt)
    request = Request(name, tokens, SamplingParams(max_tokens=max_tokens), num_draft_tokens, MAX_LENGTH)
    scheduler.add(request)
    return request


def spans(plan: Plan) -> list[tuple[str, int, int]]:
    return [(chunk.request.request_id, chunk.start, chunk.end) for chunk in plan.chunks]


def names(requests: Iterable[Request]) -> list[str]:
    return [request.request_id for request in requests]


def see(scheduler: Scheduler, request: Request, *tokens: int) -> None:
    """Commit all passes in flight: each emitted [0], the last one `tokens`."""
    while request.num_in_flight > 1:
        scheduler.commit(request, [0])
    scheduler.commit(request, tokens or [0])
