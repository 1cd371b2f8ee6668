"""Request and response bodies on their way between a client and vLLM."""

import contextlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request

from peagle.errors import nearest
from peagle.server.errors import HttpError, as_bad_body, unsupported
from peagle.server.protocol import LABELS, Speculation
from peagle.server.sse import data_of, dumps, event

log = logging.getLogger(__name__)

MAX_ERROR_CHARACTERS = 2000


@dataclass(frozen=True)
class Served:
    """What a vLLM process serves."""

    names: tuple[str, ...]
    target: str
    engine: str
    """name and version"""
    max_batch: int
    num_draft_tokens: int = 0
    method: str | None = None
    drafter_name: str | None = None
    acceptance: Mapping[str, Any] = field(default_factory=dict)
    """from the drafter's card"""
    max_waiting: int | None = None
    """requests that may wait in the queue; None: no limit"""


def checked(data: Any, known: frozenset[str] | None, served: Served, max_choices: int) -> dict[str, Any]:
    """The body to forward. Refuses fields that are not `known`: vLLM's fields of the route, if it lists any."""
    if not isinstance(data, dict):
        raise HttpError(400, f"the body must be a JSON object, got {type(data).__name__}")
    body = {name: value for name, value in data.items() if value is not None and name not in LABELS}
    _check_speculation(body.pop("speculation", None), served)
    for name in body:
        if known and name not in known:
            hint = nearest(name, known)
            hint = hint if not hint.startswith("known") else f"{served.engine} does not have it"
            raise HttpError(400, f"unknown field {name[:100]!r}; {hint}", param=name[:100], code="unknown_parameter")
    prompt, n = body.get("prompt"), body.get("n")
    num_prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    num_choices = num_prompts * (n if isinstance(n, int) else 1)
    if num_choices > max_choices:
        raise HttpError(400, f"{num_choices} answers (prompts x n) exceed the limit of {max_choices}", param="n")
    return body


def _check_speculation(value: Any, served: Served) -> None:
    """Refuse per-request speculation settings: vLLM has one setting for all requests."""
    if value is None:
        return
    try:
        asked = Speculation.model_validate(value)
    except ValidationError as error:
        raise as_bad_body(error, "speculation") from None
    engine, num_draft_tokens = served.engine, served.num_draft_tokens
    if not asked.enabled and num_draft_tokens:
        raise unsupported("speculation.enabled", f"{engine} drafts for all requests or for none")
    if asked.enabled and asked.num_draft_tokens not in (None, num_draft_tokens):
        why = f"{engine} drafts {num_draft_tokens} tokens for all requests"
        raise unsupported("speculation.num_draft_tokens", why)
    if asked.tolerance != 1:
        raise unsupported("speculation.tolerance", f"{engine} accepts drafts exactly")
    if asked.details:
        raise unsupported("speculation.details", f"{engine} does not report how each token was produced")


def request_fields(document: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """The body fields of each route, from an OpenAPI document.

    >>> schema = {"$ref": "#/components/schemas/A"}
    >>> body = {"content": {"application/json": {"schema": schema}}}
    >>> document = {"paths": {"/v1/x": {"post": {"requestBody": body}}}}
    >>> request_fields(document | {"components": {"schemas": {"A": {"properties": {"n": {}}}}}})
    {'/v1/x': frozenset({'n'})}
    """
    schemas = (document.get("components") or {}).get("schemas") or {}
    found: dict[str, frozenset[str]] = {}
    for path, operations in (document.get("paths") or {}).items():
        content = ((operations.get("post") or {}).get("requestBody") or {}).get("content") or {}
        schema = (content.get("application/json") or {}).get("schema")
        if schema is None:
            continue
        names: set[str] = set()
        for each in schema.get("anyOf") or schema.get("oneOf") or [schema]:
            each = schemas.get(each.get("$ref", "").rpartition("/")[2], each)
            names |= set(each.get("properties") or ())
        found[path] = frozenset(names)
    return found


def as_error(status: int, content: bytes) -> HttpError:
    """vLLM's error in our format. vLLM sends {"error": {message, type, param, code}} with a number as code."""
    message, param = "", None
    try:
        document = json.loads(content)
        error = document.get("error", document)
        message = error if isinstance(error, str) else str(error.get("message") or error.get("detail") or "")
        param = error.get("param") if isinstance(error, dict) else None
    except (ValueError, AttributeError):
        pass
    message = message[:MAX_ERROR_CHARACTERS] or f"the engine returned status {status}"
    if status == 503:
        return HttpError(503, message, param=param, code="engine_busy", headers={"Retry-After": "1"})
    if status >= 500:
        log.error("the engine failed a request with %d: %s", status, message)
        return HttpError(500, "the engine failed this request; see the server's log", code="engine_error")
    return HttpError(status, message, param=param)


def rewritten(text: bytes, request: Request) -> bytes:
    """One event of vLLM's stream. Only those with an error or with figures are parsed and changed."""
    if text.startswith(b"data: {") and (
        b'"metrics"' in text or b'"usage"' in text or text.startswith(b'data: {"error"')
    ):
        with contextlib.suppress(ValueError):
            document = json.loads(data_of(text) or b"")
            if "error" in document:
                status = document["error"].get("code") if isinstance(document["error"], dict) else None
                document = as_error(status if isinstance(status, int) else 500, dumps(document)).body()
            account(document, request)
            return event(document)
    return text + b"\n\n"


def account(document: dict[str, Any], request: Request) -> None:
    """Record what the request log shows of a response. Copy its figures to `usage.metrics`, as our own engine does."""
    usage, metrics = document.get("usage"), document.get("metrics") or {}
    if not isinstance(usage, dict):
        return
    figures = metrics.get("speculative_decoding") or {}
    if figures:
        usage["metrics"] = {"speculative_decoding": figures}
    request.state.account = {
        "id": document.get("id"),
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "finish_reasons": [each.get("finish_reason") for each in document.get("choices") or []],
        "acceptance_length": figures.get("mean_acceptance_length"),
        "time_to_first_token_ms": metrics.get("time_to_first_token_ms"),
        "tokens_per_second": metrics.get("tokens_per_second"),
    }
