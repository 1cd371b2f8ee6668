"""Timed requests to an OpenAI-compatible server.

Only what a measurement needs is parsed, and nothing is tokenized: servers report the number of tokens.
"""

import asyncio
import contextlib
import ipaddress
import json
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from peagle.bench.scrape import Scrape
from peagle.data.prompts import Prompt
from peagle.errors import ConfigError, ServerError
from peagle.server.sse import EventSplitter, data_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MAX_REASON = 200
METRICS_SECONDS = 10.0
RETRY_SECONDS = 1.0
KEEP_SECONDS = 2.0
"""How long to keep an unused connection; shorter than servers do."""
SHOWN = ("content", "reasoning", "reasoning_content", "tool_calls", "text")
"""Keys of a chunk that may hold output."""


def root_of(url: str) -> str:
    """The server address without /v1 or /metrics.

    >>> root_of("localhost:8000/v1/")
    'http://localhost:8000'
    """
    given, url = url, url if "://" in url else f"http://{url}"
    url = url.rstrip("/").removesuffix("/metrics").removesuffix("/v1")
    parts = urlsplit(url)
    try:
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good or parts.query or parts.fragment or parts.username:
        raise ConfigError(f"{given!r} is not a server address", hint="use http://HOST:PORT")
    return url


class Connections:
    """A pool of httpx clients with one connection each.

    A single client scans all its connections on every request; with hundreds of them that takes longer than an answer.
    Proxies from the environment are not used for localhost.
    """

    def __init__(self, root: str, api_key: str | None = None, *, seconds: float = 60.0) -> None:
        is_secure = urlsplit(root).scheme == "https"
        self._options: dict[str, Any] = {
            "base_url": root,
            "headers": headers_of(api_key),
            "timeout": httpx.Timeout(None, connect=seconds),
            "limits": httpx.Limits(max_connections=1, keepalive_expiry=KEEP_SECONDS),
            "trust_env": not is_this_machine(root),
            # Loading certificates is slow: share one context, and load none without https.
            "verify": httpx.create_ssl_context() if is_secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        }
        self._idle: list[httpx.AsyncClient] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._idle:
            await client.aclose()

    def prepare(self, count: int) -> None:
        """Create `count` clients now rather than during the measurement."""
        while len(self._idle) < count:
            self._idle.append(httpx.AsyncClient(**self._options))

    @contextlib.contextmanager
    def one(self) -> Iterator[httpx.AsyncClient]:
        """Borrow a client."""
        self.prepare(1)
        client = self._idle.pop()
        try:
            yield client
        finally:
            self._idle.append(client)


def headers_of(api_key: str | None) -> dict[str, str]:
    headers = {"Accept-Encoding": "identity"}
    return headers | ({"Authorization": f"Bearer {api_key}"} if api_key else {})


