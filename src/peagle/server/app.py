"""The application: routes, and the gate that every request passes."""

import asyncio
import json
import logging
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any, Generic

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from peagle import __version__
from peagle.server.auth import ApiKeys
from peagle.server.chat import answer_chat, render, template_of
from peagle.server.completions import answer_completion
from peagle.server.errors import HttpError, as_http_error
from peagle.server.jobs import Job
from peagle.server.lifecycle import Lifecycle, S
from peagle.server.metrics import CONTENT_TYPE
from peagle.server.openapi import add_bodies
from peagle.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, validated
from peagle.server.sagemaker import CUSTOM_ATTRIBUTES, invocation_route
from peagle.server.service import Service
from peagle.server.settings import ServerSettings
from peagle.server.streaming import CLIENT_GONE, ClientGoneError, JsonResponse, dumps
from peagle.server.tools import ToolFormat

log = logging.getLogger(__name__)
request_log = logging.getLogger("peagle.server.requests")

BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
GUARDED = ("/v1/", "/tokenize", "/detokenize", "/invocations")
"""Beginnings of paths that need an API key where there are keys."""
QUIET = frozenset({"/ping", "/health", "/metrics", "/", "/version"})
"""Paths that are asked for all the time and leave no line in the log."""
STATIC_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def create_app(settings: ServerSettings, keys: ApiKeys, lifecycle: Lifecycle[Service]) -> FastAPI:
    """The application over whatever service the lifecycle has, or will have."""
    routes = EngineRoutes(settings, lifecycle)
    app = app_with(routes, keys, metrics="Prometheus metrics")
    app.add_api_route("/", routes.page, methods=["GET"], include_in_schema=False)
    app.add_api_route("/static/{name}", routes.static, methods=["GET"], include_in_schema=False)
    add_bodies(app, BODIES)
    return app


