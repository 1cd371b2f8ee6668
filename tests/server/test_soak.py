"""256 streams at a time for as long as one likes, a third of whose clients vanish, against a process of its own.

    PEAGLE_SOAK_SECONDS=600 python -m pytest -s tests/server/test_soak.py

Without the variable it is skipped: tests/server/test_stress.py has the short form. Every answer is compared, and the
memory of the process is followed; it must not grow once every client has come round a few times.
"""

import asyncio
import itertools
import json
import os
import random
import signal
import ssl
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from harness.serve_process import Process
from harness.tiny_models import tiny_target, write_drafter, write_target
from peagle.engine.llm import LLM
from peagle.sampling_params import SamplingParams

SECONDS = float(os.environ.get("PEAGLE_SOAK_SECONDS", "0"))
pytestmark = pytest.mark.skipif(SECONDS <= 0, reason="takes minutes; PEAGLE_SOAK_SECONDS says how many seconds")

NUM_STREAMS = 256
NUM_SEEDS = 64
MAX_TOKENS = 32
PROMPT = "the user"
SAMPLE_SECONDS = 10.0
SETTLED_AFTER = 0.25
"""share of the time after which nothing new is allocated any more"""
MAX_GROWTH_MIB = 16.0


@dataclass
class Account:
    num_right: int = 0
    num_wrong: int = 0
    num_vanished: int = 0
    num_failed: int = 0
    faults: list[str] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)
    """seconds and MiB"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    target = tiny_target()
    write_target(target, root / "target")
    write_drafter(target, root / "drafter")
    return root


@pytest.fixture(scope="module")
def expected(models: Path) -> list[str]:
    """What each seed's answer must be, by the engine alone."""
    params = [SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=seed) for seed in range(NUM_SEEDS)]
    with LLM(models / "target", models / "drafter", 3, max_batch=16, max_length=128, verify_tokens=0) as llm:
        return [output.text for output in llm.generate([PROMPT] * NUM_SEEDS, params)]


@pytest.fixture
def served(models: Path) -> Iterator[Process]:
    sizes = ("--max-batch", 32, "--max-length", 128, "--max-waiting", 2 * NUM_STREAMS)
    with Process(models / "target", "--drafter", models / "drafter", "--num-draft-tokens", 3, *sizes) as found:
        yield found.wait_ready()


def memory_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def num_open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


async def ask(client: httpx.AsyncClient, seed: int, leave_after: int | None, account: Account, text: str) -> None:
    """One stream; a client that leaves does so after so many events, the first of them included."""
    body = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 1.0, "seed": seed, "stream": True}
    pieces: list[str] = []
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if leave_after is not None and len(pieces) >= leave_after:
                    account.num_vanished += 1
                    return
                if line.startswith("data: {"):
                    pieces.append(json.loads(line[6:])["choices"][0]["text"])
    except (httpx.HTTPError, AssertionError, KeyError) as error:
        account.num_failed += 1
        account.faults.append(f"seed {seed}: {error!r}")
        return
    is_right = "".join(pieces) == text
    account.num_right += is_right
    account.num_wrong += not is_right


async def soak(served: Process, expected: list[str], account: Account) -> None:
    # A client for each stream: a shared pool looks through all of its connections for every request. Certificates,
    # which take long to read, are not needed here.
    unread = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    clients = [httpx.AsyncClient(base_url=str(served.url), timeout=300, verify=unread) for _ in range(NUM_STREAMS)]
    started = time.monotonic()
    numbers, dice = itertools.count(), random.Random(0)
    pid = served.process.pid

    async def come_again(client: httpx.AsyncClient) -> None:
        while time.monotonic() - started < SECONDS:
            seed = next(numbers) % NUM_SEEDS
            leaves = dice.random() < 1 / 3
            await ask(client, seed, dice.randrange(8) if leaves else None, account, expected[seed])

    async def watch() -> None:
        while True:
            seconds = time.monotonic() - started
            account.memory.append((seconds, memory_mib(pid)))
            counts = (account.num_right, account.num_wrong, account.num_vanished, account.num_failed)
            print(
                f"{seconds:5.0f} s  {account.memory[-1][1]:6.1f} MiB  right, wrong, vanished, failed: {counts}",
                flush=True,
            )
            await asyncio.sleep(SAMPLE_SECONDS)

    watcher = asyncio.create_task(watch())
    await asyncio.gather(*(come_again(client) for client in clients))
    for client in clients:
        await client.aclose()
    watcher.cancel()


def test_memory_stays_flat_and_every_remaining_answer_is_right(served: Process, expected: list[str]) -> None:
    pid, account = served.process.pid, Account()
    num_files = num_open_files(pid)
    asyncio.run(soak(served, expected, account))
    deadline = time.monotonic() + 20
    while num_open_files(pid) > num_files and time.monotonic() < deadline:
        time.sleep(0.1)
    metrics = httpx.get(f"{served.url}/metrics").text
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        (line,) = [each for each in metrics.splitlines() if each.startswith(name)]
        assert float(line.rsplit(" ", 1)[1]) == 0, line
    settled = [mib for seconds, mib in account.memory if seconds >= SETTLED_AFTER * SECONDS]
    quarter = max(1, len(settled) // 4)
    growth = statistics.median(settled[-quarter:]) - statistics.median(settled[:quarter])
    print(f"{account.num_right} right, {account.num_vanished} vanished, memory {growth:+.1f} MiB", flush=True)
    assert (account.num_wrong, account.num_failed) == (0, 0), account.faults[:5]
    assert account.num_vanished > account.num_right / 5, "hardly anybody vanished"
    assert growth < MAX_GROWTH_MIB, account.memory
    assert num_open_files(pid) <= num_files + 1, "connections are left open"
    served.process.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    assert served.end() == 0, "a server with nothing left ends at once"
    assert time.monotonic() - asked < 15
