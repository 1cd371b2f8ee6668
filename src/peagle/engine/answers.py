"""What an engine keeps of a request beside the scheduler's books: its answers while they grow, and where they end."""

from collections.abc import Callable
from dataclasses import dataclass, field

from peagle.decoding.stopping import FinishReason, StopCheck
from peagle.engine.outputs import TokenLogprobs, Update
from peagle.engine.request import Request
from peagle.sampling_params import SamplingParams

OnUpdate = Callable[[Update], None]


@dataclass(eq=False)
class Answer:
    """One answer of a request while it grows: the scheduler's request, and what the engine keeps beside it."""

    group: "Group"
    index: int
    request: Request
    stop_check: StopCheck | None
    """follows the text, where somebody reads along or stop strings are looked for; else None"""
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    """for each verified draft, how many of its tokens were emitted"""
    num_draft_tokens: int = 0
    """of those drafts"""
    finish_reason: FinishReason | None = None
    is_new: bool = True
    """nobody has been told of it yet"""
    is_done: bool = False


@dataclass(eq=False)
class Group:
    """A caller's request: one answer, or several to the same prompt."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    arrived: float
    on_update: OnUpdate | None
    wants_text: bool = True
    answers: list[Answer] = field(default_factory=list)
    first_token_at: float | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed; the answers after the first always find it."""
        return self.answers[0].request.num_cached_tokens


def end_of(tokens: list[int], request: Request) -> tuple[int, FinishReason | None]:
    """How many of the new tokens belong to the answer, and why it ends with them, if it does."""
    room = request.max_length - len(request.token_ids)
    for index, token in enumerate(tokens[:room]):
        if token in request.end_ids:
            return index + 1, "stop"
    return (room, "length") if len(tokens) >= room else (len(tokens), None)


def follow(tokens: list[int], stop_check: StopCheck) -> tuple[int, FinishReason | None, list[str]]:
    """The same where somebody follows the text; and for each of those tokens the text that became certain with it."""
    texts: list[str] = []
    for index, token in enumerate(tokens):
        text, finish_reason = stop_check.add(token)
        texts.append(text)
        if finish_reason is not None:
            return index + 1, finish_reason, texts
    return len(tokens), None, texts
