"""Every shape of a pass as a CUDA graph, recorded at start-up: a pass runs in the smallest one that holds it.

What a graph reads lies in tensors of its own, written before each replay. Passes that adjust logits are second graphs
of the same sizes.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from peagle.engine.batch import pack_chunks, packed_size, split_packed
from peagle.engine.config import decode_buckets, prefill_buckets
from peagle.engine.graphs import Captures, record, replay_seconds
from peagle.engine.kv_cache import free_bytes
from peagle.engine.row_state import Chunks, Decoded
from peagle.engine.step import Step
from peagle.engine.transfers import Transfers

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Told what is being prepared, how many parts are done, and of how many."""

Bucket = tuple[int, int]
"""tokens and chunks of a prefill pass"""


class StepTimes(NamedTuple):
    """Seconds on the device of one decode step, and of its two halves."""

    step: float
    verify: float
    draft: float


class RecordedSteps:
    """The graphs of one `Step`. Serves one runner."""

    def __init__(self, step: Step, max_batch: int, prefill_tokens: int, transfers: Transfers) -> None:
        self.step, self.max_batch, self._transfers = step, max_batch, transfers
        self.device, self._nobody = step.state.length.device, step.state.nobody
        self.decode_sizes, self.prefill_sizes = decode_buckets(max_batch), prefill_buckets(prefill_tokens)
        self._pool = torch.cuda.graph_pool_handle()
        self._decodes: dict[int, tuple[Tensor, Callable[[], Decoded]]] = {}
        self._prefills: dict[Bucket, tuple[Tensor, Callable[[], Decoded]]] = {}
        self.adjusted: dict[int | Bucket, Callable[[], Decoded]] = {}
        """for passes that adjust logits, recorded when first needed"""
        self._rows: list[int] = []
        """what the rows of the last decode pass were"""

    @torch.no_grad()
    def record_all(self, progress: Progress, adjusts: bool) -> Captures:
        """Record every shape, the largest first, so that the others fit into the memory it needed."""
        started, free = time.perf_counter(), free_bytes(self.device)
        total = len(self.decode_sizes) + len(self.prefill_sizes)
        for num_done, bucket in enumerate(reversed(self.prefill_sizes)):
            progress(f"prefill of {bucket[0]} tokens", num_done, total)
            packed = self._no_chunks(bucket)
            self._prefills[bucket] = packed, record(self._prefill_of(packed, bucket, adjusts=False), self._pool)
        for num_done, size in enumerate(reversed(self.decode_sizes), start=len(self.prefill_sizes)):
            progress(f"decoding {size} requests", num_done, total)
            rows = torch.full((size,), self._nobody, device=self.device)
            self._decodes[size] = rows, record(self._decode_of(rows, adjusts=False), self._pool)
        if adjusts:
            for bucket in reversed(self.prefill_sizes):
                self._adjusted_prefill(bucket)
            for size in reversed(self.decode_sizes):
                self._adjusted_decode(size)
            total += len(self.adjusted)
        progress("ready", total, total)
        captures = Captures(total, time.perf_counter() - started, max(0, free - free_bytes(self.device)))
        log.info("%d graphs in %.1f s, %.2f GiB", total, captures.seconds, captures.num_bytes / 2**30)
        return captures

    def bucket(self, num_tokens: int, num_chunks: int) -> Bucket:
        """The smallest one for a prefill pass."""
        return next(
            (tokens, chunks) for tokens, chunks in self.prefill_sizes if num_tokens <= tokens and num_chunks <= chunks
        )

    def prefill(self, packed: np.ndarray, bucket: Bucket, adjusts: bool) -> Decoded:
        """A prefill pass of packed chunks."""
        replay = self._adjusted_prefill(bucket) if adjusts else self._prefills[bucket][1]
        self._transfers.send(packed, self._prefills[bucket][0])
        return replay()

    def decode(self, rows: Sequence[int], adjusts: bool) -> Decoded:
        """A decode pass of some rows, padded with nobody's."""
        size = self._size(len(rows))
        replay = self._adjusted_decode(size) if adjusts else self._decodes[size][1]
        padded = [*rows, *[self._nobody] * (size - len(rows))]
        if padded != self._rows:
            self._transfers.send(np.array(padded, np.int64), self._decodes[size][0])
            self._rows = padded
        return replay()

    def forget_rows(self) -> None:
        """Take nothing for granted that was sent before."""
        self._rows = []

    @torch.no_grad()
    def step_times(self, batch: int, num_pages: int, length: int = 256) -> StepTimes:
        """Replay the step at a batch size over texts of `length`, whole and without its draft.

        Only while nothing runs: it writes to rows and pages, of which there are `num_pages`.
        """
        with self._texts(batch, num_pages) as (rows, replay):
            step = verify = self._seconds(replay, length)
            if self.step.drafter is not None:
                verify = self._verify_seconds(rows, length)
        return StepTimes(step, verify, step - verify)

    @torch.no_grad()
    def verify_seconds(self, batch: int, num_pages: int, length: int = 256) -> float:
        """Record the first half of the step anew, and replay it as `step_times` does: for who has changed a kernel."""
        with self._texts(batch, num_pages) as (rows, _):
            return self._verify_seconds(rows, length)

    @contextmanager
    def _texts(self, batch: int, num_pages: int) -> Iterator[tuple[Tensor, Callable[[], Decoded]]]:
        """The rows of a decode pass and its replay, with a request of its own pages in every row."""
        state, size = self.step.state, self._size(batch)
        rows, replay = self._decodes[size]
        saved = rows.clone(), state.page_table.clone()
        rows.copy_(torch.arange(size, device=self.device).clamp_max(self.max_batch - 1))
        num_columns = state.page_table.shape[1] - 1
        pages = torch.arange(size * num_columns, device=self.device, dtype=torch.int32) % (num_pages - 1)
        state.page_table[:size, :num_columns] = pages.view(size, -1) + 1
        try:
            yield rows, replay
        finally:
            rows.copy_(saved[0])
            state.page_table.copy_(saved[1])
            self.forget_rows()

    def _verify_seconds(self, rows: Tensor, length: int) -> float:
        return self._seconds(record(lambda: self.step.verify(rows).decoded, torch.cuda.graph_pool_handle()), length)

    def _seconds(self, replay: Callable[[], Any], length: int, repeats: int = 30) -> float:
        # Every replay may accept all drafts, and a text must not outgrow its pages.
        num_rows, room = self.step.num_draft_tokens + 1, (self.step.state.page_table.shape[1] - 1) * self.step.page_size
        repeats = max(1, min(repeats, room // num_rows - 3))
        length = max(1, min(length, room - (repeats + 2) * num_rows))
        best = float("inf")
        for _ in range(3):
            self.step.state.length.fill_(length)
            best = min(best, replay_seconds(replay, repeats))
        self.step.state.length.zero_()
        return best

    def _size(self, num_rows: int) -> int:
        return next(size for size in self.decode_sizes if size >= num_rows)

    def _adjusted_decode(self, size: int) -> Callable[[], Decoded]:
        if size not in self.adjusted:
            rows, _ = self._decodes[size]
            rows.fill_(self._nobody)  # recording runs the step, which must touch nobody
            self.forget_rows()
            self.adjusted[size] = record(self._decode_of(rows, adjusts=True), self._pool)
        return self.adjusted[size]

    def _adjusted_prefill(self, bucket: Bucket) -> Callable[[], Decoded]:
        if bucket not in self.adjusted:
            packed, _ = self._prefills[bucket]
            packed.copy_(self._no_chunks(bucket))
            self.adjusted[bucket] = record(self._prefill_of(packed, bucket, adjusts=True), self._pool)
        return self.adjusted[bucket]

    def _decode_of(self, rows: Tensor, adjusts: bool) -> Callable[[], Decoded]:
        return lambda: self.step.decode(rows, adjusts)

    def _prefill_of(self, packed: Tensor, bucket: Bucket, adjusts: bool) -> Callable[[], Decoded]:
        chunks = unpacked(packed, bucket)
        return lambda: self.step.prefill(chunks, adjusts)

    def _no_chunks(self, bucket: Bucket) -> Tensor:
        packed = np.empty(packed_size(*bucket), np.int64)
        pack_chunks((), self._nobody, *bucket, packed)
        return torch.from_numpy(packed).to(self.device)


def unpacked(packed: Tensor, bucket: Bucket) -> Chunks:
    """The fields of packed chunks, as views."""
    return Chunks(*(packed[part] for part in split_packed(*bucket)))
