"""The engine: requests in, answers out, one step after another.

`step` plans, launches, and reads what the launch before has emitted, so that on a GPU the host's work falls into the
time the device is busy with the next step. It is not thread-safe; `AsyncEngine` gives it a thread of its own.
"""

import itertools
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from peagle.decoding.acceptance import Acceptance
from peagle.decoding.adjusting import check_token_ids
from peagle.decoding.grammar import make_guide
from peagle.decoding.reference import check_prompt
from peagle.decoding.stopping import FinishReason, StopCheck
from peagle.drafter.model import Drafter
from peagle.engine.adjustments import check_edits
from peagle.engine.answers import Answer, Group, OnUpdate, end_of, follow
from peagle.engine.checks import as_ids, check_device, check_drafts, check_max_length, check_types
from peagle.engine.config import (
    CPU_MAX_BATCH,
    GPU_MAX_BATCH,
    GPU_MAX_HELD,
    MAX_CHUNKS,
    EngineConfig,
)
from peagle.engine.launch import Emission, Launch
from peagle.engine.outputs import Completion, EngineStats, RequestMetrics, RequestOutput, TokenLogprobs, Update
from peagle.engine.pages import PagePool
from peagle.engine.recorded_steps import Progress, StepTimes
from peagle.engine.request import Request
from peagle.engine.runner import Runner
from peagle.engine.scheduler import Scheduler, SchedulerConfig
from peagle.errors import CapacityError, EngineDeadError, QueueFullError, RequestError
from peagle.sampling_params import SamplingParams
from peagle.targets.hf import HFTarget
from peagle.tokenizer import IncrementalDetokenizer, detokenize

log = logging.getLogger(__name__)


