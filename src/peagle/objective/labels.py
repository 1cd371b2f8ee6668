"""Labels in chunks, and the target positions (judges) whose distributions they are compared with.

Slots with equal anchor + depth share a label and its judge, the column before it. Labels are ordered by judge and each
chunk lists its judges once, so the target's head and softmax run once per judge: a quarter of the labels at eight
depths and a retention of 0.8.

Shapes: N labels, M judges; both are padded to fixed sizes per chunk, so that a chunk compiles once.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.objective.cod import max_num_slots
from peagle.objective.config import TrainConfig

LABEL_CHUNK = 1024  # labels projected to the vocabulary at a time, on a CPU
LABEL_MULTIPLE = 64  # a single chunk on a CPU is padded to a multiple of this
CHUNK_VALUES = 2**29  # logits per chunk on a GPU: 1 GiB, for few launches
JUDGE_SPARE = 1.1  # room for judges in a chunk, relative to the average


class ChunkShape(NamedTuple):
    """The most labels and judges per chunk."""

    num_labels: int
    num_judges: int
    is_fixed: bool = False
    """pad every chunk to this shape, because it is compiled"""

    @classmethod
    def of(cls, config: TrainConfig, vocab_size: int | None = None) -> "ChunkShape":
        """Chunks for a CPU or, with the drafter's `vocab_size`, for a GPU."""
        num_labels = LABEL_CHUNK if vocab_size is None else max(1, CHUNK_VALUES // vocab_size // 1024) * 1024
        labels_per_judge = max_num_slots(1000, config.kept_shares) / 1000
        num_judges = _round_up(int(num_labels / labels_per_judge * JUDGE_SPARE), LABEL_MULTIPLE)
        return cls(num_labels, num_judges, vocab_size is not None)

    def num_whole_columns(self, draft_vocab_size: int, vocab_size: int) -> int:
        """Columns whose target logits take no more memory than the draft logits of a chunk."""
        return max(1, self.num_labels * draft_vocab_size // vocab_size)


class Labels(NamedTuple):
    """Labels of some sequences. Padding labels have weight 0 and point at the first slot."""

    row_N: Tensor
    slot_N: Tensor
    depth_N: Tensor
    judge_N: Tensor
    """column whose target distribution the slot is compared with: one before the label"""
    weight_N: Tensor
    opinion_N: Tensor
    """index of the judge in the chunk"""
    judge_row_M: Tensor
    judge_column_M: Tensor
    num_chunks: int
    num_labels: int

    def chunks(self) -> list["Labels"]:
        """One `Labels` per chunk."""
        split = zip(*(part.chunk(self.num_chunks) for part in self[:8]), strict=True)
        return [self._replace(**dict(zip(self._fields, parts, strict=False)), num_chunks=1) for parts in split]

    def of_rows(self, first: int, last: int, shape: ChunkShape) -> "Labels":
        """The labels of sequences first .. last - 1, renumbered from 0."""
        chosen_N = (self.weight_N > 0) & (self.row_N >= first) & (self.row_N < last)
        row_N, slot_N, depth_N, judge_N = (part[chosen_N] for part in self[:4])
        return list_labels(row_N - first, slot_N, depth_N, judge_N, shape)


def list_labels(row_N: Tensor, slot_N: Tensor, depth_N: Tensor, judge_N: Tensor, shape: ChunkShape) -> Labels:
    """Split labels, ordered by row and judge, into chunks that end when labels or judges are full."""
    num_labels = len(row_N)
    is_next_N = torch.ones(num_labels, dtype=torch.bool)
    is_next_N[1:] = (row_N[1:] != row_N[:-1]) | (judge_N[1:] != judge_N[:-1])
    number_N = is_next_N.cumsum(0) - 1
    num_judges = int(number_N[-1]) + 1 if num_labels else 0
    sizes = shape[:2]
    if num_labels > shape.num_labels or num_judges > shape.num_judges:
        ends = _chunk_ends(number_N, *sizes)
    else:
        ends = [0, num_labels]
        if not shape.is_fixed:
            sizes = (_round_up(max(1, num_labels), LABEL_MULTIPLE), _round_up(max(1, num_judges), LABEL_MULTIPLE))
    num_chunks = len(ends) - 1
    chunk_N = torch.arange(num_chunks).repeat_interleave(torch.tensor(ends).diff())
    first_N = torch.tensor(ends)[chunk_N]
    opinion_N = number_N - number_N[first_N]
    # Where each label and its judge go in the padded lists.
    place_N = chunk_N * sizes[0] + torch.arange(num_labels) - first_N
    seat_N = chunk_N * sizes[1] + opinion_N
    row, slot, depth, judge, weight, opinion = (
        values_N.new_zeros(num_chunks * sizes[0]).scatter(0, place_N, values_N)
        for values_N in (row_N, slot_N, depth_N, judge_N, torch.ones(num_labels), opinion_N)
    )
    judge_row, judge_column = (
        values_N.new_zeros(num_chunks * sizes[1]).scatter(0, seat_N, values_N) for values_N in (row_N, judge_N)
    )
    return Labels(row, slot, depth, judge, weight, opinion, judge_row, judge_column, num_chunks, num_labels)


def _chunk_ends(number_N: Tensor, max_labels: int, max_judges: int) -> list[int]:
    ends = [0]
    while ends[-1] < len(number_N):
        limit = number_N[ends[-1]] + max_judges
        first_too_many = int(torch.searchsorted(number_N, limit))
        ends.append(min(ends[-1] + max_labels, first_too_many))
    return ends


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
