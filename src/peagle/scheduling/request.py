"""A request as the scheduler sees it: one sequence, its pages, its row, and its progress on the device.

    waiting --> prefill --> decode --> finished
       ^-----------+-----------'  preempted: loses its pages and its row, keeps its tokens

`token_ids` is the sequence: the prompt and every output token the host has seen. The newest token of a decoding request
is not in the target's KV cache yet; the next pass puts it there. The device is ahead of the host: its sequence is
longer by 1 to num_draft_tokens + 1 tokens per pass in flight.
"""

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from peagle.errors import RequestError
from peagle.sampling_params import SamplingParams
from peagle.scheduling.pages import IntegrityError

if TYPE_CHECKING:
    from peagle.decoding.grammar import Draft, Guide

State = Literal["waiting", "prefill", "decode", "finished"]


class TokenLogprobs(NamedTuple):
    """Natural log-probabilities of the target, before any sampling setting."""

    logprob: float
    top: dict[int, float]
    """the most likely tokens, as many as the request asked for"""


def step_room(num_draft_tokens: int, tree_nodes: int | None) -> int:
    """Positions behind the newest token that a decode step may touch.

    The target verifies the drafts there. If K of them are accepted, the drafter drafts from K - 1 mask slots behind.
    """
    return max(2 * num_draft_tokens, tree_nodes or 0) if num_draft_tokens else 0


