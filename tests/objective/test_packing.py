"""Packing: every document once an epoch, no row too long, rows well filled, and all by seed and epoch alone."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.objective.packing import Packing

lengths = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@given(lengths, st.integers(1, 50), st.integers(0, 3), st.integers(0, 3))
def test_an_epoch_holds_each_document_once_and_no_row_more_than_fits(lengths, row_length, seed, epoch):
    packing = Packing(lengths, row_length, seed)
    rows = [packing.documents(epoch, row) for row in range(packing.num_rows)]
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    assert all(row and sum(min(lengths[number], row_length) for number in row) <= row_length for row in rows)


@given(lengths, st.integers(10, 80))
def test_no_two_rows_could_have_been_one(lengths, row_length):
    packing = Packing(lengths, row_length, 0)
    filled = sorted(
        sum(min(lengths[number], row_length) for number in packing.documents(0, row)) for row in range(packing.num_rows)
    )
    assert packing.num_rows == 1 or filled[0] + filled[1] > row_length


@given(lengths, st.integers(1, 9), st.integers(0, 3))
def test_steps_walk_through_the_epochs_one_after_the_other(lengths, batch_size, seed):
    packing = Packing(lengths, 60, seed)
    num_steps = -(-packing.num_rows * 3 // batch_size)
    rows = [row for step in range(num_steps) for row in packing.documents_of_step(step, batch_size)]
    for epoch in range(3):
        visited = rows[epoch * packing.num_rows : (epoch + 1) * packing.num_rows]
        assert Counter(number for row in visited for number in row) == Counter(range(len(lengths)))


def test_epochs_and_seeds_have_orders_of_their_own_and_looking_back_changes_nothing():
    lengths = np.random.default_rng(0).integers(5, 40, 60)
    orders = {str([Packing(lengths, 50, seed).documents(epoch, 0) for epoch in range(3)]) for seed in range(3)}
    assert len(orders) == 3
    packing = Packing(lengths, 50, 0)
    first = [packing.documents(epoch, 1) for epoch in (0, 1, 2)]
    assert [packing.documents(epoch, 1) for epoch in (2, 0, 1)] == [first[2], first[0], first[1]]
    assert len({str(row) for row in first}) == 3


@pytest.mark.parametrize("row_length", [512, 2048])
def test_mixed_lengths_fill_the_rows_to_more_than_95_percent(row_length):
    lengths = np.random.default_rng(0).lognormal(5.3, 0.6, 3000).astype(int) + 20
    packing = Packing(lengths, row_length, 0)
    assert packing.lengths.sum() > 0.95 * packing.num_rows * row_length


def test_a_document_longer_than_a_row_takes_one_of_its_own():
    packing = Packing([100, 3, 8], row_length=8, seed=0)
    rows = [packing.documents(0, row) for row in range(packing.num_rows)]
    assert sorted(rows) == [[0], [1], [2]]
