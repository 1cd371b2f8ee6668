"""What goes wrong, in OpenAI's form: {"error": {"message", "type", "param", "code"}}."""

import json
import logging
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from peagle.errors import CapacityError, EngineDeadError, PeagleError, QueueFullError

log = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1
MAX_QUOTED = 200
"""Characters of a client's value that are shown back to it."""


class HttpError(Exception):
    """A request that ends with a status other than 200. `param` names the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 404: "not_found_error"}.get(self.status, "invalid_request_error")
        if self.status >= 500:
            kind = "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        content = json.dumps(self.body(), ensure_ascii=False).encode("utf-8", "replace")
        return Response(content, self.status, self.headers, media_type="application/json")


def unavailable(message: str, code: str) -> HttpError:
    """A refusal that may be tried again, here or at another replica."""
    return HttpError(503, message, code=code, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})


def unsupported(name: str, why: str) -> HttpError:
    return HttpError(400, f"{name!r} is not supported: {why}", param=name, code="unsupported_parameter")


def unknown_model(name: str, names: Sequence[str]) -> HttpError:
    message = f"the model {name[:200]!r} does not exist; this server has {', '.join(names)}"
    return HttpError(404, message, param="model", code="model_not_found")


def as_http_error(error: Exception, known_params: frozenset[str] = frozenset()) -> HttpError:
    """The answer to an error from below. Anything but a mistake of the caller is logged and told in general words."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, TimeoutError):
        message = "the request took longer than the server allows; ask for fewer tokens, or stream and stop earlier"
        return HttpError(504, message, code="timeout", headers={"x-should-retry": "false"})
    if isinstance(error, QueueFullError):
        return unavailable(_one_line(error), "queue_full")
    if isinstance(error, EngineDeadError):
        log.error("a request met an engine that has ended: %s", error.message)
        return unavailable("the engine has stopped and serves nobody any more", "engine_dead")
    if isinstance(error, PeagleError):
        first = error.message.split(" ", 1)[0]
        code = "capacity" if isinstance(error, CapacityError) else None
        return HttpError(400, _one_line(error), param=first if first in known_params else None, code=code)
    log.error("a request failed", exc_info=error)
    return HttpError(500, "the server failed at this request; its log says why", code="internal_error")


def as_bad_body(error: ValidationError, name: str | None = None) -> HttpError:
    """A body that is not what its route takes; the first complaint is told, with where it is."""
    complaints = error.errors(include_url=False, include_context=False)
    # Of the alternatives of a union, the complaint that got furthest into the body is the one that was meant.
    first = max(complaints, key=lambda each: sum(isinstance(part, int) for part in each["loc"]))
    where = ".".join(str(part) for part in first["loc"] if not _is_alternative(part)) or name
    value = repr(first.get("input"))
    value = value if len(value) <= MAX_QUOTED else value[:MAX_QUOTED] + "..."
    what = first["msg"][:1].lower() + first["msg"][1:]
    if first["type"] == "missing":
        return HttpError(400, f"{where!r} is missing", param=where)
    if first["type"] == "extra_forbidden":
        message = f"unknown field {where!r}; see /docs for what there is"
        return HttpError(400, message, param=where, code="unknown_parameter")
    if first["type"] == "too_short":
        return HttpError(400, f"{where!r} must not be empty", param=where)
    return HttpError(400, f"{where!r}: {what}, got {value}" if where else what, param=where)


def _is_alternative(part: object) -> bool:
    """Whether a part of a location names a type that was tried rather than a field."""
    return isinstance(part, str) and (part in ("str", "int", "float", "bool") or "[" in part or part[:1].isupper())


def _one_line(error: PeagleError) -> str:
    return f"{error.message}; {error.hint}" if error.hint else error.message


async def on_error(_: Request, error: Exception) -> Response:
    """Handler for everything a route raises."""
    return as_http_error(error).response()