def app_with(routes: "Routes[Any]", keys: ApiKeys, *, metrics: str) -> FastAPI:
    """An application with what is the same whoever answers; `metrics` describes those that it shows."""
    settings, lifecycle = routes.settings, routes.lifecycle
    app = FastAPI(title="peagle", version=__version__, lifespan=lifecycle.lifespan, redoc_url=None)
    app.add_api_route("/health", routes.health, methods=["GET"], summary="200 when ready, 503 otherwise")
    for method in ("GET", "POST"):
        name, what = f"ping_{method.lower()}", "SageMaker's health check"
        app.add_api_route("/ping", routes.health, methods=[method], operation_id=name, summary=what)
    app.add_api_route("/version", routes.version, methods=["GET"])
    app.add_api_route("/metrics", routes.metrics, methods=["GET"], summary=metrics)
    app.add_api_route("/v1/models", routes.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", routes.model, methods=["GET"])
    for path in BODIES:
        app.add_api_route(path, routes.handler(path), methods=["POST"], name=path)
    app.add_api_route("/invocations", routes.invocations, methods=["POST"], summary="SageMaker's inference route")
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_middleware(Gate, keys=keys, lifecycle=lifecycle, settings=settings)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    return app


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {404: f"there is no {request.url.path[:200]!r} here", 405: f"{request.method} is not allowed here"}
    message = what.get(error.status_code, str(error.detail))
    return HttpError(error.status_code, message, headers=dict(error.headers or {})).response()


class Routes(ABC, Generic[S]):
    """One method for each route; `answer` alone knows who answers."""

    def __init__(self, settings: ServerSettings, lifecycle: Lifecycle[S]) -> None:
        self.settings, self.lifecycle = settings, lifecycle

    @abstractmethod
    async def answer(self, path: str, data: Any, request: Request) -> Response:
        """The answer to a body for one of the paths."""

    def answering(self) -> S:
        """Who answers a request that the gate has let in, also where the server began to drain while its body came."""
        service = self.lifecycle.service
        if service is None or not service.is_alive:
            raise self.lifecycle.refusal()
        return service

    async def health(self) -> Response:
        """A look at a flag, never a generation: SageMaker allows two seconds."""
        if self.lifecycle.state == "ready":
            return Response(status_code=200)
        raise self.lifecycle.refusal()

    async def version(self) -> Response:
        return JsonResponse({"version": __version__})

    async def metrics(self) -> Response:
        service = self.lifecycle.service
        return Response(await service.metrics_text() if service else b"", media_type=CONTENT_TYPE)

    async def models(self) -> Response:
        service = self.lifecycle.ready_service()
        return JsonResponse({"object": "list", "data": [service.model_entry(name) for name in service.names]})

    async def model(self, name: str) -> Response:
        service = self.lifecycle.ready_service()
        service.check_model(name)
        return JsonResponse(service.model_entry(name))

    def handler(self, path: str) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            return await self.answer(path, await read_json(request, self.settings), request)

        return handle

    async def invocations(self, request: Request) -> Response:
        data = await read_json(request, self.settings)
        path = invocation_route(request.headers.get(CUSTOM_ATTRIBUTES), data, BODIES)
        return await self.answer(path, data, request)


class EngineRoutes(Routes[Service]):
    """Over our own engine, with the page in front of it."""

    async def answer(self, path: str, data: Any, request: Request) -> Response:
        body = validated(BODIES[path], data)
        service = self.answering()
        if isinstance(body, ChatBody):
            return await answer_chat(service, body, request)
        if isinstance(body, CompletionBody):
            return await answer_completion(service, body, request)
        if isinstance(body, TokenizeBody):
            return await _tokenize(service, body, request)
        assert isinstance(body, DetokenizeBody)
        return await _detokenize(service, body, request)

    async def page(self) -> Response:
        return _static_file("index.html")

    async def static(self, name: str) -> Response:
        return _static_file(name)


def _static_file(name: str) -> Response:
    kind = STATIC_TYPES.get(name.rpartition(".")[2])
    file = resources.files("peagle.server") / "static" / name
    if kind is None or "/" in name or "\\" in name or name.startswith(".") or not file.is_file():
        raise HTTPException(404)
    return Response(file.read_bytes(), media_type=kind, headers={"Cache-Control": "no-cache"})


async def _tokenize(service: Service, body: TokenizeBody, request: Request) -> Response:
    service.check_model(body.model)
    prompt, messages = body.prompt, body.messages
    if (prompt is None) == (messages is None):
        raise HttpError(400, "give either 'prompt' or 'messages'", param="prompt")

    def run() -> bytes:
        if prompt is not None:
            ids = service.encode(prompt, body.add_special_tokens)
        else:
            tools = ToolFormat(tuple(body.tools), "none") if body.tools else None
            ids = render(service, messages or [], tools, body, template_of(service))
        texts = [service.token_texts[each].text for each in ids] if body.return_token_strs else None
        return dumps({"count": len(ids), "max_model_len": service.max_length, "tokens": ids, "token_strs": texts})

    return Response(await service.in_thread(request, run), media_type="application/json")


async def _detokenize(service: Service, body: DetokenizeBody, request: Request) -> Response:
    service.check_model(body.model)
    if len(body.tokens) > service.max_length:
        message = f"there are {len(body.tokens)} tokens, but a text has at most {service.max_length}; send it in parts"
        raise HttpError(400, message, param="tokens", code="context_length_exceeded")
    if body.tokens and max(body.tokens) >= service.vocab_size:
        message = f"tokens must lie between 0 and {service.vocab_size - 1}, got {max(body.tokens)}"
        raise HttpError(400, message, param="tokens")
    decode = service.tokenizer.decode
    text = await service.in_thread(request, lambda: decode(body.tokens, clean_up_tokenization_spaces=False))
    return JsonResponse({"prompt": text})


async def read_json(request: Request, settings: ServerSettings) -> Any:
    """The body of a request as JSON, within the limits of size and time."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        message = f"the body must be JSON: send 'Content-Type: application/json', got {kind[:100]!r}"
        raise HttpError(415, message)
    too_large = HttpError(413, f"the body is larger than {settings.max_body_bytes} bytes", code="body_too_large")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > settings.max_body_bytes:
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(settings.body_seconds):
            async for chunk in request.stream():
                data += chunk
                if len(data) > settings.max_body_bytes:
                    raise too_large
    except TimeoutError:
        message = f"the body did not arrive in {settings.body_seconds:g} s"
        raise HttpError(408, message, headers={"Connection": "close"}) from None
    try:
        found = json.loads(data)
        if SURROGATE.search(data):
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except UnicodeEncodeError as error:  # JSON may name surrogates one by one, which no text has
        half = ascii(error.object[error.start])
        raise HttpError(400, f"the body has {half}, which is half of a character; send both halves") from None
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"the body is not valid JSON: {error}"[:300]) from None


class Gate:
    """Around every request: its id, the API key, readiness, the count in flight, errors, and one line of log."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, lifecycle: Lifecycle[Any], settings: ServerSettings) -> None:
        self._app, self._keys, self._lifecycle = app, keys, lifecycle
        self._line = RequestLine(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        started, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        is_guarded = scope["path"].startswith(GUARDED)
        self._lifecycle.num_in_flight += is_guarded
        try:
            if is_guarded and scope["method"] != "OPTIONS":
                self._keys.check(headers.get("authorization"))
                if self._lifecycle.state != "ready":
                    raise self._lifecycle.refusal()
            await self._app(scope, receive, send_with_id)
        except (ClientGoneError, ClientDisconnect):
            status = CLIENT_GONE
        except Exception as error:
            if status:
                raise
            await as_http_error(error).response()(scope, receive, send_with_id)
        finally:
            self._lifecycle.num_in_flight -= is_guarded
            self._account(scope, status, request_id, time.perf_counter() - started, state)

    def _account(self, scope: Scope, status: int, request_id: str, seconds: float, state: dict[str, Any]) -> None:
        service = self._lifecycle.service
        if service is not None:
            route = scope.get("route")
            service.metrics.http.labels(getattr(route, "path", "other"), str(status)).inc()
            if status == CLIENT_GONE:
                service.metrics.gone.inc()
        if scope["path"] not in QUIET:
            self._line.write(scope, status, request_id, seconds, state)


class RequestLine:
    """Writes one line about each request, without a word of its texts."""

    def __init__(self, settings: ServerSettings) -> None:
        self._is_json = settings.log_format == "json"

    def write(self, scope: Scope, status: int, request_id: str, seconds: float, state: dict[str, Any]) -> None:
        job: Job | None = state.get("job")
        entry: dict[str, Any] = {
            "time": round(time.time(), 3),
            "event": "request",
            "request_id": request_id,
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": status,
            "seconds": round(seconds, 4),
        }
        if job is not None:
            entry |= {
                "id": job.job_id,
                "user": state.get("user"),
                "prompt_tokens": job.num_prompt_tokens,
                "completion_tokens": job.num_answer_tokens,
                "finish_reasons": [choice.finish_reason for choice in job.choices],
                "acceptance_length": job.speculative_decoding()["mean_acceptance_length"] if job.num_steps else None,
                **job.timings(),
            }
        entry |= state.get("account", {})
        if self._is_json:
            request_log.info("%s", json.dumps(entry))
            return
        words = [f"{entry['method']} {entry['path']} {status} in {seconds:.3f} s"]
        if entry.get("completion_tokens") is not None:
            words.append(f"{entry['prompt_tokens']} + {entry['completion_tokens']} tokens")
            if entry.get("tokens_per_second") is not None:
                words.append(f"{entry['tokens_per_second']} tokens/s")
            if entry.get("acceptance_length") is not None:
                words.append(f"acceptance length {entry['acceptance_length']:.2f}")
        request_log.info("%s [%s]", ", ".join(words), request_id)
