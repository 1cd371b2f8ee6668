"""Slots of packed rows, cut into segments that are trained one after the other.

A segment takes the next columns of each row until its share of the slots is reached; a slot goes where its anchor
goes. It lists the depth-0 slots of its columns first, then the others by anchor and depth. Earlier columns are not
among its slots: it reads their keys and values (see `p_eagle.py`).

One row of six columns, all one document, whose four anchors keep 3, 1, 3 and 1 depths, in two segments:

>>> depths = torch.tensor([[3, 1, 3, 1, 0, 0]])
>>> found = partition(depths, torch.zeros_like(depths), num_partitions=2, num_slots=10, max_depth=3, multiple=1)
>>> segments = [segment for segment, places in found]
>>> [segment.left_B.tolist() for segment in segments], [segment.width_B.tolist() for segment in segments]
([[0], [3]], [[3], [3]])
>>> segments[0].slots.anchor_BS.tolist(), segments[0].slots.depth_BS.tolist()
([[0, 1, 2, 0, 0, 2, 2]], [[0, 0, 0, 1, 2, 1, 2]])
>>> segments[1].slots.anchor_BS.tolist(), segments[1].slots.depth_BS.tolist()
([[3, 4, 4, 3, 3, 3, 3]], [[0, -1, -1, -1, -1, -1, -1]])

Ten slots in two segments are five each, but a chain is never cut: a segment has room for two more. Padding (depth
-1) stands where a column has no slot, and behind the others.

Shapes: B rows, T columns, S slots of a segment.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.drafter.slots import PADDING, Slots


class Segment(NamedTuple):
    """Consecutive columns of each row with all their slots. Anchors are columns of the whole row."""

    slots: Slots
    left_B: Tensor
    """the first column"""
    width_B: Tensor
    """columns; as many slots, the first ones, are of depth 0 (or padding)"""


class Places(NamedTuple):
    """Where the slots of each column are in a segment."""

    is_own_BT: Tensor
    """whether the column is the segment's; the other two mean nothing where it is not"""
    first_BT: Tensor
    """number of the slot (column, 0)"""
    deeper_BT: Tensor
    """number of the slot (column, 1), which deeper ones follow"""

    def of(self, column_N: Tensor, depth_N: Tensor) -> Tensor:
        """Numbers of slots that exist; `column_N` counts the columns of all rows, row after row."""
        first_N, deeper_N = self.first_BT.flatten()[column_N], self.deeper_BT.flatten()[column_N]
        return torch.where(depth_N == 0, first_N, deeper_N + depth_N - 1)


def segment_size(num_slots: int, num_partitions: int, max_depth: int, multiple: int) -> int:
    """Slots of a segment, where a row has at most `num_slots` and an anchor `max_depth`."""
    spare = max_depth - 1 if num_partitions > 1 else 0
    return -(-(-(-num_slots // num_partitions) + spare) // multiple) * multiple


def partition(
    num_depths_BT: Tensor, start_BT: Tensor, *, num_partitions: int, num_slots: int, max_depth: int, multiple: int
) -> list[tuple[Segment, Places]]:
    """Segments of the slots that keep depths 0 .. num_depths_BT - 1 of each column; all have the same shape.

    `start_BT` is the column where each column's document begins. No row may have more than `num_slots` slots (columns
    that keep none count as one) and no anchor more than `max_depth`.
    """
    num_columns = num_depths_BT.shape[1]
    size = segment_size(num_slots, num_partitions, max_depth, multiple)
    num_deeper_BT = (num_depths_BT - 1).clamp_min(0)
    before_BT = (num_deeper_BT + 1).cumsum(1) - num_deeper_BT - 1
    segment_BT = before_BT // -(-num_slots // num_partitions)
    deeper_before_BT = num_deeper_BT.cumsum(1) - num_deeper_BT
    # The deeper slots, row after row, by anchor and depth: the column each belongs to, counted over all rows.
    column_N = torch.arange(num_depths_BT.numel()).repeat_interleave(num_deeper_BT.flatten())
    first_N = (num_deeper_BT.flatten().cumsum(0) - num_deeper_BT.flatten())[column_N]
    depth_N = torch.arange(len(column_N)) - first_N + 1
    # Padding sees one key, so that its softmax is defined; it stays near its place, which keeps block masks sparse.
    column_T = torch.arange(num_columns).clamp_max(num_columns - 2)
    first_BT = torch.where(num_depths_BT > 0, start_BT, column_T)
    found = []
    for number in range(num_partitions):
        is_own_BT = segment_BT == number
        width_B = is_own_BT.sum(1)
        # An empty segment has only padding, which must have a column to stand at.
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
