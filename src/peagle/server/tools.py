"""Tool calls: which form a target's template writes them in, and reading them out of an answer, streamed or not.

hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them   (Qwen, Hermes, SmolLM)
mistral   [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
llama     the whole answer is {"name": ..., "parameters": {...}}
forced    the whole answer is {"name": ..., "arguments": {...}}, by grammar, because tool_choice asks for a call
"""

import json
import uuid
from dataclasses import dataclass
from typing import Any, Literal

from peagle.sampling_params import Grammar
from peagle.server.errors import HttpError, unsupported
from peagle.server.protocol import ChatBody, NamedTool, Tool, ToolCall
from peagle.server.sampling import make_grammar

Form = Literal["hermes", "mistral", "llama", "forced", "none"]
OPENING = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]"}
CLOSING = "</tool_call>"


@dataclass(frozen=True)
class ToolFormat:
    """How one request's tools are shown to the target, and how its calls are told from text."""

    tools: tuple[Tool, ...]
    form: Form
    is_shown: bool = True
    only_one: bool = False

    @property
    def is_forced(self) -> bool:
        return self.form == "forced"

    @property
    def is_read(self) -> bool:
        return self.form != "none"

    @property
    def stops(self) -> tuple[str, ...]:
        return (CLOSING,) if self.only_one and self.form == "hermes" else ()


def tool_format(body: ChatBody, template: str) -> ToolFormat | None:
    """What a request's `tools` and `tool_choice` ask for; None where there are no tools."""
    if not body.tools:
        if body.tool_choice not in (None, "none", "auto"):
            raise HttpError(400, "tool_choice needs tools", param="tool_choice")
        return None
    if "tools" not in template:
        raise unsupported("tools", "the target's chat template has no place for them")
    tools = tuple(body.tools)
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        if name not in {tool.function.name for tool in tools}:
            raise HttpError(400, f"tool_choice names {name[:100]!r}, which is not among the tools", param="tool_choice")
        return ToolFormat(tools, "forced")
    if body.tool_choice == "required":
        return ToolFormat(tools, "forced")
    if body.tool_choice == "none":
        return ToolFormat(tools, "none", is_shown=False)
    form: Form = "llama"
    if "<tool_call>" in template:
        form = "hermes"
    elif "[TOOL_CALLS]" in template:
        form = "mistral"
    only_one = body.parallel_tool_calls is False
    if only_one and form == "mistral":
        raise unsupported("parallel_tool_calls", "the target's template writes all calls as one list")
    return ToolFormat(tools, form, only_one=only_one)


def forced_grammar(body: ChatBody) -> Grammar:
    """A grammar that lets the target write nothing but one call of a tool that may be called."""
    named = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": tool.function.parameters or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in body.tools or ()
        if named in (None, tool.function.name)
    ]
    return make_grammar("json_schema", calls[0] if len(calls) == 1 else {"anyOf": calls}, "tool_choice")


class ToolReader:
    """Splits one answer into text and calls as it grows; what may yet become a call is held back."""

    def __init__(self, tools: ToolFormat) -> None:
        self._form = tools.form
        self._held = ""
        self._is_inside = tools.form == "forced"
        self._is_start = True
        self.num_calls = 0

    @staticmethod
    def as_template_call(call: ToolCall) -> dict[str, Any]:
        """A call that a client sends back, its arguments an object again, as templates want them."""
        plain = call.model_dump(exclude_none=True)
        try:
            plain["function"]["arguments"] = json.loads(call.function.arguments or "{}")
        except (ValueError, RecursionError):
            return plain
        return plain

    def add(self, text: str, *, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Text and calls that became certain."""
        self._held += text
        if self._form == "hermes":
            return self._hermes(is_last)
        return self._rest_is_json(is_last)

    def _hermes(self, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        shown, calls = "", []
        while True:
            if self._is_inside:
                inside, found, rest = self._held.partition(CLOSING)
                if not found and not is_last:
                    break
                call = self._call(inside)
                if call is None:
                    shown += OPENING["hermes"] + inside + found  # not a call after all: show what was written
                else:
                    calls.append(call)
                self._held, self._is_inside = rest, False
            else:
                before, found, rest = self._held.partition(OPENING["hermes"])
                if not found:
                    num_held = 0 if is_last else _overlap(self._held, OPENING["hermes"])
                    cut = len(self._held) - num_held
                    shown, self._held = shown + self._held[:cut], self._held[cut:]
                    break
                shown, self._held, self._is_inside = shown + before, rest, True
            if not self._held and not self._is_inside:
                break
        return (shown.strip() if self.num_calls and not shown.strip() else shown), calls

    def _rest_is_json(self, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Forms in which everything from some point on is one JSON document."""
        shown = ""
        if not self._is_inside:
            shown = self._before_json(is_last)
        if not (self._is_inside and is_last):
            return shown, []
        document, self._held = self._held, ""
        text = document.strip()
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            return shown + document, []
        calls = [self._call_of(value) for value in (values if isinstance(values, list) else [values])]
        if not calls or None in calls:
            self.num_calls = 0
            return shown + document, []
        return shown, [call for call in calls if call is not None]

    def _before_json(self, is_last: bool) -> str:
        start = self._held.lstrip()
        if self._is_start and start.startswith("{" if self._form == "llama" else "[{"):
            self._held, self._is_inside = start, True
            return ""
        opening = OPENING.get(self._form, "")
        before, found, rest = self._held.partition(opening) if opening else (self._held, "", "")
        if found:
            self._held, self._is_inside = rest, True
            return before
        num_held = _overlap(self._held, opening)
        if self._is_start and start in ("", "["):
            num_held = len(self._held)
        cut = len(self._held) - (0 if is_last else num_held)
        shown, self._held = self._held[:cut], self._held[cut:]
        self._is_start = self._is_start and not shown
        return shown

    def _call(self, text: str) -> dict[str, Any] | None:
        try:
            return self._call_of(json.loads(text))
        except (ValueError, RecursionError):
            return None

    def _call_of(self, value: Any) -> dict[str, Any] | None:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        call = {
            "index": self.num_calls,
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": value["name"], "arguments": arguments},
        }
        self.num_calls += 1
        return call


def _overlap(text: str, opening: str) -> int:
    """Length of the longest end of the text that the opening begins with."""
    return next((n for n in range(min(len(text), len(opening) - 1), 0, -1) if opening.startswith(text[-n:])), 0)
