"""The same server in front of another engine: requests are checked, handed to vLLM, and its answers brought back.

What is ours stays the same for clients: API keys, request ids, the form of errors, SageMaker's routes, limits of size
and time, the drain at the end. What the engine behind cannot do for one request is refused by its name.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any, Protocol

import httpx
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from peagle import __version__
from peagle.errors import EngineDeadError, QueueFullError, ServerError, nearest
from peagle.server.app import Routes, app_with, read_json
from peagle.server.auth import ApiKeys
from peagle.server.errors import HttpError, unavailable, unknown_model
from peagle.server.lifecycle import Lifecycle
from peagle.server.metrics import baseline_of
from peagle.server.protocol import LABELS
from peagle.server.proxy_bodies import (
    Served,
    account,
    as_error,
    bring_figures,
    check_speculation,
    event,
    num_choices,
    request_fields,
)
from peagle.server.proxy_metrics import ProxyMetrics
from peagle.server.settings import ServerSettings
from peagle.server.streaming import EventStream, JsonResponse, dumps, unless_gone

log = logging.getLogger(__name__)

BASE_URL = "http://vllm"
"""Only a name: the connection goes to a socket file."""
LIMITS = httpx.Limits(max_connections=None, keepalive_expiry=2)
"""vLLM closes connections that were idle for 5 s; one must not be used again just then."""
WARMUP_TOKENS = 4
WARMUP_SECONDS = 600.0
WATCH_SECONDS = 1.0
HEALTH_SECONDS = 5.0
HEALTH_FAILURES = 3
"""Checks in a row that must fail before a living process is taken for stuck."""
SCRAPE_SECONDS = 5.0
DYING_SECONDS = 1.0
JSON = {"Content-Type": "application/json"}


class Child(Protocol):
    """The process behind."""

    @property
    def socket(self) -> Path: ...

    @property
    def returncode(self) -> int | None: ...

    def last_words(self) -> str: ...

    def end(self) -> None: ...


class ProxyService:
    """A process that answers. All methods belong to the event loop it was made for; it is ended with the service."""

    def __init__(self, child: Child, served: Served, settings: ServerSettings) -> None:
        self.child, self.served, self.settings = child, served, settings
        self.names = served.names
        baseline = baseline_of(served.acceptance, served.num_draft_tokens)
        self.metrics = ProxyMetrics(served.names[0], served.num_draft_tokens, served.max_batch, baseline)
        self.max_length: int | None = None
        self.created = int(time.time())
        self.fields: dict[str, frozenset[str]] = {}
        """by route, the fields that the engine says it takes; nothing for routes that it says nothing about"""
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(child.socket), limits=LIMITS),
            base_url=BASE_URL,
            timeout=None,
        )
        self._num_open = 0
        self._is_healthy, self._is_ending, self._is_death_told = True, False, False
        self._watcher: asyncio.Task[None] | None = None

    async def warm_up(self) -> None:
        """Learn what the engine takes, and have it answer once: one that fails at its first step is never ready."""
        listed = await self._get_json("/v1/models")
        self.max_length = next((each.get("max_model_len") for each in listed.get("data", [])), None)
        self.fields = request_fields(await self._get_json("/openapi.json"))
        body = {
            "model": self.names[0],
            "prompt": [0],
            "max_tokens": WARMUP_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        try:
            response = await self._client.post("/v1/completions", json=body, timeout=WARMUP_SECONDS)
            why = "" if response.status_code == 200 else as_error(response.status_code, response.content).message
        except httpx.HTTPError as error:
            why = f"it broke off: {error!r}"
        if why:
            words = await asyncio.to_thread(self.child.last_words)
            raise ServerError(
                f"{self.served.engine} does not answer: {why}; its last lines:\n{words}",
                hint="`peagle doctor DIR --engine vllm` checks the drafter; --num-draft-tokens 0 serves without it",
            )
        await self.metrics_text()
        self.metrics.begin()
        self._watcher = asyncio.create_task(self._watch())

    async def _get_json(self, path: str) -> dict[str, Any]:
        try:
            found = (await self._client.get(path, timeout=SCRAPE_SECONDS)).json()
        except (httpx.HTTPError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    async def _watch(self) -> None:
        """Notice that the process has ended, or does not answer any more."""
        num_failures, next_check = 0, time.monotonic() + HEALTH_SECONDS
        while self.child.returncode is None:
            await asyncio.sleep(WATCH_SECONDS)
            if time.monotonic() < next_check or self.child.returncode is not None:
                continue
            next_check = time.monotonic() + HEALTH_SECONDS
            try:
                response = await self._client.get("/health", timeout=2 * HEALTH_SECONDS)
                num_failures = 0 if response.status_code == 200 else num_failures + 1
            except httpx.HTTPError:
                num_failures += 1
            is_healthy = num_failures < HEALTH_FAILURES
            if is_healthy != self._is_healthy:
                log.error("%s does not answer its health check", self.served.engine) if not is_healthy else log.info(
                    "%s answers its health check again", self.served.engine
                )
            self._is_healthy = is_healthy
        await self._tell_death()

    async def _tell_death(self) -> None:
        """Log once that the process has ended without having been asked to."""
        if self._is_ending or self._is_death_told or self.child.returncode is None:
            return
        self._is_death_told = True
        words = await asyncio.to_thread(self.child.last_words)
        log.error("%s ended with status %s; its last lines:\n%s", self.served.engine, self.child.returncode, words)

    @property
    def is_alive(self) -> bool:
        return self.child.returncode is None and self._is_healthy

    def describe(self) -> str:
        served = self.served
        how = f"{served.method} with {served.num_draft_tokens} draft tokens" if served.method else "plain decoding"
        return f"{served.engine}, {how}, at most {self.max_length} tokens a text"

    async def abort_all(self) -> None:
        """Ending the process ends every open answer with an error that its client is told."""
        self._is_ending = True
        await asyncio.to_thread(self.child.end)

    async def close(self) -> None:
        await self._tell_death()
        self._is_ending = True
        if self._watcher is not None:
            self._watcher.cancel()
        await self._client.aclose()
        await asyncio.to_thread(self.child.end)

    async def metrics_text(self) -> bytes:
        upstream = ""
        if self.child.returncode is None:
            with contextlib.suppress(httpx.HTTPError):
                response = await self._client.get("/metrics", timeout=SCRAPE_SECONDS)
                upstream = response.text if response.status_code == 200 else ""
        return self.metrics.text(upstream)

    def check_model(self, name: str) -> None:
        if name not in self.names:
            raise unknown_model(name, self.names)

    def model_entry(self, name: str) -> dict[str, Any]:
        served = self.served
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "peagle",
            "root": served.target,
            "parent": None,
            "max_model_len": self.max_length,
            "permission": [],
            "peagle": {
                "engine": served.engine,
                "method": served.method,
                "num_draft_tokens": served.num_draft_tokens,
                "max_num_draft_tokens": served.num_draft_tokens,
                "drafter": served.drafter_name,
                "max_length": self.max_length,
            },
        }

    async def forward(self, path: str, data: Any, request: Request) -> Response:
        """The engine's answer to a body for one of its routes."""
        body = self._checked(path, data)
        headers = {"X-Request-Id": request.state.request_id}
        settings = self.settings
        if body.get("stream") is True:
            events = self._events(path, body, headers, request)
            return EventStream(events, keep_alive_seconds=settings.keep_alive_seconds, seconds=settings.request_seconds)
        return await unless_gone(request, self._whole(path, body, headers, request), settings.request_seconds)

    def _checked(self, path: str, data: Any) -> dict[str, Any]:
        """The body as the engine takes it, or a refusal that names the field."""
        if not isinstance(data, dict):
            raise HttpError(400, f"the body must be a JSON object, got {type(data).__name__}")
        body = {name: value for name, value in data.items() if value is not None and name not in LABELS}
        check_speculation(body.pop("speculation", None), self.served)
        known = self.fields.get(path)
        for name in body if known else ():
            assert known is not None
            if name not in known:
                hint = nearest(name, known)
                hint = hint if not hint.startswith("known") else f"{self.served.engine} does not know it"
                message = f"unknown field {name[:100]!r}; {hint}"
                raise HttpError(400, message, param=name[:100], code="unknown_parameter")
        asked = num_choices(body)
        if asked > self.settings.max_choices:
            message = f"{asked} answers are asked for, at most {self.settings.max_choices} are given at a time"
            raise HttpError(400, message, param="n")
        return body

    @contextlib.asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """Room for one more request, and its errors in our words."""
        limit = self.served.max_waiting
        if limit is not None and self._num_open >= self.served.max_batch + limit:
            self.metrics.refused.inc()
            raise QueueFullError(f"{limit} requests wait already", hint="try again later")
        self._num_open += 1
        try:
            yield
        except httpx.HTTPError as error:
            raise await self._broken(error) from error
        finally:
            self._num_open -= 1

    async def _broken(self, error: httpx.HTTPError) -> Exception:
        if self._is_ending:
            why = "the server is shutting down, and this answer was not finished in time"
            return unavailable(why, "server_draining")
        if await self._is_dying():
            return EngineDeadError(f"{self.served.engine} ended with status {self.child.returncode}")
        log.error("%s broke off an answer: %r", self.served.engine, error)
        return HttpError(502, "the engine broke off this answer; the server's log says more", code="engine_error")

    async def _is_dying(self) -> bool:
        """Whether the process has ended, or does so in a moment: its last answers come before that."""
        deadline = time.monotonic() + DYING_SECONDS
        while self.child.returncode is None and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return self.child.returncode is not None

    async def _refusal(self, status: int, content: bytes) -> Exception:
        error = as_error(status, content)
        if status == 500 and await self._is_dying():
            return EngineDeadError(f"{self.served.engine} ended with status {self.child.returncode}")
        return error

    async def _whole(self, path: str, body: dict[str, Any], headers: dict[str, str], request: Request) -> Response:
        async with self._place():
            response = await self._client.post(path, content=dumps(body), headers=headers | JSON)
        if response.status_code >= 400:
            raise await self._refusal(response.status_code, response.content)
        try:
            document = response.json()
        except ValueError:
            return Response(response.content, response.status_code, media_type=response.headers.get("content-type"))
        if isinstance(document, dict):
            bring_figures(document)
            account(document, request)
        return JsonResponse(document, response.status_code)

    async def _events(
        self, path: str, body: dict[str, Any], headers: dict[str, str], request: Request
    ) -> AsyncGenerator[bytes, None]:
        async with (
            self._place(),
            self._client.stream("POST", path, content=dumps(body), headers=headers | JSON) as response,
        ):
            if response.status_code >= 400:
                raise await self._refusal(response.status_code, await response.aread())
            rest = b""
            async for chunk in response.aiter_bytes():
                *events, rest = (rest + chunk).split(b"\n\n")
                if events:
                    yield b"".join(event(each, request) for each in events)
            if rest.strip():
                yield event(rest, request)


def create_proxy_app(settings: ServerSettings, keys: ApiKeys, lifecycle: Lifecycle[ProxyService]) -> FastAPI:
    """The application over whatever process the lifecycle has, or will have."""
    routes = ProxyRoutes(settings, lifecycle)
    app = app_with(routes, keys, metrics="Prometheus metrics, vLLM's and ours")
    app.add_api_route("/v1/{rest:path}", routes.other, methods=["POST"], summary="Further routes of vLLM's")
    return app


class ProxyRoutes(Routes[ProxyService]):
    """Over another process, with those of its routes that we do not have."""

    async def version(self) -> Response:
        service = self.lifecycle.service
        return JsonResponse({"version": __version__, "engine": service.served.engine if service else None})

    async def answer(self, path: str, data: Any, request: Request) -> Response:
        return await self.answering().forward(path, data, request)

    async def other(self, request: Request) -> Response:
        service = self.lifecycle.ready_service()
        if request.url.path not in service.fields:
            raise HTTPException(404)
        return await service.forward(request.url.path, await read_json(request, self.settings), request)
