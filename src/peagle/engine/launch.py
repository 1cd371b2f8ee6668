"""A plan on its way through the device, and what it brings back."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from peagle.engine.outputs import TokenLogprobs
from peagle.engine.request import Request


class Rows(Protocol):
    """Numbers on the host, or on their way there."""

    def tolist(self) -> list[list[int]]: ...


class Emission(NamedTuple):
    """What one pass emitted for one request, void if the request's epoch is another by now."""

    request: Request
    epoch: int
    token_ids: list[int]
    num_drafts: int
    """draft tokens that were verified; 0 for prefill and plain decoding"""
    logprobs: list[TokenLogprobs] | None


@dataclass
class Launch:
    """A plan on its way. `collect` waits for it and tells what it emitted, prefill first."""

    passes: "list[Pass]"
    done: Any
    started: Any = None

    def collect(self) -> list[Emission]:
        if self.done is not None:
            self.done.synchronize()
        return [emission for each in self.passes for emission in each.emissions()]

    def device_seconds(self) -> float | None:
        """How long the device worked on it; None on a CPU. Only after `collect`."""
        return None if self.started is None else self.started.elapsed_time(self.done) / 1000


@dataclass
class Pass:
    """One pass of a launch: whose rows it ran, and where its results will be."""

    requests: list[Request]
    epochs: list[int]
    emitted: Rows
    """for each request a count, then at least so many tokens"""
    is_decode: bool
    logprobs: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    def emissions(self) -> Iterator[Emission]:
        rows = self.emitted.tolist()
        for index, (request, epoch) in enumerate(zip(self.requests, self.epochs, strict=True)):
            count, *tokens = rows[index]
            logprobs = self._logprobs(index, count) if index in self.logprobs else None
            num_drafts = request.num_draft_tokens if self.is_decode else 0
            yield Emission(request, epoch, tokens[:count], num_drafts, logprobs)

    def _logprobs(self, index: int, count: int) -> list[TokenLogprobs]:
        chosen, values, ids = (part[:count].tolist() for part in self.logprobs[index])
        return [
            TokenLogprobs(own, dict(zip(top_ids, top, strict=True)))
            for own, top, top_ids in zip(chosen, values, ids, strict=True)
        ]


class SelectedRows:
    """Some of the rows of a pass."""

    def __init__(self, rows: Rows, indexes: list[int]) -> None:
        self.rows, self.indexes = rows, indexes

    def tolist(self) -> list[list[int]]:
        rows = self.rows.tolist()
        return [rows[index] for index in self.indexes]
