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


class Logprobs(NamedTuple):
    """Log-probabilities of some tokens, and the likeliest ones beside each, in tensors of the host."""

    chosen_S: Tensor
    top_values_SM: Tensor
    top_ids_SM: Tensor

    def to_list(self, count: int) -> list[TokenLogprobs]:
        chosen, values, ids = (part[:count].tolist() for part in self)
        return [
            TokenLogprobs(own, dict(zip(top_ids, top, strict=True)))
            for own, top, top_ids in zip(chosen, values, ids, strict=True)
        ]


class Scores(NamedTuple):
    """What a chunk found out about its prompt, void if the request's epoch is another by now."""

    request: Request
    epoch: int
    first: int
    """place in the prompt of the first token they are about"""
    logprobs: Logprobs


class Emission(NamedTuple):
    """What one pass emitted for one request, void if the request's epoch is another by now."""

    request: Request
    epoch: int
    token_ids: list[int]
    num_drafts: int
    """draft tokens that were verified; 0 for prefill and plain decoding"""
    logprobs: list[TokenLogprobs] | None
    is_prefill: bool = False
    draft_ids: list[int] | None = None
    """where the request has a guide: what was drafted behind the newest token"""


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

    def scores(self) -> list[Scores]:
        """What it found out about prompts. Only after `collect`."""
        return [scores for each in self.passes for scores in each.scores]

    def device_seconds(self) -> float | None:
        """How long the device worked on it; None on a CPU. Only after `collect`."""
        return None if self.started is None else self.started.elapsed_time(self.done) / 1000


@dataclass
class Pass:
    """One pass of a launch: whose rows it ran, and where its results will be."""

    requests: list[Request]
    epochs: list[int]
    emitted: Rows
    """for each request a count, the number of verified drafts, then at least so many tokens"""
    is_decode: bool
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    scores: list[Scores] = field(default_factory=list)
    newest: dict[int, Tensor] = field(default_factory=dict)
    """for requests with a guide: the newest token and its drafts"""

    def emissions(self) -> Iterator[Emission]:
        rows = self.emitted.tolist()
        for index, (request, epoch) in enumerate(zip(self.requests, self.epochs, strict=True)):
            count, num_drafts, *tokens = rows[index]
            logprobs = self.logprobs[index].to_list(count) if index in self.logprobs else None
            draft_ids = self.newest[index].tolist()[1:] if index in self.newest else None
            yield Emission(request, epoch, tokens[:count], num_drafts, logprobs, not self.is_decode, draft_ids)


class SelectedRows:
    """Some of the rows of a pass."""

    def __init__(self, rows: Rows, indexes: list[int]) -> None:
        self.rows, self.indexes = rows, indexes

    def tolist(self) -> list[list[int]]:
        rows = self.rows.tolist()
        return [rows[index] for index in self.indexes]
