"""Harmony, the form of GPT-OSS: an answer is a sequence of messages, each with a channel and perhaps a recipient.

    <|channel|>analysis<|message|>thinking<|end|><|start|>assistant<|channel|>commentary to=functions.name
    <|constrain|>json<|message|>{...}<|call|> or <|start|>assistant<|channel|>final<|message|>text<|return|>

The prompt ends with <|start|>assistant. The end of a message may be the end of the answer.
"""

import re

from peagle.dialects.json_calls import read_arguments, read_forced
from peagle.dialects.reading import Reader, Steps

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")
HEADER = re.compile(r"(<\|\w+\|>|[\s\w.=:-])*(<[|\w]*)?")
CALLERS = ("assistant", "user", "all")


def read_harmony(reader: Reader, *, has_calls: bool, is_forced: bool = False) -> Steps[None]:
    """`is_forced`: text is a call in JSON, by a grammar."""
    mark: str | None = START
    while mark is not None:
        opening = yield from reader.accept(START, CHANNEL, "assistant", " to=")
        if opening is None:  # text without a header
            mark = yield from reader.copy_until("content", START, CHANNEL, *ENDS)
            reader.held = (mark if mark in (START, CHANNEL) else "") + reader.held
            continue
        header, mark = yield from reader.take_until(MESSAGE, *ENDS)
        header = opening + header
        if mark == MESSAGE:
            mark = yield from _read_body(reader, header, has_calls, is_forced)
        elif mark is not None or not HEADER.fullmatch(header):
            reader.emit("content", header)


def _read_body(reader: Reader, header: str, has_calls: bool, is_forced: bool) -> Steps[str | None]:
    """The text of a message, and the mark that ends it; the start of another message stays unread."""
    recipient = RECIPIENT.search(header)
    marks = (START, CHANNEL, *ENDS)
    if recipient is not None and recipient[1] not in CALLERS and has_calls:
        yield from reader.skip_space()
        if (yield from reader.peek()) == "{":
            reader.emit("name", recipient[1].removeprefix("functions."))
            yield from read_arguments(reader)
            yield from reader.skip_space()
        mark = yield from reader.copy_until("content", *marks)
    elif recipient is None and ANALYSIS.search(header):
        mark = yield from reader.copy_until("reasoning", *marks)
        reader.separate("reasoning")
    elif is_forced:
        yield from read_forced(reader)
        return None
    else:
        mark = yield from reader.copy_until("content", *marks)
        if mark is not None:
            reader.separate("content")
    reader.held = (mark if mark in (START, CHANNEL) else "") + reader.held
    return mark
