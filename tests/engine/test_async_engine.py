"""The asynchronous engine: streams that equal finished answers, and every way in which one can end."""

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import pytest
import torch

from harness.tiny_models import tiny_drafter, tiny_target
from peagle.drafter.model import Drafter
from peagle.engine.async_engine import AsyncEngine
from peagle.engine.engine import Engine
from peagle.engine.llm import LLM
from peagle.engine.outputs import Update
from peagle.errors import CapacityError, EngineDeadError, RequestError
from peagle.sampling_params import SamplingParams
from peagle.scheduling.config import EngineConfig
from peagle.targets.hf import HFTarget

T = TypeVar("T")

PROMPTS = [[5, 6, 7], list(range(20, 60)), [100], [9] * 30, [3, 200, 41, 17, 88, 250, 11]]
SHORT = SamplingParams(max_tokens=16, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=400, ignore_eos=True)
"""Ends of itself only after many steps, so that what happens meanwhile happens meanwhile."""


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target(num_layers=4)


@pytest.fixture(scope="module")
def drafter(target: HFTarget) -> Drafter:
    return tiny_drafter(target)


@pytest.fixture
def engine(target: HFTarget, drafter: Drafter) -> Iterator[Engine]:
    made = Engine(target, drafter, 3, EngineConfig(max_batch=4, page_size=8))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _no_thread_is_left_behind() -> Iterator[None]:
    before = threading.enumerate()  # a server of another file's tests may still run
    yield
    new = [thread.name for thread in threading.enumerate() if thread not in before]
    assert "peagle-engine" not in new


def run(engine: Engine, use: Callable[[AsyncEngine], Awaitable[T]]) -> T:
    async def main() -> T:
        async with AsyncEngine(engine) as running, asyncio.timeout(60):
            return await use(running)

    return asyncio.run(main())


async def collect(stream: AsyncIterator[Update]) -> list[Update]:
    return [update async for update in stream]


def tokens(updates: list[Update], index: int = 0) -> tuple[int, ...]:
    return tuple(token for update in updates if update.index == index for token in update.token_ids)


def text(updates: list[Update], index: int = 0) -> str:
    return "".join(update.text for update in updates if update.index == index)


async def until_idle(engine: AsyncEngine) -> None:
    """Wait until nothing runs, and see that nothing is held."""
    while (stats := await engine.stats()).num_running or stats.num_waiting:
        await asyncio.sleep(0.001)
    assert stats.num_pages_used == 0, "pages are still held"


def test_streamed_answers_equal_finished_ones(target: HFTarget, drafter: Drafter) -> None:
    params = [
        SHORT,
        replace(SHORT, temperature=0.9, seed=3),
        replace(SHORT, num_draft_tokens=0),
        replace(SHORT, logprobs=2),
        SamplingParams(max_tokens=20, temperature=1.0, seed=8, n=2),
    ]
    with LLM(target, drafter, 3, max_batch=4, page_size=8) as llm:
        finished = llm.generate(PROMPTS, params)

    async def use(running: AsyncEngine) -> list[list[Update]]:
        return await asyncio.gather(*(collect(running.stream(*each)) for each in zip(PROMPTS, params, strict=True)))

    engine = Engine(target, drafter, 3, EngineConfig(max_batch=4, page_size=8))
    for updates, output in zip(run(engine, use), finished, strict=True):
        assert {update.request_id for update in updates} == {updates[0].request_id}
        for answer in output.outputs:
            own = [update for update in updates if update.index == answer.index]
            assert tokens(updates, answer.index) == answer.token_ids
            assert text(updates, answer.index) == answer.text
            assert [update.finish_reason for update in own] == [None] * (len(own) - 1) + [answer.finish_reason]
            if answer.logprobs is not None:
                streamed = [row for update in own for row in update.logprobs or ()]
                assert [row.logprob for row in streamed] == pytest.approx([row.logprob for row in answer.logprobs])


