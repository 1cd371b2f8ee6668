"""Runs plans on the device: uploads what changed, replays the captured passes, and fetches the emitted tokens.

On a GPU every batch shape is a CUDA graph, captured at start-up, and `launch` returns before the device has finished:
the host reads the results of one launch while the next one runs. On a CPU `launch` does the work itself.
"""

import gc
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, cast

import torch

from peagle.checkpoint.replacement import Replacement
from peagle.drafter.model import Drafter
from peagle.errors import CapacityError
from peagle.kernels.compiler import Compile
from peagle.scheduling.config import EngineConfig, shared_bucket, verify_sizes
from peagle.scheduling.draft_budget import TRIAL_STEPS, Choice, DraftBudget, DraftCurve
from peagle.scheduling.draft_trials import DraftTrials
from peagle.scheduling.plan import Plan
from peagle.scheduling.request import Request, step_room
from peagle.targets.hf import HFTarget
from peagle.targets.paged import PagedTarget
from peagle.worker.adjustments import Adjustments
from peagle.worker.captured_steps import CapturedSteps, Progress, StepTimes
from peagle.worker.chunks import chunk_views, fill_upload
from peagle.worker.drafting import Drafting
from peagle.worker.graphs import CaptureCost, CaptureError, compile_once, keep_compiled_code
from peagle.worker.kv_cache import make_kv_cache
from peagle.worker.launch import Launch, Pass, PassResult
from peagle.worker.linear_layers import join_models, pack_models, repack
from peagle.worker.logprobs import LaunchLogprobs, scored_tokens
from peagle.worker.prefill import Prefill
from peagle.worker.row_state import RowState
from peagle.worker.shared_pass import SharedPass
from peagle.worker.step import Step, run_eagerly
from peagle.worker.step_costs import measure_step_costs
from peagle.worker.transfers import Transfers
from peagle.worker.uploads import Uploads
from peagle.worker.verify_batch import draft_curve, num_drafts

USUAL_CPU_BATCH = 4
"""Batch size that plain decoding on a CPU is tuned for."""

log = logging.getLogger(__name__)


