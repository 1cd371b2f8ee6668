"""An answer as the Responses API writes it: items that are opened, grow and are closed, with an event for each."""

import uuid
from typing import Any

from peagle.responses.protocol import ResponsesBody

Json = dict[str, Any]
STATUS = {"length": "incomplete"}


class Output:
    """Builds the response from deltas of a chat completion, and the events of a stream on the way."""

    def __init__(self, body: ResponsesBody, chat: Json, frame: Json) -> None:
        """`chat` is the request as it was answered, `frame` the first document or chunk of the answer."""
        self.response = _empty_response(body, chat, frame)
        self._items: list[Json] = self.response["output"]
        self._num_events = 0
        self._is_open = False

    def begin(self) -> list[Json]:
        return [self._event(f"response.{kind}", response=self._snapshot()) for kind in ("created", "in_progress")]

    def add(self, delta: Json) -> list[Json]:
        """The events of a delta, or of a whole message."""
        events: list[Json] = []
        if text := delta.get("reasoning_content"):
            events += self._grow("reasoning", text)
        if text := delta.get("content"):
            events += self._grow("message", text)
        for call in delta.get("tool_calls") or ():
            events += self._grow_call(call)
        return events

    def end(self, finish_reason: str | None, usage: Json) -> list[Json]:
        status = STATUS.get(finish_reason or "", "completed")
        events = self._close(status)
        self.response |= {"status": status, "usage": _usage(usage)}
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        return [*events, self._event(f"response.{status}", response=self._snapshot())]

    def _grow(self, kind: str, text: str) -> list[Json]:
        """Add text to the open item of this kind, or to a new one."""
        part_type = "reasoning_text" if kind == "reasoning" else "output_text"
        events = []
        if not self._is_open or self._items[-1]["type"] != kind:
            more: Json = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
            events = self._open({"type": kind, "id": _id("rs" if kind == "reasoning" else "msg"), "content": []} | more)
            part: Json = {"type": part_type, "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
            self._items[-1]["content"] = [part]
            events.append(self._event("response.content_part.added", part=dict(part), content_index=0))
        self._items[-1]["content"][0]["text"] += text
        more = {"logprobs": []} if kind == "message" else {}
        return [*events, self._event(f"response.{part_type}.delta", delta=text, content_index=0, **more)]

    def _grow_call(self, call: Json) -> list[Json]:
        function, events = call["function"], list[Json]()
        if "id" in call:
            item = {"type": "function_call", "id": _id("fc"), "call_id": call["id"]}
            events = self._open(item | {"name": function["name"], "arguments": ""})
        self._items[-1]["arguments"] += function["arguments"]
        if function["arguments"]:
            events.append(self._event("response.function_call_arguments.delta", delta=function["arguments"]))
        return events

    def _open(self, item: Json) -> list[Json]:
        events = self._close("completed")
        self._items.append(item | {"status": "in_progress"})
        self._is_open = True
        return [*events, self._event("response.output_item.added", item=dict(self._items[-1]))]

    def _close(self, status: str) -> list[Json]:
        if not self._is_open:
            return []
        item, self._is_open = self._items[-1], False
        item["status"] = status
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            events = [self._event("response.function_call_arguments.done", **done)]
        else:
            part = item["content"][0]
            more: Json = {"logprobs": []} if item["type"] == "message" else {}
            events = [
                self._event(f"response.{part['type']}.done", text=part["text"], content_index=0, **more),
                self._event("response.content_part.done", part=part, content_index=0),
            ]
        return [*events, self._event("response.output_item.done", item=dict(item))]

    def _event(self, kind: str, **fields: Any) -> Json:
        number, self._num_events = self._num_events, self._num_events + 1
        if "response" not in fields:
            fields["output_index"] = len(self._items) - 1
            if "item" not in fields:
                fields["item_id"] = self._items[-1]["id"]
        return {"type": kind, "sequence_number": number} | fields

    def _snapshot(self) -> Json:
        return self.response | {"output": list(self._items)}


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _empty_response(body: ResponsesBody, chat: Json, frame: Json) -> Json:
    given = body.model_dump(exclude_none=True, by_alias=True)
    return {
        "id": f"resp_{frame['id'].partition('-')[2]}",
        "object": "response",
        "created_at": frame["created"],
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": frame["model"],
        "output": [],
        "parallel_tool_calls": chat.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "store": False,
        "temperature": chat.get("temperature", 1.0),
        "text": given.get("text") or {"format": {"type": "text"}},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": given.get("tools", []),
        "top_p": chat.get("top_p", 1.0),
        "truncation": "disabled",
        "usage": None,
        "user": chat.get("user"),
        "metadata": chat.get("metadata") or {},
    }


def _usage(usage: Json) -> Json:
    prompt, answer = usage.get("prompt_tokens_details") or {}, usage.get("completion_tokens_details") or {}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": prompt.get("cached_tokens", 0), "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": answer.get("reasoning_tokens", 0)},
        "total_tokens": usage["total_tokens"],
    } | {name: usage[name] for name in ("metrics",) if name in usage}
