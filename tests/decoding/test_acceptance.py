"""Counting drafts: the formulas on numbers small enough to check by hand."""

import pytest

from peagle.decoding.acceptance import Acceptance


def test_a_worked_example():
    # Four drafts of three tokens, of which 3, 0, 1 and 2 were accepted.
    counts = Acceptance.of([3, 0, 1, 2], num_draft_tokens=3)
    assert counts.num_drafts == 4
    assert counts.accepted_per_position == (3, 2, 1)
    assert counts.num_accepted == 6
    assert counts.acceptance_length == 1 + 6 / 4
    assert counts.per_position == [0.75, 0.5, 0.25]


def test_the_shares_by_position_and_one_add_up_to_the_acceptance_length():
    counts = Acceptance.of([2, 4, 0, 1, 1], num_draft_tokens=5)
    assert 1 + sum(counts.per_position) == pytest.approx(counts.acceptance_length)


def test_no_drafts_count_as_plain_decoding():
    counts = Acceptance.of([], num_draft_tokens=2)
    assert counts == Acceptance(0, (0, 0))
    assert counts.acceptance_length == 1.0 and counts.per_position == [0.0, 0.0]
    assert Acceptance.of([], num_draft_tokens=0).acceptance_length == 1.0


def test_counts_of_parts_add_up_to_those_of_the_whole():
    whole = Acceptance.of([2, 0, 1], 2)
    assert Acceptance.of([2], 2) + Acceptance.of([0, 1], 2) == whole
    assert Acceptance(0, (0, 0)) + whole == whole


def test_counts_of_different_depths_do_not_add():
    with pytest.raises(ValueError, match="shorter"):
        Acceptance.of([1], 2) + Acceptance.of([1], 1)


def test_more_accepted_than_drafted_is_a_defect():
    with pytest.raises(IndexError):
        Acceptance.of([3], num_draft_tokens=2)
