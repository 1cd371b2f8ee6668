"""Unfinished requests of an engine: a caller's request, and the n completions it asked for."""

from collections.abc import Callable
from dataclasses import dataclass, field

from peagle.decoding.stopping import FinishReason, StopCheck
from peagle.engine.outputs import Update
from peagle.sampling_params import SamplingParams
from peagle.scheduling.request import Request, TokenLogprobs

OnUpdate = Callable[[Update], None]


@dataclass(eq=False)
class PendingCompletion:
    """One completion in progress. The scheduler runs it as a `Request` of its own."""

    parent: "PendingRequest"
    index: int
    request: Request
    stop_check: StopCheck | None
    """detokenizes the output as it grows, for streaming and stop strings; None if neither needs it"""
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    """for each verified draft, the number of its tokens that were emitted"""
    num_draft_tokens: int = 0
    """tokens of those drafts"""
    num_tolerated_tokens: int = 0
    finish_reason: FinishReason | None = None
    has_update: bool = False
    """whether its first update has been sent"""
    is_done: bool = False


@dataclass(eq=False)
class PendingRequest:
    """A request as the caller sees it: a prompt, and one or more completions."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    arrived: float
    on_update: OnUpdate | None
    wants_text: bool = True
    completions: list[PendingCompletion] = field(default_factory=list)
    first_token_at: float | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens of the first completion that were cached; the other completions always find the prompt."""
        return self.completions[0].request.num_cached_tokens

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """For each prompt token, None for the first; None if not requested."""
        if self.params.prompt_logprobs is None:
            return None
        scores = self.completions[0].request.prompt_scores
        return (None, *(scores[index] for index in range(1, len(self.prompt_ids))))


def find_end(tokens: list[int], request: Request) -> tuple[int, FinishReason | None]:
    """How many of the new tokens belong to the output, and the finish reason if it ends with them."""
    room = request.max_length - len(request.token_ids)
    if len(tokens) < room and request.end_ids.isdisjoint(tokens):
        return len(tokens), None
    for index, token in enumerate(tokens[:room]):
        if token in request.end_ids:
            return index + 1, "stop"
    return (room, "length") if len(tokens) >= room else (len(tokens), None)


def find_end_in_text(tokens: list[int], stop_check: StopCheck) -> tuple[int, FinishReason | None, list[str]]:
    """The same with stop strings; also returns, for each of those tokens, the text that became final with it."""
    texts: list[str] = []
    for index, token in enumerate(tokens):
        text, finish_reason = stop_check.add(token)
        texts.append(text)
        if finish_reason is not None:
            return index + 1, finish_reason, texts
    return len(tokens), None, texts
