"""Events as OpenAI writes them: deltas of a stream, and the message that they add up to."""

import uuid
from collections.abc import Sequence
from typing import Any

from peagle.dialects.reading import Event


class Deltas:
    """The deltas of one answer. Calls get their ids and places here."""

    def __init__(self) -> None:
        self._num_calls = 0

    def of(self, events: Sequence[Event]) -> dict[str, Any]:
        """`reasoning_content`, `content` and `tool_calls`, each if there is something new."""
        delta: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for kind, text in events:
            if kind == "reasoning":
                delta["reasoning_content"] = delta.get("reasoning_content", "") + text
            elif kind == "content":
                delta["content"] = delta.get("content", "") + text
            elif kind == "name":
                calls[self._num_calls] = {
                    "index": self._num_calls,
                    "id": f"call_{uuid.uuid4().hex[:24]}",
                    "type": "function",
                    "function": {"name": text, "arguments": ""},
                }
                self._num_calls += 1
            else:
                index = self._num_calls - 1
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
        return delta | ({"tool_calls": list(calls.values())} if calls else {})


def message_of(events: Sequence[Event]) -> dict[str, Any]:
    """The message of a finished answer."""
    delta = Deltas().of(events)
    calls = [{name: value for name, value in call.items() if name != "index"} for call in delta.get("tool_calls", ())]
    message: dict[str, Any] = {"role": "assistant", "content": delta.get("content", ""), "refusal": None}
    if "reasoning_content" in delta:
        message["reasoning_content"] = delta["reasoning_content"]
    if calls:
        message |= {"content": message["content"] or None, "tool_calls": calls}
    return message
