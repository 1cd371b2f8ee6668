"""Outputs of an engine: completions, streaming updates, metrics per request, and counters."""

from dataclasses import dataclass, field
from typing import Literal

from peagle.decoding.acceptance import Acceptance, VerifiedDraft
from peagle.decoding.reference import TokenKind
from peagle.decoding.stopping import FinishReason
from peagle.scheduling.request import TokenLogprobs

EndReason = FinishReason | Literal["abort"]
"""Why a completion ends: a stop token or string ("stop"), a limit ("length"), or the caller ("abort")."""


@dataclass(frozen=True)
class Completion:
    """One of the n completions of a request."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """Metrics of a request with all its completions. Times are those of `time.perf_counter`."""

    arrived: float
    first_token_at: float | None
    finished_at: float | None
    acceptance: Acceptance
    """verified drafts, and accepted tokens per position"""
    num_cached_tokens: int
    num_preemptions: int
    started_at: float | None = None
    """when its first completion left the queue"""
    num_draft_tokens: int = 0
    """tokens of the verified drafts"""
    num_tolerated_tokens: int = 0
    """drafts that the target merely tolerated; 0 unless `SamplingParams.tolerance` is below 1"""
    accepted_by_draft: tuple[int, ...] = ()
    """accepted tokens of each verified draft, in order, completion by completion"""
    draft_positions: tuple[int, ...] = ()
    """tokens of the completion before each of them"""

    @property
    def is_lossless(self) -> bool:
        """Whether every token is the target's own choice."""
        return self.num_tolerated_tokens == 0

    @property
    def queue_seconds(self) -> float | None:
        return None if self.started_at is None else self.started_at - self.arrived

    @property
    def first_token_seconds(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.arrived


@dataclass(frozen=True)
class RequestOutput:
    """A finished request with all its completions."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    metrics: RequestMetrics
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """for each prompt token, None for the first; None if not requested"""

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.outputs[0].text

    @property
    def verified_drafts(self) -> list[VerifiedDraft]:
        pairs = zip(self.metrics.draft_positions, self.metrics.accepted_by_draft, strict=True)
        return [VerifiedDraft(len(self.prompt_token_ids), position, accepted) for position, accepted in pairs]


@dataclass(frozen=True)
class Update:
    """The new tokens of one completion in one step, for streaming."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    """for each token, the text that became final with it"""
    num_accepted: int
    """how many of the tokens, counted from the first, are accepted drafts"""
    num_drafts: int
    """draft tokens that were verified; 0 for prefill and plain decoding"""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: EndReason | None = None
    """set in the last update of the completion; "abort" comes without tokens"""
    is_prefill: bool = False
    """whether prefill emitted the token: the first of a completion, and the first after a preemption"""
    metrics: RequestMetrics | None = None
    """set in the last update of the request"""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """set in the first update of the first completion; as in `RequestOutput`"""
    marks: int = 0
    """bit i is set if token i is a tolerated draft, or the bonus token behind the end of a branch"""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def kinds(self) -> tuple[TokenKind, ...]:
        """How each token was produced, in the terms of the reference decoder.

        >>> Update("r", 0, (5, 6, 7), ("a", "b", "c"), num_accepted=2, num_drafts=4).kinds
        ('accepted', 'accepted', 'recovered')
        >>> Update("r", 0, (5, 6, 7), ("a", "b", "c"), num_accepted=2, num_drafts=4, marks=0b100).kinds
        ('accepted', 'accepted', 'bonus')
        """
        accepted: list[TokenKind] = [
            "tolerated" if self.marks >> index & 1 else "accepted" for index in range(self.num_accepted)
        ]
        last: TokenKind = "prefill" if self.is_prefill else "plain"
        if self.num_drafts:
            last = "bonus" if self.marks >> self.num_accepted & 1 else "recovered"
        return (*accepted, last)[: len(self.token_ids)]


@dataclass
class EngineStats:
    """Counters since the engine started. `device_seconds` is known on a GPU only."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    """of finished requests"""
    num_prefill_tokens: int = 0
    """prefilled tokens; a preempted request counts again"""
    num_cached_tokens: int = 0
    """cached prompt tokens of finished requests"""
    num_output_tokens: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_refused: int = 0
    """because the queue was full"""
    num_preemptions: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    num_tolerated_tokens: int = 0
    """output tokens that are not the target's own choice"""
    device_seconds: float = 0.0
    num_waiting: int = 0
    num_running: int = 0
    num_pages: int = 0
    num_pages_used: int = 0
    drafting_pays: bool | None = None
    """whether the engine drafts, or decodes without drafts because they cost more than they bring; None if it does not
    choose"""
    drafting_gain: float | None = None
    """expected tokens per second with drafts, as a multiple of those without; None until it was estimated"""
    decode_seconds: float = 0.0
    """time of the steps in which the engine chose whether to draft, by measured step times"""
    plain_decode_seconds: float = 0.0
    """what their tokens would take without drafts"""
    num_draft_pauses: int = 0
    """how often drafting stopped paying"""

    @property
    def acceptance(self) -> Acceptance:
        return Acceptance(self.num_drafts, tuple(self.accepted_per_position))
