"""Progress of a generation run."""

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peagle.engine.engine import Engine

log = logging.getLogger(__name__)


def drops(dropped: Mapping[str, int]) -> str:
    """How many were dropped, and the most frequent reason.

    >>> drops({"answer: cut": 1200, "question: repeated": 3})
    '1,203 dropped (1,200 answer: cut)'
    """
    reason = max(dropped, key=lambda each: dropped[each], default="")
    why = f" ({dropped[reason]:,} {reason})" if reason and dropped[reason] else ""
    return f"{sum(dropped.values()):,} dropped{why}"


class RunProgress:
    """Follows a run: tokens per second, and a log line every 30 seconds. The CLI shows a bar instead."""

    seconds_between: float = 30

    def __init__(self) -> None:
        self.seconds = self.tokens_per_second = 0.0

    def engine_starting(self, what: str, num_done: int, num_parts: int) -> None:
        """Called while the engine starts."""

    def begin(self, num_answer_tokens: int) -> None:
        """Called when the engine is ready; `num_answer_tokens` are in the output already."""
        self._started = self._shown = time.monotonic()
        self._first_tokens = num_answer_tokens

    def update(self, engine: "Engine", counts: Mapping[str, Any], done: float, total: float) -> None:
        """Called after each step with the counts of the output."""
        now = time.monotonic()
        self.seconds = now - self._started
        self.tokens_per_second = (counts["num_answer_tokens"] - self._first_tokens) / self.seconds
        if now - self._shown < self.seconds_between:
            return
        self._shown = now
        stats = engine.stats()
        line = (
            f"{counts['num_rows']:,} answers, {drops(counts['dropped'])}, "
            f"{stats.num_running + stats.num_waiting:,} running, {stats.num_output_tokens / self.seconds:,.0f} tokens/s"
        )
        self.show(line, done, total)

    def show(self, line: str, done: float, total: float) -> None:
        log.info("%s, %s of %s done", line, f"{done:,.0f}", f"{total:,.0f}")
