"""Sequence packing: which documents share a training sequence, by epoch.

Best fit, longest first: a document goes into the fullest sequence that still has room. The fill depends only on the
lengths, so every epoch has the same number of sequences. Each epoch shuffles documents of equal length and the order
of the sequences. A document mask keeps documents in one sequence from attending to each other.

>>> packing = Packing([3, 5, 2, 6, 4], row_length=8, seed=0)
>>> packing.num_rows
3
>>> [packing.documents(0, row) for row in range(3)] == [packing.documents(0, row) for row in range(3)]
True
>>> sorted(sorted(packing.documents(0, row)) for row in range(3))  # lengths 6 + 2, 5 + 3 and 4
[[0, 1], [2, 3], [4]]
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


class Packing:
    """The packing of each epoch, determined by (lengths, row_length, seed)."""

    def __init__(self, lengths: Sequence[int] | Integers, row_length: int, seed: int) -> None:
        self.lengths = np.minimum(np.asarray(lengths, dtype=np.int64), row_length)
        self.row_length, self.seed = row_length, seed
        row_by_rank = _best_fit(np.sort(self.lengths)[::-1], row_length)
        self.num_rows = int(row_by_rank.max()) + 1
        # Ranks by length, grouped by sequence.
        self._ranks = np.argsort(row_by_rank, kind="stable")
        self._ends = np.cumsum(np.bincount(row_by_rank, minlength=self.num_rows))
        self._epoch: tuple[int, Integers, Integers] | None = None

    def documents(self, epoch: int, row: int) -> list[int]:
        """The documents of a sequence of an epoch, in order."""
        by_rank, row_order = self._order(epoch)
        kind = row_order[row]
        first = self._ends[kind - 1] if kind else 0
        found: list[int] = by_rank[self._ranks[first : self._ends[kind]]].tolist()
        return found

    def documents_of_step(self, step: int, batch_size: int) -> list[list[int]]:
        """Documents of each sequence of a step. A batch may span two epochs."""
        numbers = range(step * batch_size, (step + 1) * batch_size)
        return [self.documents(*divmod(number, self.num_rows)) for number in numbers]

    def _order(self, epoch: int) -> tuple[Integers, Integers]:
        if self._epoch is None or self._epoch[0] != epoch:
            chance = np.random.default_rng([self.seed, epoch])
            by_rank = np.lexsort((chance.random(len(self.lengths)), -self.lengths))
            self._epoch = (epoch, by_rank, chance.permutation(self.num_rows))
        return self._epoch[1:]


def _best_fit(descending: Integers, row_length: int) -> Integers:
    """The sequence of each document, given descending lengths."""
    rows_by_room: list[list[int]] = [[] for _ in range(row_length + 1)]
    rooms = 0  # bit r: some sequence has room for exactly r more tokens
    num_rows = 0
    found = np.zeros(len(descending), dtype=np.int64)
    for rank, length in enumerate(descending.tolist()):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                rooms ^= 1 << room
        else:
            row, room = num_rows, row_length
            num_rows += 1
        found[rank] = row
        rows_by_room[room - length].append(row)
        rooms |= 1 << (room - length)
    return found
