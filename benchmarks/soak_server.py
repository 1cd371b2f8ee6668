"""Everything at once against a real `peagle serve`, for minutes: is every request answered, and is nothing left behind?

    python benchmarks/soak_server.py [--minutes 20] [--clients 12] [--log serve.log] [-- OPTIONS OF peagle serve]

Clients chat with and without streams, ask for JSON by a schema, opt out of drafting, send long prompts, vanish before
or within the answer, close their side of the connection after the request, swap the drafter for a worse one and back,
and send hostile bodies. Each accepted request must end with an answer or an error that says why. At the end a SIGTERM
meets open streams. The report has the outcomes by kind, the KV cache still in use, the memory of the process at the
start, in the middle and at the end, the longest gap between two chunks of a stream, and the seconds from SIGTERM to the
exit. The exit status is 1 if a request was lost, or something was left behind.
"""

import argparse
import asyncio
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
from safetensors.torch import load_file, save_file

import peagle

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTIONS = ("Name three rivers.", "Write a haiku about rain.", "Explain a binary search.", "What is 12 times 12?")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
HUGE = "x" * 300_000
HOSTILE: list[Any] = [
    b"{",
    b"\xff\xfe",
    b"[" * 100_000,
    {"messages": []},
    {"messages": [{"role": HUGE, "content": "x"}]},
    {"messages": [{"role": "user", "content": HUGE * 20}]},
    {"messages": [{"role": "tool", "content": "x", "tool_call_id": "none"}]},
    {"messages": [{"role": "user", "content": "x"}], HUGE: 1},
    {"messages": [{"role": "user", "content": "x"}], "temperature": 1e400},
    {"messages": [{"role": "user", "content": "x"}], "n": 10**9},
    {"messages": [{"role": "user", "content": "x"}], "stop": ["x"] * 10_000},
    {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 8,
        "structured_outputs": {"regex": "(a{1,9999}){9}"},
    },
    {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object", "schema": {"not": {}}}},
    {"messages": [{"role": "user", "content": "x"}], "logit_bias": {str(each): 1 for each in range(50_000)}},
]
MAX_ERROR_BYTES = 4096
MISFIT = "eagle3"
DRAFTERS = ("p-eagle", "worse", MISFIT)
"""The shipped drafter, the same with half of a projection, and one of another kind, which must be refused."""
NUM_AT_THE_END = 4


class Soak:
    """The clients, and what became of their requests."""

    def __init__(self, url: str, max_length: int, seed: int) -> None:
        self.url, self.max_length = url, max_length
        self.http = httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None))
        self.random = random.Random(seed)
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.faults: list[str] = []
        self.longest_gap = 0.0
        self.kinds: dict[str, Callable[[], Awaitable[str]]] = {
            "chat": lambda: self.ask(CHAT, self.chat()),
            "stream": lambda: self.stream(CHAT, self.chat()),
            "structured": self.structured,
            "no drafts": lambda: self.stream(CHAT, self.chat() | {"speculation": {"enabled": False}}),
            "long prompt": lambda: self.stream(COMPLETIONS, self.long_prompt()),
            "several answers": lambda: self.ask(COMPLETIONS, {"prompt": list(QUESTIONS), "n": 2, "max_tokens": 8}),
            "vanishing": self.vanish,
            "half-closed": self.half_close,
            "swap": self.swap,
            "hostile": self.attack,
        }

    def chat(self) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": self.random.choice(QUESTIONS)}]}
        limits = {"max_tokens": self.random.randint(1, 48), "temperature": self.random.choice([0, 0.7, 1.0])}
        return body | limits

    def long_prompt(self) -> dict[str, Any]:
        length = self.random.randint(self.max_length // 4, self.max_length // 2)
        return {"prompt": [self.random.randint(3, 250) for _ in range(length)], "max_tokens": 8, "ignore_eos": True}

    async def run(self, seconds: float, num_clients: int) -> None:
        deadline = time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < deadline:
                kind = self.random.choice(list(self.kinds))
                await self.count(kind, self.kinds[kind]())

        await asyncio.gather(*(client() for _ in range(num_clients)))

    async def count(self, kind: str, request: Awaitable[str]) -> None:
        try:
            outcome = await request
        except Exception as error:
            outcome = f"lost: {error!r}"[:300]
        if outcome.startswith("lost"):
            self.faults.append(f"{kind}: {outcome}")
            outcome = "lost"
        self.outcomes[kind, outcome] += 1

    async def ask(self, path: str, body: dict[str, Any]) -> str:
        response = await self.http.post(path, json=body)
        if response.status_code != 200:
            return refusal(response.status_code, response.content)
        choices = response.json()["choices"]
        return "answered" if all(choice["finish_reason"] for choice in choices) else f"lost: {response.text}"

    async def stream(self, path: str, body: dict[str, Any]) -> str:
        async with self.http.stream("POST", path, json=body | {"stream": True}) as response:
            if response.status_code != 200:
                return refusal(response.status_code, await response.aread())
            lines, last = [], None
            async for line in response.aiter_lines():
                now = time.monotonic()
                if line.startswith("data: "):
                    self.longest_gap = max(self.longest_gap, 0.0 if last is None else now - last)
                    lines, last = [*lines[-1:], line[6:]], now
        return end_of_stream(lines)

    async def structured(self) -> str:
        form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
        body = self.chat() | {"response_format": form, "max_tokens": 64}
        response = await self.http.post(CHAT, json=body)
        if response.status_code != 200:
            return refusal(response.status_code, response.content)
        choice = response.json()["choices"][0]
        if choice["finish_reason"] == "stop" and json.loads(choice["message"]["content"]).keys() != {"name", "age"}:
            return f"lost: {choice}"
        return "answered"

    async def vanish(self) -> str:
        body = self.chat() | {"max_tokens": self.max_length // 4, "ignore_eos": True}
        is_stream = self.random.random() < 0.5
        reader, writer = await self.send(body | {"stream": is_stream})
        try:
            if is_stream:
                await asyncio.wait_for(reader.read(100), 600)
            else:
                await asyncio.sleep(self.random.random())
        finally:
            writer.close()
        return "vanished"

    async def half_close(self) -> str:
        is_stream = self.random.random() < 0.5
        reader, writer = await self.send(self.chat() | {"stream": is_stream})
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 600)
        writer.close()
        while answer.startswith(b"HTTP/1.1 100 "):
            answer = answer.partition(b"\r\n\r\n")[2]
        head, _, content = answer.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            return refusal(int(head.split(b" ")[1]), content) if head else "lost: no answer"
        is_whole = b"data: [DONE]" in content if is_stream else b'"finish_reason":"' in content
        return "answered" if is_whole else f"lost: {content[-200:]!r}"

    async def swap(self) -> str:
        name = self.random.choice(DRAFTERS)
        response = await self.http.post("/v1/drafter", json={"drafter": name})
        if response.status_code != 200:
            outcome = refusal(response.status_code, response.content)
            return outcome if name == MISFIT else f"lost: {name} is {outcome}"
        return "lost: a drafter that does not fit was taken" if name == MISFIT else "swapped"

    async def attack(self) -> str:
        body = self.random.choice(HOSTILE)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await self.http.post(CHAT, content=content, headers={"Content-Type": "application/json"})
        return "answered" if response.status_code == 200 else refusal(response.status_code, response.content)

    async def send(self, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A request over a connection of its own."""
        host, port = self.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        content = json.dumps(body).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        await writer.drain()
        return reader, writer

    async def metric(self, name: str) -> float:
        text = (await self.http.get("/metrics")).text
        found = re.search(rf"^{re.escape(name)}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else float("nan")

    async def settle(self, seconds: float = 60.0) -> dict[str, float]:
        """What the server still holds when it has had time to notice that all clients are gone."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        deadline = time.monotonic() + seconds
        while any((held := {name: await self.metric(name) for name in names}).values()):
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.2)
        return held


def refusal(status: int, content: bytes) -> str:
    """The outcome of a request with an error status: it must say why, and not at length."""
    try:
        error = json.loads(content)["error"]
    except (ValueError, KeyError):
        return f"lost: {status} {content[:200]!r}"
    if status == 500 or not error["message"] or len(content) > MAX_ERROR_BYTES:
        return f"lost: {status} with {len(content)} bytes, {error['message'][:200]}"
    return f"refused with {status}"


def end_of_stream(lines: list[str]) -> str:
    """The outcome of a stream, from the data of its last two events."""
    if not lines or lines[-1] != "[DONE]":
        return f"lost: the stream ends with {lines[-1:]}"
    return "ended by an error that says why" if "error" in json.loads(lines[0]) else "answered"


def memory_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) / 1024