class Runner:
    """Owns the device side of one engine: KV cache, rows, CUDA graphs."""

    captured: CapturedSteps | None = None
    """None if passes run eagerly: on a CPU, with `eager`, and for targets that synchronize with the device"""
    budget: DraftBudget | None = None
    """chooses how many drafts to verify; None: all, or a fixed limit"""
    trials: DraftTrials | None = None
    """on a CPU, with a budget: chooses which new requests try drafting"""

    def __init__(
        self,
        target: HFTarget,
        drafter: Drafter | None,
        num_draft_tokens: int,
        config: EngineConfig,
        max_batch: int,
        max_length: int,
        progress: Progress = lambda *_: None,
    ) -> None:
        target.check_not_lent()  # check first: a failed start must not undo another engine's changes
        self.target, self.drafter = target, drafter
        self.config, self.max_batch = config, max_batch
        self.device = target.device
        is_gpu = self.is_asynchronous = self.device.type == "cuda"
        compile: Compile | None = compile_once if is_gpu and not config.eager else None
        if compile is not None:
            keep_compiled_code()
        self._restore: list[Callable[[], object]] = []
        try:
            if is_gpu:
                self._restore.append(join_models(target, drafter))
            else:
                self._prepare_linears(num_draft_tokens)
            self.paged_target = PagedTarget(target, compile)
            self._restore.append(self.paged_target.close)
            self._compile_drafter(compile)
            self.num_draft_tokens = num_draft_tokens
            tree_nodes = config.tree_nodes if num_draft_tokens else None
            pages_per_sequence = -(-(max_length + step_room(num_draft_tokens, tree_nodes)) // config.page_size)
            self.kv_cache = make_kv_cache(
                self.paged_target, self.drafter, config, max_batch, pages_per_sequence, tree_nodes or num_draft_tokens
            )
            self.state = RowState.empty(max_batch, pages_per_sequence, num_draft_tokens, self.device, tree_nodes)
            self._transfers = Transfers(self.device)
            self.uploads = Uploads(self.state, self._transfers, target.vocab_size)
            self._make_passes(compile or run_eagerly)
            self.capture_cost = CaptureCost(0, 0.0, 0)
            if is_gpu and not config.eager:
                self.capture_steps(progress)
                # Compiling leaves millions of objects: walking over them would stall the engine for 0.6 s each time.
                gc.collect()
                gc.freeze()
            elif not is_gpu and drafter is not None and config.verify_tokens is None:
                self._measure_steps()
        except BaseException as error:
            self.close()
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise CapacityError(
                    f"the GPU ran out of memory while the engine started: {str(error).splitlines()[0]}",
                    hint="lower --memory-share, --max-batch or --prefill-tokens",
                ) from error
            raise

    def close(self) -> None:
        """Restore the models, and free the KV cache and the graphs."""
        for restore in reversed(self._restore):
            restore()
        self._restore = []
        if "kv_cache" in self.__dict__:
            self.kv_cache.target_memory.free()
            self.kv_cache.drafter_memory.free()
        for name in ("kv_cache", "step", "plain_step", "prefill", "shared_pass", "captured", "uploads"):
            self.__dict__.pop(name, None)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            gc.unfreeze()
            gc.collect()  # graphs and compiled functions form reference cycles that hold pages
            torch.cuda.empty_cache()

    @torch.no_grad()
    def replace_drafter(self, new: Replacement) -> None:
        """Copy other weights into the drafter, between two launches.

        Copying in place keeps the captured graphs valid. Entries of the old drafter stay in the KV cache: they may cost
        the running requests some acceptance, but the target still decides every token.
        """
        drafter, drafting = self.drafter, self.step.drafting
        assert drafter is not None and drafting is not None, "checked by the engine"
        drafter.without_pair_head().load_state_dict(new.state)
        if drafter.pair_head is not None and new.pair_head is not None:
            drafter.pair_head.load_state_dict(new.pair_head.state_dict())
        drafter.card = new.card
        repack(drafter)
        drafting.renew()
        if self.budget is not None:
            self.budget.reset()
        if self.trials is not None:
            self.trials.reset()

    def recover(self) -> None:
        """After an interrupt: wait for the device, and upload everything again."""
        if self.captured is not None:
            self.captured.forget_rows()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def capture_steps(self, progress: Progress) -> None:
        """Capture every batch shape. Falls back to eager launches if the target cannot be captured."""
        passes = (self.step, self.plain_step, self.prefill, self.shared_pass)
        captured = CapturedSteps(*passes, self.max_batch, self._transfers, self.config)
        adjustments = None
        if self.config.capture_adjusted:
            self.uploads.prepare_adjustments()
            adjustments = self.uploads.adjustments
        try:
            self.capture_cost = captured.capture_all(progress, adjustments)
        except CaptureError as error:
            kind = f"{type(self.target.model).__name__} in {str(self.target.dtype).removeprefix('torch.')}"
            log.warning("%s cannot be captured as CUDA graphs (%s); falling back to eager launches", kind, error)
            log.warning("this is slower; load a mixture-of-experts target in bfloat16 to capture it")
            return
        self.captured = captured
        if self.drafter is not None and self.config.verify_tokens is None:
            self.budget = DraftBudget(captured.decode_seconds(self.kv_cache.num_pages).__getitem__)

    @property
    def may_share(self) -> bool:
        """Whether prompts may run in the pass of a decode step: not while the budget has stopped the drafter."""
        return self.budget is None or not self.budget.is_stopped

    # Running plans ----------------------------------------------------------------------------------------------------

    def launch(self, plan: Plan) -> Launch:
        """Run the chunks of a plan, then its decode step; on a GPU without waiting for either.

        On a CPU it returns with the first tokens of the prompts; `Launch.finish` runs the rest.
        """
        launch = Launch([])
        with self._inference():
            self.uploads.send(plan)
            launch.started = self._event()
            choice = self._choose(plan.decodes) if plan.shares_pass else None
            if choice is not None and (self.drafter is None or choice.num_drafting):
                self._share(plan, launch, choice)
                launch.done = self._event()
                return launch
            started = time.perf_counter()
            draft = self._prefill(plan, launch) if plan.chunks else None
            launch.prefill_seconds = time.perf_counter() - started
            launch.has_first = self._event()
        launch.rest = partial(self._finish, launch, plan, draft, choice)
        if self.is_asynchronous:
            launch.finish()
        return launch

    def _share(self, plan: Plan, launch: Launch, choice: Choice) -> None:
        """Run the decode step and the chunks as one pass."""
        rows = [cast(int, request.row) for request in plan.decodes]
        bucket = shared_bucket(len(rows), self.config.prefill_tokens, plan.num_prompt_tokens, len(plan.chunks))
        assert bucket is not None, "checked by the scheduler"
        upload = fill_upload(plan.chunks, self.state.padding_row, *bucket)
        if self.captured is not None:
            decoded, prefilled = self.captured.decode_beside(rows, upload, bucket)
            if self.budget is not None:
                choice = self.budget.resized(choice, len(decoded.emitted_BE), len(decoded.logits_NV))
        else:
            chunks = chunk_views(torch.from_numpy(upload).to(self.device), *bucket)
            decoded, prefilled = self.shared_pass.run(torch.tensor(rows, device=self.device), chunks, choice.num_tokens)
        logprobs = LaunchLogprobs()
        first = Pass.of_prompts(plan.chunks, prefilled, self._transfers, logprobs)
        logprobs.fetch(self._transfers)
        launch.passes += [first, self._decoded(plan.decodes, decoded, choice)]
        launch.is_shared = True

    def _finish(
        self, launch: Launch, plan: Plan, draft: Callable[[], None] | None, choice: Choice | None = None
    ) -> None:
        """Draft behind the first tokens, and run the decode step."""
        with self._inference():
            if draft is not None:
                started = time.perf_counter()
                draft()
                launch.prefill_seconds += time.perf_counter() - started
            for made in launch.passes:
                made.fetch_drafts(self.state, self._transfers)
            # A request may have ended with its first token.
            decodes = [request for request in plan.decodes if request.is_running]
            if decodes:
                launch.passes.append(self._decode(decodes, choice))
            launch.done = self._event()

    def _inference(self) -> AbstractContextManager[Any]:
        """On a CPU, inference mode makes the many small operations of a pass cheaper."""
        return torch.no_grad() if self.is_asynchronous else torch.inference_mode()

    def _event(self) -> torch.cuda.Event | None:
        """On a GPU: an event, recorded now."""
        if not self.is_asynchronous:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _prefill(self, plan: Plan, launch: Launch) -> Callable[[], None] | None:
        """Run the first half of a prefill pass, and return the second; None if no request of it has drafts."""
        bucket = plan.num_prompt_tokens, len(plan.chunks) + 1
        if self.captured is not None:
            bucket = self.captured.bucket(*bucket)
        upload = fill_upload(plan.chunks, self.state.padding_row, *bucket)
        adjustments = self._adjustments_for([chunk.request for chunk in plan.chunks if chunk.is_last])
        scored = scored_tokens(plan)
        if self.captured is not None and not scored:
            result, draft = self.captured.prefill(upload, bucket, adjustments)
        else:  # scored prompts are rare and of any size, so they have no graph
            chunks = chunk_views(torch.from_numpy(upload).to(self.device), *bucket)
            places = [place for _, places in scored for place in places]
            scored_S = torch.tensor(places, device=self.device) if scored else None
            prefilled = self.prefill.run(chunks, adjustments, scored_S)
            result, draft = prefilled.result, partial(self.prefill.draft, prefilled)
        logprobs = LaunchLogprobs()
        made = Pass.of_prompts(plan.chunks, result, self._transfers, logprobs)
        launch.scores = made.scores(result, logprobs, scored)
        logprobs.fetch(self._transfers)
        launch.passes.append(made)
        return draft if any(chunk.request.has_drafts for chunk in plan.chunks) else None

    def _decode(self, requests: Sequence[Request], choice: Choice | None) -> Pass:
        rows = [cast(int, request.row) for request in requests]
        adjustments = self._adjustments_for(requests)
        choice = choice or self._choose(requests)
        if self.captured is not None:
            result = self.captured.decode(rows, adjustments, choice.num_tokens)
        else:
            step = self.step if choice.num_drafting else self.plain_step
            result = step.decode(torch.tensor(rows, device=self.device), adjustments, choice.num_tokens)
        return self._decoded(requests, result, choice)

    def _decoded(self, requests: Sequence[Request], result: PassResult, choice: Choice) -> Pass:
        emitted = self._transfers.fetch(result.emitted_BE[: len(requests)])
        made = Pass(list(requests), [each.epoch for each in requests], emitted, list(range(len(requests))), True)
        if self.budget is not None:
            made.choice = choice
            made.curve = None if result.curve_2T is None else self._transfers.fetch(result.curve_2T)
        logprobs = LaunchLogprobs()
        made.add_logprobs(result, logprobs)
        logprobs.fetch(self._transfers)
        made.fetch_drafts(self.state, self._transfers)
        return made

    def _choose(self, requests: Sequence[Request]) -> Choice:
        """The tokens of the verification pass. Requests whose drafts do not pay are paused."""
        size = len(requests) if self.captured is None else self.captured.size(len(requests))
        drafting = [request for request in requests if request.has_drafts]
        if not drafting:
            return Choice(size)
        if self.budget is None:
            most = max(verify_sizes(size, self.state.tokens.shape[1] - 1, self.config.verify_tokens or 0))
            return Choice(self._fewest_tokens(requests, most), len(drafting))
        num_paused = sum(request.num_draft_tokens > 0 for request in requests) - len(drafting)
        trial_steps = self.budget.trial_steps / len(requests)  # a trial slows down the whole batch
        on_trial = [request for request in drafting if request.num_draft_steps < trial_steps]
        known = self._known_drafts(drafting)
        choice = self.budget.choose(size, len(requests), len(drafting), num_paused, known, len(on_trial))
        if self.trials is not None:
            self.trials.observe(choice.pays, sum(not request.num_draft_steps for request in on_trial))
        if not choice.pays:
            self.uploads.pause([request for request in drafting if request not in on_trial])
            if not on_trial:
                return choice
            drafting, choice = on_trial, choice._replace(num_drafting=len(on_trial))
        for request in drafting:
            request.num_draft_steps += 1
        return choice._replace(num_tokens=self._fewest_tokens(requests, choice.num_tokens))

    def _known_drafts(self, requests: Sequence[Request]) -> DraftCurve | None:
        """On a CPU: the drafts that these requests have, by probability."""
        if self.is_asynchronous:
            return None
        rows_B = torch.tensor([request.row for request in requests])
        return DraftCurve(*draft_curve(self.state.confidence, rows_B).tolist())

    def _fewest_tokens(self, requests: Sequence[Request], limit: int) -> int:
        """On a CPU shapes may depend on values: a request without drafts has one token."""
        if self.captured is not None or self.is_asynchronous:
            return limit
        rows_B = torch.tensor([request.row for request in requests])
        return min(limit, len(requests) + int(num_drafts(self.state.confidence[rows_B]).sum()))

    def observe(self, launch: Launch) -> None:
        """Let the budget learn from a collected launch."""
        if self.budget is not None:
            for made in launch.passes:
                made.teach(self.budget)

    def observe_host(self, seconds: float, num_requests: int) -> None:
        """Let the budget learn how long the host worked on a decode step while the device ran the one before."""
        if self.budget is not None and self.captured is not None:
            self.budget.observe_host(seconds, self.captured.size(num_requests))

    def _adjustments_for(self, requests: Sequence[Request]) -> Adjustments | None:
        """The tables, if a request of the pass adjusts its logits."""
        return self.uploads.adjustments if any(request.adjusts for request in requests) else None

    # Start-up ---------------------------------------------------------------------------------------------------------

    def _prepare_linears(self, num_draft_tokens: int) -> None:
        """On a CPU: pack the linear layers for the few tokens of a step."""
        if self.target.dtype == torch.float32:
            num_rows = max(num_draft_tokens + 1, min(self.max_batch, USUAL_CPU_BATCH))
            # Per request: the newest token and its drafts to verify, then up to K accepted tokens and K mask slots.
            num_drafts = self.config.tree_nodes or num_draft_tokens
            most_rows = max(num_drafts + 1, 2 * num_draft_tokens) * self.max_batch
            self._restore.append(pack_models(self.target, self.drafter, num_rows, most_rows))

    def _measure_steps(self) -> None:
        """On a CPU: measure what steps cost, for the draft budget."""
        costs = measure_step_costs(self.step, self.plain_step, self.kv_cache.num_pages)
        num_drafts = self.state.tokens.shape[1] - 1
        self.budget = DraftBudget(cache(partial(costs.by_size, num_drafts=num_drafts)), TRIAL_STEPS)
        self.trials = DraftTrials()

    def _make_passes(self, compile: Compile) -> None:
        """Prefill and decode step, with drafting if there is a drafter."""
        config, max_position = self.config, self.target.max_length - 1
        drafting = None
        if self.drafter is not None:
            memory, needs_confidence = self.kv_cache.drafter_memory, config.verify_tokens != 0
            adapts_depth = self.device.type == "cpu" and config.verify_tokens is None
            drafting = Drafting(self.drafter, self.state, memory, max_position, compile, needs_confidence, adapts_depth)
        shared = (self.state, self.kv_cache.target_memory, max_position, compile)
        self.prefill = Prefill(self.paged_target, drafting, *shared)
        assumed = config.assumed_acceptance if drafting is not None else ()
        self.step = self.plain_step = Step(self.paged_target, drafting, *shared, assumed)
        self.shared_pass = SharedPass(self.step, self.prefill, compile)
        if drafting is not None:
            self.plain_step = Step(self.paged_target, None, self.state.without_drafts(), *shared[1:])

    def _compile_drafter(self, compile: Compile | None) -> None:
        if compile is None or self.drafter is None:
            return
        forward = compile(type(self.drafter.layers[0]).forward)
        for layer in self.drafter.layers:
            layer.forward = partial(forward, layer)
            self._restore.append(partial(layer.__dict__.pop, "forward", None))

    def step_times(self, batch: int) -> StepTimes | None:
        """Device time per decode step of `batch` requests; None without graphs. Only while no request runs."""
        return None if self.captured is None else self.captured.step_times(batch, self.kv_cache.num_pages)
