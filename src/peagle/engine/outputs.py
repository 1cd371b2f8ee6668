"""What an engine gives back: answers, how they came about, and counts over everything it served."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from peagle.decoding.acceptance import Acceptance
from peagle.decoding.stopping import FinishReason

EndReason = FinishReason | Literal["abort"]
"""Why an answer ends: of its own accord ("stop"), at a limit ("length"), or because somebody ended it ("abort")."""


class TokenLogprobs(NamedTuple):
    """Natural logarithms of the target's own probabilities, whatever the sampling settings."""

    logprob: float
    top: dict[int, float]
    """the likeliest tokens, as many as were asked for"""


@dataclass(frozen=True)
class Completion:
    """One answer."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """Times are those of `time.perf_counter`."""

    arrived: float
    first_token_at: float | None
    finished_at: float | None
    acceptance: Acceptance
    num_cached_tokens: int
    num_preemptions: int


@dataclass(frozen=True)
class RequestOutput:
    """A finished request with all its answers."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    metrics: RequestMetrics

    @property
    def text(self) -> str:
        """The first answer."""
        return self.outputs[0].text


@dataclass(frozen=True)
class Update:
    """What became certain of one answer in one step, for those who follow it while it grows."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    """for each token, the text that became certain with it"""
    num_accepted: int
    """how many of the tokens, from the first, were accepted drafts"""
    num_drafts: int
    """draft tokens that were verified; 0 for prefill and plain decoding"""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: EndReason | None = None
    """set in the answer's last update; the last one of an aborted answer is "abort" and has no tokens"""

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass
class EngineStats:
    """Counts since the engine was made. Seconds of the device are known on a GPU only."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_preemptions: int = 0
    num_drafts: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    device_seconds: float = 0.0
    num_waiting: int = 0
    num_running: int = 0
    num_pages: int = 0
    num_pages_used: int = 0

    @property
    def acceptance(self) -> Acceptance:
        return Acceptance(self.num_drafts, tuple(self.accepted_per_position))