class Engine:
    """Continuous batching over one target and at most one drafter."""

    def __init__(
        self,
        target: HFTarget,
        drafter: Drafter | None = None,
        num_draft_tokens: int | None = 0,
        config: EngineConfig | None = None,
        progress: Progress = lambda *_: None,
    ) -> None:
        """Start an engine; `num_draft_tokens` None, with a drafter on a CPU, measures which number is the fastest."""
        config = config or EngineConfig()
        num_draft_tokens = check_drafts(drafter, num_draft_tokens, target)
        check_device(config, target)
        self.target = target
        target.check_not_lent()
        if drafter is not None and target.aux_layer_ids != drafter.config.aux_layer_ids:
            target.tap(drafter.config.aux_layer_ids)  # another drafter was loaded for the target since
        is_gpu = target.device.type == "cuda"
        max_batch = config.max_batch or (GPU_MAX_BATCH if is_gpu else CPU_MAX_BATCH)
        self.max_length = check_max_length(config, target, is_gpu)
        self.runner = Runner(target, drafter, num_draft_tokens, config, max_batch, self.max_length, progress)
        self.drafter, self.num_draft_tokens = self.runner.drafter, self.runner.num_draft_tokens
        pages = PagePool(self.runner.kv_cache.num_pages, config.page_size, config.reuse_prefixes)
        limits = SchedulerConfig(
            max_batch,
            self.max_length,
            config.prefill_tokens,
            MAX_CHUNKS - 1,
            (GPU_MAX_HELD if is_gpu else 0) if config.max_held is None else config.max_held,
            has_drafter=self.drafter is not None,
        )
        self.scheduler = Scheduler(limits, pages)
        self._groups: dict[str, Group] = {}
        self._answers: dict[Request, Answer] = {}
        self._guided: set[Request] = set()
        """open requests that are held to a grammar"""
        self._launches: deque[Launch] = deque()
        self._numbers = itertools.count()
        self._is_closed = False
        self._stats = EngineStats(accepted_per_position=[0] * self.num_draft_tokens)
        self._finished: list[RequestOutput] = []

    def close(self) -> None:
        """Drop every request and give the models and the memory back. The engine refuses requests afterwards."""
        self._is_closed = True
        for request_id in list(self._groups):
            self.abort(request_id)
        self._launches.clear()
        self.runner.close()

    @property
    def has_work(self) -> bool:
        return bool(self._groups or self._launches)

    # Requests ---------------------------------------------------------------------------------------------------------

    def add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        on_update: OnUpdate | None = None,
        wants_text: bool = True,
    ) -> str:
        """Queue a request and return its id; one that can never be served is refused here.

        `on_update` is called from `step` with what each step brings, and from `abort` with an update that ends each
        unfinished answer. It must not raise. Without `wants_text` the finished answer has its tokens alone, which
        saves the host the decoding; stop strings and `on_update` need the text all the same.
        """
        if self._is_closed:
            raise EngineDeadError("the engine has been closed", hint="start a new one")
        params = params or SamplingParams()
        prompt_ids = as_ids(prompt_ids)
        check_prompt(self.target, prompt_ids)
        check_types(params)
        if request_id is None:
            request_id = self._free_id()
        elif request_id in self._groups:
            raise RequestError(f"request {request_id!r} is already being served", hint="give each an id of its own")
        self._check_queue(params.n)
        num_draft_tokens, stop_ids = self._drafts_for(params), self._stop_ids(params)
        if params.adjusts_logits:
            check_token_ids(params, self.target.vocab_size)
            check_edits(params, stop_ids)
            self.runner.prepare_adjustments()
        group = Group(request_id, tuple(prompt_ids), params, time.perf_counter(), on_update, wants_text)
        for index in range(params.n):
            # A top_k beyond the vocabulary means all of it, and may be too large a number for a row.
            top_k = min(params.top_k, self.target.vocab_size)
            seed, prompt_logprobs = (params.seed + index) % 2**63, params.prompt_logprobs if index == 0 else None
            own = replace(params, n=1, seed=seed, top_k=top_k, prompt_logprobs=prompt_logprobs)
            name = request_id if params.n == 1 else f"{request_id}/{index}"
            guide = None if own.grammar is None else make_guide(self.target, own.grammar)
            request = Request(name, prompt_ids, own, num_draft_tokens, self.max_length, stop_ids, guide)
            stop_check = self._stop_check(own, request, on_update)
            group.answers.append(Answer(group, index, request, stop_check))
        for index, answer in enumerate(group.answers):
            try:
                self.scheduler.add(answer.request)
            except BaseException:
                for earlier in group.answers[:index]:
                    self.scheduler.abort(earlier.request.request_id)
                raise
        self._answers |= {answer.request: answer for answer in group.answers}
        self._guided |= {answer.request for answer in group.answers if answer.request.guide is not None}
        self._groups[request_id] = group
        return request_id

    def abort(self, request_id: str) -> bool:
        """End a request now and free what it holds; False if there is none of that id."""
        group = self._groups.pop(request_id, None)
        if group is None:
            return False
        open_answers = [answer for answer in group.answers if not answer.is_done]
        for answer in open_answers:
            self.scheduler.abort(answer.request.request_id)
            self._answers.pop(answer.request, None)
            self._guided.discard(answer.request)
        self._stats.num_aborted += 1
        if group.on_update is not None:
            for answer in open_answers:
                metrics = self._metrics(group) if answer is open_answers[-1] else None
                group.on_update(Update(request_id, answer.index, (), (), 0, 0, None, "abort", metrics=metrics))
        return True

    def reset(self) -> None:
        """Drop every request and every page that might be reused, whatever state they are in.

        For after an interrupt, which may have come between any two changes of the books. Nobody is told.
        """
        old = self.scheduler
        pages = PagePool(self.runner.kv_cache.num_pages, self.runner.config.page_size, old.pages.reuse)
        self.scheduler = Scheduler(old.config, pages)
        self._groups, self._answers, self._guided, self._finished = {}, {}, set(), []
        self._launches.clear()
        self.runner.recover()

    def step_times(self, batch: int) -> StepTimes | None:
        """What one decode step of `batch` requests takes on the device; None on a CPU. Only while nothing runs.

        Measuring overwrites pages, so none is reused afterwards.
        """
        if self._groups:
            raise RequestError("requests are being served", hint="measure steps when they are done")
        self._collect(depth=0)  # a last launch may be under way, for requests that have ended since
        times = self.runner.step_times(batch)
        if times is not None:
            self.reset()
        return times

    def _free_id(self) -> str:
        return next(name for number in self._numbers if (name := f"request-{number}") not in self._groups)

    def _check_queue(self, num_new: int) -> None:
        """Refuse answers that would have to wait behind too many others. Those who find a row at once do not wait."""
        limit = self.runner.config.max_waiting
        if limit is None:
            return
        scheduler = self.scheduler
        if num_new > limit + scheduler.config.max_batch:
            raise CapacityError(
                f"{num_new} answers are more than run and wait at the same time, {limit + scheduler.config.max_batch}",
                hint="ask for fewer answers at a time",
            )
        if len(scheduler.waiting) + num_new > limit + scheduler.num_free_rows:
            self._stats.num_refused += 1
            raise QueueFullError(
                f"{len(scheduler.waiting)} requests wait already, and at most {limit} may",
                hint="try again later, or raise max_waiting",
            )

    def _drafts_for(self, params: SamplingParams) -> int:
        wanted = params.num_draft_tokens
        if wanted is None:
            return self.num_draft_tokens
        if wanted > self.num_draft_tokens:
            raise RequestError(
                f"num_draft_tokens must be at most the engine's {self.num_draft_tokens}, got {wanted}",
                hint="start the engine with more, or leave it out",
            )
        return wanted

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.target.eos_token_ids)

    def _stop_check(self, params: SamplingParams, request: Request, on_update: OnUpdate | None) -> StopCheck | None:
        if on_update is None and not params.stop:
            return None
        detokenizer = IncrementalDetokenizer(self.target.tokenizer)
        return StopCheck(params, detokenizer, self.target.eos_token_ids, request.prompt_length, request.max_length)

    # Steps ------------------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Launch the next iteration and take in the results of the one before; the requests that finished by it."""
        if any(request.is_running for request in self._guided):
            self._collect(depth=0)  # what a grammar allows next depends on what was emitted
        plan = self.scheduler.plan()
        if not plan.is_empty:
            self._stats.num_steps += 1
            self._stats.num_prefill_tokens += sum(chunk.end - chunk.start for chunk in plan.chunks)
            self._stats.num_preemptions += len(plan.preempted)
            self._launches.append(self.runner.launch(plan))
        self._collect(depth=1 if self.runner.is_asynchronous and not plan.is_empty else 0)
        finished, self._finished = self._finished, []
        return finished

    def _collect(self, depth: int) -> None:
        """Take in the results of all launches but the last `depth`."""
        while len(self._launches) > depth:
            launch = self._launches.popleft()
            emissions = launch.collect()
            for scores in launch.scores():
                if scores.request.epoch == scores.epoch:
                    entries = scores.logprobs.to_list(len(scores.logprobs.chosen_S))
                    scores.request.prompt_scores |= dict(enumerate(entries, start=scores.first))
            for emission in emissions:
                self._take_in(emission)
            self._stats.device_seconds += launch.device_seconds() or 0.0

    def check_integrity(self) -> None:
        """Raise if pages, rows and requests contradict each other. For tests: it looks at every page."""
        self.scheduler.check_integrity()

    def _take_in(self, emission: Emission) -> None:
        request = emission.request
        if request.epoch != emission.epoch:
            return  # aborted, finished or preempted since: what it would have got is void
        answer = self._answers[request]
        tokens = emission.token_ids
        if answer.stop_check is None:
            num_kept, finish_reason = end_of(tokens, request)
            texts: list[str] = []
        else:
            num_kept, finish_reason, texts = follow(tokens, answer.stop_check)
        kept = tokens if num_kept == len(tokens) else tokens[:num_kept]
        if emission.num_drafts:
            self._count_draft(answer, min(len(tokens) - 1, num_kept), emission.num_drafts)
        if answer.group.first_token_at is None:
            answer.group.first_token_at = time.perf_counter()
        self._stats.num_output_tokens += num_kept
        if request.params.logprobs is not None and emission.logprobs is not None:
            answer.logprobs += emission.logprobs[:num_kept]
        self.scheduler.committed(request, kept)
        if request.guide is not None and emission.draft_ids is not None:
            request.guide.advance(kept)
            request.draft_ids = emission.draft_ids
        answer.texts += texts
        output = self._finish(answer, finish_reason) if finish_reason is not None else None
        if answer.group.on_update is not None:
            self._tell(answer, emission, kept, texts, output)

    def _count_draft(self, answer: Answer, num_accepted: int, num_draft_tokens: int) -> None:
        answer.accepted.append(num_accepted)
        answer.num_draft_tokens += num_draft_tokens
        self._stats.num_drafts += 1
        self._stats.num_draft_tokens += num_draft_tokens
        for position in range(num_accepted):
            self._stats.accepted_per_position[position] += 1

    def _tell(
        self,
        answer: Answer,
        emission: Emission,
        kept: list[int],
        texts: list[str],
        output: RequestOutput | None,
    ) -> None:
        logprobs = None if emission.logprobs is None else tuple(emission.logprobs[: len(kept)])
        num_accepted = min(len(emission.token_ids) - 1, len(kept)) if emission.num_drafts else 0
        update = Update(
            answer.group.request_id,
            answer.index,
            tuple(kept),
            tuple(texts),
            num_accepted,
            emission.num_drafts,
            logprobs,
            answer.finish_reason,
            emission.is_prefill,
            None if output is None else output.metrics,
            self._prompt_logprobs(answer.group) if answer.is_new and answer.index == 0 else None,
        )
        answer.is_new = False
        assert answer.group.on_update is not None, "only told to those who listen"
        answer.group.on_update(update)

    def _finish(self, answer: Answer, finish_reason: FinishReason) -> RequestOutput | None:
        """End an answer; the whole output if it was the last of its request."""
        group, request = answer.group, answer.request
        self.scheduler.finish(request)
        del self._answers[request]
        self._guided.discard(request)
        answer.is_done, answer.finish_reason = True, finish_reason
        if not all(other.is_done for other in group.answers):
            return None
        del self._groups[group.request_id]
        self._stats.num_finished += 1
        self._stats.num_cached_tokens += group.num_cached_tokens
        self._stats.num_prompt_tokens += len(group.prompt_ids)
        output = self._output(group)
        self._finished.append(output)
        return output

    def _output(self, group: Group) -> RequestOutput:
        completions = tuple(self._completion(answer) for answer in group.answers)
        prompt_logprobs = self._prompt_logprobs(group)
        return RequestOutput(group.request_id, group.prompt_ids, completions, self._metrics(group), prompt_logprobs)

    def _prompt_logprobs(self, group: Group) -> tuple[TokenLogprobs | None, ...] | None:
        if group.params.prompt_logprobs is None:
            return None
        scores = group.answers[0].request.prompt_scores
        return (None, *(scores[place] for place in range(1, len(group.prompt_ids))))

    def _metrics(self, group: Group) -> RequestMetrics:
        accepted = [count for answer in group.answers for count in answer.accepted]
        return RequestMetrics(
            group.arrived,
            group.first_token_at,
            time.perf_counter(),
            Acceptance.of(accepted, self.num_draft_tokens),
            group.num_cached_tokens,
            sum(answer.request.num_preemptions for answer in group.answers),
            min((at for answer in group.answers if (at := answer.request.started_at) is not None), default=None),
            sum(answer.num_draft_tokens for answer in group.answers),
        )

    def _completion(self, answer: Answer) -> Completion:
        token_ids = answer.request.answer_ids
        if answer.stop_check is not None:
            text = "".join(answer.texts)
        elif not answer.group.wants_text:
            text = ""
        else:
            shown = token_ids[:-1] if token_ids and token_ids[-1] in answer.request.end_ids else token_ids
            text = detokenize(self.target.tokenizer, shown)
        logprobs = None if answer.request.params.logprobs is None else tuple(answer.logprobs)
        return Completion(answer.index, text, tuple(token_ids), answer.finish_reason, logprobs)

    def stats(self) -> EngineStats:
        """Counts so far, as a copy."""
        pages = self.scheduler.pages
        return replace(
            self._stats,
            accepted_per_position=list(self._stats.accepted_per_position),
            num_waiting=len(self.scheduler.waiting),
            num_running=len(self.scheduler.running),
            num_pages=pages.capacity,
            num_pages_used=pages.num_used,
        )
