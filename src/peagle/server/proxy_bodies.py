"""What changes in bodies between a client and vLLM: our extensions on the way in, figures and errors on the way out."""

import contextlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request

from peagle.server.errors import HttpError, as_bad_body, unsupported
from peagle.server.protocol import Speculation
from peagle.server.streaming import dumps

log = logging.getLogger(__name__)

MAX_ERROR_CHARACTERS = 2000


@dataclass(frozen=True)
class Served:
    """What the process behind serves."""

    names: tuple[str, ...]
    target: str
    engine: str
    """its name and version"""
    max_batch: int
    num_draft_tokens: int = 0
    method: str | None = None
    drafter_name: str | None = None
    acceptance: Mapping[str, Any] = field(default_factory=dict)
    """of the drafter's card"""
    max_waiting: int | None = None
    """requests that may wait for a place in the batch; None: any number"""


def check_speculation(value: Any, served: Served) -> None:
    """Refuse what a request asks of the drafts that vLLM settles for all requests when it starts."""
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
    if asked.details:
        raise unsupported("speculation.details", f"{engine} does not tell how each token came about")


def request_fields(document: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """By route, the fields of its body, out of an OpenAPI document.

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
    """An engine's refusal in our form. vLLM gives {"error": {message, type, param, code}}, with a number for a code."""
    message, param = "", None
    try:
        document = json.loads(content)
        error = document.get("error", document)
        message = error if isinstance(error, str) else str(error.get("message") or error.get("detail") or "")
        param = error.get("param") if isinstance(error, dict) else None
    except (ValueError, AttributeError):
        pass
    message = message[:MAX_ERROR_CHARACTERS] or f"the engine says {status}"
    if status == 503:
        return HttpError(503, message, param=param, code="engine_busy", headers={"Retry-After": "1"})
    if status >= 500:
        log.error("the engine failed at a request with %d: %s", status, message)
        return HttpError(500, "the engine failed at this request; the server's log says why", code="engine_error")
    return HttpError(status, message, param=param)


def num_choices(body: dict[str, Any]) -> int:
    prompt, n = body.get("prompt"), body.get("n")
    num_prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    return num_prompts * (n if isinstance(n, int) else 1)


def event(data: bytes, request: Request) -> bytes:
    """One server-sent event, in our form where it has something that we put elsewhere."""
    if data.startswith(b"data: {") and (
        b'"metrics"' in data or b'"usage"' in data or data.startswith(b'data: {"error"')
    ):
        with contextlib.suppress(ValueError):
            document = json.loads(data.removeprefix(b"data: "))
            if "error" in document:
                status = document["error"].get("code") if isinstance(document["error"], dict) else None
                document = as_error(status if isinstance(status, int) else 500, dumps(document)).body()
            bring_figures(document)
            account(document, request)
            data = b"data: " + dumps(document)
    return data + b"\n\n"


def bring_figures(document: dict[str, Any]) -> None:
    """Speculation figures stand where our own engine has them too: in `usage.metrics`."""
    figures = (document.get("metrics") or {}).get("speculative_decoding")
    if figures and isinstance(document.get("usage"), dict):
        document["usage"]["metrics"] = {"speculative_decoding": figures}


def account(document: Any, request: Request) -> None:
    """What the request log shows of an answer."""
    usage = document.get("usage") if isinstance(document, dict) else None
    if not isinstance(usage, dict):
        return
    metrics = document.get("metrics") or {}
    figures = metrics.get("speculative_decoding") or {}
    request.state.account = {
        "id": document.get("id"),
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "finish_reasons": [each.get("finish_reason") for each in document.get("choices") or []],
        "acceptance_length": figures.get("mean_acceptance_length"),
        "time_to_first_token_ms": metrics.get("time_to_first_token_ms"),
        "tokens_per_second": metrics.get("tokens_per_second"),
    }
