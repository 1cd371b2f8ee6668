"""COD sampling: how many slots each depth keeps, which, and that no label leaves its answer."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.drafter.slots import training_slots
from peagle.objective.cod import max_depths, max_num_slots, sample_depths
from peagle.objective.config import TrainConfig

shares = st.floats(0.01, 1.0)


@st.composite
def masks(draw, max_rows=3):
    num_rows, num_tokens = draw(st.integers(1, max_rows)), draw(st.integers(3, 40))
    rows = st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens)
    return torch.tensor([draw(rows) for _ in range(num_rows)])


def sampled(limits, num_draft_tokens, retention, floor=0.0, seed=0):
    chance = torch.rand(limits.shape, generator=torch.Generator().manual_seed(seed))
    return sample_depths(limits, kept(num_draft_tokens, retention, floor), chance)


def kept(num_draft_tokens, retention=0.8, floor=0.0, deep_floor=0.0):
    paths = {"data": Path("data"), "output": Path("output")}
    settings = {"retention": retention, "retention_floor": floor, "deep_floor": deep_floor}
    return TrainConfig(**paths, num_draft_tokens=num_draft_tokens, **settings).kept_shares


def test_the_depths_of_a_two_turn_row_are_as_counted_by_hand():
    #       index 0  1  2  3  4  5  6  7  8  9
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 1, 1, 0]]).bool()
    # Anchor 1 is drafted from after token 2, the first answer's first: labels 3 and 4. Anchor 2: label 4. Anchor 3
    # follows the answer's end. Anchor 6 belongs to the second answer: label 8.
    assert max_depths(mask, 4).tolist() == [[0, 2, 1, 0, 0, 0, 1, 0]]
    assert max_depths(mask, 1).tolist() == [[0, 1, 1, 0, 0, 0, 1, 0]]


@given(masks(), st.integers(1, 9))
def test_labels_never_leave_the_answer_or_cross_turns(mask, num_draft_tokens):
    limits = max_depths(mask, num_draft_tokens)
    assert limits.shape == (mask.shape[0], mask.shape[1] - 2)
    for row, anchors in enumerate(limits.tolist()):
        flags = mask[row].tolist()
        for anchor, limit in enumerate(anchors):
            assert limit <= num_draft_tokens
            assert not limit or all(flags[anchor + 1 : anchor + 2 + limit]), "one unbroken answer from a + 1 on"
            goes_on = anchor + 2 + limit < len(flags) and all(flags[anchor + 1 : anchor + 3 + limit])
            assert limit == num_draft_tokens or not goes_on, "no label is given away"


@given(masks(max_rows=1), st.integers(1, 6), st.data())
def test_labels_of_packed_documents_are_those_of_each_alone(mask, num_draft_tokens, data):
    num_tokens = mask.shape[1]
    cuts = sorted(data.draw(st.sets(st.integers(1, num_tokens - 1), max_size=4)))
    document = torch.zeros_like(mask, dtype=torch.long)
    expected = torch.zeros(1, num_tokens, dtype=torch.long)
    for number, (first, last) in enumerate(zip([0, *cuts], [*cuts, num_tokens], strict=True)):
        document[:, first:last] = number
        if last - first >= 3:
            expected[:, first : last - 2] = max_depths(mask[:, first:last], num_draft_tokens)
    found = max_depths(mask, num_draft_tokens, document)
    assert torch.equal(found, expected[:, : num_tokens - 2])


@given(masks(), st.integers(1, 9), shares, shares, st.integers(0, 5))
@settings(deadline=None)
def test_every_anchor_keeps_depth_zero_and_none_more_than_it_has_labels_for(
    mask, num_draft_tokens, retention, floor, seed
):
    limits = max_depths(mask, num_draft_tokens)
    depths = sampled(limits, num_draft_tokens, retention, floor, seed)
    assert (depths >= 1).all()
    assert (depths <= limits.clamp_min(1)).all()


@given(st.integers(1, 3000), st.integers(1, 10), shares, st.floats(0.0, 1.0))
@settings(deadline=None, max_examples=60)
def test_depth_d_keeps_the_share_of_anchors_it_should(num_anchors, num_draft_tokens, retention, floor):
    limits = torch.full((1, num_anchors), num_draft_tokens)
    depths = sampled(limits, num_draft_tokens, retention, floor)
    for depth in range(1, num_draft_tokens):
        expected = math.ceil(num_anchors * max(retention**depth, floor))
        assert int((depths > depth).sum()) == expected, f"depth {depth}"


@given(masks(), st.integers(1, 9), shares, st.floats(0.0, 1.0))
@settings(deadline=None)
def test_depths_are_nested_so_that_a_slot_has_every_slot_it_attends_to(mask, num_draft_tokens, retention, floor):
    slots = training_slots(sampled(max_depths(mask, num_draft_tokens), num_draft_tokens, retention, floor))
    for anchors, depths in zip(slots.anchor_BS.tolist(), slots.depth_BS.tolist(), strict=True):
        kept = {(anchor, depth) for anchor, depth in zip(anchors, depths, strict=True) if depth >= 0}
        assert all((anchor, depth - 1) in kept for anchor, depth in kept if depth > 0)
        assert {(anchor, 0) for anchor in range(mask.shape[1] - 2)} <= kept


@given(masks(), st.integers(1, 9))
def test_retention_one_keeps_everything(mask, num_draft_tokens):
    limits = max_depths(mask, num_draft_tokens)
    assert torch.equal(sampled(limits, num_draft_tokens, 1.0), limits.clamp_min(1))


def test_the_floor_holds_deep_depths_up():
    limits = torch.full((2, 100), 8)
    depths = sampled(limits, 8, 0.5, floor=0.25)
    assert [(depths > depth).sum(1).tolist() for depth in range(1, 8)] == [[50, 50]] + [[25, 25]] * 6


def test_deep_depths_keep_a_floor_of_anchors_and_the_first_eight_do_not_change():
    shares = kept(32, deep_floor=0.1)
    assert shares[:8] == kept(8) == kept(8, deep_floor=0.1) == tuple(0.8**depth for depth in range(8))
    chance = torch.rand((1, 1000), generator=torch.Generator().manual_seed(0))
    depths = sample_depths(torch.full((1, 1000), 32), shares, chance)
    counts = [int((depths > depth).sum()) for depth in range(32)]
    assert counts[8:12] == [168, 135, 108, 100] and counts[11:] == [100] * 21, "without a floor depth 31 keeps one"
    assert counts[:8] == [math.ceil(1000 * 0.8**depth) for depth in range(8)]
    assert int(depths.sum()) == max_num_slots(1000, shares)


def test_the_floor_of_deep_depths_is_never_above_the_depth_before_them():
    shares = kept(16, retention=0.5, deep_floor=0.1)
    assert shares[8:] == (0.5**7,) * 8
    assert kept(16, retention=0.5, floor=0.2, deep_floor=0.1)[8:] == (0.2,) * 8


def test_the_sample_follows_the_random_numbers_and_nothing_else():
    limits = torch.full((3, 200), 6)
    torch.manual_seed(1)
    first = sampled(limits, 6, 0.7, seed=5)
    torch.manual_seed(2)
    assert torch.equal(first, sampled(limits, 6, 0.7, seed=5))
    assert not torch.equal(first, sampled(limits, 6, 0.7, seed=6))
    assert not torch.equal(first[0], first[1]), "rows are shuffled on their own"


@given(st.integers(1, 5000), st.integers(1, 12), shares, st.floats(0.0, 1.0), st.data())
@settings(deadline=None, max_examples=60)
def test_max_num_slots_is_a_true_bound_and_reached(num_anchors, num_draft_tokens, retention, floor, data):
    bound = max_num_slots(num_anchors, kept(num_draft_tokens, retention, floor))
    full = sampled(torch.full((1, num_anchors), num_draft_tokens), num_draft_tokens, retention, floor)
    assert int(full.sum()) == bound, "a row that is one long answer reaches it"
    num_eligible = data.draw(st.integers(0, num_anchors))
    limits = torch.zeros(1, num_anchors, dtype=torch.long)
    limits[:, :num_eligible] = num_draft_tokens
    assert int(sampled(limits, num_draft_tokens, retention, floor).sum()) <= bound


@pytest.mark.parametrize("num_anchors", [25, 125, 510, 5000, 100_000])
def test_rounding_does_not_break_the_bound_where_a_share_is_a_whole_number(num_anchors):
    depths = sampled(torch.full((1, num_anchors), 8), 8, 0.8)
    assert int(depths.sum()) == max_num_slots(num_anchors, kept(8))
