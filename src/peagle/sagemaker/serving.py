"""The HTTP routes that SageMaker calls: /ping and /invocations."""

import re
from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from peagle.errors import RequestError
from peagle.server.app import ANSWERS, ExtraRoute, Routes, read_json
from peagle.server.protocol import ChatBody, CompletionBody

CUSTOM_ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"


async def ping(routes: Routes[Any], _: Request) -> Response:
    """Only reads a flag: SageMaker allows two seconds."""
    return await routes.health()


async def invocations(routes: Routes[Any], request: Request) -> Response:
    data = await read_json(request, routes.settings)
    path = invocation_route(request.headers.get(CUSTOM_ATTRIBUTES), data, ANSWERS)
    return await routes.answer(path, data, request)


SAGEMAKER_ROUTES = (
    ExtraRoute("/ping", ("GET", "POST"), "SageMaker's health check", ping, needs_key=False),
    ExtraRoute(
        "/invocations",
        ("POST",),
        "SageMaker's inference route",
        invocations,
        bodies=(ChatBody, CompletionBody),
    ),
)


def invocation_route(attributes: str | None, body: Any, known: Iterable[str]) -> str:
    """The route for an invocation: the one in its custom attributes, else the one that fits its body.

    >>> invocation_route("route=/v1/completions,x=1", {"messages": []}, ["/v1/completions"])
    '/v1/completions'
    """
    match = re.search(r"route=(/[^\s,]+)", attributes or "")
    if match is not None:
        if match[1] not in known:
            raise RequestError(
                f"{CUSTOM_ATTRIBUTES} names an unknown route, {match[1][:200]!r}",
                hint=f"known: {', '.join(known)}",
            )
        return match[1]
    if isinstance(body, dict):
        if "messages" in body:
            return "/v1/chat/completions"
        if "prompt" in body:
            return "/v1/completions"
    raise RequestError(
        "the body has neither 'messages' nor 'prompt'", hint="send the body of a chat completion or of a completion"
    )