def test_many_streams_run_together_whatever_their_number(engine: Engine) -> None:
    params = [replace(SHORT, temperature=1.0, seed=seed, max_tokens=4 + seed % 9) for seed in range(40)]

    async def use(running: AsyncEngine) -> tuple[list[list[Update]], list[list[Update]]]:
        together = await asyncio.gather(*(collect(running.stream(PROMPTS[0], each)) for each in params))
        alone = [await collect(running.stream(PROMPTS[0], each)) for each in params[:5]]
        await until_idle(running)
        return together, alone

    together, alone = run(engine, use)
    assert [len(tokens(updates)) for updates in together] == [each.max_tokens for each in params]
    assert [tokens(updates) for updates in together[:5]] == [tokens(updates) for updates in alone]


def test_leaving_the_loop_early_frees_what_the_request_held(engine: Engine) -> None:
    async def use(running: AsyncEngine) -> None:
        async for update in running.stream(PROMPTS[1], ENDLESS):
            assert update.token_ids
            break
        await until_idle(running)
        assert (await running.stats()).num_aborted == 1

    run(engine, use)


def test_closing_one_of_several_streams_leaves_the_others_as_they_were(engine: Engine) -> None:
    async def use(running: AsyncEngine) -> tuple[list[Update], list[Update]]:
        other = asyncio.create_task(collect(running.stream(PROMPTS[1], SHORT)))
        async with contextlib.aclosing(running.stream(PROMPTS[1], ENDLESS)) as stream:
            await anext(stream)
        disturbed = await other
        await until_idle(running)
        return disturbed, await collect(running.stream(PROMPTS[1], SHORT))

    disturbed, alone = run(engine, use)
    assert tokens(disturbed) == tokens(alone)


def test_cancelling_a_task_frees_what_its_request_held(engine: Engine) -> None:
    async def use(running: AsyncEngine) -> None:
        tasks = [asyncio.create_task(collect(running.stream(prompt, ENDLESS))) for prompt in PROMPTS]
        while not (await running.stats()).num_output_tokens:
            await asyncio.sleep(0)
        for task in tasks:  # more of them than rows: some are cancelled while they wait
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        await until_idle(running)
        assert (await running.stats()).num_aborted == len(tasks)

    run(engine, use)


def test_a_request_that_another_task_aborts_ends_with_an_update_that_says_so(engine: Engine) -> None:
    async def use(running: AsyncEngine) -> None:
        params = replace(ENDLESS, n=2, temperature=1.0)
        stream = running.stream(PROMPTS[1], params, request_id="mine")
        first = await anext(stream)
        assert first.finish_reason is None
        assert await running.abort("mine") is True
        rest = await collect(stream)
        last = {update.index: update for update in rest}
        assert set(last) == {0, 1}
        for update in last.values():
            assert (update.finish_reason, update.token_ids, update.text) == ("abort", (), "")
        await until_idle(running)
        assert await running.abort("mine") is False, "it is gone"

    run(engine, use)


def test_a_waiting_request_can_be_aborted_too(engine: Engine) -> None:
    async def use(running: AsyncEngine) -> None:
        busy = [asyncio.create_task(collect(running.stream([7], ENDLESS))) for _ in range(4)]
        while (await running.stats()).num_running < 4:
            await asyncio.sleep(0)
        waiting = asyncio.create_task(collect(running.stream([8], ENDLESS, request_id="late")))
        while not (await running.stats()).num_waiting:
            await asyncio.sleep(0)
        assert await running.abort("late")
        (update,) = await waiting
        assert update.finish_reason == "abort"
        for task in busy:
            task.cancel()
        await asyncio.wait(busy)
        await until_idle(running)

    run(engine, use)


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ([], SHORT, RequestError, "the prompt is empty"),
        ([999], SHORT, RequestError, "between 0 and 287"),
        ([5], replace(SHORT, num_draft_tokens=4), RequestError, "num_draft_tokens=4 exceeds the engine's 3"),
        (["word"], SHORT, RequestError, "a list of token ids"),
    ],
)
def test_a_refused_request_raises_in_its_own_stream_alone(
    engine: Engine, prompt: list[int], params: SamplingParams, error: type[Exception], message: str
) -> None:
    async def use(running: AsyncEngine) -> list[Update]:
        other = asyncio.create_task(collect(running.stream(PROMPTS[0], SHORT)))
        with pytest.raises(error, match=message):
            await collect(running.stream(prompt, params))
        return await other

    assert len(tokens(run(engine, use))) == SHORT.max_tokens


