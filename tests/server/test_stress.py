"""Many clients at once, a third of whom vanish: the others' answers are right, and nothing is left behind."""

import asyncio
import contextlib
import functools
import json
import logging
import random
import threading

import httpx
import pytest

from harness.local_server import running, tiny_llm
from peagle.engine.async_engine import _Call
from peagle.sampling_params import SamplingParams

MANY = 64
FIRST_SEED = 1_000
"""Seed 38 draws a number 2e-9 from the border of two tokens' intervals, where the rounding of the batch decides."""
MAX_TOKENS = 48
PROMPT = "the user"


@functools.cache
def expected_answers(num_seeds):
    """What each seed's answer must be."""
    with tiny_llm() as llm:
        params = [
            SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=FIRST_SEED + index)
            for index in range(num_seeds)
        ]
        return [output.text for output in llm.generate([PROMPT] * num_seeds, params)]


def body_of(seed, **more):
    return {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 1.0, "seed": FIRST_SEED + seed, **more}


async def stream(client, seed, leave_after=None):
    """The text of a streamed answer; None for a client that leaves after so many chunks."""
    pieces = []
    async with client.stream("POST", "/v1/completions", json=body_of(seed, stream=True)) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if leave_after is not None and len(pieces) >= leave_after:
                return None
            if line.startswith("data: {"):
                pieces.append(json.loads(line[6:])["choices"][0]["text"])
    assert line == "data: [DONE]" or not line
    return "".join(pieces)


async def whole(client, seed, leave_after=None):
    try:
        response = await client.post("/v1/completions", json=body_of(seed), timeout=leave_after or 120)
    except httpx.TimeoutException:
        return None
    return response.json()["choices"][0]["text"]


@pytest.mark.parametrize("num_clients", [32, pytest.param(MANY, marks=pytest.mark.slow)])
def test_vanishing_clients_leave_nothing_behind(num_clients):
    expected = expected_answers(num_clients)
    with running(lambda: tiny_llm(max_waiting=None)) as served:
        num_tasks = num_server_tasks(served)

        async def main():
            dice = random.Random(0)
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=served.url, timeout=120, limits=limits) as client:
                asks = []
                for seed in range(num_clients):
                    leaves = seed % 3 == 0
                    if seed % 2:
                        asks.append(stream(client, seed, dice.randrange(6) if leaves else None))
                    else:
                        asks.append(whole(client, seed, dice.uniform(0.05, 0.5) if leaves else None))
                return await asyncio.gather(*asks)

        answers = asyncio.run(main())
        wrong = [seed for seed, answer in enumerate(answers) if answer is not None and answer != expected[seed]]
        assert not wrong, f"seeds {wrong}"
        assert all(answers[seed] is not None for seed in range(num_clients) if seed % 3)
        assert sum(answer is None for answer in answers) >= num_clients // 6, "hardly anybody vanished"
        stats = served.wait_until_idle()
        assert (stats.num_running, stats.num_waiting, stats.num_pages_used) == (0, 0, 0)
        assert served.lifecycle.num_in_flight == 0 and not served.service.jobs
        assert num_server_tasks(served) <= num_tasks, "tasks are left in the event loop"
        # A client may leave when all of its answer has been written to the socket already.
        assert 0 < served.metric("peagle:clients_gone_total") <= sum(answer is None for answer in answers)


def num_server_tasks(served):
    async def count():
        for _ in range(100):  # connections that clients closed take a moment to be noticed
            if len(asyncio.all_tasks()) <= 3:
                break
            await asyncio.sleep(0.02)
        return len(asyncio.all_tasks())

    return asyncio.run_coroutine_threadsafe(count(), served.server.lifecycle._loop).result(30)


def test_a_client_that_leaves_frees_its_pages_at_once():
    with running(lambda: tiny_llm(with_drafter=False)) as served:
        body = {"prompt": PROMPT, "max_tokens": 240, "ignore_eos": True}
        for more in ({"stream": True}, {}):
            with contextlib.suppress(httpx.TimeoutException):
                with httpx.stream("POST", f"{served.url}/v1/completions", json=body | more, timeout=0.2) as response:
                    next(response.iter_raw())
            stats = served.wait_until_idle(5)
            assert stats.num_pages_used == 0 and stats.num_running == 0
        assert served.stats().num_aborted == 2


