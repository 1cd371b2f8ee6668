"""Every batch shape as a CUDA graph, captured at start-up. A pass runs in the smallest graph that fits it.

A graph reads its input from tensors of its own, which are written before each replay. Passes that adjust logits, and
decode steps of requests without drafts, have graphs of their own.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from peagle.scheduling.config import (
    EngineConfig,
    decode_buckets,
    prefill_buckets,
    shared_buckets,
    shared_size,
    verify_sizes,
)
from peagle.worker.adjustments import Adjustments
from peagle.worker.chunks import Chunks, chunk_views, fill_upload
from peagle.worker.graphs import CaptureCost, capture, replay_seconds
from peagle.worker.kv_cache import free_bytes
from peagle.worker.launch import PassResult
from peagle.worker.prefill import Prefill, Prefilled
from peagle.worker.shared_pass import SharedPass
from peagle.worker.step import Step
from peagle.worker.transfers import Transfers

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called with the part being prepared, the number of parts done, and their total."""

TOKEN_STRIDE = 7919
"""Distance of the newest token ids of neighboring rows while steps are timed: a prime, so that they differ."""

Bucket = tuple[int, int]
"""tokens and chunks of a prefill pass"""


class DecodeShape(NamedTuple):
    """A decode step with a graph of its own."""

    batch: int
    num_tokens: int
    """of the verification pass; as many as requests if there are no drafts"""
    is_adjusted: bool


class PrefillShape(NamedTuple):
    """A prefill pass with graphs of its own."""

    bucket: Bucket
    is_adjusted: bool


class SharedShape(NamedTuple):
    """A decode step and a prefill pass in one graph; `shared_size` gives the tokens of its verification pass."""

    batch: int
    bucket: Bucket


class PrefillReplay(NamedTuple):
    """Replays of the two halves of a prefill pass."""

    run: Callable[[], Prefilled]
    draft: Callable[[], None] | None
    """None without a drafter"""


class StepTimes(NamedTuple):
    """Seconds on the device per decode step, and of its two halves."""

    step: float
    verify: float
    draft: float


