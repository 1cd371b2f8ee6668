"""Requests to an OpenAI-compatible server, with the moments at which their answers came in.

Only what a measurement needs is read of a stream, and nothing is tokenized: servers tell the number of tokens.
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
from peagle.bench.workloads import Prompt
from peagle.errors import ConfigError, ServerError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MAX_REASON = 200
METRICS_SECONDS = 10.0
RETRY_SECONDS = 1.0
KEEP_SECONDS = 2.0
"""How long an unused connection is kept: not so long that the server closes it first."""
SHOWN = ("content", "reasoning", "reasoning_content", "tool_calls", "text")
"""Keys of a chunk under which an answer's next piece is found, whatever kind of piece it is."""


def root_of(url: str) -> str:
    """The address in front of /v1 and /metrics, however much of that is given.

    >>> root_of("localhost:8000/v1/")
    'http://localhost:8000'
    """
    given, url = url, url if "://" in url else f"http://{url}"
    url = url.rstrip("/")
    for end in ("/metrics", "/v1"):
        url = url.removesuffix(end)
    parts = urlsplit(url)
    try:
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good or parts.query or parts.fragment or parts.username:
        raise ConfigError(f"{given!r} is not the address of a server", hint="give it as http://HOST:PORT")
    return url


class Connections:
    """Clients of one connection each, as many as are used at the same time.

    One client for all would look at each of its connections whenever a request begins, and at hundreds of them that
    takes longer than an answer. Proxies of the environment are not asked for this machine itself.
    """

    def __init__(self, root: str, api_key: str | None = None, *, seconds: float = 60.0) -> None:
        is_secure = urlsplit(root).scheme == "https"
        self._options: dict[str, Any] = {
            "base_url": root,
            "headers": headers_of(api_key),
            "timeout": httpx.Timeout(None, connect=seconds),
            "limits": httpx.Limits(max_connections=1, keepalive_expiry=KEEP_SECONDS),
            "trust_env": not is_this_machine(root),
            # Reading the certificates takes long, so all share them; without https they are not read at all.
            "verify": httpx.create_ssl_context() if is_secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        }
        self._all: list[httpx.AsyncClient] = []
        self._idle: list[httpx.AsyncClient] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._all:
            await client.aclose()

    def prepare(self, count: int) -> None:
        """Make so many now, because making one takes time from those that are being measured."""
        while len(self._idle) < count:
            self._idle.append(self._new())

    def _new(self) -> httpx.AsyncClient:
        client = httpx.AsyncClient(**self._options)
        self._all.append(client)
        return client

    @contextlib.contextmanager
    def one(self) -> Iterator[httpx.AsyncClient]:
        """A client that nobody else uses meanwhile."""
        client = self._idle.pop() if self._idle else self._new()
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
    """What every request of a run has in common."""

    model: str
    is_chat: bool
    max_tokens: int
    temperature: float
    ignore_eos: bool
    seed: int
    seconds: float
    """after which a request counts as failed"""
    more: Mapping[str, Any] = field(default_factory=dict)
    """fields that are added to every body"""

    @property
    def path(self) -> str:
        return CHAT if self.is_chat else COMPLETIONS

    def body(self, prompt: Prompt, index: int) -> dict[str, Any]:
        """As a completion, the texts of a prompt's messages stand below each other, without roles."""
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
    """One request and what came of it. Moments are those of time.perf_counter, in seconds."""

    index: int
    due: float
    """when it should have been sent; later where all places were taken"""
    sent: float = 0.0
    ended: float = 0.0
    times: list[float] = field(default_factory=list)
    """when pieces of the answer arrived"""
    pieces: list[str] = field(default_factory=list)
    num_input: int = 0
    num_output: int = 0
    has_usage: bool = False
    error: str | None = None
    """why it failed; None where it did not"""
    _is_whole: bool = False

    @property
    def ttft(self) -> float | None:
        return self.times[0] - self.sent if self.times else None

    @property
    def latency(self) -> float:
        """To the last piece of the answer."""
        return (self.times[-1] if self.times else self.ended) - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first one; None for answers without a second one."""
        if not self.times or self.num_output < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.num_output - 1)

    @property
    def itls(self) -> list[float]:
        """Between pieces, which with speculation hold several tokens each."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]

    def read(self, data: bytes, now: float) -> None:
        """Take one event of the stream into account."""
        if data == b"[DONE]":
            self._is_whole = True
            return
        chunk = json.loads(data)
        if chunk.get("error"):
            self.error = reason_of(chunk["error"], "in the stream")
            return
        if usage := chunk.get("usage"):
            self.has_usage = True
            self.num_input = usage.get("prompt_tokens") or 0
            self.num_output = usage.get("completion_tokens") or 0
        for choice in chunk.get("choices") or ():
            piece = choice.get("delta") or choice
            shown = next((piece[key] for key in SHOWN if piece.get(key)), None)
            if choice.get("finish_reason"):
                self._is_whole = True
            # An answer may end without anything to show; its end is then when it came.
            if shown or (choice.get("finish_reason") and not self.times):
                self.times.append(now)
                self.pieces.append(shown if isinstance(shown, str) else "")

    def settle(self) -> None:
        """Call it when the stream has ended: what is missing makes it a failure, or is counted by its pieces."""
        if self.error is None and not self._is_whole:
            self.error = "the stream ended before its answer did"
        if not self.has_usage:
            self.num_output = len(self.times)