def test_a_request_that_can_never_fit_is_refused(target: HFTarget) -> None:
    async def use(running: AsyncEngine) -> None:
        with pytest.raises(CapacityError, match="leaves no room for output"):
            await collect(running.stream([5] * 20, SHORT))
        assert len(tokens(await collect(running.stream([5], replace(SHORT, max_tokens=5))))) == 5

    run(Engine(target, config=EngineConfig(max_batch=1, page_size=4, max_length=12)), use)


def test_a_refused_namesake_does_not_end_the_request_it_met(engine: Engine) -> None:
    async def use(running: AsyncEngine) -> list[Update]:
        stream = running.stream(PROMPTS[0], SHORT, request_id="mine")
        updates = [await anext(stream)]
        with pytest.raises(RequestError, match="'mine' is already being served"):
            await collect(running.stream(PROMPTS[2], SHORT, request_id="mine"))
        namesake = asyncio.create_task(collect(running.stream(PROMPTS[2], SHORT, request_id="mine")))
        await asyncio.sleep(0)
        namesake.cancel()  # before it has learned that it was refused
        return updates + await collect(stream)

    updates = run(engine, use)
    assert (len(tokens(updates)), updates[-1].finish_reason) == (SHORT.max_tokens, "length")


def test_an_error_of_the_engine_reaches_every_stream_and_every_later_call(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launch, num_launches = engine.runner.launch, 0

    def fail_late(plan: object) -> object:
        nonlocal num_launches
        num_launches += 1
        if num_launches > 5:
            _pages = engine.runner.kv_cache  # as the frames of a real step hold them
            raise ZeroDivisionError("a mistake of ours")
        return launch(plan)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.runner, "launch", fail_late)

    async def use(running: AsyncEngine) -> None:
        streams = [collect(running.stream(prompt, ENDLESS)) for prompt in PROMPTS]
        results = await asyncio.gather(*streams, return_exceptions=True)
        assert not running.is_alive
        later = [collect(running.stream([5], SHORT)), running.stats(), running.abort("mine")]
        for error in [*results, *await asyncio.gather(*later, return_exceptions=True)]:
            assert isinstance(error, EngineDeadError)
            assert "the engine stopped: ZeroDivisionError('a mistake of ours')" in str(error)
            assert isinstance(error.__cause__, ZeroDivisionError)

    pages = weakref.ref(engine.runner.kv_cache.target_memory[0][0])
    run(engine, use)
    assert "the engine stopped" in caplog.text, "whoever runs the server sees where it came from"
    gc.collect()
    assert pages() is None, "what is still raised must not hold the memory"


