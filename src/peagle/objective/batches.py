"""Training batches: packed sequences with their slots and labels.

A batch is determined by (settings, step), so a resumed run continues with the same batches. Each of several processes
takes its share of the sequences.

Shapes: B sequences, T tokens, S slots of a segment, N labels.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from peagle.data.conversations import Conversation
from peagle.drafter.slots import Slots
from peagle.objective.cod import max_depths, max_num_slots, sample_depths
from peagle.objective.config import TrainConfig
from peagle.objective.labels import ChunkShape, Labels, list_labels
from peagle.objective.packing import Packing
from peagle.objective.partition import Segment, partition

SLOT_MULTIPLE = 128  # the block size of FlexAttention
PREFETCHED = 4  # batches prepared ahead

T = TypeVar("T")


class Part(NamedTuple):
    """A segment and its labels."""

    segment: Segment
    labels: Labels


class Batch(NamedTuple):
    """The packed sequences of one step, or a micro-batch of them."""

    token_ids_BT: Tensor
    document_BT: Tensor
    """document number within the sequence; -1 is padding"""
    position_BT: Tensor
    """position in the document"""
    parts: tuple[Part, ...]
    num_labels: int
    chunk_shape: ChunkShape
    documents: tuple[tuple[int, ...], ...] = ()
    """conversation numbers of each sequence, if the batch comes from `Batches`"""

    @property
    def slots(self) -> Slots:
        """All slots of an unpartitioned batch."""
        (part,) = self.parts
        return part.segment.slots

    @property
    def labels(self) -> Labels:
        """All labels of an unpartitioned batch."""
        (part,) = self.parts
        return part.labels

    def to(self, device: torch.device) -> "Batch":
        """The batch on `device`: asynchronous, through pinned memory, with one copy per dtype."""
        return self if self.token_ids_BT.device.type == device.type else moved(self, device)

    def rows(self, first: int, last: int) -> "Batch":
        """Sequences first .. last - 1."""
        rows = slice(first, last)
        parts = tuple(
            Part(
                tree_map_only(Tensor, lambda tensor: tensor[rows], part.segment),
                part.labels.of_rows(first, last, self.chunk_shape),
            )
            for part in self.parts
        )
        num_labels = sum(part.labels.num_labels for part in parts)
        text = (self.token_ids_BT[rows], self.document_BT[rows], self.position_BT[rows])
        return Batch(*text, parts, num_labels, self.chunk_shape, self.documents[rows])


class Batches:
    """The batches of a run. With several processes, every `world_size`-th sequence from `rank` on."""

    def __init__(
        self,
        conversations: Sequence[Conversation],
        config: TrainConfig,
        rank: int = 0,
        world_size: int = 1,
        chunk_shape: ChunkShape | None = None,
    ) -> None:
        self.conversations, self.config, self.rank, self.world_size = conversations, config, rank, world_size
        self._chunk_shape = chunk_shape or ChunkShape.of(config)
        self.packing = Packing([len(row) for row in conversations], config.max_length, config.seed)

    def documents(self, step: int) -> list[int]:
        """Conversation numbers of `step`, of all processes."""
        return [number for row in self.packing.documents_of_step(step, self.config.batch_size) for number in row]

    def make(self, step: int) -> Batch:
        """Pack the sequences of `step`, sample their slots, partition them, and list the labels."""
        config = self.config
        documents = self.packing.documents_of_step(step, config.batch_size)
        # Drawn for all processes, so that slots do not depend on the number of processes.
        chance = np.random.default_rng([config.seed, step]).random((config.batch_size, config.max_length - 2))
        mine = slice(self.rank, None, self.world_size)
        rows = [[self.conversations[number] for number in row] for row in documents[mine]]
        token_ids_BT, loss_mask_BT, document_BT, position_BT = pack_sequences(rows, config.max_length)
        shares = config.kept_shares
        # An anchor needs a next token and one to predict in its document.
        is_anchor_BT = functional.pad((document_BT[:, 2:] == document_BT[:, :-2]) & (document_BT[:, :-2] >= 0), (0, 2))
        limit_BT = max_depths(loss_mask_BT, config.num_draft_tokens, document_BT)
        depths_BT = (
            functional.pad(sample_depths(limit_BT, shares, torch.from_numpy(chance[mine])), (0, 2)) * is_anchor_BT
        )
        start_BT = torch.arange(document_BT.shape[1]) - position_BT
        num_slots = max_num_slots(document_BT.shape[1], shares)
        sizes = {"num_slots": num_slots, "max_depth": config.num_draft_tokens, "multiple": SLOT_MULTIPLE}
        segments = partition(depths_BT, start_BT, num_partitions=config.num_partitions or 1, **sizes)
        # Labeled slots by judge, column anchor + depth + 1.
        labeled_BT = torch.minimum(depths_BT, functional.pad(limit_BT, (0, 2)))
        is_label_BTK = torch.stack(
            [
                functional.pad(labeled_BT[:, : -(depth + 1)] > depth, (depth + 1, 0))
                for depth in range(config.num_draft_tokens)
            ],
            dim=-1,
        )
        row_N, judge_N, depth_N = is_label_BTK.nonzero(as_tuple=True)
        column_N = row_N * document_BT.shape[1] + judge_N - depth_N - 1
        parts = []
        for segment, places in segments:
            own_N = slice(None) if len(segments) == 1 else places.is_own_BT.flatten()[column_N]
            row_n, column_n, depth_n, judge_n = (part[own_N] for part in (row_N, column_N, depth_N, judge_N))
            labels = list_labels(row_n, places.of(column_n, depth_n), depth_n, judge_n, self._chunk_shape)
            parts.append(Part(segment, labels))
        text = (token_ids_BT, document_BT, position_BT)
        return Batch(*text, tuple(parts), len(row_N), self._chunk_shape, tuple(map(tuple, documents[mine])))

    def prefetched(self, first_step: int, end_step: int, prepare: Callable[[Batch], T]) -> Generator[T]:
        """`prepare` of the batches of steps first_step .. end_step - 1, computed ahead by a thread."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="peagle-batches")
        jobs = (pool.submit(lambda step: prepare(self.make(step)), step) for step in range(first_step, end_step))
        ahead = deque(islice(jobs, PREFETCHED))
        try:
            while ahead:
                batch = ahead.popleft().result()
                ahead.extend(islice(jobs, 1))
                yield batch
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def pack_sequences(rows: Sequence[Sequence[Conversation]], row_length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sequence packing: token ids, loss mask, document numbers (-1: padding) and positions, [B, T] each, truncated."""
    shape = (len(rows), row_length)
    token_ids, loss_mask = np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
    document, position = np.full(shape, -1, np.int64), np.zeros(shape, np.int64)
    counting = np.arange(row_length)
    for row, conversations in enumerate(rows):
        first = 0
        for number, conversation in enumerate(conversations):
            last = min(row_length, first + len(conversation))
            token_ids[row, first:last] = conversation.token_ids[: last - first]
            loss_mask[row, first:last] = conversation.loss_mask[: last - first]
            document[row, first:last] = number
            position[row, first:last] = counting[: last - first]
            first = last
    return tuple(map(torch.from_numpy, (token_ids, loss_mask, document, position)))  # type: ignore[return-value]


def moved(batch: Batch, device: torch.device) -> Batch:
    """A copy on `device`, with one transfer per dtype."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    parts: dict[torch.dtype, Iterator[Tensor]] = {}
    is_cuda = device.type == "cuda"
    # pin_memory uses the thread's current GPU, which is the first one in a new thread.
    with torch.cuda.device(device) if is_cuda else contextlib.nullcontext():
        for dtype in {tensor.dtype for tensor in tensors}:
            flat = torch.cat([tensor.flatten() for tensor in tensors if tensor.dtype == dtype])
            flat = flat.pin_memory() if is_cuda else flat
            sizes = [tensor.numel() for tensor in tensors if tensor.dtype == dtype]
            parts[dtype] = iter(flat.to(device, non_blocking=True).split(sizes))
    copy: Batch = tree_map_only(Tensor, lambda tensor: next(parts[tensor.dtype]).view(tensor.shape), batch)
    return copy
