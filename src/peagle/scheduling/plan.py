"""A plan: what the scheduler has the device run in one engine step."""

from dataclasses import dataclass

from peagle.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens start .. end - 1 of a request's sequence, to prefill.

    Token i fills the target's KV cache at position i and, together with token i + 1, the drafter's at position i + 1.
    Positions below `first_write` are in shared pages and must not be written. The last chunk of a sequence emits its
    next token.
    """

    request: Request
    start: int
    end: int
    first_write: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """One engine step: a prefill pass over the chunks, then a decode step of `decodes`.

    A request whose last chunk is in the plan may decode in the same plan, unless both are one pass. Page tables change
    only for requests with a chunk and for those in `grown`.
    """

    chunks: tuple[Chunk, ...]
    decodes: tuple[Request, ...]
    grown: tuple[Request, ...] = ()
    preempted: tuple[Request, ...] = ()
    shares_pass: bool = False
    """whether the chunks may run in the pass of the decode step"""

    @property
    def is_empty(self) -> bool:
        """Nothing to launch. If requests are left, collect the results in flight before the next plan."""
        return not (self.chunks or self.decodes)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(chunk.end - chunk.start for chunk in self.chunks)