def test_calls_that_the_thread_never_came_to_raise_too(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    is_in_step, may_fail = threading.Event(), threading.Event()

    def fail() -> None:
        is_in_step.set()
        may_fail.wait(30)
        raise ZeroDivisionError

    monkeypatch.setattr(engine, "step", fail)

    async def use(running: AsyncEngine) -> None:
        first = asyncio.create_task(collect(running.stream([5], SHORT)))
        await asyncio.to_thread(is_in_step.wait, 30)
        queued = [asyncio.create_task(call) for call in (collect(running.stream([6], SHORT)), running.stats())]
        await asyncio.sleep(0.01)
        may_fail.set()
        results = await asyncio.gather(first, *queued, return_exceptions=True)
        assert all(isinstance(result, EngineDeadError) for result in results)

    run(engine, use)


def test_a_call_that_fails_is_its_callers_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    async def use(running: AsyncEngine) -> list[Update]:
        with monkeypatch.context() as patched:
            patched.setattr(engine, "stats", fail)
            with pytest.raises(ZeroDivisionError):
                await running.stats()
        return await collect(running.stream(PROMPTS[0], SHORT))

    assert len(tokens(run(engine, use))) == SHORT.max_tokens


def test_stats_can_be_read_while_requests_run(engine: Engine) -> None:
    async def use(running: AsyncEngine) -> None:
        seen = []
        async for _ in running.stream(PROMPTS[1], replace(ENDLESS, max_tokens=40)):
            seen.append(await running.stats())
        await until_idle(running)
        end = await running.stats()
        counts = [stats.num_output_tokens for stats in [*seen, end]]
        assert counts == sorted(counts) and counts[-1] == 40
        assert seen[0].num_running == 1 and seen[0].num_pages_used > 0
        assert end.num_prefill_tokens == len(PROMPTS[1]) and end.num_finished == 1
        assert end.acceptance.num_drafts > 0

    run(engine, use)


def test_closing_ends_open_streams_and_the_thread(engine: Engine) -> None:
    async def use(running: AsyncEngine) -> None:
        tasks = [asyncio.create_task(collect(running.stream(prompt, ENDLESS))) for prompt in PROMPTS]
        while not (await running.stats()).num_output_tokens:
            await asyncio.sleep(0)
        await asyncio.gather(running.close(), running.close())
        assert not running.is_alive and running._thread.is_alive() is False
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineDeadError) and "the engine is closed" in str(result)
        with pytest.raises(EngineDeadError, match="engine is closed"):
            await running.stats()
        with pytest.raises(EngineDeadError, match="engine is closed"):
            await anext(running.stream([5], SHORT))

    run(engine, use)


def test_closing_gives_the_target_back(target: HFTarget, engine: Engine) -> None:
    async def use(running: AsyncEngine) -> None:
        await anext(running.stream([5], ENDLESS))

    run(engine, use)
    target.forward(torch.tensor([PROMPTS[0]]))  # refused while an engine has the target


def test_an_event_loop_that_closes_over_its_streams_does_not_stop_the_engine(engine: Engine) -> None:
    """A caller in a thread with a loop of its own goes away without a word, which no context manager can mend."""
    running = AsyncEngine(engine)
    loop = asyncio.new_event_loop()
    stream = running.stream(PROMPTS[1], ENDLESS)
    loop.run_until_complete(anext(stream))
    loop.close()

    async def use() -> list[Update]:
        updates = await collect(running.stream(PROMPTS[0], SHORT))
        await until_idle(running)
        await running.close()
        return updates

    assert len(tokens(asyncio.run(asyncio.wait_for(use(), 60)))) == SHORT.max_tokens
    with contextlib.suppress(StopIteration):
        stream.aclose().send(None)


def test_an_idle_engine_audits_its_pages_and_stops_where_they_contradict_each_other(
    target: HFTarget, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        inner = Engine(target, config=EngineConfig(max_batch=2, max_length=64))
        async with AsyncEngine(inner) as engine:
            async for _ in engine.stream([1, 2, 3], SamplingParams(max_tokens=2)):
                pass
            await engine.stats()
            inner.scheduler.pages.allocate(1)  # a page that nobody holds
            with contextlib.suppress(EngineDeadError):
                await engine.stats()  # idle again after it
            for _ in range(100):
                if not engine.is_alive:
                    break
                await asyncio.sleep(0.02)
            assert not engine.is_alive
            with pytest.raises(EngineDeadError, match="page"):
                await engine.stats()

    asyncio.run(main())
    assert "the engine stopped" in caplog.text
