"""What HTTP and streaming cost: tokens/s of one stream at a time against the same engine called directly, in one run.

    python benchmarks/http_cost.py [--target DIR] [--drafter DIR] [--num-draft-tokens 3] [--rounds 20] [--json OUT.json]

A server runs in this process over a real socket; its client is a process of its own. Each round answers one prompt in
three ways, the order turning from round to round: by the engine's own loop in the engine's thread, without a server or
an event loop and with the text made once at the end; by the asynchronous engine; and as a stream over HTTP. A round's
cost is 1 - tokens/s of a way / tokens/s of the engine's loop; medians and quartiles over the rounds are reported,
because other work on the machine comes and goes. So is the processor time that this process took for a token, which
such work hardly changes. The exit status is 1 if HTTP costs more than `--limit`.
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

# One stream for each line that comes in; seconds and the number of tokens go out.
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
    """A server in a thread, a client in a process, and the engine behind the one for the other to be compared with."""

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
        assert self.lifecycle.service is not None, "there when it is ready"
        self.service = self.lifecycle.service
        self.prompt_ids = self.service.tokenizer(PROMPT)["input_ids"]
        self.params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/completions"
        # A session of its own: Ctrl-C is for this process, which then ends the client.
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
        self.server.stop()
        self.thread.join(30)

    def _in_the_loop(self, coroutine: Coroutine[Any, Any, float]) -> float:
        assert self.server._loop is not None, "the server runs"
        return asyncio.run_coroutine_threadsafe(coroutine, self.server._loop).result()

    # The three ways, each in tokens/s ---------------------------------------------------------------------------------

    def engine(self) -> float:
        engine = self.service.engine._engine

        def run() -> float:
            started = time.perf_counter()
            engine.add(self.prompt_ids, self.params)
            outputs = []
            while engine.has_work:
                outputs += engine.step()
            return len(outputs[0].outputs[0].token_ids) / (time.perf_counter() - started)

        return self._in_the_loop(self.service.engine._ask(run))

    def async_engine(self) -> float:
        async def run() -> float:
            started, num_tokens = time.perf_counter(), 0
            async for update in self.service.engine.stream(self.prompt_ids, self.params):
                num_tokens += len(update.token_ids)
            return num_tokens / (time.perf_counter() - started)

        return self._in_the_loop(run())

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
    """Tokens/s of one answer, and the milliseconds of processor time that this process took for each token of it."""
    before = time.process_time()
    speed = way()
    return {"speed": speed, "processor_ms": (time.process_time() - before) * 1000 / num_tokens}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="a directory or a name; by default the embedded target")
    parser.add_argument("--drafter", default="auto", help="a directory; by default the one that ships for the target")
    parser.add_argument("--num-draft-tokens", type=int, default=3)
    parser.add_argument("--num-tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--limit", type=float, default=0.05, help="of the cost of HTTP")
    parser.add_argument("--json", type=Path, help="write the rounds here too")
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
    print(f"{'':<14}{'tokens/s':>10}{'cost':>8}{'quartiles':>16}{'processor ms/token':>21}")
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
