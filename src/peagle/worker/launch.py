"""A plan in flight on the device, and its results.

Shapes: B requests of a pass, L tokens per request, E = L + 3, N rows of logits, V vocabulary, S scored prompt tokens.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from peagle.decoding.grammar import Draft
from peagle.scheduling.draft_budget import Choice, DraftBudget, DraftCurve
from peagle.scheduling.plan import Chunk
from peagle.scheduling.request import Request, TokenLogprobs
from peagle.worker.logprobs import LaunchLogprobs, LogprobSpan
from peagle.worker.row_state import RowState
from peagle.worker.transfers import Transfers


class PassResult(NamedTuple):
    """Output of a pass, on the device."""

    emitted_BE: Tensor
    """for each request: number of emitted tokens, number of verified drafts, marks as in `Emission`, then the tokens;
    those beyond the number are meaningless"""
    logits_NV: Tensor
    """the target's logits, before any adjustment"""
    place_BL: Tensor
    """the row of the logits that each token of each request comes from"""
    scored_logits_SV: Tensor | None = None
    """logits of the prompt tokens that `Prefill` was asked to score"""
    curve_2T: Tensor | None = None
    """the new drafts by probability, as in `DraftCurve`"""


class Emission(NamedTuple):
    """Tokens that one pass emitted for one request. Void if the request has another epoch by now."""

    request: Request
    epoch: int
    token_ids: list[int]
    num_drafts: int
    """draft tokens that were verified; 0 for prefill and plain decoding"""
    marks: int
    """bit i is set if token i is a tolerated draft, not the target's own choice, and if it is a bonus token"""
    logprobs: list[TokenLogprobs] | None
    is_prefill: bool = False
    drafts: list[Draft] | None = None
    """for a request with a grammar: the drafts behind the newest token"""


class PromptScores(NamedTuple):
    """Log-probabilities of the prompt tokens of one chunk. Void if the request has another epoch by now."""

    request: Request
    epoch: int
    first: int
    """index in the prompt of the first of these tokens"""
    logprobs: LogprobSpan


@dataclass(eq=False)
class Pass:
    """One pass of a launch: its requests, and host tensors that hold the results once the launch is done."""

    requests: list[Request]
    epochs: list[int]
    emitted: Tensor
    """a line per chunk or request, as in `PassResult`"""
    lines: list[int]
    """the line of each request in `emitted`"""
    is_decode: bool
    choice: Choice | None = None
    """the size of a decode pass"""
    curve: Tensor | None = None
    """the drafts for the next pass, as in `DraftCurve`"""
    logprobs: dict[int, LogprobSpan] = field(default_factory=dict)
    """by place in `requests`"""
    drafts: dict[int, Tensor] = field(default_factory=dict)
    """for requests with a grammar, by place in `requests`: the fields of each `Draft`, float64 [3, M]"""

    @classmethod
    def of_prompts(
        cls, chunks: Sequence[Chunk], result: PassResult, transfers: Transfers, logprobs: LaunchLogprobs
    ) -> "Pass":
        """The first tokens of the requests whose last chunk ran. The caller fetches `logprobs`."""
        lines = [line for line, chunk in enumerate(chunks) if chunk.is_last]
        requests, emitted = [chunks[line].request for line in lines], transfers.fetch(result.emitted_BE[: len(chunks)])
        made = cls(requests, [request.epoch for request in requests], emitted, lines, False)
        made.add_logprobs(result, logprobs)
        return made

    @property
    def num_accepted(self) -> int:
        """Accepted drafts."""
        return int((self.emitted[:, 0] - 1).sum())

    def teach(self, budget: DraftBudget) -> None:
        """Let the budget learn from a decode pass that was collected."""
        if self.choice is None:
            return
        budget.observe_time(self.choice, 1 + self.num_accepted / len(self.requests))
        if self.curve is None:
            return
        budget.observe_accepted(self.num_accepted, self.choice)
        counts, sums = self.curve.tolist()
        if counts[-1]:
            budget.observe(DraftCurve(counts, sums), self.choice.num_drafting)

    def add_logprobs(self, result: PassResult, logprobs: LaunchLogprobs) -> None:
        """Compute the log-probabilities of the emitted tokens for the requests that ask for them."""
        for index, (request, line) in enumerate(zip(self.requests, self.lines, strict=True)):
            if request.params.logprobs is not None:
                logits_LV = result.logits_NV[result.place_BL[line]]
                self.logprobs[index] = logprobs.add(logits_LV, result.emitted_BE[line, 3:], request.params.logprobs)

    def fetch_drafts(self, state: RowState, transfers: Transfers) -> None:
        """Fetch the drafts of requests with a grammar: the host decides which of them to verify."""
        for index, request in enumerate(self.requests):
            if request.guide is not None:
                tables = (state.tokens[:, 1:], state.parent[:, 1:], state.confidence)
                self.drafts[index] = transfers.fetch(torch.stack([table[request.row].double() for table in tables]))

    @staticmethod
    def scores(result: PassResult, logprobs: LaunchLogprobs, scored: list[tuple[Chunk, range]]) -> list[PromptScores]:
        """Compute the log-probabilities of the prompt tokens of these chunks."""
        num_done, scores = 0, []
        for chunk, places in scored:
            request, first = chunk.request, chunk.start + 1
            assert result.scored_logits_SV is not None and request.params.prompt_logprobs is not None
            logits_SV = result.scored_logits_SV[num_done : num_done + len(places)]
            token_ids_S = torch.tensor(request.token_ids[first : first + len(places)], device=logits_SV.device)
            span = logprobs.add(logits_SV, token_ids_S, request.params.prompt_logprobs)
            scores.append(PromptScores(request, request.epoch, first, span))
            num_done += len(places)
        return scores

    def emissions(self) -> Iterator[Emission]:
        emitted, is_prefill = self.emitted.tolist(), not self.is_decode
        for index, (request, epoch, line) in enumerate(zip(self.requests, self.epochs, self.lines, strict=True)):
            values = emitted[line]
            count, num_drafts, marks = values[:3]
            logprobs = self.logprobs[index].to_list()[:count] if index in self.logprobs else None
            drafts = None
            if index in self.drafts:
                drafts = [(int(token), int(parent), score) for token, parent, score in self.drafts[index].T.tolist()]
            tokens = values[3 : 3 + count]
            yield Emission(request, epoch, tokens, num_drafts, marks, logprobs, is_prefill, drafts)


