"""Training rows as tensors: which conversations a step takes, their slots, and where each slot's label is.

Everything here is a function of (settings, step), so an interrupted run goes on with the very batch it would have had.
Shapes: B rows, T tokens, S slots, N slots with a label.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from peagle.drafter.slots import Slots, training_slots
from peagle.training.cod import max_depths, max_num_slots, sample_depths
from peagle.training.config import TrainConfig
from peagle.training.conversations import Conversation

LABEL_CHUNK = 4096  # labels are projected to the vocabulary this many at a time, always as many: one compiled shape
LABEL_MULTIPLE = 64  # a batch of fewer labels than a chunk is only padded to a multiple of this
SLOT_MULTIPLE = 64  # fused attention kernels want rows of such a length


class Batch(NamedTuple):
    """One step's rows. Labels are listed flat; those past the real ones, which fill up a chunk, weigh 0."""

    token_ids_BT: Tensor
    slots: Slots
    row_N: Tensor
    slot_N: Tensor
    depth_N: Tensor
    judge_N: Tensor
    """column of `token_ids_BT` whose target distribution judges the slot: one before the label"""
    weight_N: Tensor
    num_labels: int

    def to(self, device: torch.device) -> "Batch":
        """A copy on `device`; towards a GPU through pinned memory, so that the host does not wait for it."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

        return Batch(
            move(self.token_ids_BT),
            Slots(*map(move, self.slots)),
            move(self.row_N),
            move(self.slot_N),
            move(self.depth_N),
            move(self.judge_N),
            move(self.weight_N),
            self.num_labels,
        )


def rows_of_step(step: int, batch_size: int, num_rows: int, seed: int) -> list[int]:
    """Row numbers of a step: each epoch is a new permutation of all rows, and a batch may span two of them."""
    rows = []
    for number in range(step * batch_size, (step + 1) * batch_size):
        epoch, index = divmod(number, num_rows)
        rows.append(int(_permutation(num_rows, seed, epoch)[index]))
    return rows


_permutations: dict[tuple[int, int, int], np.ndarray] = {}


def _permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    key = (num_rows, seed, epoch)
    if key not in _permutations:
        if len(_permutations) > 2:
            _permutations.clear()
        _permutations[key] = np.random.default_rng([seed, epoch]).permutation(num_rows)
    return _permutations[key]


def make_batch(conversations: Sequence[Conversation], config: TrainConfig, step: int) -> Batch:
    """Pad the rows of `step` to `max_length`, sample their slots and list the labels."""
    rows = rows_of_step(step, config.batch_size, len(conversations), config.seed)
    token_ids_BT, loss_mask_BT = pad_rows([conversations[row] for row in rows], config.max_length)
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    cod = (config.num_draft_tokens, config.retention, config.retention_floor)
    limits_BT = max_depths(loss_mask_BT, config.num_draft_tokens)
    num_slots = max_num_slots(limits_BT.shape[1], *cod)
    slots = training_slots(sample_depths(limits_BT, *cod, generator), _round_up(num_slots, SLOT_MULTIPLE))
    return label_batch(token_ids_BT, slots, limits_BT)


def pad_rows(conversations: Sequence[Conversation], max_length: int) -> tuple[Tensor, Tensor]:
    """Token ids and loss mask, [B, T] each, padded on the right with zeros."""
    token_ids_BT = torch.zeros(len(conversations), max_length, dtype=torch.long)
    loss_mask_BT = torch.zeros(len(conversations), max_length, dtype=torch.bool)
    for row, conversation in enumerate(conversations):
        length = min(len(conversation), max_length)
        token_ids_BT[row, :length] = torch.from_numpy(conversation.token_ids[:length])
        loss_mask_BT[row, :length] = torch.from_numpy(conversation.loss_mask[:length])
    return token_ids_BT, loss_mask_BT


def label_batch(token_ids_BT: Tensor, slots: Slots, max_depths_BT: Tensor) -> Batch:
    """List the slots that have a label: those whose depth their anchor is drafted to."""
    limit_BS = max_depths_BT.gather(1, slots.anchor_BS)
    row_N, slot_N = ((slots.depth_BS >= 0) & (slots.depth_BS < limit_BS)).nonzero(as_tuple=True)
    num_labels = len(row_N)
    multiple = LABEL_CHUNK if num_labels > LABEL_CHUNK else LABEL_MULTIPLE
    padding = _round_up(max(1, num_labels), multiple) - num_labels
    row_N, slot_N = (torch.cat([part, part.new_zeros(padding)]) for part in (row_N, slot_N))
    weight_N = (torch.arange(len(row_N)) < num_labels).float()
    depth_N = slots.depth_BS[row_N, slot_N].clamp_min(0)
    judge_N = slots.label_BS[row_N, slot_N] - 1
    return Batch(token_ids_BT, slots, row_N, slot_N, depth_N, judge_N, weight_N, num_labels)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
