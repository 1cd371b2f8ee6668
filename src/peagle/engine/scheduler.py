"""What the next iteration of the engine runs: chunks of prompts to prefill, then one decode pass over many requests.

The caller's loop is one iteration behind the device:

    plan = scheduler.plan()         # counts on everything that was launched before, seen or not
    launch(plan)                    # does not wait
    for request, tokens in collect(the launch before):
        scheduler.committed(request, tokens), or scheduler.finish(request) after the last ones

`plan` assumes that what it returned is launched, in order, before it is called again; requests that were aborted or
finished in between are skipped. A result is reported only while `request.epoch` is what it was at the launch.

The rules:

- The order of arrival is the priority. Every running request is older than every waiting one.
- Every decoding request is in every plan, until its last token is on the way. One that is held to a grammar skips a
  plan where the host has not seen its last pass.
- A decoding request that needs a page when none is free preempts the youngest running one, itself if need be. The
  oldest can take all pages, and no request is accepted that needs more, so the oldest always finishes.
- A waiting request is admitted when there is a row, and pages for its whole text and its first decode pass. It never
  passes an older one.
- Prefill takes `prefill_tokens` a plan at most, the oldest first, but each leaves half of what is left to the younger
  ones, so that a short prompt gets through behind long ones.
- A prefill pass costs about a decode pass, however few tokens it has. So where many requests decode, a new one may be
  held back for a few plans, until others have come to share its pass.
- Nothing is computed twice at the same time: a request whose next page an older one is just prefilling waits for it.
- A request that wants log-probabilities of its prompt runs all of it, a little a plan, and takes over no pages.

Pages whose content is found in the pool are taken over and not prefilled. The drafter's entry at the first position
behind them reads the target's state of the token before, which is not kept; so prefill starts one token early, and
does not write that token again. With pages of 4 tokens and a text that begins like one already prefilled:

>>> from peagle.sampling_params import SamplingParams
>>> scheduler = Scheduler(SchedulerConfig(max_batch=2, max_length=64, prefill_tokens=32), PagePool(20, page_size=4))
>>> first = Request("first", range(10), SamplingParams(), num_draft_tokens=0, max_length=64)
>>> scheduler.add(first)
>>> [(chunk.start, chunk.end, chunk.first_write, chunk.is_last) for chunk in scheduler.plan().chunks]
[(0, 10, 0, True)]
>>> second = Request("second", [*range(9), 77, 78], SamplingParams(), num_draft_tokens=0, max_length=64)
>>> scheduler.add(second)
>>> [(chunk.start, chunk.end, chunk.first_write, chunk.is_last) for chunk in scheduler.plan().chunks]
[(7, 11, 8, True)]
>>> first.pages[:2] == second.pages[:2], set(first.pages[2:]) & set(second.pages[2:])
(True, set())
"""

import heapq
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from peagle.engine.pages import IntegrityError, PagePool
from peagle.engine.request import Request
from peagle.errors import CapacityError, ConfigError, RequestError

