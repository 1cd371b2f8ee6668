"""Lays out the slots of packed sequences in segments that are trained one after another.

A segment takes the next columns of each sequence until it has its share of the slots; slots stay with their anchor.
Its depth-0 slots come first, by column, then the others by anchor and depth. It reads the keys and values of earlier
columns from the context (see `p_eagle.py`). Tests hold the slots equal to `drafter.slots.training_slots`, which is
simpler but neither partitions nor has fixed shapes.

One sequence of six columns and one document, whose four anchors keep 3, 1, 3 and 1 depths, in two segments:

>>> depths = torch.tensor([[3, 1, 3, 1, 0, 0]])
>>> found = partition(depths, torch.zeros_like(depths), num_partitions=2, num_slots=10, max_depth=3, multiple=1)
>>> segments = [segment for segment, places in found]
>>> [segment.left_B.tolist() for segment in segments], [segment.width_B.tolist() for segment in segments]
([[0], [3]], [[3], [3]])
>>> segments[0].slots.anchor_BS.tolist(), segments[0].slots.depth_BS.tolist()
([[0, 1, 2, 0, 0, 2, 2]], [[0, 0, 0, 1, 2, 1, 2]])
>>> segments[1].slots.anchor_BS.tolist(), segments[1].slots.depth_BS.tolist()
([[3, 4, 4, 3, 3, 3, 3]], [[0, -1, -1, -1, -1, -1, -1]])

Ten slots make two segments of five, plus room for two more because an anchor's slots are never split. Padding (depth
-1) fills columns without a slot and the end of a segment.

Shapes: B sequences, T columns, S slots of a segment.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.drafter.slots import PADDING, Slots


class Segment(NamedTuple):
    """Consecutive columns of each sequence with all their slots. Anchors are columns of the sequence."""

    slots: Slots
    left_B: Tensor
    """first column"""
    width_B: Tensor
    """number of columns, and of leading depth-0 (or padding) slots"""


class Places(NamedTuple):
    """Slot numbers of each column in a segment."""

    is_own_BT: Tensor
    """whether the column is in the segment; the other fields are undefined if not"""
    first_BT: Tensor
    """slot number of (column, 0)"""
    deeper_BT: Tensor
    """slot number of (column, 1); deeper ones follow"""

    def of(self, column_N: Tensor, depth_N: Tensor) -> Tensor:
        """Slot numbers of existing slots; `column_N` indexes the flattened columns of all sequences."""
        first_N, deeper_N = self.first_BT.flatten()[column_N], self.deeper_BT.flatten()[column_N]
        return torch.where(depth_N == 0, first_N, deeper_N + depth_N - 1)


def segment_size(num_slots: int, num_partitions: int, max_depth: int, multiple: int) -> int:
    """Slots per segment, if a sequence has at most `num_slots` and an anchor `max_depth`."""
    spare = max_depth - 1 if num_partitions > 1 else 0
    return -(-(-(-num_slots // num_partitions) + spare) // multiple) * multiple


def partition(
    num_depths_BT: Tensor, start_BT: Tensor, *, num_partitions: int, num_slots: int, max_depth: int, multiple: int
) -> list[tuple[Segment, Places]]:
    """Segments of equal shape, with depths 0 .. num_depths_BT - 1 of each column.

    `start_BT` is the first column of each column's document. A sequence has at most `num_slots` slots (a column
    without slots counts as one) and an anchor at most `max_depth`.
    """
    num_columns = num_depths_BT.shape[1]
    size = segment_size(num_slots, num_partitions, max_depth, multiple)
    num_deeper_BT = (num_depths_BT - 1).clamp_min(0)
    before_BT = (num_deeper_BT + 1).cumsum(1) - num_deeper_BT - 1
    segment_BT = before_BT // -(-num_slots // num_partitions)
    deeper_before_BT = num_deeper_BT.cumsum(1) - num_deeper_BT
    # The flattened column of each deeper slot, by anchor and depth.
    column_N = torch.arange(num_depths_BT.numel()).repeat_interleave(num_deeper_BT.flatten())
    first_N = (num_deeper_BT.flatten().cumsum(0) - num_deeper_BT.flatten())[column_N]
    depth_N = torch.arange(len(column_N)) - first_N + 1
    # Padding attends to one nearby key, so that its softmax is defined and block masks stay sparse.
    column_T = torch.arange(num_columns).clamp_max(num_columns - 2)
    first_BT = torch.where(num_depths_BT > 0, start_BT, column_T)
    found = []
    for number in range(num_partitions):
        is_own_BT = segment_BT == number
        width_B = is_own_BT.sum(1)
        # An empty segment has only padding, which still needs a column.
        left_B = (segment_BT < number).sum(1).clamp_max(num_columns - 2)
        deeper_before_B1 = deeper_before_BT.gather(1, left_B[:, None])
        deeper_BT = width_B[:, None] + deeper_before_BT - deeper_before_B1
        places = Places(is_own_BT, torch.arange(num_columns) - left_B[:, None], deeper_BT)
        anchor_BS = left_B[:, None].repeat(1, size)
        start_BS, depth_BS = anchor_BS.clone(), torch.full_like(anchor_BS, PADDING)
        own_C = is_own_BT.flatten().nonzero()[:, 0]
        own_N = slice(None) if num_partitions == 1 else is_own_BT.flatten()[column_N]
        own_columns, own_depths = torch.cat([own_C, column_N[own_N]]), torch.cat([0 * own_C, depth_N[own_N]])
        slot = places.of(own_columns, own_depths) + own_columns // num_columns * size
        is_real = (num_depths_BT > 0).flatten()[own_columns]
        anchor_BS.view(-1)[slot] = column_T[own_columns % num_columns]
        start_BS.view(-1)[slot] = first_BT.flatten()[own_columns]
        depth_BS.view(-1)[slot] = torch.where(is_real, own_depths, PADDING)
        found.append((Segment(Slots(anchor_BS, depth_BS, start_BS), left_B, width_B), places))
    return found
