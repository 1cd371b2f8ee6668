"""Batches: which rows a step takes, and that each label points at the right slot and the right judge."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peagle.drafter.slots import training_slots
from peagle.training.batches import LABEL_MULTIPLE, SLOT_MULTIPLE, label_batch, make_batch, pad_rows, rows_of_step
from peagle.training.cod import max_depths
from peagle.training.config import TrainConfig
from peagle.training.conversations import Conversation


def conversation(token_ids, mask):
    return Conversation(np.array(token_ids, dtype=np.int32), np.array(mask, dtype=np.bool_))


def conversations(num_rows, length=20, seed=0):
    chance = np.random.default_rng(seed)
    lengths = chance.integers(6, length + 1, num_rows)
    return [conversation(chance.integers(3, 200, n), np.arange(n) >= 3) for n in lengths]


def config(**settings):
    settings = {"num_draft_tokens": 4, "max_length": 24, "batch_size": 3, "retention": 0.7} | settings
    return TrainConfig(data=Path("data"), output=Path("out"), **settings)


@given(st.integers(1, 30), st.integers(1, 9), st.integers(0, 3))
def test_each_epoch_visits_each_row_once(num_rows, batch_size, seed):
    num_epochs = 3
    num_steps = -(-num_rows * num_epochs // batch_size)
    visited = [row for step in range(num_steps) for row in rows_of_step(step, batch_size, num_rows, seed)]
    for epoch in range(num_epochs):
        assert Counter(visited[epoch * num_rows : (epoch + 1) * num_rows]) == Counter(range(num_rows))


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(rows_of_step(epoch, 40, 40, seed)) for epoch in range(3) for seed in range(3)}
    assert len(orders) == 9


def equal(left, right):
    flat = [[*batch.slots, *(part for part in batch if isinstance(part, torch.Tensor))] for batch in (left, right)]
    return left.num_labels == right.num_labels and all(torch.equal(*pair) for pair in zip(*flat, strict=True))


def test_a_batch_is_a_function_of_settings_and_step():
    rows = conversations(7)
    first = [make_batch(rows, config(), step) for step in (0, 5, 2)]
    torch.manual_seed(99)
    rows_of_step(123, 4, 50, 3)
    again = [make_batch(rows, config(), step) for step in (0, 5, 2)]
    assert all(equal(*pair) for pair in zip(first, again, strict=True))
    assert not equal(first[0], first[1])
    assert not equal(first[0], make_batch(rows, config(seed=1), 0))


def test_all_batches_of_a_run_share_one_shape():
    rows = conversations(9)
    batches = [make_batch(rows, config(), step) for step in range(6)]
    assert len({batch.token_ids_BT.shape for batch in batches}) == 1
    assert {batch.slots.anchor_BS.shape[1] % SLOT_MULTIPLE for batch in batches} == {0}
    assert len({batch.slots.anchor_BS.shape for batch in batches}) == 1
    assert {len(batch.row_N) % LABEL_MULTIPLE for batch in batches} == {0}


def test_the_labels_of_a_ten_token_row_are_as_counted_by_hand():
    #            index 0   1   2   3   4   5   6   7   8   9
    row = conversation([10, 11, 12, 13, 14, 15, 16, 17, 18, 19], [0, 0, 1, 1, 1, 0, 0, 1, 1, 0])
    token_ids, mask = pad_rows([row], 10)
    limits = max_depths(mask, 3)
    batch = label_batch(token_ids, training_slots(limits.clamp_min(1)), limits)
    # Depth-0 slots of anchors 0..7 come first, so slot = anchor there; the one deeper slot, (1, 1), is number 8.
    assert batch.num_labels == 4
    found = [part[:4].tolist() for part in (batch.slot_N, batch.depth_N, batch.judge_N)]
    assert found == [[1, 2, 6, 8], [0, 0, 0, 1], [2, 3, 7, 3]]
    labels = token_ids[0, batch.judge_N[:4] + 1].tolist()
    assert labels == [13, 14, 18, 14], "the target's distribution at a judge predicts the token after it"
    assert batch.weight_N.tolist() == [1.0] * 4 + [0.0] * (LABEL_MULTIPLE - 4)
    assert batch.slots.anchor_BS[0, batch.slot_N[:4]].tolist() == [1, 2, 6, 1]


def test_every_label_lies_in_an_answer_and_one_after_its_judge():
    rows = conversations(5)
    settings = config(retention=1.0)
    batch = make_batch(rows, settings, 1)
    _, mask = pad_rows([rows[row] for row in rows_of_step(1, 3, 5, 0)], settings.max_length)
    for n in range(batch.num_labels):
        row, slot = int(batch.row_N[n]), int(batch.slot_N[n])
        anchor, depth = int(batch.slots.anchor_BS[row, slot]), int(batch.slots.depth_BS[row, slot])
        assert int(batch.depth_N[n]) == depth and int(batch.judge_N[n]) == anchor + depth + 1
        assert mask[row, anchor + 1 : anchor + depth + 3].all()
    assert batch.num_labels == int(max_depths(mask, 4).sum()), "with retention 1 no label is missing"


def test_a_batch_without_any_label_still_has_a_full_chunk_of_no_weight():
    batch = make_batch([conversation([5, 6, 7, 8], [0, 0, 0, 1])], config(batch_size=2), 0)
    assert batch.num_labels == 0 and len(batch.row_N) == LABEL_MULTIPLE and not batch.weight_N.any()


@pytest.mark.parametrize("length", [4, 30])
def test_rows_are_padded_or_cut_to_the_length(length):
    token_ids, mask = pad_rows([conversation(range(5, 15), [1] * 10)], length)
    kept = min(10, length)
    assert token_ids[0].tolist() == list(range(5, 5 + kept)) + [0] * (length - kept)
    assert mask[0].tolist() == [True] * kept + [False] * (length - kept)


def test_moving_a_batch_keeps_every_part():
    batch = make_batch(conversations(4), config(), 0)
    assert equal(batch, batch.to(torch.device("cpu")))


def test_large_batches_are_padded_to_whole_chunks(monkeypatch):
    """Two rows of 12 tokens have 2 * 10 * (number of depths) labels at most: more than a chunk of 16."""
    monkeypatch.setattr("peagle.training.batches.LABEL_CHUNK", 16)
    token_ids_BT = torch.zeros(2, 12, dtype=torch.long)
    loss_mask_BT = torch.ones(2, 12, dtype=torch.bool)
    depths_BT = max_depths(loss_mask_BT, 3)
    batch = label_batch(token_ids_BT, training_slots(depths_BT), depths_BT)
    assert batch.num_labels > 16 and len(batch.row_N) % 16 == 0 and len(batch.row_N) - batch.num_labels < 16
