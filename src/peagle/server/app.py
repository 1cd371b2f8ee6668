"""The application: its routes, for our own engine and for whatever else answers."""

import asyncio
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, Generic

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from peagle import __version__
from peagle.server.auth import ApiKeys
from peagle.server.chat import answer_chat, render
from peagle.server.completions import answer_completion
from peagle.server.errors import HttpError, invalid
from peagle.server.gate import Gate
from peagle.server.lifecycle import Lifecycle, S
from peagle.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, validated
from peagle.server.service import Service
from peagle.server.settings import ServerSettings
from peagle.server.sse import dumps
from peagle.server.streaming import JsonResponse

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
GUARDED = ("/v1/", "/tokenize", "/detokenize")
"""Prefixes of the paths that need an API key, if there are keys."""
QUIET = ("/health", "/metrics", "/", "/version")
"""Paths that monitors poll: they leave no line in the log."""
STATIC = Path(str(resources.files("peagle.server") / "static"))


@dataclass(frozen=True)
class ExtraRoute:
    """A route that a hosting platform expects. `handle` gets the app's routes and the request.

    One that needs no key counts as a health check: it is answered while draining and not logged.
    """

    path: str
    methods: tuple[str, ...]
    summary: str
    handle: "Callable[[Routes[Any], Request], Awaitable[Response]]"
    needs_key: bool = True
    bodies: tuple[type[BaseModel], ...] = ()


def create_app(
    settings: ServerSettings, keys: ApiKeys, lifecycle: Lifecycle[Service], extra_routes: Sequence[ExtraRoute] = ()
) -> FastAPI:
    """The application over the lifecycle's service, which may still be loading."""
    routes = EngineRoutes(settings, lifecycle)
    app = app_with(routes, keys, extra_routes)
    app.add_api_route("/", partial(routes.static, "index.html"), methods=["GET"], include_in_schema=False)
    app.add_api_route("/static/{name}", routes.static, methods=["GET"], include_in_schema=False)
    _document(app, extra_routes)
    return app


def _document(app: FastAPI, extra_routes: Sequence[ExtraRoute]) -> None:
    """Add the request bodies to the OpenAPI document: our own code parses them, so FastAPI does not know them."""
    bodies: dict[str, tuple[type[BaseModel], ...]] = {path: (kind,) for path, (kind, _) in ANSWERS.items()}
    bodies |= {each.path: each.bodies for each in extra_routes if each.bodies}
    reference = "#/components/schemas/{model}"
    kinds = dict.fromkeys(kind for each in bodies.values() for kind in each)
    _, schemas = models_json_schema([(kind, "validation") for kind in kinds], ref_template=reference)
    document = app.openapi()
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
    for path, taken in bodies.items():
        references = [{"$ref": reference.format(model=kind.__name__)} for kind in taken]
        schema = references[0] if len(references) == 1 else {"anyOf": references}
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        document["paths"][path]["post"]["requestBody"] = body


