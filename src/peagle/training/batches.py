"""Training rows as tensors: which documents a step takes, their slots, and where each slot's label is.

Everything here is a function of (settings, step), so an interrupted run goes on with the very batch it would have had,
and of no process: each of several takes its share of the same rows.

Shapes: B rows, T tokens, S slots of a segment, N slots with a label.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from peagle.drafter.slots import Slots
from peagle.training.cod import max_depths, max_num_slots, sample_depths
from peagle.training.config import TrainConfig
from peagle.training.conversations import Conversation
from peagle.training.labels import LABEL_CHUNK as LABEL_CHUNK
from peagle.training.labels import ChunkShape, Labels, list_labels
from peagle.training.packing import Packing
from peagle.training.partition import Segment, partition

SLOT_MULTIPLE = 128  # slots of a row: whole blocks of FlexAttention
PREFETCHED = 3  # batches made ahead


T = TypeVar("T")


class Part(NamedTuple):
    """A segment and the labels of its slots."""

    segment: Segment
    labels: Labels


class Batch(NamedTuple):
    """Rows of one step, or some of them."""

    token_ids_BT: Tensor
    document_BT: Tensor
    """number of the document in its row; -1 is padding"""
    position_BT: Tensor
    """position of the token in its document"""
    parts: tuple[Part, ...]
    num_labels: int
    chunk_shape: ChunkShape
    documents: tuple[tuple[int, ...], ...] = ()
    """numbers of the conversations in each row, in their order, where the rows are some of `Batches`"""

    @property
    def slots(self) -> Slots:
        """All slots, where rows are not partitioned."""
        (part,) = self.parts
        return part.segment.slots

    @property
    def labels(self) -> Labels:
        """All labels, where rows are not partitioned."""
        (part,) = self.parts
        return part.labels

    def to(self, device: torch.device) -> "Batch":
        """A copy on `device`, or itself if it is there. Towards a GPU all parts go at once, through pinned memory, and
        the host does not wait for them.
        """
        return self if self.token_ids_BT.device.type == device.type else moved(self, device)

    def rows(self, first: int, last: int) -> "Batch":
        """Rows first .. last - 1 alone."""
        parts = tuple(
            Part(
                _mapped(part.segment, lambda tensor: tensor[first:last]),
                part.labels.of_rows(first, last, self.chunk_shape),
            )
            for part in self.parts
        )
        num_labels = sum(part.labels.num_labels for part in parts)
        return Batch(
            self.token_ids_BT[first:last],
            self.document_BT[first:last],
            self.position_BT[first:last],
            parts,
            num_labels,
            self.chunk_shape,
            self.documents[first:last],
        )


class Batches:
    """The batches of a run: all of a step's rows, or of several processes every `world_size`-th from `rank` on."""

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
        """Numbers of the conversations in `step`, of all processes."""
        return [number for row in self.packing.documents_of_step(step, self.config.batch_size) for number in row]

    def make(self, step: int) -> Batch:
        """Pack the rows of `step`, sample their slots and list the labels."""
        config = self.config
        documents = self.packing.documents_of_step(step, config.batch_size)
        # Drawn for all processes, so that each row has the same slots wherever it is trained.
        chance = np.random.default_rng([config.seed, step]).random((config.batch_size, config.max_length - 2))
        mine = slice(self.rank, None, self.world_size)
        rows = [[self.conversations[number] for number in row] for row in documents[mine]]
        packed = pack_rows(rows, config.max_length)
        batch = slot_batch(*packed, config, torch.from_numpy(chance[mine]), self._chunk_shape)
        return batch._replace(documents=tuple(map(tuple, documents[mine])))

    def prefetched(self, first_step: int, end_step: int, prepare: Callable[[Batch], T]) -> Generator[T]:
        """What `prepare` makes of the batches of steps first_step .. end_step - 1, by a thread a few steps ahead."""
        ready: queue.Queue[T | BaseException] = queue.Queue(PREFETCHED)
        is_over = threading.Event()

        def make_all() -> None:
            try:
                for step in range(first_step, end_step):
                    batch = prepare(self.make(step))
                    while not is_over.is_set():
                        try:
                            ready.put(batch, timeout=0.1)
                            break
                        except queue.Full:
                            continue
                    if is_over.is_set():
                        return
            except BaseException as error:
                ready.put(error)

        threading.Thread(target=make_all, name="peagle-batches", daemon=True).start()
        try:
            for _ in range(first_step, end_step):
                batch = ready.get()
                if isinstance(batch, BaseException):
                    raise batch
                yield batch
        finally:
            is_over.set()


