"""Gemma 4: a channel of thoughts, and calls in a form of its own.

<|channel>thought
...<channel|>text<|tool_call>call:name{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>
"""

import re

from peagle.dialects.json_calls import read_forced
from peagle.dialects.reading import Reader, Steps
from peagle.dialects.values import Arguments, BrokenError, ValueReader

CHANNEL, CHANNEL_END = "<|channel>", "<channel|>"
CALL, CALL_END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
THOUGHT = "thought\n"
MARKS = (CHANNEL, CHANNEL_END, CALL, CALL_END, QUOTE)
CALL_NAME = re.compile(r"\s*call:\s*([\w.:-]+)\s*\{")


def read_gemma(reader: Reader, *, is_open: bool, has_calls: bool, is_forced: bool = False) -> Steps[None]:
    """`is_open`: the prompt ends inside of a thought. `is_forced`: text is a call in JSON, by a grammar."""
    if is_open or (yield from reader.accept(CHANNEL + THOUGHT)):
        yield from _read_thought(reader)
    if is_forced:
        yield from read_forced(reader)
    marks = (CHANNEL, CHANNEL_END, CALL, CALL_END) if has_calls else (CHANNEL, CHANNEL_END)
    while mark := (yield from reader.copy_until("content", *marks)):
        if mark == CHANNEL and (yield from reader.accept(THOUGHT)):
            yield from _read_thought(reader)
        elif mark == CALL:
            yield from _read_call(reader)


def _read_thought(reader: Reader) -> Steps[None]:
    yield from reader.copy_until("reasoning", CHANNEL_END)
    reader.separate("reasoning")
    reader.trim("content")


def _read_call(reader: Reader) -> Steps[None]:
    while (found := CALL_NAME.match(reader.held)) is None:
        at = reader.held.find(CALL_END)
        if at >= 0 or reader.is_over:
            reader.emit("content", CALL + reader.take(at if at >= 0 else len(reader.held)))
            return
        yield
    reader.emit("name", found[1])
    reader.take(found.end())
    out = Arguments(reader)
    out.open("{", "}")
    try:
        yield from ValueReader(reader, out, QUOTE).members("}")
    except BrokenError:
        reader.emit("content", out.end())
    rest, _ = yield from reader.take_until(CALL_END)
    reader.emit("content", rest)
