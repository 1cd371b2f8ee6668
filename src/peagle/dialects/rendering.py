"""What chat templates expect: messages with calls and thinking, descriptions of tools, the effort of thinking."""

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any

HARMONY = "<|channel|>"
SHORT_IDS = "with length 9"
"""Mistral's templates refuse ids of calls that have another length."""
HARMONY_EFFORTS = ("low", "medium", "high")


def template_message(message: Mapping[str, Any], template: str) -> dict[str, Any]:
    """A client's message as templates take it: plain text, arguments as objects, thinking under the template's name."""
    plain = dict(message)
    if isinstance(plain.get("content"), list):
        plain["content"] = "\n".join(part["text"] for part in plain["content"])
    plain.setdefault("content", "")
    if plain["role"] == "developer" and "developer" not in template:
        plain["role"] = "system"
    if SHORT_IDS in template:
        for holder, key in ((plain, "tool_call_id"), *((call, "id") for call in plain.get("tool_calls", ()))):
            if holder.get(key):
                holder[key] = re.sub(r"[^0-9A-Za-z]", "", holder[key])[-9:]
    for call in plain.get("tool_calls", ()):
        with contextlib.suppress(ValueError, RecursionError):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
    thinking = plain.get("reasoning_content") or plain.get("reasoning")
    if thinking and "reasoning_content" not in template:
        if "message.thinking" in template and not (plain["content"] and plain.get("tool_calls")):
            plain.setdefault("thinking", thinking)
    elif thinking:
        plain["reasoning_content"] = thinking
    return plain


def template_tool(tool: dict[str, Any], template: str) -> dict[str, Any]:
    """A tool as the template takes it. That of GPT-OSS needs a description."""
    if HARMONY in template:
        tool["function"].setdefault("description", "")
    return tool


def effort_variables(effort: str, template: str) -> dict[str, Any] | None:
    """The template's variables for `reasoning_effort`; None if it has none. Raises ValueError for an unknown effort."""
    if "reasoning_effort" in template:
        if HARMONY in template and effort not in HARMONY_EFFORTS:
            raise ValueError(f"must be one of {', '.join(HARMONY_EFFORTS)}, got {effort[:50]!r}")
        return {"reasoning_effort": effort}
    return {"enable_thinking": effort != "none"} if "enable_thinking" in template else None
