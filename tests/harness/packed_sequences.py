"""Small packed sequences, and what each of their documents would be alone."""

from pathlib import Path

import numpy as np
import torch

from peagle.data.conversations import Conversation
from peagle.objective.batches import Batches
from peagle.objective.config import TrainConfig

NUM_DRAFT_TOKENS = 4


def settings(**changes):
    values = {"num_draft_tokens": NUM_DRAFT_TOKENS, "max_length": 40, "batch_size": 3, "retention": 0.7}
    if changes.get("method") != "eagle3":
        values["labels"] = "all"  # random text is not what the target finds likeliest, so hardly any is reached
    return TrainConfig(data=Path("data"), output=Path("out"), **(values | {"compile": "off"} | changes))


def conversation(token_ids, mask):
    return Conversation(np.array(token_ids, dtype=np.int32), np.array(mask, dtype=np.bool_))


def conversations(num_rows=20, shortest=2, longest=25, seed=0):
    chance = np.random.default_rng(seed)
    lengths = chance.integers(shortest, longest + 1, num_rows)
    return [conversation(chance.integers(3, 200, n), np.arange(n) >= min(3, n // 2)) for n in lengths]


def packed_batch(step=0, rows=None, **changes):
    return Batches(rows or conversations(), settings(**changes)).make(step)


def spans(batch):
    """(row, first column, end) of every document."""
    found = []
    for row, documents in enumerate(batch.document_BT.tolist()):
        for number in sorted(set(documents) - {-1}):
            columns = [column for column, document in enumerate(documents) if document == number]
            assert columns == list(range(columns[0], columns[-1] + 1)), "a document stands in one piece"
            found.append((row, columns[0], columns[-1] + 1))
    return found


def slots_by_segment(batch):
    """The slots of each segment as a set of (row, anchor, depth), without padding."""
    found = []
    for segment, _ in batch.parts:
        row, slot = (segment.slots.depth_BS >= 0).nonzero(as_tuple=True)
        parts = (row, segment.slots.anchor_BS[row, slot], segment.slots.depth_BS[row, slot])
        found.append(set(zip(*(part.tolist() for part in parts), strict=True)))
    return found


def labels_of(batch):
    """All labels as (row, anchor, depth, judge)."""
    found = []
    for segment, labels in batch.parts:
        for n in labels.weight_N.nonzero()[:, 0].tolist():
            row, slot = int(labels.row_N[n]), int(labels.slot_N[n])
            anchor, depth = int(segment.slots.anchor_BS[row, slot]), int(segment.slots.depth_BS[row, slot])
            assert depth == int(labels.depth_N[n])
            found.append((row, anchor, depth, int(labels.judge_N[n])))
    return found


def same(left, right):
    """Whether two nests of tuples hold the same tensors and numbers."""
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, tuple):
        return len(left) == len(right) and all(same(*pair) for pair in zip(left, right, strict=True))
    return left == right