@dataclass
class Launch:
    """A plan in flight. `collect` waits for it."""

    passes: list[Pass]
    """those whose results nobody has read; prefill comes first"""
    done: Any = None
    """CUDA event; None on a CPU, like `started`"""
    started: Any = None
    has_first: Any = None
    """CUDA event: the device has the first tokens of the prompts; None if they come with the rest"""
    is_shared: bool = False
    """whether prompts and decode step share one pass: then all tokens arrive together"""
    scores: list[PromptScores] = field(default_factory=list)
    """log-probabilities of prompts"""
    rest: Callable[[], None] | None = None
    """on a CPU: what is left to run after the first tokens"""
    prefill_seconds: float = 0.0
    """on a CPU: time of the prefill pass, once `finish` has run"""
    waited_seconds: float = 0.0
    """time that `collect` waited for the device"""

    def collect_first(self) -> list[Emission]:
        """Wait for the first tokens of the prompts and for `scores`, and return the tokens.

        `collect` then returns the others. A grammar needs the drafts behind its first token, so it waits for them.
        """
        first = [each for each in self.passes if not each.is_decode and each.requests and not self.is_shared]
        first = [each for each in first if all(request.guide is None for request in each.requests)]
        if self.has_first is not None and (first or self.scores):
            self.has_first.synchronize()
        self.passes = [each for each in self.passes if each not in first]
        return [emission for each in first for emission in each.emissions()]

    def finish(self) -> None:
        """On a CPU: run the rest."""
        if self.rest is not None:
            rest, self.rest = self.rest, None
            rest()

    def collect(self) -> list[Emission]:
        """Wait for the device, and return what the passes emitted, prefill first."""
        if self.done is not None:
            started = time.perf_counter()
            self.done.synchronize()
            self.waited_seconds = time.perf_counter() - started
        return [emission for each in self.passes for emission in each.emissions()]

    def device_seconds(self) -> float | None:
        """Time on the device; None on a CPU. Call `collect` first."""
        return None if self.started is None else self.started.elapsed_time(self.done) / 1000
