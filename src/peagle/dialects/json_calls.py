"""Calls that are JSON documents, with marks around them or alone.

hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number            (Qwen, Hermes, SmolLM)
mistral   [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...] or [TOOL_CALLS]name[CALL_ID]id[ARGS]{...}, any number
llama     the whole answer is {"name": ..., "parameters": {...}}
forced    the whole answer is {"name": ..., "arguments": {...}}, by a grammar, because tool_choice requires a call
"""

import json
import re
from typing import Any

from peagle.dialects.reading import Reader, Steps, overlap
from peagle.dialects.values import Arguments, BrokenError, ValueReader

CALL, CALL_END = "<tool_call>", "</tool_call>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
NAME = re.compile(r"[\w.:-]+")


def read_hermes(reader: Reader) -> Steps[None]:
    while (yield from reader.copy_until("content", CALL)):
        yield from read_call(reader, CALL, CALL_END)


def read_llama(reader: Reader) -> Steps[None]:
    if (yield from reader.look(1)) == "{":
        yield from read_call(reader, "", "")
    else:
        yield from reader.copy_until("content")


def read_forced(reader: Reader) -> Steps[None]:
    yield from read_call(reader, "", "")


def read_mistral(reader: Reader) -> Steps[None]:
    start = yield from reader.look(1)
    is_list = start == "[" and (yield from reader.look(2)) == "[{"  # without its mark
    mark = TOOL_CALLS if is_list else (yield from reader.copy_until("content", TOOL_CALLS))
    while mark:
        yield from reader.skip_space()
        if (yield from reader.peek()) == "[":
            text, mark = yield from reader.take_until(TOOL_CALLS)
            emit_calls(reader, text, TOOL_CALLS)
        else:
            text, mark = yield from reader.take_until(ARGS, TOOL_CALLS)
            name = text.partition(CALL_ID)[0].strip()
            is_call = mark == ARGS and NAME.fullmatch(name) and (yield from reader.look(1)) == "{"
            if is_call:
                reader.emit("name", name)
                yield from read_arguments(reader)
            else:
                reader.emit("content", TOOL_CALLS + text + (ARGS if mark == ARGS else ""))
            if mark != TOOL_CALLS:
                mark = yield from reader.copy_until("content", TOOL_CALLS)


def read_call(reader: Reader, opening: str, end: str) -> Steps[None]:
    """One call up to the mark that ends it; without a mark, up to the end of the answer.

    Arguments that come behind the name go out as they grow; other forms when the call is complete.
    """
    while True:
        header, at = HEADER.match(reader.held), reader.held.find(end) if end else -1
        if header is not None and (at < 0 or header.end() <= at):
            break
        if at >= 0 or reader.is_over:
            text, mark = yield from reader.take_until(*filter(None, [end]))
            emit_calls(reader, text, opening, mark or "")
            return
        yield
    reader.emit("name", json.loads(header[1], strict=False))
    reader.take(header.end())
    yield from read_arguments(reader)
    rest, mark = yield from reader.take_until(*filter(None, [end]))
    if mark is None:
        rest = rest[: len(rest) - overlap(rest, (end,))]
    if not _is_end_of_object(rest):
        reader.emit("content", rest)


def read_arguments(reader: Reader) -> Steps[None]:
    """A JSON object as the arguments of the call whose name was emitted."""
    out = Arguments(reader)
    try:
        yield from ValueReader(reader, out).value()
    except BrokenError:
        reader.emit("content", out.end())


def emit_calls(reader: Reader, text: str, opening: str, end: str = "") -> None:
    """Emit the calls in a JSON document: one, or a list. What is not a call stays text."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    found = document if isinstance(document, list) else [document]
    calls = [call for each in found if (call := as_call(each)) is not None]
    if not calls or len(calls) < len(found):
        reader.emit("content", opening + text + end)
        return
    for name, arguments in calls:
        reader.emit("name", name)
        reader.emit("arguments", json.dumps(arguments, ensure_ascii=False))


def as_call(value: Any) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments of a call that was read as JSON; None if it is none.

    >>> as_call({"name": "f", "arguments": "{}"}), as_call({"name": "f"}), as_call({"arguments": {}})
    (('f', {}), ('f', {}), None)
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    arguments = {} if arguments is None else arguments
    return (value["name"], arguments) if isinstance(arguments, dict) else None


def _is_end_of_object(text: str) -> bool:
    """Whether only the end of the call's object is left: its brace, one too many, or further keys."""
    if not text.strip("} \n"):
        return True
    try:
        return isinstance(json.loads('{"": 0' + text), dict)
    except (ValueError, RecursionError):
        return False