def make_batch(
    conversations: Sequence[Conversation], config: TrainConfig, step: int, rank: int = 0, world_size: int = 1
) -> Batch:
    """One batch on its own; `Batches` makes many."""
    return Batches(conversations, config, rank, world_size).make(step)


def pack_rows(rows: Sequence[Sequence[Conversation]], row_length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token ids, loss mask, document numbers (-1: padding) and positions, [B, T] each. What exceeds a row is cut."""
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


def slot_batch(
    token_ids_BT: Tensor,
    loss_mask_BT: Tensor,
    document_BT: Tensor,
    position_BT: Tensor,
    config: TrainConfig,
    chance_BT: Tensor,
    chunk_shape: ChunkShape,
) -> Batch:
    """Sample the slots of packed rows by `chance_BT` [B, T - 2], partition them, and list those with a label.

    The batch does not know which conversations its rows hold.
    """
    cod = (config.num_draft_tokens, config.retention, config.retention_floor)
    # An anchor has a token after it in its document, and one to predict.
    is_anchor_BT = functional.pad((document_BT[:, 2:] == document_BT[:, :-2]) & (document_BT[:, :-2] >= 0), (0, 2))
    limit_BT = max_depths(loss_mask_BT, config.num_draft_tokens, document_BT)
    depths_BT = functional.pad(sample_depths(limit_BT, *cod, chance_BT), (0, 2)) * is_anchor_BT
    start_BT = torch.arange(document_BT.shape[1]) - position_BT
    num_slots = max_num_slots(document_BT.shape[1], *cod)
    sizes = {"num_slots": num_slots, "max_depth": config.num_draft_tokens, "multiple": SLOT_MULTIPLE}
    segments = partition(depths_BT, start_BT, num_partitions=config.num_partitions or 1, **sizes)
    # Labelled slots by the column that judges them, which anchor + depth + 1 is.
    labelled_BT = torch.minimum(depths_BT, functional.pad(limit_BT, (0, 2)))
    is_label_BTK = torch.stack(
        [
            functional.pad(labelled_BT[:, : -(depth + 1)] > depth, (depth + 1, 0))
            for depth in range(config.num_draft_tokens)
        ],
        dim=-1,
    )
    row_N, judge_N, depth_N = is_label_BTK.nonzero(as_tuple=True)
    column_N = row_N * document_BT.shape[1] + judge_N - depth_N - 1
    parts = []
    for segment, places in segments:
        own = (row_N, column_N, depth_N, judge_N)
        if len(segments) > 1:
            is_own_N = places.is_own_BT.flatten()[column_N]
            own = (row_N[is_own_N], column_N[is_own_N], depth_N[is_own_N], judge_N[is_own_N])
        row_n, column_n, depth_n, judge_n = own
        parts.append(Part(segment, list_labels(row_n, places.of(column_n, depth_n), depth_n, judge_n, chunk_shape)))
    return Batch(token_ids_BT, document_BT, position_BT, tuple(parts), len(row_N), chunk_shape)


def pad_rows(conversations: Sequence[Conversation], max_length: int) -> tuple[Tensor, Tensor]:
    """Token ids and loss mask, [B, T] each, one conversation a row, padded on the right with zeros."""
    token_ids_BT, loss_mask_BT, _, _ = pack_rows([[conversation] for conversation in conversations], max_length)
    return token_ids_BT, loss_mask_BT


def moved(batch: Batch, device: torch.device) -> Batch:
    """A copy on `device`: one transfer for each type of number."""
    tensors = _tensors(batch)
    parts: dict[torch.dtype, Iterator[Tensor]] = {}
    is_cuda = device.type == "cuda"
    # Memory is pinned for the thread's current GPU, which in a new thread is the first one.
    with torch.cuda.device(device) if is_cuda else contextlib.nullcontext():
        for dtype in {tensor.dtype for tensor in tensors}:
            flat = torch.cat([tensor.flatten() for tensor in tensors if tensor.dtype == dtype])
            flat = flat.pin_memory() if is_cuda else flat
            sizes = [tensor.numel() for tensor in tensors if tensor.dtype == dtype]
            parts[dtype] = iter(flat.to(device, non_blocking=True).split(sizes))
    copy: Batch = _mapped(batch, lambda tensor: next(parts[tensor.dtype]).view(tensor.shape))
    return copy


def _tensors(value: Any) -> list[Tensor]:
    """Every tensor in nested tuples, in order."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, tuple) else []


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`value` with every tensor in its tuples replaced."""
    if isinstance(value, Tensor):
        return function(value)
    if not isinstance(value, tuple):
        return value
    parts = [_mapped(part, function) for part in value]
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