def is_this_machine(root: str) -> bool:
    host = urlsplit(root).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class Question:
    """Settings shared by all requests of a run."""

    model: str
    is_chat: bool
    max_tokens: int
    temperature: float
    ignore_eos: bool
    seed: int
    seconds: float = 600.0
    """timeout of a request"""
    more: Mapping[str, Any] = field(default_factory=dict)
    """extra fields of every body"""

    def body(self, prompt: Prompt, index: int) -> dict[str, Any]:
        """For /v1/completions the messages are joined by blank lines, without roles."""
        body: dict[str, Any] = {"model": self.model}
        if self.is_chat:
            body["messages"] = list(prompt.messages)
        else:
            body["prompt"] = "\n\n".join(message["content"] for message in prompt.messages)
        body |= {"max_tokens": self.max_tokens, "temperature": self.temperature, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.temperature > 0:
            body["seed"] = self.seed + index
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body | dict(self.more)


@dataclass
class Outcome:
    """One request and its result. Times are from time.perf_counter."""

    index: int
    due: float
    """when it should have been sent; `sent` is later if the concurrency limit was reached"""
    sent: float = 0.0
    ended: float = 0.0
    times: list[float] = field(default_factory=list)
    """arrival times of chunks with output"""
    pieces: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    """pieces of the answer itself, without thinking: what the next turn of a conversation repeats"""
    category: str = ""
    speculation: Mapping[str, Any] | None = None
    """what the server says about the drafts of this request: vLLM's `metrics.speculative_decoding`"""
    num_input: int = 0
    num_output: int = 0
    has_usage: bool = False
    error: str | None = None
    """why it failed; None if it did not"""
    is_whole: bool = False

    @property
    def ttft(self) -> float | None:
        return self.times[0] - self.sent if self.times else None

    @property
    def latency(self) -> float:
        """Until the last chunk (E2E latency)."""
        return (self.times[-1] if self.times else self.ended) - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token, excluding the first; None for answers of one token."""
        if not self.times or self.num_output < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.num_output - 1)

    @property
    def itls(self) -> list[float]:
        """Times between chunks. With speculation a chunk holds several tokens."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]

    def read(self, data: bytes, now: float) -> None:
        """Process one event of the stream."""
        if data == b"[DONE]":
            self.is_whole = True
            return
        chunk = json.loads(data)
        if chunk.get("error"):
            self.error = reason_of(chunk["error"], "in the stream")
            return
        if usage := chunk.get("usage"):
            self.has_usage = True
            self.num_input = usage.get("prompt_tokens") or 0
            self.num_output = usage.get("completion_tokens") or 0
        self.speculation = (chunk.get("metrics") or {}).get("speculative_decoding") or self.speculation
        for choice in chunk.get("choices") or ():
            piece = choice.get("delta") or choice
            self.said.append(piece.get("content") or piece.get("text") or "")
            shown = next((piece[key] for key in SHOWN if piece.get(key)), None)
            if choice.get("finish_reason"):
                self.is_whole = True
            # An answer without output: its end counts as its arrival.
            if shown or (choice.get("finish_reason") and not self.times):
                self.times.append(now)
                self.pieces.append(shown if isinstance(shown, str) else "")


async def ask(connections: Connections, question: Question, prompt: Prompt, outcome: Outcome) -> None:
    """Send one request and read its stream to the end. Errors go into `outcome`, not up."""
    body = json.dumps(question.body(prompt, outcome.index)).encode()
    path, headers = CHAT if question.is_chat else COMPLETIONS, {"Content-Type": "application/json"}
    try:
        with connections.one() as client:
            outcome.sent = time.perf_counter()
            async with asyncio.timeout(question.seconds):
                async with client.stream("POST", path, content=body, headers=headers) as response:
                    if response.status_code != 200:
                        outcome.error = reason_of(_parsed(await response.aread()), f"HTTP {response.status_code}")
                        return
                    splitter = EventSplitter()
                    async for block in response.aiter_raw():
                        now = time.perf_counter()
                        for event in splitter.feed(block):
                            if (data := data_of(event)) is not None:
                                outcome.read(data, now)
                    if (data := data_of(splitter.rest)) is not None:
                        outcome.read(data, time.perf_counter())
        if outcome.error is None and not outcome.is_whole:
            outcome.error = "the stream ended early"
        if not outcome.has_usage:
            outcome.num_output = len(outcome.times)
    except TimeoutError:
        outcome.error = f"timeout after {question.seconds:g} s"
    except httpx.HTTPError as error:
        outcome.error = f"{type(error).__name__}: {error}".rstrip(": ")[:MAX_REASON]
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        outcome.error = f"not an OpenAI-compatible response: {type(error).__name__}: {error}"[:MAX_REASON]
    finally:
        outcome.ended = time.perf_counter()


def _parsed(data: bytes) -> Any:
    try:
        found = json.loads(data)
    except ValueError:
        return data.decode("utf-8", "replace")
    return found.get("error", found) if isinstance(found, dict) else found


def reason_of(error: Any, where: str) -> str:
    """One line for an error object; equal errors give equal lines."""
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error.get("code") or error
    return f"{where}: {' '.join(str(error).split())}"[:MAX_REASON].rstrip(": ")


async def model_of(connections: Connections, root: str, *, ready_seconds: float = 0.0) -> str:
    """The first model the server lists. Waits up to `ready_seconds` for a server that is still loading."""
    deadline = time.monotonic() + ready_seconds
    while True:
        reason, is_early = "", True
        try:
            response = await _get(connections, "/v1/models")
            if response.status_code == 200:
                return str(response.json()["data"][0]["id"])
            reason = reason_of(_parsed(response.content), f"HTTP {response.status_code}")
            is_early = response.status_code in (502, 503)
        except (httpx.TransportError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise ServerError(f"{root}/v1/models is not OpenAI-compatible: {error}") from error
        if not is_early or time.monotonic() >= deadline:
            hint = "is it running and ready? --ready-seconds waits for a server that is still loading"
            if "HTTP 40" in reason:
                hint = "pass its API key with --api-key-file, or set PEAGLE_API_KEY"
            raise ServerError(f"the server at {root} does not list its models: {reason}", hint=hint)
        await asyncio.sleep(RETRY_SECONDS)


async def scrape(connections: Connections) -> Scrape:
    """Scrape /metrics; empty if the server has none."""
    try:
        response = await _get(connections, "/metrics")
    except (httpx.HTTPError, TimeoutError):
        return Scrape()
    return Scrape.parse(response.text, time.perf_counter()) if response.status_code == 200 else Scrape()


async def _get(connections: Connections, path: str) -> httpx.Response:
    async with asyncio.timeout(METRICS_SECONDS):
        with connections.one() as client:
            return await client.get(path)
