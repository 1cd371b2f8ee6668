"""The same server in front of vLLM: it checks requests, forwards them, and returns vLLM's answers.

Clients see the same API keys, request ids, error format, extra routes, limits and drain as with our own engine. A
field that vLLM does not know is refused by name.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import httpx
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from peagle import __version__
from peagle.checkpoint.card import baseline_of
from peagle.errors import EngineDeadError, QueueFullError, ServerError
from peagle.server.app import ExtraRoute, Routes, app_with, read_json
from peagle.server.auth import ApiKeys
from peagle.server.backend import Backend
from peagle.server.errors import HttpError
from peagle.server.lifecycle import Lifecycle
from peagle.server.settings import ServerSettings
from peagle.server.sse import EventSplitter, dumps
from peagle.server.streaming import EventStream, JsonResponse, unless_gone
from peagle.vllm.process import VllmProcess
from peagle.vllm.proxy_bodies import Served, account, as_error, checked, request_fields, rewritten
from peagle.vllm.proxy_metrics import ProxyMetrics

log = logging.getLogger(__name__)

BASE_URL = "http://vllm"
"""A placeholder: the connection goes to a socket file."""
LIMITS = httpx.Limits(max_connections=None, keepalive_expiry=2)
"""vLLM closes connections that were idle for 5 s; drop ours before that."""
WARMUP_TOKENS = 4
WARMUP_SECONDS = 600.0
WATCH_SECONDS = 1.0
HEALTH_SECONDS = 5.0
HEALTH_FAILURES = 3
"""Consecutive failed checks before a running process counts as stuck."""
SCRAPE_SECONDS = 5.0
DYING_SECONDS = 1.0


class ProxyService(Backend):
    """A vLLM process as a backend. Closing the service ends the process. All methods belong to one event loop."""

    metrics: ProxyMetrics

    def __init__(self, child: VllmProcess, served: Served, settings: ServerSettings) -> None:
        # vLLM does not count by temperature. Sampled requests accept less: greedy ones must not raise their alarm.
        lengths = (baseline_of(served.acceptance, served.num_draft_tokens, is_sampled) for is_sampled in (True, False))
        baseline = next(filter(None, lengths), None)
        metrics = ProxyMetrics(served.names[0], served.num_draft_tokens, served.max_batch, baseline)
        super().__init__(served.names, served.target, metrics)
        self.child, self.served, self.settings = child, served, settings
        self.method, self.drafter_name = served.method, served.drafter_name
        self.num_draft_tokens, self.max_length, self.engine_name = served.num_draft_tokens, None, served.engine
        self.fields: dict[str, frozenset[str]] = {}
        """by route, the body fields in vLLM's OpenAPI document"""
        transport = httpx.AsyncHTTPTransport(uds=str(child.socket), limits=LIMITS)
        self._client = httpx.AsyncClient(transport=transport, base_url=BASE_URL, timeout=None)
        self._num_open = 0
        self._is_healthy, self._is_ending, self._is_death_logged = True, False, False
        self._watcher: asyncio.Task[None] | None = None

    async def warm_up(self) -> None:
        listed, document = await self._get("/v1/models"), await self._get("/openapi.json")
        self.max_length = listed.json()["data"][0].get("max_model_len") if listed else None
        self.fields = request_fields(document.json()) if document else {}
        body = {"prompt": [0], "max_tokens": WARMUP_TOKENS, "temperature": 0, "ignore_eos": True}
        try:
            response = await self._client.post(
                "/v1/completions", json=body | {"model": self.names[0]}, timeout=WARMUP_SECONDS
            )
            why = "" if response.status_code == 200 else as_error(response.status_code, response.content).message
        except httpx.HTTPError as error:
            why = f"the connection broke: {error!r}"
        if why:
            words = await asyncio.to_thread(self.child.last_words)
            raise ServerError(
                f"{self.engine_name} failed its first request: {why}; its last lines:\n{words}",
                hint="`peagle doctor DIR --engine vllm` checks the drafter; --num-draft-tokens 0 serves without it",
            )
        await self.metrics_text()
        self.metrics.begin()
        self._watcher = asyncio.create_task(self._watch())

    async def _get(self, path: str, seconds: float = SCRAPE_SECONDS) -> httpx.Response | None:
        """vLLM's response; None if it has none or reports an error."""
        with contextlib.suppress(httpx.HTTPError):
            response = await self._client.get(path, timeout=seconds)
            if response.status_code == 200:
                return response
        return None

    async def _watch(self) -> None:
        """Notice when the process ends or stops answering."""
        num_failures, next_check = 0, time.monotonic() + HEALTH_SECONDS
        while self.child.returncode is None:
            await asyncio.sleep(WATCH_SECONDS)
            if time.monotonic() < next_check or self.child.returncode is not None:
                continue
            next_check = time.monotonic() + HEALTH_SECONDS
            num_failures = 0 if await self._get("/health", 2 * HEALTH_SECONDS) else num_failures + 1
            is_healthy = num_failures < HEALTH_FAILURES
            if is_healthy != self._is_healthy:
                level, what = (logging.INFO, "passes again") if is_healthy else (logging.ERROR, "fails")
                log.log(level, "%s: its health check %s", self.engine_name, what)
            self._is_healthy = is_healthy
        await self._log_death()

    async def _log_death(self) -> None:
        """Log once that the process ended on its own."""
        if self._is_ending or self._is_death_logged or self.child.returncode is None:
            return
        self._is_death_logged = True
        words = await asyncio.to_thread(self.child.last_words)
        log.error("%s ended with status %s; its last lines:\n%s", self.engine_name, self.child.returncode, words)

    @property
    def is_alive(self) -> bool:
        return self.child.returncode is None and self._is_healthy

    async def close(self) -> None:
        await self._log_death()
        self._is_ending = True
        if self._watcher is not None:
            self._watcher.cancel()
        await self._client.aclose()
        await asyncio.to_thread(self.child.end)

    async def metrics_text(self) -> bytes:
        response = await self._get("/metrics") if self.child.returncode is None else None
        return self.metrics.text(response.text if response else "")

    async def forward(self, path: str, data: Any, request: Request) -> Response:
        """vLLM's answer to a request body."""
        body = checked(data, self.fields.get(path), self.served, self.settings.max_choices)
        if body.get("stream") is True:
            return EventStream(self._events(path, body, request), self.settings)
        return await unless_gone(request, self._whole(path, body, request), self.settings.request_seconds)

    @contextlib.asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """Count one open request against the queue's limit, and translate its errors."""
        limit = self.served.max_waiting
        if limit is not None and self._num_open >= self.served.max_batch + limit:
            self.metrics.refused.inc()
            raise QueueFullError(f"the queue is full ({limit} requests)", hint="retry later")
        self._num_open += 1
        try:
            yield
        except httpx.HTTPError as error:
            raise await self._broken(error) from error
        finally:
            self._num_open -= 1

    async def _broken(self, error: httpx.HTTPError) -> Exception:
        if death := await self._death():
            return death
        log.error("%s broke off a response: %r", self.engine_name, error)
        return HttpError(502, "the engine broke off this response; see the server's log", code="engine_error")

    async def _death(self) -> EngineDeadError | None:
        """The error if the process has ended or ends within a second: its last responses arrive before its status."""
        deadline = time.monotonic() + DYING_SECONDS
        while self.child.returncode is None and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        status = self.child.returncode
        return None if status is None else EngineDeadError(f"{self.engine_name} ended with status {status}")

    async def _refusal(self, status: int, content: bytes) -> Exception:
        error = as_error(status, content)
        return (await self._death() if status == 500 else None) or error

    async def _whole(self, path: str, body: dict[str, Any], request: Request) -> Response:
        async with self._place():
            response = await self._client.post(path, content=dumps(body), headers=_headers(request))
        if response.status_code >= 400:
            raise await self._refusal(response.status_code, response.content)
        try:
            document = response.json()
        except ValueError:
            return Response(response.content, response.status_code, media_type=response.headers.get("content-type"))
        if isinstance(document, dict):
            account(document, request)
        return JsonResponse(document, response.status_code)

    async def _events(self, path: str, body: dict[str, Any], request: Request) -> AsyncGenerator[bytes, None]:
        async with (
            self._place(),
            self._client.stream("POST", path, content=dumps(body), headers=_headers(request)) as response,
        ):
            if response.status_code >= 400:
                raise await self._refusal(response.status_code, await response.aread())
            splitter = EventSplitter()
            async for chunk in response.aiter_bytes():
                events = splitter.feed(chunk)
                if events:
                    yield b"".join(rewritten(each, request) for each in events)
            if splitter.rest.strip():
                yield rewritten(splitter.rest, request)


def _headers(request: Request) -> dict[str, str]:
    return {"X-Request-Id": request.state.request_id, "Content-Type": "application/json"}


def create_proxy_app(
    settings: ServerSettings, keys: ApiKeys, lifecycle: Lifecycle[ProxyService], extra_routes: Sequence[ExtraRoute] = ()
) -> FastAPI:
    """The application over the lifecycle's vLLM process, which may still be starting."""
    routes = ProxyRoutes(settings, lifecycle)
    app = app_with(routes, keys, extra_routes)
    app.add_api_route("/v1/{rest:path}", routes.other, methods=["POST"], summary="Further routes of vLLM")
    return app


class ProxyRoutes(Routes[ProxyService]):
    """The routes in front of vLLM, and those of its own that we do not have."""

    async def version(self) -> Response:
        service = self.lifecycle.service
        return JsonResponse({"version": __version__, "engine": service.engine_name if service else None})

    async def answer(self, path: str, data: Any, request: Request) -> Response:
        return await self.lifecycle.answering().forward(path, data, request)

    async def other(self, request: Request) -> Response:
        service = self.lifecycle.answering()
        if request.url.path not in service.fields:
            raise HTTPException(404)
        return await service.forward(request.url.path, await read_json(request, self.settings), request)
