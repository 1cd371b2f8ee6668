"""One caller's job as the scheduler sees it: its text, its pages, its row, and how far the device has got.

    waiting --> prefill --> decode --> finished
       ^-----------+-----------'  preempted: pages and row are given up, the text so far is kept

`token_ids` is the text: the prompt and every answer token the host has seen. The newest token of a decoding request is
not in the target's cache yet; the next pass puts it there. The device is ahead of the host, so the text it works on
may be longer: by 1 to num_draft_tokens + 1 tokens for each pass in flight.
"""

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Literal

from peagle.engine.pages import IntegrityError
from peagle.errors import RequestError
from peagle.sampling_params import SamplingParams

if TYPE_CHECKING:
    from peagle.decoding.grammar import Guide
    from peagle.engine.outputs import TokenLogprobs

State = Literal["waiting", "prefill", "decode", "finished"]


@dataclass(slots=True, eq=False)
class Request:
    """Made by the caller with a prompt; from `Scheduler.add` on, only the scheduler changes what is below `state`."""

    request_id: str
    prompt_ids: InitVar[Sequence[int]]
    params: SamplingParams
    num_draft_tokens: int
    """draft tokens per step for this request; 0 decodes plainly"""
    max_length: int
    """most tokens of text: given as the engine's limit, lowered to what prompt and max_tokens can reach"""
    end_ids: frozenset[int] = frozenset()
    """tokens that end the answer"""
    guide: "Guide | None" = None
    """holds the answer to a grammar. It must have seen all of the text before the next pass, so that a request with one
    has one pass in flight at most"""

    prompt_scores: "dict[int, TokenLogprobs]" = field(init=False, default_factory=dict)
    """where prompt_logprobs are asked for: what the host knows of them, by place in the prompt"""
    draft_ids: list[int] = field(init=False, default_factory=list)
    """where there is a guide: the drafts that the device has behind the newest token"""
    adjusts: bool = field(init=False)
    """whether its logits are changed before a token is chosen from them"""
    token_ids: list[int] = field(init=False)
    """prompt and committed answer"""
    prompt_length: int = field(init=False)
    started_at: float | None = field(init=False, default=None)
    """when it first got a row, in seconds of `time.perf_counter`"""
    arrival: int = field(init=False, default=-1)
    """place in the order of arrival, which is the order of priority"""
    state: State = field(init=False, default="waiting")
    row: int | None = field(init=False, default=None)
    """place in the batch's tensors while it runs"""
    epoch: int = field(init=False, default=0)
    """raised whenever the request gives up its row: a result launched under an older epoch is void"""
    num_in_flight: int = field(init=False, default=0)
    """launched passes that emit tokens the host has not seen"""

    pages: list[int] = field(init=False, default_factory=list)
    """pages[i] holds the positions i * page_size .. (i + 1) * page_size - 1 of the text"""
    num_prefilled: int = field(init=False, default=0)
    """tokens whose prefill has been launched or need not be; the next chunk starts here"""
    write_from: int = field(init=False, default=0)
    """positions below lie in pages taken over from others and are never written"""
    num_registered: int = field(init=False, default=0)
    """pages from the first on whose content others may find"""
    page_keys: list[bytes] = field(init=False, default_factory=list)
    """keys of the text's full pages, as far as computed; they outlive a preemption, like the text"""

    num_cached_tokens: int = field(init=False, default=0)
    """prompt tokens that were not run because their pages were there"""
    num_preemptions: int = field(init=False, default=0)

    def __post_init__(self, prompt_ids: Sequence[int]) -> None:
        if len(prompt_ids) == 0:
            raise RequestError(f"request {self.request_id!r} has an empty prompt", hint="give at least one token")
        self.adjusts = self.params.adjusts_logits
        self.token_ids = list(prompt_ids)
        self.prompt_length = len(self.token_ids)
        self.max_length = min(self.max_length, self.prompt_length + self.params.max_tokens)

    @property
    def answer_ids(self) -> list[int]:
        """The committed answer, as a copy."""
        return self.token_ids[self.prompt_length :]

    @property
    def is_running(self) -> bool:
        return self.row is not None

    @property
    def wants_decode(self) -> bool:
        """Whether another pass may be launched and can add to the answer: each one in flight brings a token."""
        if self.guide is not None and self.num_in_flight:
            return False
        return len(self.token_ids) + self.num_in_flight < self.max_length

    @property
    def wants_scores(self) -> bool:
        """Whether log-probabilities of its prompt are missing, so that all of the prompt has to be run."""
        return self.params.prompt_logprobs is not None and len(self.prompt_scores) < self.prompt_length - 1

    def reach(self, num_in_flight: int) -> int:
        """Positions that a decode pass behind `num_in_flight` unseen ones may touch.

        With K draft tokens, each unseen pass may have added K + 1 tokens. The pass itself verifies K draft tokens
        behind the newest token and, if all are accepted, drafts the next ones from K - 1 placeholders behind those.
        """
        length = len(self.token_ids) + num_in_flight * (self.num_draft_tokens + 1)
        return min(length, self.max_length) + 2 * self.num_draft_tokens

    def forget_device(self) -> None:
        """Go back to the text alone. The row and the pages must have been given back; what is in flight is void."""
        self.row = None
        self.epoch += 1
        self.pages = []
        self.num_in_flight = self.num_prefilled = self.write_from = self.num_registered = 0

    def check_integrity(self, page_size: int) -> None:
        """Raise IntegrityError if text, pages and progress contradict each other."""
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
