"""Unfinished requests of an engine: a caller's request, and the n completions it asked for."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from peagle.decoding.acceptance import Acceptance
from peagle.decoding.stopping import FinishReason, StopCheck
from peagle.engine.outputs import Completion, RequestMetrics, RequestOutput, Update
from peagle.sampling_params import SamplingParams
from peagle.scheduling.request import Request, TokenLogprobs
from peagle.tokenizer import detokenize
from peagle.worker.launch import Emission

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
    positions: list[int] = field(default_factory=list)
    """for each verified draft, the tokens of the answer before it"""
    num_draft_tokens: int = 0
    """tokens of those drafts"""
    num_tolerated_tokens: int = 0
    finish_reason: FinishReason | None = None
    has_update: bool = False
    """whether its first update has been sent"""
    is_done: bool = False

    def notify(self, emission: Emission, kept: list[int], texts: list[str], metrics: RequestMetrics | None) -> None:
        """Tell the caller, if it asked for that, which tokens of an emission were added, and their text."""
        parent = self.parent
        if parent.on_update is None:
            return
        update = Update(
            parent.request_id,
            self.index,
            tuple(kept),
            tuple(texts),
            min(len(emission.token_ids) - 1, len(kept)) if emission.num_drafts else 0,
            emission.num_drafts,
            None if emission.logprobs is None else tuple(emission.logprobs[: len(kept)]),
            self.finish_reason,
            emission.is_prefill,
            metrics,
            parent.prompt_logprobs if not self.has_update and self.index == 0 else None,
            emission.marks,
        )
        self.has_update = True
        parent.on_update(update)

    def output(self, tokenizer: "PreTrainedTokenizerBase") -> Completion:
        token_ids = self.request.output_ids
        if self.stop_check is not None:
            text = "".join(self.texts)
        elif not self.parent.wants_text:
            text = ""
        else:
            shown = token_ids[:-1] if token_ids and token_ids[-1] in self.request.end_ids else token_ids
            text = detokenize(tokenizer, shown)
        logprobs = None if self.request.params.logprobs is None else tuple(self.logprobs)
        return Completion(self.index, text, tuple(token_ids), self.finish_reason, logprobs)


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

    def metrics(self, num_draft_tokens: int) -> RequestMetrics:
        """`num_draft_tokens` is the limit of the engine."""
        completions = self.completions
        accepted = [count for each in completions for count in each.accepted]
        started = [each.request.started_at for each in completions if each.request.started_at is not None]
        return RequestMetrics(
            self.arrived,
            self.first_token_at,
            time.perf_counter(),
            Acceptance.of(accepted, num_draft_tokens),
            self.num_cached_tokens,
            sum(each.request.num_preemptions for each in completions),
            min(started, default=None),
            sum(each.num_draft_tokens for each in completions),
            sum(each.num_tolerated_tokens for each in completions),
            tuple(accepted),
            tuple(position for each in completions for position in each.positions),
        )

    def output(self, tokenizer: "PreTrainedTokenizerBase", num_draft_tokens: int) -> RequestOutput:
        completions = tuple(completion.output(tokenizer) for completion in self.completions)
        metrics = self.metrics(num_draft_tokens)
        return RequestOutput(self.request_id, self.prompt_ids, completions, metrics, self.prompt_logprobs)


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
