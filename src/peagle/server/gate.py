"""The middleware around every request: its id, the API key, readiness, errors, and the request log."""

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from peagle.server.auth import ApiKeys
from peagle.server.errors import as_http_error, unavailable
from peagle.server.jobs import Job
from peagle.server.lifecycle import Lifecycle
from peagle.server.sse import DONE, event
from peagle.server.streaming import CLIENT_GONE, ClientGoneError

request_log = logging.getLogger("peagle.server.requests")

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True)
class Gate:
    app: ASGIApp
    keys: ApiKeys
    lifecycle: Lifecycle[Any]
    guarded: tuple[str, ...]
    """prefixes of the paths that need an API key"""
    quiet: Collection[str]
    """paths that are not logged"""
    is_json: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        started, status, is_whole = time.perf_counter(), 0, False

        async def send_with_id(message: Message) -> None:
            nonlocal status, is_whole
            is_whole = message["type"] == "http.response.body" and not message.get("more_body")
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        is_guarded = scope["path"].startswith(self.guarded)
        task = asyncio.current_task()
        assert task is not None
        if is_guarded:
            self.lifecycle.in_flight.add(task)
        try:
            if is_guarded and scope["method"] != "OPTIONS":
                self.keys.check(headers.get("authorization"))
                if self.lifecycle.state != "ready":
                    raise self.lifecycle.refusal()
            await self.app(scope, receive, send_with_id)
        except (ClientGoneError, ClientDisconnect):
            status = CLIENT_GONE
        except asyncio.CancelledError:
            reason = self.lifecycle.cut_reason
            if reason is None or is_whole:
                raise
            state["is_cut"], error = True, unavailable(reason, "aborted")
            self.lifecycle.num_cut += 1
            last = {"type": "http.response.body", "body": event(error.body()) + DONE, "more_body": False}
            await (send(last) if status else error.response()(scope, receive, send_with_id))
            status = error.status
        except Exception as error:
            if status:
                raise
            await as_http_error(error).response()(scope, receive, send_with_id)
        finally:
            self.lifecycle.in_flight.discard(task)
            if self.lifecycle.service is not None:
                metrics = self.lifecycle.service.metrics
                metrics.http.labels(getattr(scope.get("route"), "path", "other"), str(status)).inc()
                metrics.gone.inc(status == CLIENT_GONE)
                metrics.cut.inc("is_cut" in state)
            if scope["path"] not in self.quiet:
                self._log(log_entry(scope, status, time.perf_counter() - started, state))

    def _log(self, entry: dict[str, Any]) -> None:
        if self.is_json:
            request_log.info("%s", json.dumps(entry))
            return
        path = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in entry["path"])
        words = [f"{entry['method']} {path} {entry['status']} in {entry['seconds']:.3f} s"]
        if entry.get("is_cut"):
            words.append("cut by the shutdown")
        if entry.get("completion_tokens") is not None:
            words.append(f"{entry['prompt_tokens']} + {entry['completion_tokens']} tokens")
            if entry.get("tokens_per_second") is not None:
                words.append(f"{entry['tokens_per_second']} tokens/s")
            if entry.get("acceptance_length") is not None:
                words.append(f"acceptance length {entry['acceptance_length']:.2f}")
        request_log.info("%s [%s]", ", ".join(words), entry["request_id"])


def log_entry(scope: Scope, status: int, seconds: float, state: dict[str, Any]) -> dict[str, Any]:
    """The log line of a request. It never contains text of the prompt or the answer."""
    entry: dict[str, Any] = {
        "time": round(time.time(), 3),
        "event": "request",
        "request_id": state["request_id"],
        "method": scope["method"],
        "path": scope["path"][:200],
        "status": status,
        "seconds": round(seconds, 4),
    } | ({"is_cut": True} if "is_cut" in state else {})
    job: Job | None = state.get("job")
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
    return entry | state.get("account", {})