@dataclass(slots=True, eq=False)
class Request:
    """Created with a prompt. After `Scheduler.add`, only the scheduler changes `state` and the fields after it."""

    request_id: str
    prompt_ids: InitVar[Sequence[int]]
    params: SamplingParams
    num_draft_tokens: int
    """draft tokens per step for this request; 0: plain decoding"""
    max_length: int
    """maximum tokens of the sequence: the engine's limit, lowered to prompt + max_tokens"""
    end_ids: frozenset[int] = frozenset()
    """tokens that end the output"""
    tree_nodes: int = 0
    """drafts to verify per step, if they form a tree; else num_draft_tokens"""
    guide: "Guide | None" = None
    """constrains the output to a grammar. It must read all tokens before the next pass, so such a request has at most
    one pass in flight"""

    prompt_scores: "dict[int, TokenLogprobs]" = field(init=False, default_factory=dict)
    """for prompt_logprobs: the log-probabilities so far, by index in the prompt"""
    drafts: "list[Draft]" = field(init=False, default_factory=list)
    """with a guide: the drafts behind the newest token on the device"""
    adjusts: bool = field(init=False)
    """whether penalties, biases, min_tokens or a grammar change its logits, or it tolerates drafts"""
    token_ids: list[int] = field(init=False)
    """prompt and committed output"""
    prompt_length: int = field(init=False)
    step_room: int = field(init=False)
    """positions behind the newest token that a decode step may touch"""
    started_at: float | None = field(init=False, default=None)
    """`time.perf_counter` when it first got a row"""
    arrival: int = field(init=False, default=-1)
    """order of arrival, which is the priority"""
    state: State = field(init=False, default="waiting")
    row: int | None = field(init=False, default=None)
    """its row in `RowState` while it runs"""
    epoch: int = field(init=False, default=0)
    """incremented when the request loses its row; results launched under an older epoch are void"""
    is_paused: bool = field(init=False, default=False)
    """whether it decodes without drafts, because they did not pay; the drafter's KV cache has gaps since then"""
    skips_drafts: bool = field(init=False, default=False)
    """whether it never had drafts, because they did not pay for the requests before it (`DraftTrials`)"""
    num_draft_steps: int = field(init=False, default=0)
    """decode steps with drafts that the draft budget sized"""
    num_in_flight: int = field(init=False, default=0)
    """launched passes whose tokens the host has not seen"""

    pages: list[int] = field(init=False, default_factory=list)
    """pages[i] holds positions i * page_size .. (i + 1) * page_size - 1"""
    num_prefilled: int = field(init=False, default=0)
    """tokens whose prefill is launched or not needed; the next chunk starts here"""
    write_from: int = field(init=False, default=0)
    """positions below are in shared pages and are never written"""
    num_registered: int = field(init=False, default=0)
    """number of leading pages that other requests can find"""
    page_keys: list[bytes] = field(init=False, default_factory=list)
    """keys of the full pages computed so far; kept across preemption, like the tokens"""

    num_cached_tokens: int = field(init=False, default=0)
    """prompt tokens that were not prefilled because their pages were cached"""
    num_preemptions: int = field(init=False, default=0)

    def __post_init__(self, prompt_ids: Sequence[int]) -> None:
        if len(prompt_ids) == 0:
            raise RequestError(f"request {self.request_id!r} has an empty prompt", hint="pass at least one token")
        self.adjusts = self.params.adjusts_logits or self.params.tolerance < 1
        self.token_ids = list(prompt_ids)
        self.prompt_length = len(self.token_ids)
        self.max_length = min(self.max_length, self.prompt_length + self.params.max_tokens)
        self.step_room = step_room(self.num_draft_tokens, self.tree_nodes)

    @property
    def output_ids(self) -> list[int]:
        """The committed output, as a copy."""
        return self.token_ids[self.prompt_length :]

    @property
    def is_running(self) -> bool:
        return self.row is not None

    @property
    def has_drafts(self) -> bool:
        return self.num_draft_tokens > 0 and not (self.is_paused or self.skips_drafts)

    @property
    def wants_decode(self) -> bool:
        """Whether one more pass may be launched and can add tokens; each pass in flight adds at least one."""
        if self.guide is not None and self.num_in_flight:
            return False
        return len(self.token_ids) + self.num_in_flight < self.max_length

    @property
    def wants_scores(self) -> bool:
        """Whether prompt_logprobs are still incomplete, so that the whole prompt has to run."""
        return self.params.prompt_logprobs is not None and len(self.prompt_scores) < self.prompt_length - 1

    def reach(self, num_in_flight: int) -> int:
        """Positions that a decode step may touch after `num_in_flight` unseen passes.

        With K draft tokens, each unseen pass may have added K + 1 tokens.
        """
        length = len(self.token_ids) + num_in_flight * (self.num_draft_tokens + 1)
        return min(length, self.max_length) + self.step_room

    def drop_device_state(self) -> None:
        """Keep only the tokens. The caller has freed row and pages; results in flight become void."""
        self.row = None
        self.is_paused = False  # prefill fills the drafter's KV cache anew
        self.epoch += 1
        self.pages, self.drafts = [], []
        self.num_in_flight = self.num_prefilled = self.write_from = self.num_registered = 0

    def check_integrity(self, page_size: int) -> None:
        """Raise IntegrityError if tokens, pages and progress contradict each other."""
        is_bare = not (self.pages or self.num_in_flight or self.num_prefilled or self.num_registered)
        num_written = self.num_prefilled
        if self.state == "decode":
            num_written = max(num_written, len(self.token_ids) - 1)
        num_read_only = max(num_written, self.write_from)
        num_touched = max(num_read_only, self.reach(self.num_in_flight - 1) if self.num_in_flight else 0)
        for holds, complaint in (
            (self.is_running == (self.state in ("prefill", "decode")), f"has row {self.row} but is in {self.state}"),
            (self.is_running or is_bare, "has no row but holds something on the device"),
            (len(self.token_ids) <= self.max_length, "is longer than its max_length"),
            (self.state != "prefill" or self.num_prefilled < len(self.token_ids), "has nothing left to prefill"),
            (num_touched <= len(self.pages) * page_size, "has no page for a position it touches"),
            (self.num_registered * page_size <= num_read_only, "may write to a page that others can find"),
        ):
            if not holds:
                raise IntegrityError(f"request {self.request_id!r} {complaint}")
