"""Batches: packed rows, their slots, and that each label points at the right slot and the right judge."""

import threading

import numpy as np
import pytest
import torch

from harness.packed_sequences import (
    conversation,
    conversations,
    labels_of,
    packed_batch,
    same,
    settings,
    slots_by_segment,
    spans,
)
from peagle.objective.batches import SLOT_MULTIPLE, Batches, moved, pack_sequences
from peagle.objective.cod import max_depths
from peagle.objective.labels import LABEL_MULTIPLE


def test_packed_rows_number_their_documents_and_count_positions_anew():
    rows = [[conversation([5, 6, 7], [0, 1, 1]), conversation([8, 9], [1, 1])], [conversation(range(20, 30), [1] * 10)]]
    token_ids, mask, document, position = pack_sequences(rows, 7)
    assert token_ids.tolist() == [[5, 6, 7, 8, 9, 0, 0], [20, 21, 22, 23, 24, 25, 26]], "the longest is cut"
    assert mask.int().tolist() == [[0, 1, 1, 1, 1, 0, 0], [1] * 7]
    assert document.tolist() == [[0, 0, 0, 1, 1, -1, -1], [0] * 7]
    assert position.tolist() == [[0, 1, 2, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5, 6]]


def test_the_documents_of_a_batch_are_those_of_the_conversations():
    rows, config = conversations(), settings()
    batches = Batches(rows, config)
    batch = batches.make(2)
    texts = [batch.token_ids_BT[row, first:end].tolist() for row, first, end in spans(batch)]
    assert texts == [rows[number].token_ids.tolist() for number in batches.documents(2)]


def test_a_batch_is_a_function_of_settings_and_step():
    rows = conversations(30)
    first = [Batches(rows, settings()).make(step) for step in (0, 5, 2)]
    torch.manual_seed(99)
    np.random.seed(3)
    batches = Batches(rows, settings())
    assert all(same(*pair) for pair in zip(first, (batches.make(step) for step in (0, 5, 2)), strict=True))
    assert not same(first[0], first[1])
    assert not same(first[0], Batches(rows, settings(seed=1)).make(0))


def test_all_batches_of_a_run_share_one_shape():
    batches = Batches(conversations(), settings(num_partitions=2))
    made = [batches.make(step) for step in range(6)]
    shapes = {tuple(part.segment.slots.anchor_BS.shape for part in batch.parts) for batch in made}
    ((first, second),) = shapes
    assert first == second and first[1] % SLOT_MULTIPLE == 0
    assert len({batch.token_ids_BT.shape for batch in made}) == 1


@pytest.mark.parametrize("num_partitions", [1, 2, 5])
def test_each_document_has_the_slots_and_labels_it_would_have_alone(num_partitions):
    """With retention 1, where chance decides nothing."""
    rows, config = conversations(), settings(retention=1.0, num_partitions=num_partitions)
    batches = Batches(rows, config)
    batch = batches.make(1)
    slots, labels = set(), []
    for (row, first, end), number in zip(spans(batch), batches.documents(1), strict=True):
        if end - first < 3:
            continue  # too short for an anchor
        limits = max_depths(torch.from_numpy(rows[number].loss_mask)[None], config.num_draft_tokens)[0].tolist()
        for anchor, limit in enumerate(limits):
            slots |= {(row, first + anchor, depth) for depth in range(max(1, limit))}
            labels += [(row, first + anchor, depth, first + anchor + depth + 1) for depth in range(limit)]
    found = slots_by_segment(batch)
    assert set().union(*found) == slots and sum(map(len, found)) == len(slots), "each once"
    assert sorted(labels_of(batch)) == sorted(labels)
    assert batch.num_labels == len(labels)


def test_slots_are_dropped_at_random_but_keep_the_depths_before_them():
    kept = set().union(*slots_by_segment(packed_batch(retention=0.5)))
    every = set().union(*slots_by_segment(packed_batch(retention=1.0)))
    assert kept < every
    assert {slot for slot in every if slot[2] == 0} <= kept
    assert all((row, anchor, depth - 1) in kept for row, anchor, depth in kept if depth > 0)