def app_with(routes: "Routes[Any]", keys: ApiKeys, extra_routes: Sequence[ExtraRoute]) -> FastAPI:
    """The routes and the gate that every backend shares."""
    settings, lifecycle = routes.settings, routes.lifecycle
    app = FastAPI(title="peagle", version=__version__, lifespan=lifecycle.lifespan, redoc_url=None)
    app.add_api_route("/health", routes.health, methods=["GET"], summary="200 when ready, 503 otherwise")
    app.add_api_route("/version", routes.version, methods=["GET"])
    app.add_api_route("/metrics", routes.metrics, methods=["GET"], summary="Prometheus metrics")
    app.add_api_route("/v1/models", routes.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", routes.model, methods=["GET"])
    for path in ANSWERS:
        app.add_api_route(path, partial(routes.post, path), methods=["POST"], name=path)
    for extra in extra_routes:
        for method in extra.methods:
            name = f"{extra.path.strip('/')}_{method.lower()}"
            handle = partial(extra.handle, routes)
            app.add_api_route(extra.path, handle, methods=[method], operation_id=name, summary=extra.summary)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_middleware(
        Gate,
        keys=keys,
        lifecycle=lifecycle,
        guarded=(*GUARDED, *(each.path for each in extra_routes if each.needs_key)),
        quiet={*QUIET, *(each.path for each in extra_routes if not each.needs_key)},
        is_json=settings.log_format == "json",
    )
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
    path = request.url.path[:200]
    what = {404: f"no route {path!r}", 405: f"{request.method} is not allowed for {path!r}"}
    message = what.get(error.status_code, str(error.detail))
    return HttpError(error.status_code, message, headers=dict(error.headers or {})).response()


class Routes(ABC, Generic[S]):
    """One method per route. Subclasses say how a request body is answered."""

    def __init__(self, settings: ServerSettings, lifecycle: Lifecycle[S]) -> None:
        self.settings, self.lifecycle = settings, lifecycle

    @abstractmethod
    async def answer(self, path: str, data: Any, request: Request) -> Response:
        """Answer a request body sent to `path`."""

    async def health(self) -> Response:
        """Reads a flag and runs no generation: health checks have short timeouts."""
        if self.lifecycle.state == "ready":
            return Response(status_code=200)
        raise self.lifecycle.refusal()

    async def version(self) -> Response:
        return JsonResponse({"version": __version__})

    async def metrics(self) -> Response:
        service = self.lifecycle.service
        return Response(await service.metrics_text() if service else b"", media_type=CONTENT_TYPE_LATEST)

    async def models(self) -> Response:
        service = self.lifecycle.answering()
        return JsonResponse({"object": "list", "data": [service.model_entry(name) for name in service.names]})

    async def model(self, name: str) -> Response:
        service = self.lifecycle.answering()
        service.check_model(name)
        return JsonResponse(service.model_entry(name))

    async def post(self, path: str, request: Request) -> Response:
        return await self.answer(path, await read_json(request, self.settings), request)


class EngineRoutes(Routes[Service]):
    """The routes in front of our own engine, and the page at `/`."""

    async def answer(self, path: str, data: Any, request: Request) -> Response:
        kind, handle = ANSWERS[path]
        return await handle(self.lifecycle.answering(), validated(kind, data), request)

    async def static(self, name: str) -> Response:
        if name not in os.listdir(STATIC):
            raise HTTPException(404)
        return FileResponse(STATIC / name, headers={"Cache-Control": "no-cache"})


async def _tokenize(service: Service, body: TokenizeBody, request: Request) -> Response:
    service.check_model(body.model)
    prompt, messages = body.prompt, body.messages
    if (prompt is None) == (messages is None):
        raise HttpError(400, "exactly one of 'prompt' and 'messages' is required", param="prompt")

    def run() -> bytes:
        if prompt is not None:
            ids = service.encode(prompt, body.add_special_tokens)
        else:
            ids = render(service, messages or [], body.tools or (), body)
        texts = [service.token_texts[each].text for each in ids] if body.return_token_strs else None
        return dumps({"count": len(ids), "max_model_len": service.max_length, "tokens": ids, "token_strs": texts})

    return Response(await service.in_thread(request, run), media_type="application/json")


async def _detokenize(service: Service, body: DetokenizeBody, request: Request) -> Response:
    service.check_model(body.model)
    if len(body.tokens) > service.max_length:
        why = f"has {len(body.tokens)} elements, which exceeds the limit of {service.max_length}"
        raise invalid("tokens", why, "context_length_exceeded")
    if body.tokens and max(body.tokens) >= service.vocab_size:
        raise invalid("tokens", f"must be between 0 and {service.vocab_size - 1}, got {max(body.tokens)}")
    decode = service.tokenizer.decode
    text = await service.in_thread(request, lambda: decode(body.tokens, clean_up_tokenization_spaces=False))
    return JsonResponse({"prompt": text})


ANSWERS: dict[str, tuple[type[BaseModel], Callable[..., Awaitable[Response]]]] = {
    "/v1/chat/completions": (ChatBody, answer_chat),
    "/v1/completions": (CompletionBody, answer_completion),
    "/tokenize": (TokenizeBody, _tokenize),
    "/detokenize": (DetokenizeBody, _detokenize),
}
"""By path, the request body and what answers it."""


async def read_json(request: Request, settings: ServerSettings) -> Any:
    """The JSON body of a request, within the limits of size and time."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise HttpError(415, f"the body must be JSON: send 'Content-Type: application/json', got {kind[:100]!r}")
    too_large = HttpError(413, f"the body exceeds the limit of {settings.max_body_bytes} bytes", code="body_too_large")
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
        message = f"the body did not arrive within {settings.body_seconds:g} s"
        raise HttpError(408, message, headers={"Connection": "close"}) from None
    try:
        found = json.loads(data)
        if SURROGATE.search(data):
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise HttpError(400, f"the body contains {half}, an unpaired surrogate") from None
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"the body is not valid JSON: {error}"[:300]) from None
