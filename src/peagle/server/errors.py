"""HTTP errors in OpenAI's format: {"error": {"message", "type", "param", "code"}}."""

import logging
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response

from peagle.errors import CapacityError, EngineDeadError, PeagleError, QueueFullError
from peagle.server.sse import dumps

log = logging.getLogger(__name__)

SEE_DOCS = "see /docs for the fields"
MESSAGES = {
    "missing": "is missing",
    "too_short": "must not be empty",
    "greater_than_equal": "must be at least {ge}, got {value}",
    "less_than_equal": "must be at most {le}, got {value}",
    "less_than": "must be below {lt}, got {value}",
    "too_long": "must have at most {max_length} elements, got {actual_length}",
    "model_type": "must be an object, got {value}",
    "dict_type": "must be an object, got {value}",
}
"""Messages for pydantic's error types."""
MAX_QUOTED = 200
"""Characters of a client's value that an error message quotes."""
MAX_MESSAGE, MAX_PARAM = 500, 100
"""Characters of a message and of a field's name. Each takes at most 6 bytes, so a body stays below 4 KB."""


class HttpError(Exception):
    """A response with an error status. `param` names the field at fault."""

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
        self.status, self.message, self.code = status, _shortened(message, MAX_MESSAGE), code
        self.param = None if param is None else _shortened(param, MAX_PARAM)
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 404: "not_found_error"}.get(self.status, "invalid_request_error")
        if self.status >= 500:
            kind = "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Response(dumps(self.body()), self.status, self.headers, media_type="application/json")


def unavailable(message: str, code: str) -> HttpError:
    """A 503 that the client may retry, here or at another replica."""
    return HttpError(503, message, code=code, headers={"Retry-After": "1"})


def invalid(name: str, why: str, code: str | None = None) -> HttpError:
    """A 400 for one field."""
    return HttpError(400, f"{name!r} {why}", param=name, code=code)


def unsupported(name: str, why: str) -> HttpError:
    return invalid(name, f"is not supported: {why}", "unsupported_parameter")


def as_http_error(error: Exception, known_params: frozenset[str] = frozenset()) -> HttpError:
    """The HTTP error for an exception. Failures that are not the client's are logged, without details to the client."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, TimeoutError):
        message = "the request exceeded the server's time limit; ask for fewer tokens"
        return HttpError(504, message, code="timeout", headers={"x-should-retry": "false"})
    if isinstance(error, QueueFullError):
        return unavailable(_one_line(error), "queue_full")
    if isinstance(error, EngineDeadError):
        log.error("the engine has stopped: %s", error.message)
        return unavailable("the engine has stopped", "engine_dead")
    if isinstance(error, PeagleError):
        message, first = _one_line(error), error.message.split(" ", 1)[0]
        code = "capacity" if isinstance(error, CapacityError) else None
        if first in known_params:
            return HttpError(400, message.replace(first, repr(first), 1), param=first, code=code)
        return HttpError(400, message, code=code)
    log.error("a request failed", exc_info=error)
    return HttpError(500, "internal error; see the server's log", code="internal_error")


def as_bad_body(error: ValidationError, name: str = "body") -> HttpError:
    """A 400 for the first field that does not validate."""
    complaints = error.errors(include_url=False)
    # In a union, the alternative that matched furthest into the body is the one the client meant, then one of its type.
    first = max(complaints, key=lambda each: (_depth(each["loc"]), not each["type"].endswith("_type")))
    where = ".".join(str(part) for part in first["loc"] if not _is_alternative(part)) or name
    value = repr(first.get("input"))
    value = value if len(value) <= MAX_QUOTED else value[:MAX_QUOTED] + "..."
    if first["type"] == "extra_forbidden":
        return HttpError(400, f"unknown field {where!r}; {SEE_DOCS}", param=where, code="unknown_parameter")
    if first["type"] in MESSAGES:
        return invalid(where, MESSAGES[first["type"]].format(value=value, **first.get("ctx", {})))
    return invalid(where, f"{first['msg'].replace('Input should be', 'must be')}, got {value}")


def _depth(location: tuple[int | str, ...]) -> int:
    return sum(isinstance(part, int) for part in location)


def _is_alternative(part: object) -> bool:
    """Whether a part of a location names a type of a union, not a field."""
    return isinstance(part, str) and (part in ("str", "int", "float", "bool") or "[" in part or part[:1].isupper())


def _shortened(text: str, limit: int) -> str:
    """At most `limit` characters, without the middle: it is what a client sent. The end says what to do."""
    return text if len(text) <= limit else f"{text[: limit - limit // 4 - 5]} ... {text[-(limit // 4) :]}"


def _one_line(error: PeagleError) -> str:
    return f"{error.message}; {error.hint}" if error.hint else error.message
