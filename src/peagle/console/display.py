"""Answers on stdout as they stream; on a terminal each token has the color of its kind."""

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from peagle.engine.outputs import Update

STYLES = {"accepted": "green", "bonus": "cyan", "recovered": "magenta", "tolerated": "red"}


class Display:
    """Prints answers in order: the first while it streams, each later one once those before it have ended."""

    def __init__(self, headings: list[str]) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._headings = headings
        self._updates: list[list[Update]] = [[] for _ in headings]
        self._index = 0
        self._open()

    def add(self, update: "Update") -> None:
        self._updates[update.index].append(update)
        while self._index < len(self._updates):
            ready = self._updates[self._index]
            self._updates[self._index] = []
            for each in ready:
                self._write(each)
            if not ready or ready[-1].finish_reason is None:
                return
            self._console.print()
            self._index += 1
            self._open()

    def _open(self) -> None:
        if self._index < len(self._headings) and self._headings[self._index]:
            self._console.print(Text(f"--- {self._headings[self._index]}", style="bold"))

    def _write(self, update: "Update") -> None:
        """Each token in the color of its kind on a terminal, else plain text."""
        if self._console.is_terminal:
            tokens = zip(update.texts, update.kinds, strict=True)
            self._console.print(Text.assemble(*((text, STYLES.get(kind, "")) for text, kind in tokens)), end="")
        else:  # rich would turn tabs into spaces and drop control characters
            sys.stdout.write(update.text)
            sys.stdout.flush()
