"""Runs plans on the device: uploads what changed, replays a captured step, and brings back what was emitted.

On a GPU every shape is a CUDA graph, recorded at start-up, and `launch` returns before the device has finished: the
host reads a launch's results while the next one runs. On a CPU `launch` does the work.
"""

import gc
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from peagle.drafter.config import USUAL_NUM_DRAFT_TOKENS
from peagle.drafter.model import Drafter
from peagle.engine.adjustments import Adjustments
from peagle.engine.batch import HostRows, pack_chunks, packed_size
from peagle.engine.calibrate import calibrate
from peagle.engine.config import GPU_VERIFY_ROWS, EngineConfig
from peagle.engine.graphs import Captures, RecordingError, compile_once
from peagle.engine.kv_cache import KVCache, choose_num_pages, free_bytes, make_kv_cache, page_bytes
from peagle.engine.launch import Launch, Pass, Rows, SelectedRows
from peagle.engine.logprobs import add_logprobs, add_scores, scored_tokens
from peagle.engine.packing import join_models, pack_models, quantize_target
from peagle.engine.recorded_steps import Progress, RecordedSteps, StepTimes, unpacked
from peagle.engine.request import Request
from peagle.engine.row_state import RowState
from peagle.engine.scheduler import Plan
from peagle.engine.step import Step
from peagle.engine.transfers import Transfers
from peagle.errors import CapacityError, TargetError
from peagle.targets.hf import HFTarget
from peagle.targets.load import cache_directory
from peagle.targets.paged import Compile, LayerShape, PagedTarget

USUAL_CPU_BATCH = 4
"""Requests at a time for which plain decoding on a CPU is made fast."""
RECORDABLE = "load a target with experts in bfloat16: in other types they wait for the device"

log = logging.getLogger(__name__)


