"""What an engine gives back: answers, how they came about, and counts over everything it served."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from peagle.decoding.acceptance import Acceptance
from peagle.decoding.reference import TokenKind
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
    """Of a request with all its answers. Times are those of `time.perf_counter`."""

    arrived: float
    first_token_at: float | None
    finished_at: float | None
    acceptance: Acceptance
    """drafts that were verified, and how many of their tokens were accepted at each position"""
    num_cached_tokens: int
    num_preemptions: int
    started_at: float | None = None
    """when its first answer got a place in the batch, the end of its time in the queue"""
    num_draft_tokens: int = 0
    """tokens of those drafts"""

    @property
    def queue_seconds(self) -> float | None:
        return None if self.started_at is None else self.started_at - self.arrived

    @property
    def first_token_seconds(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.arrived


@dataclass(frozen=True)
class RequestOutput:
    """A finished request with all its answers."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    metrics: RequestMetrics
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """for each token of the prompt, where they were asked for; None for the first, which nothing comes before"""

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
    is_prefill: bool = False
    """whether the token came from running the text so far: an answer's first one, and the first after a preemption"""
    metrics: RequestMetrics | None = None
    """set in the last update of the request, which ends the last of its answers"""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """set in the first update of the first answer, where they were asked for; as in `RequestOutput`"""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def kinds(self) -> tuple[TokenKind, ...]:
        """For each token how it came about, in the words of the reference decoder.

        >>> Update("r", 0, (5, 6, 7), ("a", "b", "c"), num_accepted=2, num_drafts=4).kinds
        ('accepted', 'accepted', 'recovered')
        """
        accepted: list[TokenKind] = ["accepted"] * self.num_accepted
        last: TokenKind = "prefill" if self.is_prefill else "plain"
        if self.num_drafts:
            last = "bonus" if self.num_accepted == self.num_drafts else "recovered"
        return (*accepted, last)[: len(self.token_ids)]


@dataclass
class EngineStats:
    """Counts since the engine was made. Seconds of the device are known on a GPU only."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    """of finished requests"""
    num_prefill_tokens: int = 0
    """run through prefill, those of preempted requests again"""
    num_cached_tokens: int = 0
    """prompt tokens of finished requests that were not run because their pages were there"""
    num_output_tokens: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_refused: int = 0
    """because too many waited"""
    num_preemptions: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    device_seconds: float = 0.0
    num_waiting: int = 0
    num_running: int = 0
    num_pages: int = 0
    num_pages_used: int = 0

    @property
    def acceptance(self) -> Acceptance:
        return Acceptance(self.num_drafts, tuple(self.accepted_per_position))