async def ask(connections: Connections, question: Question, prompt: Prompt, outcome: Outcome) -> None:
    """Send one request and follow its stream to the end. Whatever goes wrong is written down, not raised."""
    body = json.dumps(question.body(prompt, outcome.index)).encode()
    headers = {"Content-Type": "application/json"}
    try:
        with connections.one() as client:
            outcome.sent = time.perf_counter()
            async with asyncio.timeout(question.seconds):
                async with client.stream("POST", question.path, content=body, headers=headers) as response:
                    if response.status_code != 200:
                        outcome.error = reason_of(_parsed(await response.aread()), f"HTTP {response.status_code}")
                        return
                    await _follow(response, outcome)
        outcome.settle()
    except TimeoutError:
        outcome.error = f"not finished after {question.seconds:g} s"
    except httpx.HTTPError as error:
        outcome.error = f"{type(error).__name__}: {error}".rstrip(": ")[:MAX_REASON]
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        outcome.error = f"an answer that is not OpenAI's: {type(error).__name__}: {error}"[:MAX_REASON]
    finally:
        outcome.ended = time.perf_counter()


async def _follow(response: httpx.Response, outcome: Outcome) -> None:
    rest = b""
    async for block in response.aiter_raw():
        now = time.perf_counter()
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                outcome.read(line[5:].strip(), now)


def _parsed(data: bytes) -> Any:
    try:
        found = json.loads(data)
    except ValueError:
        return data.decode("utf-8", "replace")
    return found.get("error", found) if isinstance(found, dict) else found


def reason_of(error: Any, where: str) -> str:
    """One line about an error object, the same for errors that are the same."""
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error.get("code") or error
    return f"{where}: {' '.join(str(error).split())}"[:MAX_REASON].rstrip(": ")


async def model_of(connections: Connections, root: str, *, ready_seconds: float = 0.0) -> str:
    """The first model the server names. Waits so long for a server that does not answer yet."""
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
            raise ServerError(f"{root}/v1/models does not answer as OpenAI's does: {error}") from error
        if not is_early or time.monotonic() >= deadline:
            hint = "is it running there, and ready? --ready-seconds waits for one that still loads"
            if "HTTP 40" in reason:
                hint = "give its API key with --api-key-file, or in the variable that --api-key-variable names"
            raise ServerError(f"the server at {root} does not say which models it has: {reason}", hint=hint)
        await asyncio.sleep(RETRY_SECONDS)


async def scrape(connections: Connections) -> Scrape:
    """What /metrics says now; nothing where there is no such thing."""
    try:
        response = await _get(connections, "/metrics")
    except (httpx.HTTPError, TimeoutError):
        return Scrape()
    return Scrape.parse(response.text, time.perf_counter()) if response.status_code == 200 else Scrape()


async def _get(connections: Connections, path: str) -> httpx.Response:
    async with asyncio.timeout(METRICS_SECONDS):
        with connections.one() as client:
            return await client.get(path)