class Runner:
    """Owns the device's side of an engine: pages, rows, graphs. Serves one engine."""

    recorded: RecordedSteps | None = None
    """None where passes run as they are: on a CPU, and for targets that look at values on the way"""

    def __init__(
        self,
        target: HFTarget,
        drafter: Drafter | None,
        num_draft_tokens: int | None,
        config: EngineConfig,
        max_batch: int,
        max_length: int,
        progress: Progress = lambda *_: None,
    ) -> None:
        target.check_not_lent()  # before any of it is touched: undoing that would undo the other engine's work
        self.target, self.drafter = target, drafter
        self.config, self.max_batch = config, max_batch
        self.device = target.device
        is_gpu = self.is_asynchronous = self.device.type == "cuda"
        compiles = is_gpu if config.compile is None else config.compile
        compile: Compile | None = compile_once if compiles else None
        if compiles:
            # What was compiled once is found again by the next start, also after a restart of the machine.
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_directory() / "compiled"))
        self._restore: list[Callable[[], object]] = []
        try:
            if is_gpu:
                self._restore.append(join_models(target, drafter))
            else:
                self._prepare_linears(num_draft_tokens)
            self.paged_target = PagedTarget(target, compile)
            self._restore.append(self.paged_target.close)
            self._compile_drafter(compile)
            if num_draft_tokens is None:
                num_draft_tokens = self._calibrate()
            self.num_draft_tokens = num_draft_tokens
            self.kv_cache = self._make_kv_cache(max_length)
            pages_a_text = -(-(max_length + 2 * num_draft_tokens) // config.page_size)
            self.state = RowState.empty(max_batch, pages_a_text, num_draft_tokens, self.device)
            self.rows = HostRows(max_batch, pages_a_text)
            self.step = Step(
                self.paged_target,
                self.drafter,
                num_draft_tokens,
                self.state,
                self.kv_cache.target_memory,
                self.kv_cache.drafter_memory,
                target.max_length - 1,
                compile,
                GPU_VERIFY_ROWS if is_gpu and config.verify_rows is None else config.verify_rows or None,
            )
            self._transfers = Transfers(self.device)
            self._adjusted_rows: set[int] = set()
            """rows whose adjustments may be others than none"""
            self.captures = Captures(0, 0.0, 0)
            if is_gpu if config.capture is None else config.capture:
                self.record_steps(progress)
        except BaseException as error:
            self.close()
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise CapacityError(
                    f"the GPU ran out of memory while the engine started: {str(error).splitlines()[0]}",
                    hint="lower memory_share, max_batch or prefill_tokens",
                ) from error
            raise

    def close(self) -> None:
        """Give the models back as they were, and the memory of pages and graphs."""
        for restore in reversed(self._restore):
            restore()
        self._restore = []
        for name in ("kv_cache", "step", "recorded"):
            self.__dict__.pop(name, None)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            gc.collect()  # graphs and compiled functions refer to each other, and to pages
            torch.cuda.empty_cache()

    def recover(self) -> None:
        """After an interrupt at an unknown place: wait for the device, and take nothing it was told for granted."""
        if self.recorded is not None:
            self.recorded.forget_rows()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def record_steps(self, progress: Progress) -> None:
        """Record every shape of a pass; from then on passes are replayed, or launched where that is impossible."""
        recorded = RecordedSteps(self.step, self.max_batch, self.config.prefill_tokens, self._transfers)
        if self.config.capture_adjusted:
            self.prepare_adjustments()
        try:
            self.captures = recorded.record_all(progress, self.config.capture_adjusted)
        except RecordingError as error:
            kind = f"{type(self.target.model).__name__} in {str(self.target.dtype).removeprefix('torch.')}"
            complaint = f"a pass of {kind} cannot be recorded as a CUDA graph: {error}"
            if self.config.capture:
                raise TargetError(complaint, hint=f"leave capture out, or {RECORDABLE}") from error
            log.warning("%s; passes are launched instead, which is slower; %s", complaint, RECORDABLE)
            return
        self.recorded = recorded

    def prepare_adjustments(self) -> None:
        """Make the tables that requests with penalties, biases or grammars need, if they are not there."""
        if self.step.adjustments is not None:
            return
        sizes = (self.max_batch, self.num_draft_tokens, self.target.vocab_size)
        try:
            self.step.adjustments = Adjustments.empty(*sizes, self.device)
        except torch.cuda.OutOfMemoryError as error:
            raise CapacityError(
                f"the GPU has no memory left for penalties and grammars: {str(error).splitlines()[0]}",
                hint="lower memory_share or max_batch, or set capture_adjusted to have it taken at start",
            ) from error

    # Running plans ----------------------------------------------------------------------------------------------------

    def launch(self, plan: Plan) -> Launch:
        """Run a plan's chunks, then its decode pass; on a GPU without waiting for either."""
        # The stricter mode makes each of the many small operations of a pass cheaper for the host.
        with torch.no_grad() if self.is_asynchronous else torch.inference_mode():
            return self._launch(plan)

    def _launch(self, plan: Plan) -> Launch:
        started = done = None
        self._upload(plan)
        if self.is_asynchronous:
            started = torch.cuda.Event(enable_timing=True)
            started.record()
        passes = []
        if plan.chunks:
            passes.append(self._prefill(plan))
        if plan.decodes:
            passes.append(self._decode(plan.decodes))
        if self.is_asynchronous:
            done = torch.cuda.Event(enable_timing=True)
            done.record()
        return Launch(passes, done, started)

    def _upload(self, plan: Plan) -> None:
        """Send the rows of new requests and the page tables that changed."""
        for chunk in plan.chunks:
            self.rows.settle(chunk.request)
            self.rows.place(chunk.request)
            if chunk.is_last:
                self._settle_adjustments(chunk.request)
                self._guide(chunk.request, [])
        for request in plan.grown:
            if request.is_running:
                self.rows.place(request)
        if plan.chunks:
            for name in ("max_draft", "seed", "temperature", "top_k", "top_p", "min_p"):
                self._transfers.send(getattr(self.rows, name), getattr(self.state, name))
        if plan.chunks or plan.grown:
            self._transfers.send(self.rows.page_table, self.state.page_table)
        for request in plan.decodes:
            if request.guide is not None:
                self._guide(request, request.draft_ids[: request.num_draft_tokens])

    def _settle_adjustments(self, request: Request) -> None:
        assert request.row is not None, "only running requests are settled"
        if not request.adjusts and request.row not in self._adjusted_rows:
            return
        assert self.step.adjustments is not None, "made when the request was added"
        self._adjusted_rows.add(request.row)  # first, so that what is half written is known after an error
        self.step.adjustments.settle(request)
        if not request.adjusts:
            self._adjusted_rows.discard(request.row)

    def _guide(self, request: Request, draft_ids: list[int]) -> None:
        """Send what a request's grammar allows in its next pass, and the drafts that it prescribes."""
        if request.guide is None:
            return
        adjustments = self.step.adjustments
        assert adjustments is not None and request.row is not None, "made when it was added, and it runs"
        allowed_LW = np.empty(adjustments.allowed.shape[1:], np.int32)
        drafts = request.guide.plan(draft_ids, allowed_LW)
        adjustments.write(adjustments.allowed[request.row], allowed_LW)
        if drafts != draft_ids:
            adjustments.write(self.state.tokens[request.row, 1 : 1 + len(drafts)], np.array(drafts, np.int64))

    def _fetch_drafts(self, result: Pass) -> None:
        for index, request in enumerate(result.requests):
            if request.guide is not None:
                result.newest[index] = self._transfers.fetch(self.state.tokens[request.row].clone())

    def _prefill(self, plan: Plan) -> Pass:
        num_tokens = sum(chunk.end - chunk.start for chunk in plan.chunks)
        bucket = num_tokens, len(plan.chunks) + 1
        if self.recorded is not None:
            bucket = self.recorded.bucket(*bucket)
        packed = np.empty(packed_size(*bucket), np.int64)
        pack_chunks(plan.chunks, self.state.nobody, *bucket, packed)
        last = [(index, chunk.request) for index, chunk in enumerate(plan.chunks) if chunk.is_last]
        adjusts = any(request.adjusts for _, request in last)
        scored = scored_tokens(plan)
        if scored:
            # Rare, and of any size: not worth a graph.
            chunks = unpacked(torch.from_numpy(packed).to(self.device), bucket)
            places_S = torch.tensor([place for _, places in scored for place in places], device=self.device)
            decoded = self.step.prefill(chunks, adjusts, places_S)
        elif self.recorded is not None:
            decoded = self.recorded.prefill(packed, bucket, adjusts)
        else:
            decoded = self.step.prefill(unpacked(torch.from_numpy(packed).to(self.device), bucket), adjusts)
        emitted: Rows = self._transfers.fetch(decoded.emitted_BE[: len(plan.chunks)])
        if len(last) < len(plan.chunks):
            emitted = SelectedRows(emitted, [index for index, _ in last])
        result = Pass([request for _, request in last], [request.epoch for _, request in last], emitted, False)
        add_logprobs(result, decoded, [index for index, _ in last])
        add_scores(result, decoded, scored)
        self._fetch_drafts(result)
        return result

    def _decode(self, requests: Sequence[Request]) -> Pass:
        rows = [cast(int, request.row) for request in requests]
        adjusts = any(request.adjusts for request in requests)
        if self.recorded is not None:
            decoded = self.recorded.decode(rows, adjusts)
        else:
            decoded = self.step.decode(torch.tensor(rows, device=self.device), adjusts)
        emitted = self._transfers.fetch(decoded.emitted_BE[: len(rows)])
        result = Pass(list(requests), [request.epoch for request in requests], emitted, True)
        add_logprobs(result, decoded, list(range(len(rows))))
        self._fetch_drafts(result)
        return result

    # Start-up ---------------------------------------------------------------------------------------------------------

    def _prepare_linears(self, num_draft_tokens: int | None) -> None:
        """On a CPU: give the linear layers the form that serves a step's few rows best."""
        most_drafts = num_draft_tokens
        if most_drafts is None:
            most_drafts = USUAL_NUM_DRAFT_TOKENS if self.drafter is None else self.drafter.config.usual_num_draft_tokens
        num_rows = max(most_drafts + 1, min(self.max_batch, USUAL_CPU_BATCH))
        if self.config.quantize is not None:
            self._restore.append(quantize_target(self.target, num_rows))
        packs = self.target.dtype == torch.float32
        if packs if self.config.pack is None else self.config.pack:
            # Verifying takes K + 1 rows of a request, drafting up to 2 K: what was accepted, then the placeholders.
            most_rows = max(most_drafts + 1, 2 * most_drafts) * self.max_batch
            self._restore.append(pack_models(self.target, self.drafter, num_rows, most_rows))

    def _calibrate(self) -> int:
        """Choose the number of draft tokens by what they cost and bring here; with 0 the drafter is let go."""
        assert self.drafter is not None, "the number is open only where there is a drafter"
        chosen = calibrate(self.paged_target, self.drafter, self.config.page_size)
        if chosen == 0:
            self.drafter = None
        return chosen

    def _compile_drafter(self, compile: Compile | None) -> None:
        if compile is None or self.drafter is None:
            return
        forward = compile(type(self.drafter.layers[0]).forward)
        for layer in self.drafter.layers:
            layer.forward = _bound(forward, layer)
            self._restore.append(partial(layer.__dict__.pop, "forward", None))

    def _make_kv_cache(self, max_length: int) -> KVCache:
        drafter_layers: tuple[LayerShape, ...] = ()
        if self.drafter is not None:
            shape = LayerShape(self.drafter.config.num_kv_heads, self.drafter.config.head_dim)
            drafter_layers = (shape,) * self.drafter.config.num_layers
        layers = self.paged_target.layers
        config, dtype = self.config, self.target.dtype
        num_pages = choose_num_pages(
            config,
            page_bytes(layers + drafter_layers, config.page_size, dtype),
            free_bytes(self.device) - self._activation_bytes(),
            -(-(max_length + 2 * self.num_draft_tokens) // config.page_size),
            self.max_batch,
        )
        return make_kv_cache(layers, drafter_layers, num_pages, config.page_size, dtype, self.device)

    def _activation_bytes(self) -> int:
        """Room for what a pass computes on the way: the logits, in float32 at worst, and some layers' worth of rows."""
        if self.device.type != "cuda":
            return 0
        num_logits = max(self.max_batch * (self.num_draft_tokens + 1), 64)
        num_rows = max(self.config.prefill_tokens, 2 * num_logits)
        intermediate = getattr(self.target.model.config.get_text_config(), "intermediate_size", 0) or 0
        width = 8 * self.target.hidden_size + 4 * intermediate
        # Adjusted logits are two more in float32, and each row has counts, marks of its prompt and bits. Their graphs
        # may be recorded late, but there must be room for them: running out of memory then would end every request.
        logits = (14 * num_logits + 6 * self.max_batch) * self.target.vocab_size
        return logits + 4 * num_rows * width + 2**30

    def step_times(self, batch: int) -> StepTimes | None:
        """How long a decode step of so many requests takes; None on a CPU. Only while nothing runs."""
        return None if self.recorded is None else self.recorded.step_times(batch, self.kv_cache.num_pages)


def _bound(function: Callable[..., Any], module: torch.nn.Module) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(module, *args, **kwargs)
