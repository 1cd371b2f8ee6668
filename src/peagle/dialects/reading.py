"""Incremental parsing: a dialect is a generator that reads an answer while it grows.

A generator waits for more text with a bare `yield`. Everything it finds, it emits as an event once it is certain, so
the events do not depend on how the text was cut into pieces.
"""

from collections.abc import Callable, Generator
from typing import Literal, NamedTuple, TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]

Kind = Literal["reasoning", "content", "name", "arguments"]


class Event(NamedTuple):
    """A piece of an answer: text for the user, thinking, the name of a new call, or a piece of its arguments."""

    kind: Kind
    text: str


class Reader:
    """The text that is not yet read, and the events so far."""

    def __init__(self) -> None:
        self.held = ""
        self.is_over = False
        """whether no more text will come"""
        self.is_cut = False
        """whether a limit ended the answer"""
        self.num_calls = 0
        self.is_thinking = False
        """whether the text being read is thinking"""
        self._events: list[Event] = []
        self._trimmed: set[Kind] = {"reasoning"}
        """kinds whose leading and trailing whitespace is dropped"""
        self._spaces: dict[Kind, str] = {}
        """whitespace that goes out with the next text of its kind"""
        self._begun: set[Kind] = set()

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def emit(self, kind: Kind, text: str) -> None:
        if kind == "name":
            self.num_calls += 1
            self.trim("content")
        elif kind in self._trimmed:
            body = text.strip()
            space = self._spaces.get(kind, "") + text[: len(text) - len(text.lstrip())]
            self._spaces[kind] = text[len(text.rstrip()) :] if body else space
            text = (space if kind in self._begun else "") + body if body else ""
        if not text:
            return
        self._begun.add(kind)
        if self._events and self._events[-1].kind == kind != "name":
            text = self._events.pop().text + text
        self._events.append(Event(kind, text))

    def trim(self, kind: Kind) -> None:
        """From here on, whitespace goes out only between texts of this kind."""
        self._trimmed.add(kind)

    def separate(self, kind: Kind) -> None:
        """The next text of this kind starts on a new line."""
        self.trim(kind)
        self._spaces[kind] = "\n"

    def take(self, num: int) -> str:
        taken, self.held = self.held[:num], self.held[num:]
        return taken

    def peek(self, num: int = 1) -> Steps[str]:
        """The next characters; fewer only at the end."""
        while len(self.held) < num and not self.is_over:
            yield
        return self.held[:num]

    def look(self, num: int) -> Steps[str]:
        """The next characters behind whitespace, none of it read; fewer only at the end."""
        while len(self.held.lstrip()) < num and not self.is_over:
            yield
        return self.held.lstrip()[:num]

    def skip_space(self) -> Steps[None]:
        while True:
            self.held = self.held.lstrip()
            if self.held or self.is_over:
                return
            yield

    def accept(self, *texts: str) -> Steps[str | None]:
        """Read one of these texts if it comes next."""
        while True:
            if found := next((text for text in texts if self.held.startswith(text)), None):
                self.take(len(found))
                return found
            if self.is_over or not any(text.startswith(self.held) for text in texts):
                return None
            yield

    def copy_until(self, kind: Kind, *marks: str) -> Steps[str | None]:
        """Emit the text before the first of these marks, and read the mark. None: the answer ended without one."""
        self.is_thinking = kind == "reasoning"
        while True:
            at, mark = self._find(marks)
            if mark is not None:
                self.emit(kind, self.take(at))
                self.take(len(mark))
                self.is_thinking = False
                return mark
            num_held = 0 if self.is_over else overlap(self.held, marks)
            self.emit(kind, self.take(len(self.held) - num_held))
            if self.is_over:
                return None
            yield

    def take_until(self, *marks: str) -> Steps[tuple[str, str | None]]:
        """The text before the first of these marks, and the mark, both read. At the end: all text, and None."""
        while True:
            at, mark = self._find(marks)
            if mark is not None:
                text = self.take(at)
                self.take(len(mark))
                return text, mark
            if self.is_over:
                return self.take(len(self.held)), None
            yield

    def _find(self, marks: tuple[str, ...]) -> tuple[int, str | None]:
        found = [(at, -len(mark), mark) for mark in marks if (at := self.held.find(mark)) >= 0]
        if not found:
            return -1, None
        at, _, mark = min(found)
        return at, mark


class Parser:
    """Feeds one growing answer to a dialect's generator."""

    def __init__(self, read: Callable[[Reader], Steps[None]]) -> None:
        self._reader = Reader()
        self._steps = read(self._reader)
        next(self._steps, None)

    @property
    def num_calls(self) -> int:
        return self._reader.num_calls

    @property
    def is_thinking(self) -> bool:
        return self._reader.is_thinking

    def feed(self, text: str, *, is_last: bool = False, is_cut: bool = False) -> list[Event]:
        """What is certain now. With `is_last` everything is; `is_cut`: a limit ended the answer."""
        reader = self._reader
        reader.held += text
        reader.is_over, reader.is_cut = is_last, is_cut
        next(self._steps, None)
        return reader.take_events()


def overlap(text: str, marks: tuple[str, ...]) -> int:
    """Length of the longest suffix of `text` that starts one of the marks.

    >>> overlap("a <tool", ("<tool_call>", "<think>")), overlap("a < b", ("<think>",))
    (5, 0)
    """
    longest = min(len(text), max(map(len, marks), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)
