"""POST /v1/responses: a chat completion, translated on the way in and on the way out."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from peagle.responses.output import Json, Output
from peagle.responses.protocol import ResponsesBody, as_chat, parse
from peagle.server.app import ExtraRoute, Routes, read_json
from peagle.server.sse import EventSplitter, data_of, dumps
from peagle.server.streaming import EventStream, JsonResponse


async def respond(routes: Routes[Any], request: Request) -> Response:
    body, rest = parse(await read_json(request, routes.settings))
    chat = as_chat(body, rest)
    answer = await routes.answer("/v1/chat/completions", chat, request)
    if isinstance(answer, EventStream):
        return answer.translated(lambda events: _events(events, body, chat))
    document = json.loads(bytes(answer.body))
    output, choice = Output(body, chat, document), document["choices"][0]
    output.add(choice["message"])
    output.end(choice["finish_reason"], document["usage"])
    return JsonResponse(output.response)


async def _events(chunks: AsyncGenerator[bytes, None], body: ResponsesBody, chat: Json) -> AsyncGenerator[bytes, None]:
    """The stream of a chat completion as events of a response. Nothing comes before the first chunk."""
    output: Output | None = None
    finish_reason: str | None = None
    splitter = EventSplitter()
    async with aclosing(chunks):
        async for piece in chunks:
            events: list[Json] = []
            for each in splitter.feed(piece):
                data = data_of(each)
                if data is None or data == b"[DONE]":
                    continue
                chunk = json.loads(data)
                if output is None:
                    output = Output(body, chat, chunk)
                    events += output.begin()
                for choice in chunk["choices"]:
                    events += output.add(choice["delta"])
                    finish_reason = choice["finish_reason"] or finish_reason
                if not chunk["choices"]:
                    events += output.end(finish_reason, chunk["usage"])
            if events:
                yield b"".join(
                    b"event: " + each["type"].encode() + b"\ndata: " + dumps(each) + b"\n\n" for each in events
                )


RESPONSES_ROUTE = ExtraRoute(
    "/v1/responses", ("POST",), "OpenAI's Responses API, without stored state", respond, bodies=(ResponsesBody,)
)
