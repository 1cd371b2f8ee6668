"""Which tools a request shows to the target, and whether it must call one."""

from dataclasses import dataclass
from typing import Any

from peagle.dialects.dialect import Dialect
from peagle.sampling_params import Grammar
from peagle.server.errors import invalid, unsupported
from peagle.server.protocol import ChatBody, NamedTool, Tool
from peagle.server.sampling import make_grammar


@dataclass(frozen=True)
class ToolUse:
    """The tools that a request shows to the target, and how it may call them."""

    tools: tuple[Tool, ...] = ()
    is_forced: bool = False
    """whether a grammar makes the answer a call"""
    stops: tuple[str, ...] = ()

    @property
    def schemas(self) -> dict[str, Any]:
        return {tool.function.name: tool.function.parameters for tool in self.tools}


def tool_use(body: ChatBody, dialect: Dialect) -> ToolUse:
    """What `tools` and `tool_choice` of a request mean."""
    if not body.tools:
        if body.tool_choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "requires 'tools'")
        return ToolUse()
    if not dialect.has_tools:
        raise unsupported("tools", "the target's chat template does not use them")
    tools = tuple(body.tools)
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        if name not in {tool.function.name for tool in tools}:
            raise invalid("tool_choice", f"names {name[:100]!r}, which is not in 'tools'")
    if body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool):
        return ToolUse(tools, is_forced=True)
    if body.tool_choice == "none":
        return ToolUse()
    if body.parallel_tool_calls is not False:
        return ToolUse(tools)
    if dialect.calls == "mistral":
        raise unsupported("parallel_tool_calls", "the target's chat template writes all calls as one list")
    return ToolUse(tools, stops=(dialect.call_end,) if dialect.call_end else ())


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
