"""Tool calls: which format the target's chat template uses, and parsing them from an answer, streamed or not.

hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number            (Qwen, Hermes, SmolLM)
mistral   [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
llama     the whole answer is {"name": ..., "parameters": {...}}
forced    the whole answer is {"name": ..., "arguments": {...}}, by a grammar, because tool_choice requires a call
"""

import json
import uuid
from dataclasses import dataclass
from typing import Any, Literal

from peagle.sampling_params import Grammar
from peagle.server.errors import invalid, unsupported
from peagle.server.protocol import ChatBody, NamedTool, Tool
from peagle.server.sampling import make_grammar

Form = Literal["hermes", "mistral", "llama", "forced", "none"]
OPENING: dict[Form, str] = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]"}
CLOSING = "</tool_call>"


@dataclass(frozen=True)
class ToolFormat:
    """The tools that a request shows to the target, and how calls of them are parsed."""

    tools: tuple[Tool, ...] = ()
    form: Form = "none"
    only_one: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        return (CLOSING,) if self.only_one and self.form == "hermes" else ()


def tool_format(body: ChatBody, template: str) -> ToolFormat:
    """The format for a request's `tools` and `tool_choice`."""
    if not body.tools:
        if body.tool_choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "requires 'tools'")
        return ToolFormat()
    if "tools" not in template:
        raise unsupported("tools", "the target's chat template does not use them")
    tools = tuple(body.tools)
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        if name not in {tool.function.name for tool in tools}:
            raise invalid("tool_choice", f"names {name[:100]!r}, which is not in 'tools'")
    if body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool):
        return ToolFormat(tools, "forced")
    if body.tool_choice == "none":
        return ToolFormat()
    form: Form = next((form for form, opening in OPENING.items() if opening in template), "llama")
    only_one = body.parallel_tool_calls is False
    if only_one and form == "mistral":
        raise unsupported("parallel_tool_calls", "the target's chat template writes all calls as one list")
    return ToolFormat(tools, form, only_one=only_one)


def forced_grammar(body: ChatBody) -> Grammar:
    """A grammar that allows exactly one call of an allowed tool."""
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
    """Splits one growing answer into text and calls. Holds back text that may still become a call."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._held = ""
        self._is_inside = form == "forced"
        self._is_start = True
        self.num_calls = 0

    def add(self, text: str, *, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        """The text and the calls that are certain now."""
        if self._form == "none":
            return text, []
        self._held += text
        is_hermes, calls = self._form == "hermes", list[dict[str, Any]]()
        shown = "" if self._is_inside else self._outside(is_last)
        while self._is_inside:
            inside, closing, rest = self._held.partition(CLOSING) if is_hermes else (self._held, "", "")
            if not closing and not is_last:
                break
            found = self._calls(inside)
            calls += found
            if not found:  # not a call: show the text
                shown += (OPENING["hermes"] if is_hermes else "") + inside + closing
            self._held, self._is_inside = rest, False
            shown += self._outside(is_last)
        return ("" if self.num_calls and not shown.strip() else shown), calls

    def _outside(self, is_last: bool) -> str:
        """The text that is certain to be before the next call."""
        start, may_be_json = self._held.lstrip(), self._is_start and self._form != "hermes"
        if may_be_json and start.startswith("{" if self._form == "llama" else "[{"):
            self._held, self._is_inside = start, True
            return ""
        opening = OPENING.get(self._form, "")
        before, found, rest = self._held.partition(opening) if opening else (self._held, "", "")
        if found:
            self._held, self._is_inside = rest, True
            return before
        num_held = len(self._held) if may_be_json and start in ("", "[") else _overlap(self._held, opening)
        cut = len(self._held) - (0 if is_last else num_held)
        shown, self._held = self._held[:cut], self._held[cut:]
        self._is_start = self._is_start and not shown
        return shown

    def _calls(self, text: str) -> list[dict[str, Any]]:
        """The calls in a JSON document: one, or a list outside hermes. Empty if any part is not a call."""
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            return []
        calls: list[dict[str, Any]] = []
        for value in document if isinstance(document, list) and self._form != "hermes" else [document]:
            if not isinstance(value, dict) or not isinstance(value.get("name"), str):
                return []
            arguments = value.get("arguments", value.get("parameters", {}))
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            function = {"name": value["name"], "arguments": arguments}
            index = self.num_calls + len(calls)
            calls.append(
                {"index": index, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
            )
        self.num_calls += len(calls)
        return calls


def _overlap(text: str, opening: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `opening`."""
    return next((n for n in range(min(len(text), len(opening) - 1), 0, -1) if opening.startswith(text[-n:])), 0)