def test_the_position_of_a_slot_is_its_anchors_in_its_document_plus_its_depth():
    batch = packed_batch()
    slots = batch.slots
    row, slot = (slots.depth_BS >= 0).nonzero(as_tuple=True)
    expected = batch.position_BT[row, slots.anchor_BS[row, slot]] + slots.depth_BS[row, slot]
    assert torch.equal(slots.position_BS[row, slot], expected)


def test_partitions_change_neither_the_slots_nor_the_labels():
    whole = packed_batch(step=3)
    for num_partitions in (2, 3, 8):
        parts = packed_batch(step=3, num_partitions=num_partitions)
        assert len(parts.parts) == num_partitions
        assert set().union(*slots_by_segment(parts)) == slots_by_segment(whole)[0]
        assert sorted(labels_of(parts)) == sorted(labels_of(whole))


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_shares_of_several_processes_together_are_the_batch_of_one(world_size):
    rows, config = conversations(40), settings(batch_size=6)
    whole = Batches(rows, config).make(4)
    shares = [Batches(rows, config, rank, world_size).make(4) for rank in range(world_size)]
    for rank, share in enumerate(shares):
        assert torch.equal(share.token_ids_BT, whole.token_ids_BT[rank::world_size])
    rows_by_rank = [
        (row * world_size + rank, *rest) for rank, share in enumerate(shares) for row, *rest in labels_of(share)
    ]
    assert sorted(rows_by_rank) == sorted(labels_of(whole))
    assert sum(share.num_labels for share in shares) == whole.num_labels


@pytest.mark.parametrize("num_partitions", [1, 3])
def test_some_rows_of_a_batch_are_a_batch(num_partitions):
    batch = packed_batch(batch_size=5, num_partitions=num_partitions)
    parts = [batch.rows(first, min(5, first + 2)) for first in (0, 2, 4)]
    assert [len(part.token_ids_BT) for part in parts] == [2, 2, 1]
    moved = [(row + 2 * number, *rest) for number, part in enumerate(parts) for row, *rest in labels_of(part)]
    assert sorted(moved) == sorted(labels_of(batch))
    assert same(batch.rows(0, 5), batch)


def test_a_batch_without_any_label_still_has_a_chunk_of_no_weight():
    batch = packed_batch(rows=[conversation([5, 6, 7, 8], [0, 0, 0, 1])], batch_size=2)
    assert batch.num_labels == 0
    assert len(batch.labels.row_N) == LABEL_MULTIPLE and not batch.labels.weight_N.any()


@pytest.mark.parametrize("length", [4, 30])
def test_rows_are_padded_or_cut_to_the_length(length):
    token_ids, mask, *_ = pack_sequences([[conversation(range(5, 15), [1] * 10)]], length)
    kept = min(10, length)
    assert token_ids[0].tolist() == list(range(5, 5 + kept)) + [0] * (length - kept)
    assert mask[0].tolist() == [True] * kept + [False] * (length - kept)


def test_moving_a_batch_keeps_every_part():
    batch = packed_batch(num_partitions=2)
    assert batch.to(torch.device("cpu")) is batch
    assert same(moved(batch, torch.device("cpu")), batch)
    assert batch.to(torch.device("meta")).parts[1].labels.judge_N.device.type == "meta"


def test_prefetched_batches_are_the_same_and_come_in_order():
    batches = Batches(conversations(), settings())
    prefetched = list(batches.prefetched(2, 9, lambda batch: (batch.num_labels, batch)))
    assert all(same(batch, batches.make(step)) for step, (_, batch) in zip(range(2, 9), prefetched, strict=True))


def test_prefetching_ends_with_its_reader_and_hands_on_errors():
    batches = Batches(conversations(), settings())
    stream = batches.prefetched(0, 10**6, lambda batch: batch)
    next(stream)
    stream.close()
    for thread in [thread for thread in threading.enumerate() if thread.name == "peagle-batches"]:
        thread.join(timeout=10)
        assert not thread.is_alive(), "nobody reads what it makes"

    def fail(batch):
        raise ValueError("no memory for this batch")

    with pytest.raises(ValueError, match="no memory for this batch"):
        next(batches.prefetched(0, 3, fail))
