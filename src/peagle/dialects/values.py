"""Read the arguments of a call while it grows, and emit them as JSON.

What was emitted plus `closing` is a JSON document at any time: a comma and a key go out with the first piece of their
value, numbers and literals when they are complete. So a call that the model breaks still ends in valid JSON.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from peagle.dialects.reading import Reader, Steps, overlap

NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")
LITERALS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
BARE = re.compile(r"[-+.\w]*")
BARE_TEXT = re.compile(r"[^,\]}<]*")
BARE_KEY = re.compile(r"[^:,{}\[\]<]*")
PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
HEX = re.compile(r"[0-9a-fA-F]{4}")
MAX_DEPTH = 100


class BrokenError(Exception):
    """The text is not a value."""


def quoted(text: str) -> str:
    """The inside of a JSON string.

    >>> print(quoted('a "b"' + chr(10)))
    a \\"b\\"\\n
    """
    return json.dumps(text, ensure_ascii=False)[1:-1]


@dataclass
class Arguments:
    """Emits the JSON of one call. `closing` is what would end it now."""

    reader: Reader
    closing: list[str] = field(default_factory=list)
    _held: str = ""

    def hold(self, text: str) -> None:
        """Emit this text together with the next value."""
        self._held += text

    def write(self, text: str) -> None:
        self.reader.emit("arguments", self._held + text)
        self._held = ""

    def open(self, opening: str, closing: str) -> None:
        self.write(opening)
        self.closing.append(closing)

    def close(self) -> None:
        self.write(self.closing.pop())

    def end(self) -> str:
        """The call ends here, complete or not. Returns text that belongs to no argument.

        An answer that a limit cut stays as it is. Else what is open is closed, and what has no value is returned.
        """
        reader = self.reader
        if self.closing and reader.is_over and reader.is_cut:
            self.write(reader.take(len(reader.held)))
            return ""
        dropped, self._held = self._held, ""
        while self.closing:
            self.close()
        return dropped


@dataclass
class ValueReader:
    """Recursive descent over values: JSON, or a form with another quote around texts without escapes."""

    reader: Reader
    out: Arguments
    quote: str = '"'

    @property
    def is_json(self) -> bool:
        return self.quote == '"'

    def value(self) -> Steps[None]:
        """Read one value. Raises BrokenError where the text, or the answer, ends it."""
        reader, out = self.reader, self.out
        yield from reader.skip_space()
        if len(out.closing) > MAX_DEPTH:
            raise BrokenError
        if (yield from reader.accept("{")):
            out.open("{", "}")
            yield from self.members("}")
        elif (yield from reader.accept("[")):
            out.open("[", "]")
            yield from self.members("]")
        elif (yield from reader.accept(self.quote)):
            out.open('"', '"')
            yield from self._string(out.write)
            out.close()
        else:
            yield from self._bare()

    def members(self, end: str) -> Steps[None]:
        """The members of an object or an array that is open, and its end."""
        reader, out, is_first = self.reader, self.out, True
        while True:
            yield from reader.skip_space()
            has_comma = not is_first and (yield from reader.accept(","))
            yield from reader.skip_space()
            if (yield from reader.accept(end)):  # also behind a comma too many
                out.close()
                return
            if not is_first:
                if not has_comma:
                    raise BrokenError
                out.hold(", ")
            is_first = False
            if end == "}":
                yield from self._key()
            yield from self.value()

    def _key(self) -> Steps[None]:
        reader, out = self.reader, self.out
        if (yield from reader.accept(self.quote)):
            out.hold('"')
            yield from self._string(out.hold)
        else:
            key = yield from self._matching(BARE_KEY)
            if self.is_json or not key.strip():
                raise BrokenError
            reader.take(len(key))
            out.hold('"' + quoted(key.strip()))
        out.hold('": ')
        yield from reader.skip_space()
        if not (yield from reader.accept(":")):
            raise BrokenError

    def _string(self, write: Callable[[str], None]) -> Steps[None]:
        """The rest of a string, with its closing quote."""
        reader = self.reader
        while not self.is_json:
            at = reader.held.find(self.quote)
            num_held = 0 if reader.is_over else overlap(reader.held, (self.quote,))
            write(quoted(reader.take(at if at >= 0 else len(reader.held) - num_held)))
            if at >= 0:
                reader.take(len(self.quote))
                return
            if reader.is_over:
                raise BrokenError
            yield
        while first := (yield from reader.peek()):
            if found := PLAIN.match(reader.held):
                write(reader.take(found.end()))
            elif first == '"':
                reader.take(1)
                return
            elif first == "\\":
                yield from self._escape(write)
            else:
                write(quoted(reader.take(1)))
        raise BrokenError

    def _escape(self, write: Callable[[str], None]) -> Steps[None]:
        """An escape of JSON. Before anything else, a backslash stands for itself."""
        reader = self.reader
        pair = yield from reader.peek(2)
        length = 6 if pair == "\\u" else 2
        escape = yield from reader.peek(length)
        if len(escape) < length:
            raise BrokenError
        if (HEX.fullmatch(escape[2:]) is not None) if length == 6 else escape[1] in '"\\/bfnrt':
            write(reader.take(length))
        else:
            write("\\\\")
            reader.take(1)

    def _bare(self) -> Steps[None]:
        """A number or a literal; in other forms than JSON also a text without quotes."""
        text = yield from self._matching(BARE if self.is_json else BARE_TEXT)
        word = text.strip()
        value = LITERALS.get(word) or (word if NUMBER.fullmatch(word) else None)
        if value is None and (self.is_json or not word):
            raise BrokenError
        if self.reader.is_over and self.reader.is_cut and len(text) == len(self.reader.held):
            raise BrokenError  # it may be incomplete
        self.reader.take(len(text))
        self.out.write(value or f'"{quoted(word)}"')

    def _matching(self, pattern: re.Pattern[str]) -> Steps[str]:
        """What matches at the start of the text, once something else follows or the answer is over."""
        reader = self.reader
        while True:
            found = pattern.match(reader.held)
            assert found is not None, "the pattern matches the empty text"
            if found.end() < len(reader.held) or reader.is_over:
                return found[0]
            yield
