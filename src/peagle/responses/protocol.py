"""The body of POST /v1/responses, and the chat completion that it stands for.

Nothing is stored between requests: clients send the whole conversation. Fields that are not listed here are passed to
the chat completion, which honours or refuses them by name.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from peagle.server.errors import invalid, unsupported
from peagle.server.protocol import NamedBody, Part, validated

NOT_STORED = "the server stores nothing; send the whole conversation as 'input'"
CLIENTS_OWN = "the server runs no tools; use tools of type 'function'"


class Text(Part):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


Texts = str | list[Text] | None


class Item(Part):
    """A message, a call, the result of a call, or thinking, by `type`."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: str | None = None
    status: str | None = None
    role: str | None = None
    content: Texts = None
    phase: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Texts = None
    summary: list[Text] | None = None
    encrypted_content: str | None = None


class FunctionTool(Part):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Part):
    type: Literal["function"]
    name: str


class TextFormat(Part):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextSettings(Part):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Part):
    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """accepted: thinking comes as it is"""
    generate_summary: None = None


class ResponsesBody(NamedBody):
    """POST /v1/responses."""

    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    """accepted: thinking comes as it is"""
    stream: bool | None = None
    stream_options: dict[Literal["include_obfuscation"], Literal[False]] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    top_logprobs: Literal[0] | None = None


def parse(data: Any) -> tuple[ResponsesBody, dict[str, Any]]:
    """The body, and the fields that go to the chat completion unchanged."""
    rest = dict(data) if isinstance(data, dict) else {}
    own = {name: rest.pop(name) for name in ResponsesBody.model_fields if name in rest}
    body = validated(ResponsesBody, own if isinstance(data, dict) else data)
    for name in ("previous_response_id", "conversation", "prompt"):
        if getattr(body, name) is not None:
            raise unsupported(name, NOT_STORED)
    for name in ("messages", "n"):
        if rest.get(name) not in (None, 1):
            raise unsupported(name, "this route takes 'input' and gives one answer")
    for name in ("max_tokens", "max_completion_tokens"):
        if rest.get(name) is not None:
            raise unsupported(name, "this route takes 'max_output_tokens'")
    return body, rest


def as_chat(body: ResponsesBody, rest: dict[str, Any]) -> dict[str, Any]:
    """The body of the chat completion."""
    chat: dict[str, Any] = rest | {"model": body.model, "messages": _messages(body)}
    if body.max_output_tokens is not None:
        chat["max_completion_tokens"] = body.max_output_tokens
    if body.tools:
        chat["tools"] = [_tool(index, tool) for index, tool in enumerate(body.tools)]
    if isinstance(body.tool_choice, FunctionChoice):
        chat["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.name}}
    elif body.tool_choice is not None and (body.tools or body.tool_choice != "auto"):
        chat["tool_choice"] = body.tool_choice
    if body.text is not None and body.text.format is not None:
        chat["response_format"] = _format(body.text.format)
    if body.reasoning is not None and body.reasoning.effort is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if body.stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    return chat


def _tool(index: int, tool: FunctionTool) -> dict[str, Any]:
    if tool.type != "function":
        raise unsupported(f"tools.{index}.type", f"{tool.type[:50]!r}: {CLIENTS_OWN}")
    if tool.name is None:
        raise invalid(f"tools.{index}.name", "is missing")
    return {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}


def _format(given: TextFormat) -> dict[str, Any]:
    if given.type != "json_schema":
        return {"type": given.type}
    if given.schema_ is None:
        raise invalid("text.format.schema", "is missing")
    return {"type": "json_schema", "json_schema": {"name": given.name, "schema": given.schema_}}


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    """The items as chat messages. Thinking, text and calls that follow each other are one message of the assistant."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for index, item in enumerate(body.input):
        if item.type == "message" and item.role != "assistant":
            if not item.role:
                raise invalid(f"input.{index}.role", "is missing")
            messages.append({"role": item.role, "content": _text(item.content)})
        elif item.type == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        else:
            _add_to_answer(messages, item, index)
    return messages


def _add_to_answer(messages: list[dict[str, Any]], item: Item, index: int) -> None:
    """Add thinking, text or a call to the assistant's last message, or to a new one if it has gone on from there."""
    order = ("reasoning_content", "content", "tool_calls")
    place = {"reasoning": 0, "message": 1, "function_call": 2}[item.type]
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or (place < 2 and any(key in last for key in order[place:])):
        last = {"role": "assistant"}
        messages.append(last)
    if place < 2:
        last[order[place]] = _text(item.content or item.summary)
        return
    if item.name is None:
        raise invalid(f"input.{index}.name", "is missing")
    function = {"name": item.name, "arguments": item.arguments or "{}"}
    last.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})


def _text(content: Texts) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())