class CapturedSteps:
    """The graphs of one engine: decode steps by batch size, prefill passes by bucket."""

    def __init__(
        self,
        step: Step,
        plain_step: Step,
        prefill: Prefill,
        shared: SharedPass,
        max_batch: int,
        transfers: Transfers,
        config: EngineConfig,
    ) -> None:
        """`plain_step` decodes without drafts; without a drafter it is `step`."""
        self.step, self.plain_step, self._prefill, self._shared = step, plain_step, prefill, shared
        self.max_batch, self._transfers, self._verify_tokens = max_batch, transfers, config.verify_tokens
        self.device, self._padding_row = step.state.length.device, step.state.padding_row
        self.decode_sizes, self.prefill_sizes = decode_buckets(max_batch), prefill_buckets(config.prefill_tokens)
        self.shared_shapes = [
            SharedShape(size, bucket)
            for size in self.decode_sizes
            for bucket in shared_buckets(size, config.prefill_tokens)
            if max_batch > 1
        ]
        if config.captured_batches:
            self.decode_sizes, self.prefill_sizes = config.captured_batches, self.prefill_sizes[-1:]
            self.shared_shapes = []
        self._pool = torch.cuda.graph_pool_handle()
        self._row_tensors: dict[int, Tensor] = {}
        self.decodes: dict[DecodeShape, Callable[[], PassResult]] = {}
        self._uploads: dict[Bucket, Tensor] = {}
        self.prefills: dict[PrefillShape, PrefillReplay] = {}
        self.shared: dict[SharedShape, Callable[[], tuple[PassResult, PassResult]]] = {}
        self._rows: list[int] = []
        """rows of the last decode pass, which its graph still holds"""

    @torch.no_grad()
    def capture_all(self, progress: Progress, adjustments: Adjustments | None) -> CaptureCost:
        """Capture every shape, the largest first, so that the others reuse its memory.

        With `adjustments`, also capture passes that adjust logits: per batch size those with no drafts and with the
        most. The others are captured when first needed.
        """
        started, free = time.perf_counter(), free_bytes(self.device)
        shapes = [
            DecodeShape(size, num_tokens, False)
            for size in reversed(self.decode_sizes)
            for num_tokens in reversed(self.verify_sizes(size))
        ]
        shared = self.shared_shapes[::-1]
        total = len(self.prefill_sizes) + len(shapes) + len(shared)
        for num_done, bucket in enumerate(reversed(self.prefill_sizes)):
            progress(f"prefill of {bucket[0]} tokens", num_done, total)
            self._prefill_replay(PrefillShape(bucket, False), None)
        for num_done, shape in enumerate(shapes, start=len(self.prefill_sizes)):
            progress(f"decoding {shape.batch} requests, {shape.num_tokens} tokens", num_done, total)
            self._decode_replay(shape, None)
        for num_done, both in enumerate(shared, start=len(self.prefill_sizes) + len(shapes)):
            progress(f"decoding {both.batch} requests beside {both.bucket[0]} tokens of prompts", num_done, total)
            self._shared_replay(both)
        if adjustments is not None:
            for bucket in reversed(self.prefill_sizes):
                self._prefill_replay(PrefillShape(bucket, True), adjustments)
            for size in reversed(self.decode_sizes):
                for num_tokens in {size, max(self.verify_sizes(size))}:
                    self._decode_replay(DecodeShape(size, num_tokens, True), adjustments)
        progress("ready", total, total)
        num_graphs = (1 if self.step.drafting is None else 2) * len(self.prefills) + len(self.decodes) + len(shared)
        cost = CaptureCost(num_graphs, time.perf_counter() - started, max(0, free - free_bytes(self.device)))
        log.info("captured %d CUDA graphs in %.1f s, %.2f GiB", num_graphs, cost.seconds, cost.num_bytes / 2**30)
        return cost

    def bucket(self, num_tokens: int, num_chunks: int) -> Bucket:
        """The smallest bucket for a prefill pass."""
        return next(
            (tokens, chunks) for tokens, chunks in self.prefill_sizes if num_tokens <= tokens and num_chunks <= chunks
        )

    def prefill(
        self, upload: np.ndarray, bucket: Bucket, adjustments: Adjustments | None
    ) -> tuple[PassResult, Callable[[], None] | None]:
        """Replay the first half of a prefill pass over the chunks of an upload buffer; also returns the second half."""
        replay = self._prefill_replay(PrefillShape(bucket, adjustments is not None), adjustments)
        self._transfers.send(upload, self._uploads[bucket])
        return replay.run().result, replay.draft

    def decode(self, rows: Sequence[int], adjustments: Adjustments | None, num_tokens: int) -> PassResult:
        """Replay a decode step of these rows, padded to a captured size, with a pass of `num_tokens`."""
        size = self.size(len(rows))
        replay = self._decode_replay(DecodeShape(size, num_tokens, adjustments is not None), adjustments)
        self._send_rows(rows, size)
        return replay()

    def decode_beside(self, rows: Sequence[int], upload: np.ndarray, bucket: Bucket) -> tuple[PassResult, PassResult]:
        """Replay a decode step of these rows in one pass with the chunks of an upload buffer; the results of both."""
        size = self.size(len(rows))
        replay = self._shared_replay(SharedShape(size, bucket))
        self._send_rows(rows, size)
        self._transfers.send(upload, self._uploads[bucket])
        return replay()

    def _send_rows(self, rows: Sequence[int], size: int) -> None:
        padded = [*rows, *[self._padding_row] * (size - len(rows))]
        if padded != self._rows:
            self._transfers.send(np.array(padded, np.int64), self._row_tensors[size])
            self._rows = padded

    def forget_rows(self) -> None:
        """Upload the rows again before the next decode step."""
        self._rows = []

    @torch.no_grad()
    def step_times(self, batch: int, num_pages: int, length: int = 256) -> StepTimes:
        """Time the step at a batch size over sequences of `length` tokens, as a whole and without its draft.

        Call it only while no request runs: it overwrites rows and pages.
        """
        with self._sequences(batch, num_pages) as (rows, replay):
            step = verify = self._seconds(replay, length)
            if self.step.drafting is not None:
                verify = self._verify_seconds(rows, length)
        return StepTimes(step, verify, step - verify)

    @torch.no_grad()
    def verify_seconds(self, batch: int, num_pages: int, length: int = 256) -> float:
        """Capture the verification half of the step anew and time it; for comparing kernels."""
        with self._sequences(batch, num_pages) as (rows, _):
            return self._verify_seconds(rows, length)

    @contextmanager
    def _sequences(self, batch: int, num_pages: int) -> Iterator[tuple[Tensor, Callable[[], PassResult]]]:
        """The rows of a decode step and its replay, with drafts and a sequence of its own pages in every row."""
        state, size = self.step.state, self.size(batch)
        rows, replay = self._row_tensors[size], self.decodes[DecodeShape(size, max(self.verify_sizes(size)), False)]
        saved = rows.clone(), state.page_table.clone(), state.max_draft.clone()
        rows.copy_(torch.arange(size, device=self.device).clamp_max(self.max_batch - 1))
        num_columns = state.page_table.shape[1] - 1
        pages = torch.arange(size * num_columns, device=self.device, dtype=torch.int32) % (num_pages - 1)
        state.page_table[:size, :num_columns] = pages.view(size, -1) + 1
        state.max_draft.fill_(state.num_draft_tokens)
        # Different newest tokens: rows that are alike would choose the same experts, and leave the others unread.
        token_R = torch.arange(len(state.tokens), device=self.device) * TOKEN_STRIDE
        state.tokens[:, 0] = token_R % self.step.target.target.vocab_size
        try:
            yield rows, replay
        finally:
            rows.copy_(saved[0])
            state.page_table.copy_(saved[1])
            state.max_draft.copy_(saved[2])
            self.forget_rows()

    def _verify_seconds(self, rows: Tensor, length: int) -> float:
        num_tokens = max(self.verify_sizes(len(rows)))
        verify = capture(lambda: self.step.verify(rows, None, num_tokens).result, torch.cuda.graph_pool_handle())
        return self._seconds(verify, length)

    def _seconds(self, replay: Callable[[], Any], length: int, repeats: int = 30) -> float:
        # Each replay may accept all drafts, and a sequence must not outgrow its pages.
        num_tokens = self.step.state.num_draft_tokens + 1
        room = (self.step.state.page_table.shape[1] - 1) * self.step.page_size
        repeats = max(1, min(repeats, room // num_tokens - 3))
        length = max(1, min(length, room - (repeats + 2) * num_tokens))
        best = float("inf")
        for _ in range(3):
            self.step.state.length.fill_(length)
            best = min(best, replay_seconds(replay, repeats))
        self.step.state.length.zero_()
        return best

    def size(self, num_rows: int) -> int:
        """The captured batch size for a number of rows."""
        return next(size for size in self.decode_sizes if size >= num_rows)

    def verify_sizes(self, size: int) -> tuple[int, ...]:
        """Tokens of the verification passes of a batch, to choose from."""
        return verify_sizes(size, self.step.state.tokens.shape[1] - 1, self._verify_tokens)

    @torch.no_grad()
    def decode_seconds(self, num_pages: int, length: int = 256) -> dict[int, dict[int, float]]:
        """Device time per decode step over sequences of `length` tokens, by batch size and tokens of the pass.

        Only while no request runs.
        """
        seconds: dict[int, dict[int, float]] = {}
        for size in self.decode_sizes:
            with self._sequences(size, num_pages):
                seconds[size] = {
                    num_tokens: self._seconds(self.decodes[DecodeShape(size, num_tokens, False)], length, repeats=5)
                    for num_tokens in self.verify_sizes(size)
                }
        return seconds

    def _decode_replay(self, shape: DecodeShape, adjustments: Adjustments | None) -> Callable[[], PassResult]:
        """The replay of a decode step; captures it if it is new."""
        if shape not in self.decodes:
            rows = self._padding_rows(shape.batch)
            step = self.plain_step if shape.num_tokens == shape.batch else self.step
            self.decodes[shape] = capture(lambda: step.decode(rows, adjustments, shape.num_tokens), self._pool)
        return self.decodes[shape]

    def _padding_rows(self, batch: int) -> Tensor:
        """The rows of a decode step: the warm-up runs it, and must not touch a request's row."""
        rows = self._row_tensors.setdefault(batch, torch.empty(batch, dtype=torch.long, device=self.device))
        self.forget_rows()
        return rows.fill_(self._padding_row)

    def _shared_replay(self, shape: SharedShape) -> Callable[[], tuple[PassResult, PassResult]]:
        """The replay of a decode step and chunks in one pass; captures it if it is new."""
        if shape not in self.shared:
            rows, chunks = self._padding_rows(shape.batch), self._padding_chunks(shape.bucket)
            num_tokens = shared_size(self.verify_sizes(shape.batch))
            self.shared[shape] = capture(lambda: self._shared.run(rows, chunks, num_tokens), self._pool)
        return self.shared[shape]

    def _prefill_replay(self, shape: PrefillShape, adjustments: Adjustments | None) -> PrefillReplay:
        """The replay of a prefill pass; captures it if it is new. The second half reads what the first one left."""
        if shape not in self.prefills:
            chunks = self._padding_chunks(shape.bucket)
            run = capture(lambda: self._prefill.run(chunks, adjustments), self._pool)
            prefilled = run()
            draft = None
            if self.step.drafting is not None:
                draft = capture(lambda: self._prefill.draft(prefilled), self._pool)
            self.prefills[shape] = PrefillReplay(run, draft)
        return self.prefills[shape]

    def _padding_chunks(self, bucket: Bucket) -> Chunks:
        """The chunks in the upload buffer of a bucket, all of them padding."""
        empty = torch.from_numpy(fill_upload((), self._padding_row, *bucket)).to(self.device)
        upload = self._uploads.setdefault(bucket, torch.empty_like(empty))
        return chunk_views(upload.copy_(empty), *bucket)