@pytest.mark.slow
def test_a_client_that_does_not_read_does_not_hold_up_the_others():
    with running() as served:
        stuck = httpx.Client(timeout=60)
        request = stuck.build_request("POST", f"{served.url}/v1/completions", json=body_of(1, stream=True, n=8))
        response = stuck.send(request, stream=True)
        try:
            answer = served.http.post("/v1/completions", json=body_of(2), timeout=30).json()
            assert answer["choices"][0]["text"] == expected_answers(32)[2]
        finally:
            response.close()
            stuck.close()
        assert served.wait_until_idle().num_pages_used == 0


def test_drain_under_load_loses_no_accepted_request():
    """SIGTERM's path: everything that was accepted is answered in full, everything new is refused with a 503."""
    with running(lambda: tiny_llm(max_waiting=None)) as served:
        answers, refused = {}, []

        def ask(seed):
            response = httpx.post(f"{served.url}/v1/completions", json=body_of(seed), timeout=60)
            if response.status_code == 200:
                answers[seed] = response.json()["choices"][0]["text"]
            else:
                refused.append(response)

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(24)]
        for thread in threads:
            thread.start()
        while served.lifecycle.num_in_flight < 8:
            pass
        served.server.lifecycle.begin_drain()
        for thread in threads:
            thread.join()
        served.thread.join(30)
        expected = expected_answers(32)
        assert answers and all(text == expected[seed] for seed, text in answers.items())
        assert len(answers) >= 8, "those that had been accepted"
        for response in refused:
            assert response.status_code == 503 and response.json()["error"]["code"] == "server_draining"


def cut(served, begin):
    """Answers of a whole and a streamed request that are open when `begin` is called."""
    body = {"prompt": PROMPT, "max_tokens": 480, "ignore_eos": True}
    found = {}

    def ask():
        found["whole"] = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)

    def follow():
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body | {"stream": True}, timeout=60) as response:
            lines = found["lines"] = []
            for line in filter(None, response.iter_lines()):
                lines.append(line)

    threads = [threading.Thread(target=ask), threading.Thread(target=follow)]
    for thread in threads:
        thread.start()
    while served.stats().num_running < 2 or not found.get("lines"):
        pass
    begin()
    for thread in threads:
        thread.join()
    return found["whole"], found["lines"]


@pytest.mark.parametrize("is_engine_stuck", [False, True])
def test_requests_that_outlast_the_drain_are_told_logged_and_counted(caplog, is_engine_stuck):
    release = threading.Event()

    def begin():
        if is_engine_stuck:  # in one long step, as with a long prompt on a busy machine
            served.service.engine._put(_Call(lambda: release.wait(20), lambda _: None))
        served.lifecycle.begin_drain()

    with (
        caplog.at_level(logging.INFO, logger="peagle.server.requests"),
        running(lambda: tiny_llm(with_drafter=False, max_length=500), drain_seconds=0.1, log_format="json") as served,
    ):
        whole, lines = cut(served, begin)
        release.set()
    reason = "the server is shutting down, and this answer did not finish within 0.1 s"
    assert whole.status_code == 503
    for error in (whole.json()["error"], json.loads(lines[-2][6:])["error"]):
        assert error["code"] == "aborted" and error["message"] == reason
    assert lines[-1] == "data: [DONE]"
    assert served.lifecycle.num_cut == 2
    assert b"peagle:requests_cut_total 2.0" in served.service.metrics.text()
    logged = [json.loads(each.getMessage()) for each in caplog.records if each.name == "peagle.server.requests"]
    assert [(each["status"], each["is_cut"]) for each in logged] == [(503, True)] * 2


def test_a_second_signal_ends_streams_with_an_error():
    with running(lambda: tiny_llm(with_drafter=False, max_length=500)) as served:

        def begin():
            served.lifecycle.begin_drain()
            served.lifecycle.begin_cut()

        whole, lines = cut(served, begin)
    assert whole.status_code == 503 and whole.json()["error"]["code"] == "aborted"
    assert json.loads(lines[-2][6:])["error"]["message"] == "the server was stopped before this answer was finished"
