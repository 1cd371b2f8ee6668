"""Qwen3-Coder's calls: tags around a function and around each parameter, whose text is not escaped.

<tool_call>
<function=name>
<parameter=key>
value
</parameter>
</function>
</tool_call>
"""

import json
from collections.abc import Mapping
from typing import Any

from peagle.dialects.json_calls import CALL, CALL_END, read_arguments
from peagle.dialects.reading import Reader, Steps, overlap
from peagle.dialects.values import LITERALS, Arguments, quoted

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
JSON_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


def read_xml(reader: Reader, schemas: Mapping[str, Any]) -> Steps[None]:
    """`schemas`: the parameters of each tool, as JSON schemas."""
    while mark := (yield from reader.copy_until("content", CALL, FUNCTION)):
        if mark == CALL:
            yield from reader.skip_space()
            if not (yield from reader.accept(FUNCTION)):
                reader.emit("content", CALL)
                continue
        name, mark = yield from reader.take_until(">")
        if mark is None:
            reader.emit("content", FUNCTION + name)
            return
        reader.emit("name", name.strip())
        if (yield from reader.look(1)) == "{":  # Llama 3.1's form: JSON in the function
            yield from read_arguments(reader)
            yield from reader.skip_space()
            yield from reader.accept(FUNCTION_END)
            continue
        yield from _read_parameters(reader, _properties(schemas.get(name.strip())))


def _read_parameters(reader: Reader, properties: Mapping[str, Any]) -> Steps[None]:
    out, is_first = Arguments(reader), True
    out.open("{", "}")
    while True:
        yield from reader.skip_space()
        mark = yield from reader.accept(PARAMETER, FUNCTION_END, CALL_END)
        if mark != PARAMETER:
            break
        key, mark = yield from reader.take_until(">")
        if mark is None:
            reader.held = PARAMETER + key
            break
        out.hold(f'{"" if is_first else ", "}"{quoted(key.strip())}": ')
        is_first = False
        if not (yield from _read_value(reader, out, _types(properties.get(key.strip())))):
            break
    if mark is None and reader.is_over and any(each.startswith(reader.held) for each in (PARAMETER, FUNCTION_END)):
        reader.held = ""  # a tag that was cut
    reader.emit("content", out.end())
    if mark == FUNCTION_END:
        yield from reader.skip_space()
        yield from reader.accept(CALL_END)


def _read_value(reader: Reader, out: Arguments, types: frozenset[str]) -> Steps[bool]:
    """The value of a parameter and its end tag; False if the answer ends before."""
    yield from reader.accept("\n")
    if types != {"string"}:
        text, mark = yield from reader.take_until(PARAMETER_END)
        if mark is None:
            reader.held = text
            return False
        out.write(_as_json(text.removesuffix("\n"), types))
        return True
    out.open('"', '"')
    while True:
        at = reader.held.find(PARAMETER_END)
        if at >= 0:
            out.write(quoted(reader.take(at).removesuffix("\n")))
            out.close()
            reader.take(len(PARAMETER_END))
            return True
        # The line break before the end tag is not part of the value.
        num_held = 0 if reader.is_over else overlap(reader.held, (f"\n{PARAMETER_END}", PARAMETER_END))
        out.write(quoted(reader.take(len(reader.held) - num_held)))
        if reader.is_over:
            return False
        yield


def _as_json(text: str, types: frozenset[str]) -> str:
    """The JSON of a parameter's text: what it says, if its type is allowed; else a string."""
    try:
        value = json.loads(LITERALS.get(text.strip(), text))
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return f'"{quoted(text)}"'
    is_bool = isinstance(value, bool)
    allowed = [JSON_TYPES[each] for each in types if each in JSON_TYPES and (each == "boolean" or not is_bool)]
    return written if any(isinstance(value, each) for each in allowed) else f'"{quoted(text)}"'


def _properties(schema: Any) -> Mapping[str, Any]:
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _types(schema: Any) -> frozenset[str]:
    """The JSON types that a parameter may have; a string if its schema does not say."""
    if not isinstance(schema, Mapping):
        return frozenset({"string"})
    own = schema.get("type")
    types = {own} if isinstance(own, str) else {each for each in own if isinstance(each, str)} if own else set()
    for each in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        types |= _types(each)
    if not types and "enum" in schema:
        names = {"str": "string", "bool": "boolean", "int": "integer", "float": "number", "NoneType": "null"}
        types = {names.get(type(value).__name__, "object") for value in schema["enum"]}
    return frozenset(types or {"string"})