DECODES_A_NEW_REQUEST = 8
"""One new request for so many that decode is worth a prefill pass: measured at 64 requests, see docs/log.md."""
SCORED_TOKENS = 256
"""Tokens of prompts a plan for which the logits of every token are kept: they take far more room than the tokens."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_batch: int
    """rows: requests that run at the same time"""
    max_length: int
    """most tokens of one text, prompt and answer together"""
    prefill_tokens: int
    """most tokens of prompts in one plan"""
    max_chunks: int = 64
    """most prompts that one plan works on"""
    max_held: int = 0
    """plans for which a new request may be held back, while others decode, so that several share a prefill pass"""
    has_drafter: bool = False
    """pages carry drafter entries; what a request decodes plainly has none and is not reused"""

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_length", "prefill_tokens", "max_chunks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens start .. end - 1 of a request's text, to be run through prefill.

    Token i gives the target's KV at position i and, read together with token i + 1, the drafter's entry at position
    i + 1. Positions below `first_write` lie in shared pages and must not be written. The last chunk of a text emits
    its next token.
    """

    request: Request
    start: int
    end: int
    first_write: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """One iteration: all chunks, then one pass over all of `decodes`, which may follow their last chunk directly.

    The pages of a request change only where it has a chunk or is in `grown`.
    """

    chunks: tuple[Chunk, ...]
    decodes: tuple[Request, ...]
    grown: tuple[Request, ...] = ()
    preempted: tuple[Request, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Nothing to launch. With work left, results in flight must be collected before the next plan."""
        return not (self.chunks or self.decodes)


class Scheduler:
    """Owns the rows, the two queues and every request in them; takes pages from `pages` and gives them back."""

    def __init__(self, config: SchedulerConfig, pages: PagePool) -> None:
        self.config = config
        self.pages = pages
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._running: dict[str, Request] = {}
        self._free_rows = list(range(config.max_batch))
        """a heap, so that the rows in use stay close together"""
        self._num_arrived = 0
        self._last_chunks: list[Chunk] = []
        self._num_held = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def waiting(self) -> Collection[Request]:  # live views, oldest first
        return self._waiting.values()

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def running(self) -> Collection[Request]:
        return self._running.values()

    # What the caller tells the scheduler ----------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a new request, or refuse it if it could never run to its end."""
        name = f"request {request.request_id!r}"
        if request.request_id in self._waiting or request.request_id in self._running:
            raise RequestError(f"{name} is already being served", hint="give every request an id of its own")
        if request.prompt_length >= self.config.max_length:
            raise CapacityError(
                f"{name}: the prompt has {request.prompt_length} tokens, which leaves no room for an answer: "
                f"prompt and answer together hold at most {self.config.max_length}",
                hint="shorten the prompt, or raise max_length",
            )
        request.max_length = min(request.max_length, self.config.max_length)
        num_needed = self.pages.pages_for(request.max_length + 2 * request.num_draft_tokens)
        if num_needed > self.pages.capacity:
            raise CapacityError(
                f"{name}: {request.prompt_length} prompt and up to {request.max_length - request.prompt_length} "
                f"answer tokens need {num_needed} pages of {self.pages.page_size} tokens, "
                f"but there are only {self.pages.capacity}",
                hint="ask for fewer max_tokens, shorten the prompt, or give the engine more memory for pages",
            )
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self._waiting[request.request_id] = request

    def abort(self, request_id: str) -> Request | None:
        """End a request at any moment; None if there is no such request (any more)."""
        request = self._running.get(request_id) or self._waiting.get(request_id)
        if request is not None:
            self.finish(request)
        return request

    def finish(self, request: Request) -> None:
        """Take back the row and the pages of a request that needs no more tokens. What is in flight for it is void."""
        if request.is_running:
            self._give_up_row(request)
        else:
            del self._waiting[request.request_id]
            request.forget_device()
        request.state = "finished"

    def committed(self, request: Request, new_tokens: Sequence[int], num_passes: int = 1) -> None:
        """The host has seen what `num_passes` passes emitted for a running request; `new_tokens` join its text."""
        if num_passes > request.num_in_flight:
            raise IntegrityError(f"request {request.request_id!r}: no pass in flight can have emitted {new_tokens}")
        request.num_in_flight -= num_passes
        request.token_ids += new_tokens
        # The newest token is not in the cache. Everything before it is, and no later pass writes there.
        num_written = len(request.token_ids) - 1
        fills_page = num_written >= (request.num_registered + 1) * self.pages.page_size
        if fills_page and (request.num_draft_tokens or not self.config.has_drafter):
            self._register(request, num_written)

    # The plan -------------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Decide the next iteration and count it as launched."""
        for chunk in self._last_chunks:
            if chunk.request.is_running:
                self._register(chunk.request, chunk.end)
        grown: list[Request] = []
        preempted: list[Request] = []
        decodes = self._plan_decodes(grown, preempted)
        # Memory that was just taken from the youngest is not given to somebody younger still, or to itself.
        self._last_chunks = chunks = self._plan_chunks(may_admit=not preempted and not self._holds_back(decodes))
        for chunk in chunks:
            if chunk.is_last and chunk.request.wants_decode:
                chunk.request.num_in_flight += 1
                decodes.append(chunk.request)
        return Plan(tuple(chunks), tuple(decodes), tuple(grown), tuple(preempted))

    def _plan_decodes(self, grown: list[Request], preempted: list[Request]) -> list[Request]:
        """Every decoding request, oldest first, with the pages it needs; the youngest may lose theirs to the others."""
        decodes = []
        page_size = self.pages.page_size
        for request in list(self._running.values()):
            if request.state != "decode" or not request.wants_decode:
                continue
            reach = request.reach(request.num_in_flight)
            if reach > len(request.pages) * page_size:
                if not self._grow(request, reach, preempted):
                    continue
                grown.append(request)
            request.num_in_flight += 1
            decodes.append(request)
        return decodes

    def _grow(self, request: Request, reach: int, preempted: list[Request]) -> bool:
        """Give a request pages for `reach` positions; False if it had to be preempted itself."""
        num_new = self.pages.pages_for(reach) - len(request.pages)
        while num_new > self.pages.num_free:
            youngest = next(reversed(self._running.values()))
            self._preempt(youngest)
            preempted.append(youngest)
            if youngest is request:
                return False
        request.pages += self.pages.allocate(num_new)
        return True

    def _holds_back(self, decodes: list[Request]) -> bool:
        """Whether new requests wait for more of them: enough have come, or have waited long enough, or all can go."""
        num_new = min(len(self._waiting), len(self._free_rows))
        is_few = 0 < num_new < len(decodes) // DECODES_A_NEW_REQUEST
        self._num_held = self._num_held + 1 if is_few and self._num_held < self.config.max_held else 0
        return self._num_held > 0

    def _plan_chunks(self, may_admit: bool) -> list[Chunk]:
        """Share out the prefill tokens: first half of what is left to each, then the rest to the youngest of them."""
        num_left, num_scored = self.config.prefill_tokens, SCORED_TOKENS
        shares: dict[Request, int] = {}
        keys_in_work: set[bytes] = set()
        for request in self._prefilling(may_admit):
            next_keys = request.page_keys[request.num_registered :]
            if (next_keys and next_keys[0] in keys_in_work) or (request.wants_scores and not num_scored):
                continue
            keys_in_work.update(next_keys)
            half = max(num_left // 2, self.pages.page_size)
            share = min(len(request.token_ids) - request.num_prefilled, half, num_left)
            if request.wants_scores:
                share = min(share, num_scored)
                num_scored -= share
            shares[request] = share
            num_left -= share
            if not num_left or len(shares) == self.config.max_chunks:
                break
        for request in reversed(shares):
            if request.wants_scores:
                continue
            more = min(len(request.token_ids) - request.num_prefilled - shares[request], num_left)
            shares[request] += more
            num_left -= more
        return [self._next_chunk(request, num_tokens) for request, num_tokens in shares.items()]

    def _prefilling(self, may_admit: bool) -> Iterator[Request]:
        """Requests with text to prefill, oldest first; the waiting ones are admitted as they are asked for."""
        for request in [request for request in self._running.values() if request.state == "prefill"]:
            if not request.wants_scores:
                self._take_over(request, self.pages.match(request.page_keys[request.num_registered :]))
            yield request
        while may_admit and (admitted := self._admit_oldest()) is not None:
            yield admitted

    def _next_chunk(self, request: Request, num_tokens: int) -> Chunk:
        start, end = request.num_prefilled, request.num_prefilled + num_tokens
        is_last = end == len(request.token_ids)
        request.num_prefilled = end
        if is_last:
            request.state = "decode"
            request.num_in_flight += 1
        return Chunk(request, start, end, max(start, request.write_from), is_last)

    # How requests get rows and pages and give them up -----------------------------------------------------------------

    def _admit_oldest(self) -> Request | None:
        """Give the oldest waiting request a row and its pages; None if there is none or it must go on waiting."""
        if not self._waiting or not self._free_rows:
            return None
        request = next(iter(self._waiting.values()))
        self.pages.extend_keys(request.page_keys, request.token_ids)
        shared = [] if request.wants_scores else self.pages.match(request.page_keys)
        num_pages = self.pages.pages_for(request.reach(1))
        num_taken = num_pages - sum(self.pages.num_holders(page) > 0 for page in shared)
        # One page is left to each running request: they grow first, and would only push this one out again.
        if num_taken + len(self._running) > self.pages.num_free:
            return None
        del self._waiting[request.request_id]
        self._running[request.request_id] = request
        request.row = heapq.heappop(self._free_rows)
        request.state = "prefill"
        if request.started_at is None:
            request.started_at = time.perf_counter()
        self._take_over(request, shared)
        request.pages += self.pages.allocate(num_pages - len(shared))
        return request

    def _take_over(self, request: Request, shared: list[int]) -> None:
        """Put pages that hold the next part of the request's text in the place of its own, and skip that part."""
        if not shared:
            return
        first, end = request.num_registered, request.num_registered + len(shared)
        own = request.pages[first:end]
        self.pages.share(shared)
        request.pages[first:end] = shared
        self.pages.release(own)
        request.num_registered = end
        request.write_from = end * self.pages.page_size
        num_prefilled = request.write_from - 1
        if not request.num_preemptions:
            request.num_cached_tokens += num_prefilled - request.num_prefilled
        request.num_prefilled = num_prefilled

    def _preempt(self, request: Request) -> None:
        """Back to the head of the waiting requests, with the text the host has seen and nothing else."""
        self._give_up_row(request)
        request.state = "waiting"
        request.num_preemptions += 1
        self._waiting[request.request_id] = request
        self._waiting.move_to_end(request.request_id, last=False)

    def _give_up_row(self, request: Request) -> None:
        assert request.row is not None, "only running requests have something to give up"
        del self._running[request.request_id]
        heapq.heappush(self._free_rows, request.row)
        self.pages.release(request.pages)
        request.forget_device()

    def _register(self, request: Request, num_written: int) -> None:
        """Let others find the pages that the first `num_written` tokens fill."""
        if not self.pages.reuse:
            return
        num_full = num_written // self.pages.page_size
        self.pages.extend_keys(request.page_keys, request.token_ids)
        for index in range(request.num_registered, num_full):
            self.pages.register(request.pages[index], request.page_keys[index])
        request.num_registered = max(request.num_registered, num_full)

    def check_idle(self) -> None:
        """Raise IntegrityError where, without any request, pages or rows are held or lost."""
        assert not self._waiting and not self._running, "only asked then"
        num_held, num_rows = self.pages.num_used, len(self._free_rows)
        if num_held or num_rows != self.config.max_batch:
            free = f"{num_rows} of {self.config.max_batch} rows are free"
            raise IntegrityError(f"scheduler: nothing runs, but {num_held} pages are held, and {free}")

    def check_integrity(self) -> None:
        """Raise IntegrityError with the first contradiction between queues, rows, requests and pages."""
        waiting, running = list(self._waiting.values()), list(self._running.values())

        def require(condition: bool, complaint: str) -> None:
            if not condition:
                raise IntegrityError(f"scheduler: {complaint}")

        arrivals = [request.arrival for request in running + waiting]
        require(arrivals == sorted(set(arrivals)), "the queues are not in the order of arrival")
        rows = self._free_rows + [request.row for request in running if request.row is not None]
        require(sorted(rows) == list(range(self.config.max_batch)), "rows are lost or held twice")
        for request in running + waiting:
            request.check_integrity(self.pages.page_size)
            require(request.is_running == (request.request_id in self._running), f"{request.request_id!r} is misplaced")
            for page in request.pages[request.num_registered :]:
                is_private = self.pages.num_holders(page) == 1 and not self.pages.has_key(page)
                require(is_private, f"{request.request_id!r} may write to page {page}, which others can read")
        self.pages.check_integrity(held=[page for request in running for page in request.pages])
