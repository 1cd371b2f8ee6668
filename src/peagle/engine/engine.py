"""The engine: requests in, completions out, one step at a time.

`step` plans, launches, and then processes the results of the previous launch. On a GPU the host thus works while the
device runs the next step. The engine is not thread-safe; `AsyncEngine` runs it in a thread of its own.
"""

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from peagle.checkpoint.card import DrafterCard
from peagle.checkpoint.replacement import DrafterFiles, replacement_for
from peagle.decoding.acceptance import per_position
from peagle.decoding.adjusting import check_token_ids
from peagle.decoding.draft_tree import check_tree
from peagle.decoding.grammar import make_guide
from peagle.decoding.reference import check_prompt
from peagle.decoding.stopping import FinishReason, StopCheck
from peagle.drafter.model import Drafter
from peagle.engine.checks import TrainedLength, as_ids, check_drafts, check_max_length, check_types
from peagle.engine.outputs import EngineStats, RequestOutput, Update
from peagle.engine.pending import OnUpdate, PendingCompletion, PendingRequest, find_end, find_end_in_text
from peagle.errors import CapacityError, ConfigError, EngineDeadError, QueueFullError, RequestError
from peagle.sampling_params import SamplingParams
from peagle.scheduling.config import EngineConfig, SchedulerConfig
from peagle.scheduling.pages import PagePool
from peagle.scheduling.plan import Plan
from peagle.scheduling.prefill_pace import PrefillPace
from peagle.scheduling.request import Request
from peagle.scheduling.scheduler import Scheduler
from peagle.targets.hf import HFTarget
from peagle.tokenizer import IncrementalDetokenizer
from peagle.worker.adjustments import check_edits
from peagle.worker.captured_steps import Progress, StepTimes
from peagle.worker.launch import Emission, Launch
from peagle.worker.runner import Runner

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
        """Start an engine. With `num_draft_tokens` None, a drafter that can draft trees drafts trees."""
        num_draft_tokens, config = check_drafts(drafter, num_draft_tokens, config or EngineConfig())
        check_tree(drafter, config.tree_nodes)
        self.target = target
        target.check_not_lent()
        if drafter is not None and target.aux_layer_ids != drafter.config.aux_layer_ids:
            target.tap(drafter.config.aux_layer_ids)  # another drafter was loaded for this target since
        is_gpu = target.device.type == "cuda"
        self.max_length = check_max_length(config, target, is_gpu)
        limits = SchedulerConfig.of(config, self.max_length, is_gpu)
        self.runner = Runner(target, drafter, num_draft_tokens, config, limits.max_batch, self.max_length, progress)
        self.drafter, self.num_draft_tokens, self.tree_nodes = drafter, num_draft_tokens, config.tree_nodes or 0
        pages = PagePool(self.runner.kv_cache.num_pages, config.page_size, config.reuse_prefixes)
        self.scheduler = Scheduler(limits, pages, self.runner.trials)
        self.pace = None if is_gpu else PrefillPace()
        self._pending: dict[str, PendingRequest] = {}
        self._completions: dict[Request, PendingCompletion] = {}
        self._guided: set[Request] = set()
        """unfinished requests with a grammar"""
        self._launches, self._finished = deque[Launch](), list[RequestOutput]()
        self._numbers, self._is_closed = itertools.count(), False
        self._trained_length = TrainedLength(drafter)
        self.on_finished: Callable[[RequestOutput, SamplingParams], None] | None = None
        """called with each finished request; must not raise"""
        self._stats = EngineStats()
        self._num_drafts_by_accepted = [0] * (self.num_draft_tokens + 1)

    def close(self) -> None:
        """Drop every request, restore the models and free the memory. Later requests are refused."""
        self._is_closed = True
        for request_id in list(self._pending):
            self.abort(request_id)
        self._launches.clear()
        self.runner.close()

    def swap_drafter(self, files: DrafterFiles) -> DrafterCard:
        """Serve other weights of the same drafter from the next step on. Call it between two steps.

        Running requests continue with the same answers, because the target decides every token. Raises, and changes
        nothing, if the directory does not fit.
        """
        if self.drafter is None:
            raise ConfigError("there is no drafter to replace", hint="start with --drafter")
        new = replacement_for(self.drafter, self.target, files)
        new.config.check_num_draft_tokens(self.num_draft_tokens)
        self.runner.replace_drafter(new)
        self._trained_length = TrainedLength(self.drafter)
        return new.card

    @property
    def has_work(self) -> bool:
        return bool(self._pending or self._launches)

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
        """Queue a request and return its id. Raises if the request can never be served.

        `step` calls `on_update` with the new tokens of each step; `abort` calls it with a last update for each
        unfinished completion. It must not raise. Without `wants_text` the output has token ids only, which saves
        detokenizing; stop strings and `on_update` still detokenize.
        """
        if self._is_closed:
            raise EngineDeadError("the engine is closed", hint="start a new one")
        params = params or SamplingParams()
        prompt_ids = as_ids(prompt_ids)
        check_prompt(self.target, prompt_ids)
        self._trained_length.check(len(prompt_ids))
        check_types(params)
        if request_id is None:
            request_id = self._free_id()
        elif request_id in self._pending:
            raise RequestError(f"request {request_id!r} is already being served", hint="use a unique request id")
        self._check_queue(params.n)
        num_draft_tokens, stop_ids = self._drafts_for(params), self._stop_ids(params)
        if params.adjusts_logits or params.tolerance < 1:
            check_token_ids(params, self.target.vocab_size)
            check_edits(params, stop_ids)
            self.runner.uploads.prepare_adjustments()
        pending = PendingRequest(request_id, tuple(prompt_ids), params, time.perf_counter(), on_update, wants_text)
        for index in range(params.n):
            # A top_k beyond the vocabulary means all of it, and may not fit into the row's int32.
            top_k = min(params.top_k, self.target.vocab_size)
            seed, prompt_logprobs = (params.seed + index) % 2**63, params.prompt_logprobs if index == 0 else None
            own = replace(params, n=1, seed=seed, top_k=top_k, prompt_logprobs=prompt_logprobs)
            name = request_id if params.n == 1 else f"{request_id}/{index}"
            guide = None if own.grammar is None else make_guide(self.target, own.grammar)
            request = Request(
                name, prompt_ids, own, num_draft_tokens, self.max_length, stop_ids, self.tree_nodes, guide
            )
            stop_check = self._stop_check(own, request, on_update)
            pending.completions.append(PendingCompletion(pending, index, request, stop_check))
        for index, completion in enumerate(pending.completions):
            try:
                self.scheduler.add(completion.request)
            except BaseException:
                for earlier in pending.completions[:index]:
                    self.scheduler.abort(earlier.request.request_id)
                raise
        self._completions |= {each.request: each for each in pending.completions}
        self._guided |= {each.request for each in pending.completions if each.request.guide is not None}
        self._pending[request_id] = pending
        return request_id

    def abort(self, request_id: str) -> bool:
        """End a request now and free its memory; False if there is no such request."""
        pending = self._pending.pop(request_id, None)
        if pending is None:
            return False
        unfinished = [each for each in pending.completions if not each.is_done]
        for completion in unfinished:
            self.scheduler.abort(completion.request.request_id)
            self._completions.pop(completion.request, None)
            self._guided.discard(completion.request)
        self._stats.num_aborted += 1
        if pending.on_update is not None:
            for completion in unfinished:
                metrics = pending.metrics(self.num_draft_tokens) if completion is unfinished[-1] else None
                pending.on_update(Update(request_id, completion.index, (), (), 0, 0, None, "abort", metrics=metrics))
        return True

    def reset(self) -> None:
        """Drop every request and the whole prefix cache, without calling `on_update`.

        For use after an interrupt, which may have left any state half changed.
        """
        old = self.scheduler
        pages = PagePool(self.runner.kv_cache.num_pages, self.runner.config.page_size, old.pages.reuse)
        self.scheduler = Scheduler(old.config, pages, old.trials)
        self._pending, self._completions, self._guided, self._finished = {}, {}, set(), []
        self._launches.clear()
        self.runner.recover()

    def step_times(self, batch: int) -> StepTimes | None:
        """Device time per decode step of `batch` requests; None on a CPU. Only while no request runs.

        Measuring overwrites pages, so it clears the prefix cache.
        """
        if self._pending:
            raise RequestError("requests are being served", hint="measure steps after they finish")
        self._collect(depth=0)  # a last launch may be in flight for requests that have finished
        times = self.runner.step_times(batch)
        if times is not None:
            self.reset()
        return times

    def _free_id(self) -> str:
        return next(name for number in self._numbers if (name := f"request-{number}") not in self._pending)

    def _check_queue(self, num_new: int) -> None:
        """Raise if `num_new` more completions exceed the queue. Completions that find a free row do not queue."""
        limit = self.runner.config.max_waiting
        if limit is None:
            return
        if num_new > limit + self.scheduler.config.max_batch:
            raise CapacityError(
                f"n={num_new} exceeds capacity (batch + queue = {limit + self.scheduler.config.max_batch})",
                hint="lower n, or raise --max-waiting or --max-batch",
            )
        if len(self.scheduler.waiting) + num_new > limit + self.scheduler.num_free_rows:
            self._stats.num_refused += 1
            raise QueueFullError(
                f"the queue is full ({len(self.scheduler.waiting)} waiting, max_waiting={limit})",
                hint="try again later, or raise --max-waiting",
            )

    def _drafts_for(self, params: SamplingParams) -> int:
        wanted = params.num_draft_tokens
        if wanted is None:
            return self.num_draft_tokens
        if wanted > self.num_draft_tokens:
            raise RequestError(
                f"num_draft_tokens={wanted} exceeds the engine's {self.num_draft_tokens}",
                hint="start the engine with more, or omit num_draft_tokens",
            )
        return wanted

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.target.eos_token_ids)

    def _stop_check(self, params: SamplingParams, request: Request, on_update: OnUpdate | None) -> StopCheck | None:
        if on_update is None and not params.stop and not params.shown_token_ids:
            return None
        detokenizer = IncrementalDetokenizer(self.target.tokenizer, shown_ids=params.shown_token_ids)
        return StopCheck(params, detokenizer, self.target.eos_token_ids, request.prompt_length, request.max_length)

    # Steps ------------------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Launch the next step, process the results of the previous one, and return the requests that finished."""
        if any(request.is_running for request in self._guided):
            self._collect(depth=0)  # what a grammar allows next depends on the emitted tokens
        started = time.perf_counter()
        plan = self.scheduler.plan(self._shared_tokens(), self._may_share())
        if plan.is_empty:
            self._collect(depth=0)
        else:
            self._stats.num_steps += 1
            self._stats.num_prefill_tokens += plan.num_prompt_tokens
            self._stats.num_preemptions += len(plan.preempted)
            self._launch(plan, started)
        finished, self._finished = self._finished, []
        return finished

    def _may_share(self) -> bool:
        """Whether the next decode step is one that prompts may run in: with a drafter, only if it has drafts."""
        decoding = (request for request in self.scheduler.running if request.state == "decode")
        return self.runner.may_share and (self.drafter is None or any(request.has_drafts for request in decoding))

    def _shared_tokens(self) -> int | None:
        """On a CPU with streaming callers: prompt tokens per step that do not stall their streams."""
        has_streams = any(each.on_update for each in self._pending.values())
        return self.pace.num_tokens if self.pace is not None and has_streams else None

    def _launch(self, plan: Plan, started: float) -> None:
        """Launch a plan, and process what has arrived: earlier results, then the first tokens of its prompts.

        `started` is when the host began to work on this step.
        """
        launch = self.runner.launch(plan)
        self._launches.append(launch)
        waited = self._collect(depth=1)
        if launch.is_shared or not plan.chunks:
            self.runner.observe_host(time.perf_counter() - started - waited, len(plan.decodes))
        self._process_first(launch)
        launch.finish()
        if self.pace is not None and plan.chunks:
            self.pace.observe(plan.num_prompt_tokens, launch.prefill_seconds)
        self._collect(depth=1 if self.runner.is_asynchronous else 0)

    def _process_first(self, launch: Launch) -> None:
        """Process the first tokens of the prompts before their drafts are ready."""
        emissions = launch.collect_first()
        scores, launch.scores = launch.scores, []
        for each in scores:
            if each.request.epoch == each.epoch:
                entries = each.logprobs.to_list()
                each.request.prompt_scores |= dict(enumerate(entries, start=each.first))
        for emission in emissions:
            self._process(emission)

    def _collect(self, depth: int) -> float:
        """Process the results of all launches but the last `depth`; returns the seconds that it waited for them."""
        waited = 0.0
        while len(self._launches) > depth:
            launch = self._launches.popleft()
            emissions = launch.collect()
            self.runner.observe(launch)
            for emission in emissions:
                self._process(emission)
            self._stats.device_seconds += launch.device_seconds() or 0.0
            waited += launch.waited_seconds
        return waited

    def check_integrity(self) -> None:
        """Raise if pages, rows and requests contradict each other. For tests: it checks every page."""
        self.scheduler.check_integrity()

    def _process(self, emission: Emission) -> None:
        request = emission.request
        if request.epoch != emission.epoch:
            return  # aborted, finished or preempted since the launch
        completion, tokens = self._completions[request], emission.token_ids
        if completion.stop_check is None:
            num_kept, finish_reason = find_end(tokens, request)
            texts: list[str] = []
        else:
            num_kept, finish_reason, texts = find_end_in_text(tokens, completion.stop_check)
        kept = tokens if num_kept == len(tokens) else tokens[:num_kept]
        num_accepted = min(len(tokens) - 1, num_kept)
        if emission.num_drafts:
            self._count_draft(completion, num_accepted, emission.num_drafts)
        if num_tolerated := (emission.marks & (1 << num_accepted) - 1).bit_count():
            completion.num_tolerated_tokens += num_tolerated
            self._stats.num_tolerated_tokens += num_tolerated
        if emission.is_prefill and completion.parent.first_token_at is None:
            completion.parent.first_token_at = time.perf_counter()
        self._stats.num_output_tokens += num_kept
        if emission.logprobs is not None:
            completion.logprobs += emission.logprobs[:num_kept]
        self.scheduler.commit(request, kept)
        if request.guide is not None and emission.drafts is not None:
            request.guide.advance(kept)
            if finish_reason == "stop" and request.guide.has_failed:
                finish_reason = "length"  # the answer was cut, not ended
            request.drafts = emission.drafts
        completion.texts += texts
        output = self._finish(completion, finish_reason) if finish_reason is not None else None
        completion.notify(emission, kept, texts, None if output is None else output.metrics)

    def _count_draft(self, completion: PendingCompletion, num_accepted: int, num_draft_tokens: int) -> None:
        completion.accepted.append(num_accepted)
        completion.positions.append(len(completion.request.token_ids) - completion.request.prompt_length)
        completion.num_draft_tokens += num_draft_tokens
        self._stats.num_drafts += 1
        self._stats.num_draft_tokens += num_draft_tokens
        self._num_drafts_by_accepted[num_accepted] += 1

    def _finish(self, completion: PendingCompletion, finish_reason: FinishReason) -> RequestOutput | None:
        """Finish a completion; returns the output if it was the last one of its request."""
        pending, request = completion.parent, completion.request
        self.scheduler.finish(request)
        self._trained_length.check(request.prompt_length + len(request.output_ids))
        del self._completions[request]
        self._guided.discard(request)
        completion.is_done, completion.finish_reason = True, finish_reason
        if not all(other.is_done for other in pending.completions):
            return None
        del self._pending[pending.request_id]
        self._stats.num_finished += 1
        self._stats.num_cached_tokens += pending.num_cached_tokens
        self._stats.num_prompt_tokens += len(pending.prompt_ids)
        output = pending.output(self.target.tokenizer, self.num_draft_tokens)
        self._finished.append(output)
        if self.on_finished is not None:
            self.on_finished(output, pending.params)
        return output

    def stats(self) -> EngineStats:
        """A copy of the counters."""
        pages, budget = self.scheduler.pages, self.runner.budget
        return replace(
            self._stats,
            accepted_per_position=per_position(self._num_drafts_by_accepted),
            num_waiting=len(self.scheduler.waiting),
            num_running=len(self.scheduler.running),
            num_pages=pages.capacity,
            num_pages_used=pages.num_used,
            drafting_pays=None if budget is None else budget.pays,
            drafting_gain=None if budget is None else budget.gain,
            decode_seconds=0.0 if budget is None else budget.seconds,
            plain_decode_seconds=0.0 if budget is None else budget.plain_seconds,
            num_draft_pauses=0 if budget is None else budget.num_pauses,
        )