async def wait_ready(process: "subprocess.Popen[bytes]", log: Path, seconds: float = 600.0) -> str:
    deadline = time.monotonic() + seconds
    async with httpx.AsyncClient(timeout=seconds) as client:  # a busy machine may load slowly
        while time.monotonic() < deadline and process.poll() is None:
            found = re.search(r"listening on (http://[\w.]+:\d+)", log.read_text(encoding="utf-8"))
            if found and (await client.get(f"{found[1]}/ping")).status_code == 200:
                return found[1]
            await asyncio.sleep(0.2)
    raise SystemExit(f"the server did not start; see {log}")


async def soak(arguments: argparse.Namespace, process: "subprocess.Popen[bytes]") -> int:
    url = await wait_ready(process, arguments.log)
    async with httpx.AsyncClient(base_url=url) as client:
        max_length = (await client.get("/v1/models")).json()["data"][0]["max_model_len"]
    clients = Soak(url, max_length, arguments.seed)
    memory = [memory_mib(process.pid)]
    for _ in range(2):
        await clients.run(30 * arguments.minutes, arguments.clients)
        memory.append(memory_mib(process.pid))
    held = await clients.settle()
    body = clients.chat() | {"max_tokens": max_length // 2, "ignore_eos": True}
    last = [asyncio.create_task(clients.count("at SIGTERM", clients.stream(CHAT, body))) for _ in range(NUM_AT_THE_END)]
    while await clients.metric("vllm:num_requests_running") < NUM_AT_THE_END:
        await asyncio.sleep(0.1)
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    await asyncio.gather(*last)
    status = await asyncio.to_thread(process.wait, 120)
    seconds = time.monotonic() - started
    for (kind, outcome), count in sorted(clients.outcomes.items()):
        print(f"{kind:16}{outcome:32}{count:8,}")
    print(f"{clients.outcomes.total():,} requests, {len(clients.faults)} lost")
    print(f"held afterwards: {', '.join(f'{name} {value:g}' for name, value in held.items())}")
    print(f"memory at the start, in the middle, at the end: {', '.join(f'{each:.0f}' for each in memory)} MiB")
    print(f"longest gap between two chunks of a stream: {clients.longest_gap:.2f} s")
    print(f"exit {seconds:.1f} s after SIGTERM, status {status}")
    for fault in clients.faults[:20]:
        print(f"LOST {fault}")
    return int(bool(clients.faults or any(held.values()) or status))


def write_drafters(directory: Path) -> None:
    assets = Path(peagle.__file__).parent / "assets"
    for name in DRAFTERS:
        kind = MISFIT if name == MISFIT else "p-eagle"
        shutil.copytree(assets / f"smollm2-135m-instruct-{kind}", directory / name)
    weights = directory / "worse" / "model.safetensors"
    tensors = load_file(weights)
    tensors["fc.weight"] /= 2
    save_file(tensors, weights)


def main() -> int:
    own, _, options = " ".join(sys.argv[1:]).partition("-- ")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=12, help="requests at the same time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, default=Path("soak_server.log"), help="the server's stderr")
    arguments = parser.parse_args(own.split())
    with tempfile.TemporaryDirectory() as drafters, arguments.log.open("wb") as log:
        write_drafters(Path(drafters))
        served = ["--port", "0", "--device", "cpu", "--swap-from", drafters]
        command = [sys.executable, "-m", "peagle", "serve", *served, *options.split()]
        process = subprocess.Popen(command, stderr=log)
        try:
            return asyncio.run(soak(arguments, process))
        finally:
            if process.poll() is None:
                process.kill()


if __name__ == "__main__":
    sys.exit(main())
