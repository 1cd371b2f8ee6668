"""The scheduler against a device that remembers what was written where.

The fake device has no network. A cell of KV memory holds the whole text up to its token, because that is what real KV
depends on; the drafter's entry at position i holds the same text, because it reads token i and the state of token
i - 1. Before anything is computed for a token, every cell it would attend to is compared with the text. One wrong page
id, one page written by a second request, one entry missing after reuse, and the comparison fails.
"""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import peagle.scheduling.config as config_module
import peagle.scheduling.scheduler as scheduler_module
from peagle.sampling_params import SamplingParams
from peagle.scheduling.config import SchedulerConfig
from peagle.scheduling.draft_trials import DraftTrials
from peagle.scheduling.pages import WASTE_PAGE, PagePool
from peagle.scheduling.plan import Chunk, Plan
from peagle.scheduling.request import Request
from peagle.scheduling.scheduler import Scheduler

Text = tuple[int, ...]
VOCABULARY = 11
END_TOKEN = 10
REJECTED = (-1,)


def next_token(text: Text) -> int:
    """What the target says after a text: depends on nothing else."""
    return (31 * text[-1] + 7 * len(text) + 3 * text[0] + text[len(text) // 2]) % VOCABULARY


def whole_answer(prompt: Text, max_length: int) -> list[int]:
    text = prompt
    while len(text) < max_length and not (len(text) > len(prompt) and text[-1] == END_TOKEN):
        text += (next_token(text),)
    return list(text[len(prompt) :])


class SomeTrials(DraftTrials):
    """Some requests skip their trial, by chance."""

    def __init__(self, choose: random.Random, rate: float) -> None:
        super().__init__()
        self.choose, self.rate = choose, rate

    @property
    def skips_next(self) -> bool:
        return self.choose.random() < self.rate


@dataclass(frozen=True)
class Result:
    """What one pass emitted for a request, and the epoch it was launched under."""

    request: Request
    epoch: int
    tokens: Text


@dataclass
class FakeDevice:
    """Page contents, and the text of each row; the host never looks inside."""

    pool: PagePool
    choose: random.Random
    pause_rate: float
    target: dict[tuple[int, int], Text] = field(default_factory=dict)
    drafter: dict[tuple[int, int], Text] = field(default_factory=dict)
    rows: dict[int, Text] = field(default_factory=dict)

    def launch(self, plan: Plan) -> list[Result]:
        chunks = [chunk for chunk in plan.chunks if chunk.request.is_running]
        is_drafted = any(chunk.request.has_drafts for chunk in plan.chunks)
        results = [self._prefill(chunk, is_drafted) for chunk in chunks]
        for request in plan.decodes:
            request.is_paused |= request.is_running and self.choose.random() < self.pause_rate
        results += [self._decode(request) for request in plan.decodes if request.is_running]
        return [result for result in results if result.tokens]

    def _cell(self, request: Request, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.pool.page_size)
        return (request.pages[index] if index < len(request.pages) else WASTE_PAGE), offset

    def _write(self, memory: dict[tuple[int, int], Text], request: Request, position: int, text: Text) -> None:
        page, offset = self._cell(request, position)
        if page != WASTE_PAGE:
            assert self.pool.num_holders(page) == 1, f"position {position} of {request.request_id}: the page is shared"
            assert not self.pool.has_key(page), f"position {position} of {request.request_id}: others can find the page"
            memory[page, offset] = text

    def _expect(self, request: Request, text: Text, num_target: int, num_drafter: int) -> None:
        """The first cells, which the next token attends to, are those of `text`. The drafter has no entry at 0."""
        for position in range(num_target):
            assert self.target.get(self._cell(request, position)) == text[: position + 1], (
                f"{request.request_id}: the target reads something else at {position}"
            )
        for position in range(1, num_drafter if request.has_drafts else 0):
            assert self.drafter.get(self._cell(request, position)) == text[: position + 1], (
                f"{request.request_id}: the drafter reads something else at {position}"
            )

    def _prefill(self, chunk: Chunk, is_drafted: bool) -> Result:
        """The drafter runs the chunks of all requests, or none; without drafts it may have missed earlier ones."""
        request, text = chunk.request, tuple(chunk.request.token_ids)
        assert chunk.start < chunk.end <= len(text) and chunk.is_last == (chunk.end == len(text))
        self._expect(request, text, num_target=max(chunk.start, chunk.first_write), num_drafter=chunk.start + 1)
        if chunk.is_last:
            text += (next_token(text),)
            self.rows[request.row] = text
        for position in range(max(chunk.start, chunk.first_write), chunk.end):
            self._write(self.target, request, position, text[: position + 1])
        for position in range(max(chunk.start + 1, chunk.first_write), chunk.end + 1 if is_drafted else 0):
            self._write(self.drafter, request, position, text[: position + 1] if request.has_drafts else REJECTED)
        return Result(request, request.epoch, text[-1:] if chunk.is_last else ())

    def _decode(self, request: Request) -> Result:
        text, num_drafts = self.rows[request.row], request.num_draft_tokens if request.has_drafts else 0
        length, num_known = len(text), len(request.token_ids)
        assert text[:num_known] == tuple(request.token_ids), f"{request.request_id}: its row holds another text"
        if length <= request.max_length:  # beyond that, whatever is emitted is thrown away
            self._expect(request, text, num_target=length - 1, num_drafter=length)
            touched = range(length - 1, length + 2 * num_drafts)
            assert all(self._cell(request, position)[0] != WASTE_PAGE for position in touched), "pages do not reach"
        for _ in range(1 + self.choose.randint(0, num_drafts)):
            text += (next_token(text),)
        for position in range(length - 1, length + num_drafts):
            is_right = position < len(text) - 1
            self._write(self.target, request, position, text[: position + 1] if is_right else REJECTED)
        if num_drafts:
            for position in range(length, len(text) + num_drafts - 1):
                self._write(self.drafter, request, position, text[: position + 1] if position < len(text) else REJECTED)
        self.rows[request.row] = text
        return Result(request, request.epoch, text[length:])


@dataclass(frozen=True)
class Setting:
    """One simulated service: its sizes, and the seed of all that happens in it."""

    seed: int
    page_size: int
    num_spare_pages: int
    max_batch: int
    prefill_tokens: int
    max_chunks: int
    max_delay: int
    shares_passes: bool
    num_draft_tokens: int
    num_requests: int
    abort_rate: float
    pause_rate: float
    """of requests whose drafts stop paying, per step"""
    host_is_behind: bool
    reuse: bool


SETTINGS = st.builds(
    Setting,
    seed=st.integers(0, 2**32),
    page_size=st.integers(1, 5),
    num_spare_pages=st.integers(0, 12),
    max_batch=st.integers(1, 5),
    prefill_tokens=st.integers(1, 24),
    max_chunks=st.integers(1, 4),
    max_delay=st.integers(0, 3),
    shares_passes=st.booleans(),
    num_draft_tokens=st.integers(0, 4),
    num_requests=st.integers(1, 12),
    abort_rate=st.sampled_from([0.0, 0.0, 0.1]),
    pause_rate=st.sampled_from([0.0, 0.0, 0.3]),
    host_is_behind=st.booleans(),
    reuse=st.booleans(),
)


@dataclass
class Service:
    """The caller's loop around a scheduler and a fake device."""

    setting: Setting
    num_preempted: int = 0
    num_cached_tokens: int = 0
    num_shared: int = 0
    finished: list[Request] = field(default_factory=list)
    aborted: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        setting = self.setting
        self.choose = random.Random(setting.seed)
        beginnings = [self._some_tokens(12) for _ in range(2)]
        self.to_come = [self._some_request(index, beginnings) for index in range(setting.num_requests)]
        longest = max(request.max_length + 2 * request.num_draft_tokens for request in self.to_come)
        num_pages = 1 - (-longest // setting.page_size) + setting.num_spare_pages
        self.pool = PagePool(num_pages, setting.page_size, setting.reuse)
        limits = SchedulerConfig(
            setting.max_batch,
            60,
            setting.prefill_tokens,
            setting.max_chunks,
            setting.max_delay,
            setting.shares_passes,
        )
        self.scheduler = Scheduler(limits, self.pool, SomeTrials(self.choose, setting.pause_rate))
        self.device = FakeDevice(self.pool, self.choose, setting.pause_rate)

    def _some_tokens(self, most: int) -> list[int]:
        return [self.choose.randrange(VOCABULARY) for _ in range(self.choose.randint(1, most))]

    def _some_request(self, index: int, beginnings: list[list[int]]) -> Request:
        prompt = self.choose.choice(beginnings) + self.choose.choice([[], self._some_tokens(6)])
        num_draft_tokens = self.choose.choice([self.setting.num_draft_tokens] * 3 + [0])
        params = SamplingParams(max_tokens=self.choose.randint(1, 20))
        return Request(f"r{index}", prompt, params, num_draft_tokens, max_length=60)

    def run(self) -> None:
        in_flight: list[list[Result]] = []
        num_iterations = 0
        while self.to_come or self.scheduler.has_work or in_flight:
            num_iterations += 1
            assert num_iterations < 2000, "the service makes no progress"
            while self.to_come and self.choose.random() < 0.5:
                self.scheduler.add(self.to_come.pop(0))
            plan = self.scheduler.plan(may_share=self.choose.random() < 0.8)
            self.num_shared += plan.shares_pass
            self.num_preempted += len(plan.preempted)
            self.scheduler.check_integrity()
            self._check_plan(plan, must_advance=not any(in_flight))
            self._maybe_abort()
            in_flight.append(self.device.launch(plan))
            self._maybe_abort()
            while len(in_flight) > (1 if self.setting.host_is_behind and not plan.is_empty else 0):
                for result in in_flight.pop(0):
                    self._collect(result)
            self.scheduler.check_integrity()

    def _check_plan(self, plan: Plan, must_advance: bool) -> None:
        assert not (plan.is_empty and must_advance and self.scheduler.has_work), "nothing runs and nothing is awaited"
        assert sum(chunk.end - chunk.start for chunk in plan.chunks) <= self.setting.prefill_tokens
        assert len(plan.chunks) <= self.setting.max_chunks
        assert len(set(plan.decodes)) == len(plan.decodes)
        assert all(request.is_running for request in plan.decodes)

    def _maybe_abort(self) -> None:
        if self.choose.random() < self.setting.abort_rate:
            request = self.scheduler.abort(f"r{self.choose.randrange(self.setting.num_requests)}")
            if request is not None:
                self.aborted.append(request)
            self.scheduler.check_integrity()

    def _collect(self, result: Result) -> None:
        request = result.request
        if request.epoch != result.epoch:
            return
        tokens = result.tokens[: request.max_length - len(request.token_ids)]
        if END_TOKEN in tokens:
            tokens = tokens[: tokens.index(END_TOKEN) + 1]
        self.scheduler.commit(request, tokens)
        if len(request.token_ids) == request.max_length or END_TOKEN in tokens:
            self.scheduler.finish(request)
            self.num_cached_tokens += request.num_cached_tokens
            self.finished.append(request)

    def check_end(self) -> None:
        assert self.pool.num_used == 0, "pages are left over"
        assert len(self.finished) + len(self.aborted) == self.setting.num_requests
        for request in self.finished:
            prompt = tuple(request.token_ids[: request.prompt_length])
            assert request.output_ids == whole_answer(prompt, request.max_length), f"{request.request_id} went wrong"
        for request in self.aborted:
            prompt = tuple(request.token_ids[: request.prompt_length])
            expected = whole_answer(prompt, request.max_length)
            assert request.output_ids == expected[: len(request.output_ids)], "an aborted answer is a beginning"


@pytest.fixture(autouse=True)
def _delays_in_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "DECODES_PER_ADMISSION", 1)
    monkeypatch.setattr(config_module, "SHARED_BUCKETS", ((4, 2), (8, 3)))


@given(setting=SETTINGS)
@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
def test_every_token_reads_the_text_before_it_whatever_is_shared_preempted_or_aborted(setting: Setting) -> None:
    service = Service(setting)
    service.run()
    service.check_end()


def tight(seed: int, **changes: object) -> Setting:
    values: dict = {
        "seed": seed,
        "page_size": 3,
        "num_spare_pages": 2,
        "max_batch": 4,
        "prefill_tokens": 8,
        "max_chunks": 3,
        "max_delay": 0,
        "shares_passes": True,
        "num_draft_tokens": 3,
        "num_requests": 12,
        "abort_rate": 0.0,
        "pause_rate": 0.0,
        "host_is_behind": True,
        "reuse": True,
    }
    return Setting(**(values | changes))


def test_the_simulation_does_preempt_reuse_and_share_passes() -> None:
    services = [Service(tight(seed)) for seed in range(20)]
    for service in services:
        service.run()
        service.check_end()
    assert sum(service.num_preempted for service in services) > 20
    assert sum(service.num_cached_tokens for service in services) > 200
    assert sum(service.num_shared for service in services) > 50


@pytest.mark.parametrize(
    "fault", ["one page is swapped", "one cell is overwritten", "first_write is ignored", "bare pages are for all"]
)
def test_the_simulation_notices(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = FakeDevice._prefill, FakeDevice._decode

    def swapping(device: FakeDevice, request: Request) -> Result:
        if len(request.token_ids) > 2 * device.pool.page_size:
            request.pages[0], request.pages[1] = request.pages[1], request.pages[0]
        return decode(device, request)

    def overwriting(device: FakeDevice, request: Request) -> Result:
        device.target[device._cell(request, 0)] = REJECTED
        return decode(device, request)

    def ignoring(device: FakeDevice, chunk: Chunk, is_drafted: bool) -> Result:
        return prefill(device, Chunk(chunk.request, chunk.start, chunk.end, chunk.start, chunk.is_last), is_drafted)

    if fault == "first_write is ignored":
        monkeypatch.setattr(FakeDevice, "_prefill", ignoring)
    elif fault == "bare pages are for all":
        monkeypatch.setattr(
            Scheduler, "_match", lambda own, request: own.pages.match(request.page_keys[request.num_registered :])
        )
    else:
        monkeypatch.setattr(FakeDevice, "_decode", swapping if fault == "one page is swapped" else overwriting)

    def run_twenty() -> None:
        for seed in range(20):
            Service(tight(seed)).run()

    with pytest.raises(AssertionError, match=r"reads something else|page is shared|others can find"):
        run_twenty()
