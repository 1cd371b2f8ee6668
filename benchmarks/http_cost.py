"""Overhead of HTTP and streaming: tokens per second of one stream, compared with direct calls to the same engine.

    python benchmarks/http_cost.py [--target DIR] [--drafter DIR] [--num-draft-tokens 3] [--rounds 20] [--json OUT.json]

The server runs in this process and listens on a real socket; the client is a second process. Each round completes one
prompt in three ways, in rotating order: directly with the engine's own loop, which detokenizes once at the end; with
the asynchronous engine; and as a stream over HTTP. The cost of a way is 1 - its tokens/s / tokens/s of the engine's
loop. Medians and quartiles over the rounds are printed, because the machine may be shared, and so is the CPU time of
this process per token, which other load hardly changes. The exit status is 1 if HTTP costs more than `--limit`.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from peagle.engine.llm import LLM
from peagle.provenance import provenance
from peagle.sampling_params import SamplingParams
from peagle.server.app import create_app
from peagle.server.auth import ApiKeys
from peagle.server.lifecycle import Lifecycle, Server, bind
from peagle.server.service import Service
from peagle.server.settings import ServerSettings

READY_SECONDS = 300.0
PROMPT = "Write a short story about a lighthouse keeper and the sea."

# Reads one request body per line; writes the seconds and the number of tokens of each stream.
CLIENT = """
import json, sys, time
import httpx
with httpx.Client(timeout=600) as client:
    for line in sys.stdin:
        started = time.perf_counter()
        with client.stream("POST", sys.argv[1], content=line, headers={"Content-Type": "application/json"}) as response:
            lines = [each for each in response.iter_lines() if each]
        seconds = time.perf_counter() - started
        print(json.dumps([seconds, json.loads(lines[-2][6:])["usage"]["completion_tokens"]]), flush=True)
"""


class Bench:
    """A server in a thread, a client in a process, and direct access to the server's engine."""

    def __init__(self, load: Callable[[], LLM], num_tokens: int) -> None:
        settings = ServerSettings(port=0)
        listener = bind(settings)
        self.lifecycle = Lifecycle(settings, load, lambda llm: Service(llm, settings))
        self.server = Server(create_app(settings, ApiKeys(()), self.lifecycle), self.lifecycle)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]}, daemon=True)
        self.thread.start()
        deadline = time.monotonic() + READY_SECONDS
        while self.lifecycle.state != "ready":
            if time.monotonic() > deadline or not self.thread.is_alive():
                raise SystemExit(f"the server is {self.lifecycle.state}: {self.lifecycle.failure}")
            time.sleep(0.05)
        assert self.lifecycle.service is not None, "set when the server is ready"
        self.service = self.lifecycle.service
        self.prompt_ids = self.service.tokenizer(PROMPT)["input_ids"]
        self.params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/completions"
        # In its own session, so that Ctrl-C reaches this process only, which then ends the client.
        self.client = subprocess.Popen(
            [sys.executable, "-c", CLIENT, url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def close(self) -> None:
        self.client.kill()
        self.client.communicate()
        self.server.lifecycle.begin_drain()
        self.thread.join(30)

    def _run_in_loop(self, coroutine: Coroutine[Any, Any, float]) -> float:
        assert self.server.lifecycle._loop is not None, "the server runs"
        return asyncio.run_coroutine_threadsafe(coroutine, self.server.lifecycle._loop).result()

    # Three ways to complete the prompt, each in tokens per second -----------------------------------------------------

    def engine(self) -> float:
        engine = self.service.engine._engine

        def run() -> float:
            started = time.perf_counter()
            engine.add(self.prompt_ids, self.params)
            outputs = []
            while engine.has_work:
                outputs += engine.step()
            return len(outputs[0].outputs[0].token_ids) / (time.perf_counter() - started)

        return self._run_in_loop(self.service.engine._ask(run))

    def async_engine(self) -> float:
        async def run() -> float:
            started, num_tokens = time.perf_counter(), 0
            async for update in self.service.engine.stream(self.prompt_ids, self.params):
                num_tokens += len(update.token_ids)
            return num_tokens / (time.perf_counter() - started)

        return self._run_in_loop(run())

    def http(self) -> float:
        body = {
            "prompt": self.prompt_ids,
            "max_tokens": self.params.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self.client.stdin.write(json.dumps(body) + "\n")
        self.client.stdin.flush()
        seconds, num_tokens = json.loads(self.client.stdout.readline())
        return num_tokens / seconds


def measured(way: Callable[[], float], num_tokens: int) -> dict[str, float]:
    """Tokens per second of one completion, and milliseconds of CPU time of this process per token."""
    before = time.process_time()
    speed = way()
    return {"speed": speed, "processor_ms": (time.process_time() - before) * 1000 / num_tokens}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="directory or name; default: the embedded target")
    parser.add_argument("--drafter", default="auto", help="directory; default: the drafter that ships with the target")
    parser.add_argument("--num-draft-tokens", type=int, default=3)
    parser.add_argument("--num-tokens", type=int, default=128, help="tokens per completion")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--limit", type=float, default=0.05, help="maximum cost of HTTP")
    parser.add_argument("--json", type=Path, help="also write the rounds to this file")
    options = parser.parse_args()

    def load() -> LLM:
        return LLM(options.target, options.drafter, options.num_draft_tokens, max_batch=1, max_length=512)

    bench = Bench(load, options.num_tokens)
    ways = {"engine": bench.engine, "async engine": bench.async_engine, "HTTP stream": bench.http}
    names = list(ways)
    rounds = []
    try:
        for number in range(-1, options.rounds):
            order = [names[(number + index) % len(names)] for index in range(len(names))]
            speeds = {name: measured(ways[name], options.num_tokens) for name in order}
            if number >= 0:
                rounds.append(speeds)
    except KeyboardInterrupt:
        print(f"interrupted after {len(rounds)} rounds", file=sys.stderr)
    finally:
        bench.close()
    if len(rounds) < 2:
        return 130
    costs = {name: [1 - each[name]["speed"] / each["engine"]["speed"] for each in rounds] for name in names}
    print(f"{'':<14}{'tokens/s':>10}{'cost':>8}{'quartiles':>16}{'CPU ms/token':>21}")
    for name in names:
        speed, processor = (
            statistics.median(each[name][what] for each in rounds) for what in ("speed", "processor_ms")
        )
        low, middle, high = statistics.quantiles(costs[name], n=4)
        print(f"{name:<14}{speed:>10.1f}{middle:>8.1%}{low:>8.1%}{high:>8.1%}{processor:>21.2f}")
    if options.json is not None:
        found = {"rounds": rounds, "provenance": provenance()}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(statistics.median(costs["HTTP stream"]) > options.limit)


if __name__ == "__main__":
    sys.exit(main())
