"""The scheduler: decides which prompt chunks to prefill and which requests to decode in the next engine step.

The engine's loop is one step ahead of the results it has seen:

    plan = scheduler.plan()         # assumes that every earlier plan was launched, and counts on its results
    launch(plan)                    # does not wait
    for request, tokens in results of the previous launch:
        scheduler.commit(request, tokens), or scheduler.finish(request) after the last tokens

Launch plans in order. A request may be aborted or finished between two plans. A result counts only if `request.epoch`
is the same as at the launch.

The rules:

- First come, first served. Every running request is older than every waiting one.
- Every decoding request is in every plan, until its last token is in flight. Exception: a request with a grammar skips
  a plan while its previous pass is unseen, because the grammar must read those tokens first.
- A decoding request that needs a page when none is free preempts the youngest running request, possibly itself. The
  oldest can take all pages, and a request that needs more is refused, so the oldest always finishes.
- A waiting request is admitted when there is a free row, and pages for its prompt and its first decode step. It never
  overtakes an older one.
- Prefill takes at most `prefill_tokens` per plan, the oldest first. Each request leaves half of the rest to younger
  ones, so that a short prompt behind long ones does not wait for all of them. `plan` takes a lower limit for plans that
  several requests share: on a CPU a long prompt would stall the others (`prefill_pace`).
- A prefill pass costs about as much as a decode step, however few tokens it has. So on a GPU few tokens share the pass
  of the decode step (`shares_pass`). A few new requests beside many decoding ones take no more tokens per plan than
  that pass has room for. Where passes are not shared, they may wait some plans (`max_delay`) for others to share their
  prefill pass.
- Nothing is computed twice at the same time: if an older request is prefilling the page that a request needs next, the
  request waits for it.
- A request with prompt_logprobs runs its whole prompt, at most `SCORED_TOKENS` per plan, and reuses no pages.

Prefix caching: pages whose content is in the pool are shared and not prefilled. The drafter's entry at the first
position behind them reads the target's state of the token before, which is not stored. So prefill starts one token
early, and does not write that token again. With pages of 4 tokens, and a prompt that begins like one already prefilled:

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
import itertools
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence

from peagle.errors import CapacityError, RequestError
from peagle.scheduling.config import SchedulerConfig, shared_bucket, shared_buckets
from peagle.scheduling.draft_trials import DraftTrials
from peagle.scheduling.pages import IntegrityError, PagePool
from peagle.scheduling.plan import Chunk, Plan
from peagle.scheduling.request import Request

DECODES_PER_ADMISSION = 8
"""A prefill pass pays from one new request per this many decoding ones on; measured at 64 requests (docs/log.md)."""
SCORED_TOKENS = 256
"""Prompt tokens per plan that need logits: these take far more memory than hidden states."""


class Scheduler:
    """Owns the rows, the waiting and the running requests, and the pages they hold."""

    def __init__(self, config: SchedulerConfig, pages: PagePool, trials: DraftTrials | None = None) -> None:
        self.config, self.pages, self.trials = config, pages, trials
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._running: dict[str, Request] = {}
        self._free_rows = list(range(config.max_batch))
        """a heap: the lowest row is used first"""
        self._num_arrived = 0
        self._last_chunks: list[Chunk] = []
        self._num_delayed = 0
        self._shares_passes = config.shares_passes

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

    # Requests and results ---------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a new request. Raises if it can never finish."""
        name = f"request {request.request_id!r}"
        if request.request_id in self._waiting or request.request_id in self._running:
            raise RequestError(f"{name} is already being served", hint="use a unique request id")
        if request.prompt_length >= self.config.max_length:
            raise CapacityError(
                f"{name}: a prompt of {request.prompt_length} tokens leaves no room for output "
                f"(max_length={self.config.max_length})",
                hint="shorten the prompt, or raise --max-length",
            )
        request.max_length = min(request.max_length, self.config.max_length)
        num_needed = self.pages.pages_for(request.max_length + request.step_room)
        if num_needed > self.pages.capacity:
            raise CapacityError(
                f"{name}: {request.prompt_length} prompt and up to {request.max_length - request.prompt_length} "
                f"output tokens need {num_needed} pages of {self.pages.page_size} tokens, "
                f"but the KV cache has {self.pages.capacity}",
                hint="lower max_tokens, shorten the prompt, or raise --memory-share",
            )
        request.arrival, self._num_arrived = self._num_arrived, self._num_arrived + 1
        self._waiting[request.request_id] = request

    def abort(self, request_id: str) -> Request | None:
        """End a request at any time; None if there is no such request."""
        request = self._running.get(request_id) or self._waiting.get(request_id)
        if request is not None:
            self.finish(request)
        return request

    def finish(self, request: Request) -> None:
        """End a request and free its row and pages. Its results in flight become void."""
        if request.is_running:
            self._release(request)
        else:
            del self._waiting[request.request_id]
            request.drop_device_state()
        request.state = "finished"

    def commit(self, request: Request, new_tokens: Sequence[int], num_passes: int = 1) -> None:
        """Append `new_tokens`, which `num_passes` passes emitted, to the sequence of a running request."""
        if num_passes > request.num_in_flight:
            raise IntegrityError(f"request {request.request_id!r}: no pass in flight can have emitted {new_tokens}")
        request.num_in_flight -= num_passes
        request.token_ids += new_tokens
        # The newest token is not in the KV cache yet. Everything before it is, and is never written again.
        num_written = len(request.token_ids) - 1
        if num_written >= (request.num_registered + 1) * self.pages.page_size:
            self._register(request, num_written)

    # The plan ---------------------------------------------------------------------------------------------------------

    def plan(self, shared_tokens: int | None = None, may_share: bool = True) -> Plan:
        """Plan the next engine step, and count it as launched.

        shared_tokens: maximum prompt tokens if several requests run or wait; default: `prefill_tokens`.
        may_share: whether prompts may run in the pass of the decode step, if the engine `shares_passes`.
        """
        self._shares_passes = may_share and self.config.shares_passes
        num_tokens = self.config.prefill_tokens
        if shared_tokens is not None and len(self._running) + len(self._waiting) > 1:
            num_tokens = min(num_tokens, shared_tokens)
        for chunk in self._last_chunks:
            if chunk.request.is_running:
                self._register(chunk.request, chunk.end)
        grown, preempted = list[Request](), list[Request]()
        decodes = self._plan_decodes(grown, preempted)
        room = self._room_beside(decodes)
        # Pages just taken from the youngest request must not go to a younger one, or back to itself.
        may_admit = not preempted and (room is not None or not self._delays_admission(decodes))
        self._last_chunks = chunks = self._plan_chunks(num_tokens, may_admit, room)
        shares_pass = self._may_share(decodes, chunks)
        for chunk in chunks:
            if chunk.is_last and chunk.request.wants_decode and not shares_pass:
                chunk.request.num_in_flight += 1
                decodes.append(chunk.request)
        return Plan(tuple(chunks), tuple(decodes), tuple(grown), tuple(preempted), shares_pass)

    def _plan_decodes(self, grown: list[Request], preempted: list[Request]) -> list[Request]:
        """Every decoding request, oldest first, with the pages it needs; may preempt the youngest ones."""
        decodes, page_size = list[Request](), self.pages.page_size
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
        """Allocate pages for `reach` positions of a request; False if the request itself was preempted."""
        num_new = self.pages.pages_for(reach) - len(request.pages)
        while num_new > self.pages.num_free:
            youngest = next(reversed(self._running.values()))
            self._preempt(youngest)
            preempted.append(youngest)
            if youngest is request:
                return False
        request.pages += self.pages.allocate(num_new)
        return True

    def _is_few(self, num_new: int, decodes: list[Request]) -> bool:
        return 0 < num_new < len(decodes) // DECODES_PER_ADMISSION

    def _delays_admission(self, decodes: list[Request]) -> bool:
        """Whether the few new requests wait one more plan, so that later ones can share their prefill pass."""
        is_few = self._is_few(min(len(self._waiting), len(self._free_rows)), decodes)
        self._num_delayed = self._num_delayed + 1 if is_few and self._num_delayed < self.config.max_delay else 0
        return self._num_delayed > 0

    def _room_beside(self, decodes: list[Request]) -> tuple[int, int] | None:
        """Tokens and chunks of few new requests that the pass of the decode step has room for; None for more requests.

        One chunk of the pass is padding.
        """
        num_admitted = min(len(self._waiting), len(self._free_rows))
        prefilling = (request for request in self._running.values() if request.state == "prefill")
        new = [*prefilling, *itertools.islice(self._waiting.values(), num_admitted)]
        buckets = shared_buckets(len(decodes), self.config.prefill_tokens) if self._shares_passes else ()
        if not buckets or not self._is_few(len(new), decodes) or not _are_usual([*new, *decodes]):
            return None
        num_tokens, num_chunks = buckets[-1]
        return num_tokens, min(num_chunks - 1, self.config.max_chunks)

    def _may_share(self, decodes: list[Request], chunks: list[Chunk]) -> bool:
        """Whether the chunks may run in the pass of the decode step."""
        if not (self._shares_passes and decodes and chunks):
            return False
        num_tokens = sum(chunk.end - chunk.start for chunk in chunks)
        bucket = shared_bucket(len(decodes), self.config.prefill_tokens, num_tokens, len(chunks))
        return bucket is not None and _are_usual([*decodes, *(chunk.request for chunk in chunks)])

    def _plan_chunks(self, num_left: int, may_admit: bool, room: tuple[int, int] | None) -> list[Chunk]:
        """Split `num_left` tokens: each request gets up to half of the rest; what remains goes to the youngest.

        With `room` for tokens and chunks, a request that fits into the rest gets all it needs.
        """
        num_left, max_chunks = (num_left, self.config.max_chunks) if room is None else (min(num_left, room[0]), room[1])
        num_scored = SCORED_TOKENS
        shares: dict[Request, int] = {}
        keys_in_work: dict[bool, set[bytes]] = {False: set(), True: set()}
        """by whether their pages will have drafter entries"""
        for request in self._prefilling(may_admit):
            next_keys = request.page_keys[request.num_registered :]
            is_in_work = bool(next_keys) and next_keys[0] in keys_in_work[request.has_drafts]
            if is_in_work or (request.wants_scores and not num_scored):
                continue
            for has_drafts in {False, request.has_drafts}:
                keys_in_work[has_drafts].update(next_keys)
            num_needed = len(request.token_ids) - request.num_prefilled
            half = max(num_left // 2, self.pages.page_size)
            share = min(num_needed, num_left if room is not None and num_needed <= num_left else half, num_left)
            if request.wants_scores:
                share = min(share, num_scored)
                num_scored -= share
            shares[request] = share
            num_left -= share
            if not num_left or len(shares) == max_chunks:
                break
        for request in [each for each in reversed(shares) if not each.wants_scores]:
            more = min(len(request.token_ids) - request.num_prefilled - shares[request], num_left)
            shares[request] += more
            num_left -= more
        return [self._next_chunk(request, num_tokens) for request, num_tokens in shares.items()]

    def _prefilling(self, may_admit: bool) -> Iterator[Request]:
        """Requests with tokens to prefill, oldest first; admits waiting ones as the caller iterates."""
        for request in [request for request in self._running.values() if request.state == "prefill"]:
            if not request.wants_scores:
                self._adopt_pages(request, self._match(request))
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

    # Rows and pages ---------------------------------------------------------------------------------------------------

    def _admit_oldest(self) -> Request | None:
        """Give the oldest waiting request a row and pages; None if there is none, or no room for it."""
        if not self._waiting or not self._free_rows:
            return None
        request = next(iter(self._waiting.values()))
        request.skips_drafts = self.trials is not None and self.trials.skips_next
        self.pages.extend_keys(request.page_keys, request.token_ids)
        shared = [] if request.wants_scores else self._match(request)
        num_pages = self.pages.pages_for(request.reach(1))
        num_taken = num_pages - sum(self.pages.num_holders(page) > 0 for page in shared)
        # Leave one page to each running request that can grow. They grow first, and would only preempt this one again.
        num_left = self.pages.num_free - num_taken
        if num_left < len(self._running) and num_left < sum(map(self._can_grow, self._running.values())):
            return None
        if self.trials is not None and request.num_draft_tokens:
            self.trials.admit(request.skips_drafts)
        del self._waiting[request.request_id]
        self._running[request.request_id] = request
        request.row = heapq.heappop(self._free_rows)
        request.state = "prefill"
        if request.started_at is None:
            request.started_at = time.perf_counter()
        self._adopt_pages(request, shared)
        request.pages += self.pages.allocate(num_pages - len(shared))
        return request

    def _can_grow(self, request: Request) -> bool:
        return request.max_length + request.step_room > len(request.pages) * self.pages.page_size

    def _match(self, request: Request) -> list[int]:
        """Pages of other requests with the same content as the next ones of this request."""
        return self.pages.match(request.page_keys[request.num_registered :], with_bare=not request.has_drafts)

    def _adopt_pages(self, request: Request, shared: list[int]) -> None:
        """Replace the next pages of a request by shared ones with the same content, and skip their prefill."""
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
        """Move a request to the head of the queue. It keeps the tokens the host has seen, and nothing on the device."""
        self._release(request)
        request.state = "waiting"
        request.num_preemptions += 1
        self._waiting[request.request_id] = request
        self._waiting.move_to_end(request.request_id, last=False)

    def _release(self, request: Request) -> None:
        assert request.row is not None, "the request is running"
        del self._running[request.request_id]
        heapq.heappush(self._free_rows, request.row)
        self.pages.release(request.pages)
        request.drop_device_state()

    def _register(self, request: Request, num_written: int) -> None:
        """Make the pages that the first `num_written` tokens fill available to other requests."""
        if not self.pages.reuse:
            return
        num_full = num_written // self.pages.page_size
        self.pages.extend_keys(request.page_keys, request.token_ids)
        # Prompts of requests with drafts have drafter entries, also if drafts stopped paying since.
        num_read = request.num_prefilled if request.num_draft_tokens and not request.skips_drafts else 0
        num_drafted = num_written if request.has_drafts else num_read
        for index in range(request.num_registered, num_full):
            is_bare = (index + 1) * self.pages.page_size > num_drafted
            self.pages.register(request.pages[index], request.page_keys[index], is_bare)
        request.num_registered = max(request.num_registered, num_full)

    def check_idle(self) -> None:
        """Without requests: raise IntegrityError if pages or rows are still held."""
        assert not self._waiting and not self._running, "the scheduler is idle"
        num_held, num_rows = self.pages.num_used, len(self._free_rows)
        if num_held or num_rows != self.config.max_batch:
            free = f"{num_rows} of {self.config.max_batch} rows are free"
            raise IntegrityError(f"scheduler: no requests, but {num_held} pages are held, and {free}")

    def check_integrity(self) -> None:
        """Raise IntegrityError if queues, rows, requests and pages contradict each other."""
        waiting, running = list(self._waiting.values()), list(self._running.values())

        def require(condition: bool, complaint: str) -> None:
            if not condition:
                raise IntegrityError(f"scheduler: {complaint}")

        arrivals = [request.arrival for request in running + waiting]
        require(arrivals == sorted(set(arrivals)), "the queues are not in order of arrival")
        rows = self._free_rows + [request.row for request in running if request.row is not None]
        require(sorted(rows) == list(range(self.config.max_batch)), "rows are lost or held twice")
        for request in running + waiting:
            request.check_integrity(self.pages.page_size)
            require(request.is_running == (request.request_id in self._running), f"{request.request_id!r} is misplaced")
            for page in request.pages[request.num_registered :]:
                is_private = self.pages.num_holders(page) == 1 and not self.pages.has_key(page)
                require(is_private, f"{request.request_id!r} may write to page {page}, which others can read")
        self.pages.check_integrity(held=[page for request in running for page in request.pages])


def _are_usual(requests: Collection[Request]) -> bool:
    """Whether no request adjusts logits or wants log-probabilities of its prompt, which takes a pass of its own."""
    return not any(request.adjusts or request.wants_scores for request in requests)
