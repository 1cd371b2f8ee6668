"""Slots: the worked example of the module, and that training rows are serving rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.drafter_passes import aux_of, inputs_of, serving_logits, training_logits
from harness.tiny_models import tiny_drafter, tiny_target
from peagle.drafter.slots import (
    PADDING,
    Slots,
    batch_serving_slots,
    context_slots,
    packed_serving_slots,
    serving_slots,
    slot_inputs,
    training_slots,
    visible,
)

DEPTHS = st.lists(st.integers(0, 5), min_size=1, max_size=9).map(lambda rest: [max(rest[0], 1), *rest[1:]])


def listed(slots: Slots, row: int = 0) -> list[tuple[int, int]]:
    return list(zip(slots.anchor_BS[row].tolist(), slots.depth_BS[row].tolist(), strict=True))


@given(depths=DEPTHS)
@settings(deadline=None, max_examples=40)
def test_training_slots_are_depth_zero_of_every_anchor_and_then_the_chains_one_after_the_other(
    depths: list[int],
) -> None:
    text = [(anchor, 0 if count else PADDING) for anchor, count in enumerate(depths)]
    chains = [(anchor, depth) for anchor, count in enumerate(depths) for depth in range(1, count)]
    assert listed(training_slots(torch.tensor([depths]))) == text + chains


@given(depths=DEPTHS)
@settings(deadline=None, max_examples=40)
def test_a_slot_sees_the_text_up_to_its_anchor_and_its_own_chain_and_nothing_else(depths: list[int]) -> None:
    slots = training_slots(torch.tensor([depths]))
    sees = visible(slots, slots)[0]
    for query, (query_anchor, query_depth) in enumerate(listed(slots)):
        for key, (key_anchor, key_depth) in enumerate(listed(slots)):
            is_text = key_depth == 0 and key_anchor <= query_anchor
            is_chain = key_anchor == query_anchor and 0 < key_depth <= query_depth
            assert bool(sees[query, key]) == (is_text or is_chain)


@given(documents=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5), min_size=1, max_size=4))
@settings(deadline=None, max_examples=60)
def test_documents_that_share_a_row_have_the_slots_each_would_have_alone(documents: list[list[int]]) -> None:
    first_of = [sum(map(len, documents[:number])) for number in range(len(documents))]
    start = [first for first, depths in zip(first_of, documents, strict=True) for _ in depths]
    flat = [count for depths in documents for count in depths]
    packed = training_slots(torch.tensor([flat]), start_BT=torch.tensor([start]))
    sees, rows = visible(packed, packed)[0], {slot: row for row, slot in enumerate(listed(packed)) if slot[1] >= 0}
    for first, depths in zip(first_of, documents, strict=True):
        alone = training_slots(torch.tensor([depths]))
        for query, (anchor, depth) in enumerate(listed(alone)):
            if depth == PADDING:
                continue
            row = rows[anchor + first, depth]
            seen = {listed(alone)[key] for key in visible(alone, alone)[0, query].nonzero().flatten().tolist()}
            found = {listed(packed)[key] for key in sees[row].nonzero().flatten().tolist()}
            assert found == {(anchor + first, depth) for anchor, depth in seen}
            assert packed.position_BS[0, row] == alone.position_BS[0, query]
            assert packed.label_BS[0, row] == alone.label_BS[0, query] + first


@given(
    pieces=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=5),
    num_padding=st.integers(0, 3),
    num_draft_tokens=st.integers(1, 5),
)
@settings(deadline=None, max_examples=60)
def test_packed_pieces_have_the_serving_slots_each_would_have_alone(
    pieces: list[tuple[int, int]], num_padding: int, num_draft_tokens: int
) -> None:
    sizes = [size for _, size in pieces]
    first_token = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    num_tokens = max(1, first_token[-1] + num_padding)
    slots, chunks, tokens, first_slot = packed_serving_slots(
        torch.tensor([first for first, _ in pieces]), torch.tensor(first_token), num_tokens, num_draft_tokens
    )
    assert len(listed(slots)) == num_tokens + len(pieces) * (num_draft_tokens - 1)
    for number, (first, size) in enumerate(pieces):
        own = range(first_slot[number], first_slot[number + 1])
        assert chunks[own].tolist() == [number] * len(own)
        if not size:
            assert all(listed(slots)[slot][1] == PADDING for slot in own)
            continue
        assert [listed(slots)[slot] for slot in own] == listed(serving_slots(first, size, num_draft_tokens))
        anchors = [listed(slots)[slot][0] for slot in own]
        assert tokens[own].tolist() == [first_token[number] + anchor - first for anchor in anchors]
    assert all(depth == PADDING for _, depth in listed(slots)[first_slot[-1] :])
    assert min(tokens) >= 0 and max(tokens) < num_tokens, "padding reads something"


@given(first=st.integers(0, 6), num_anchors=st.integers(1, 4), num_draft_tokens=st.integers(1, 5))
@settings(deadline=None, max_examples=40)
def test_serving_is_plain_causal_attention_over_the_cache_and_the_new_slots(
    first: int, num_anchors: int, num_draft_tokens: int
) -> None:
    slots = serving_slots(first, num_anchors, num_draft_tokens)
    num_slots = num_anchors + num_draft_tokens - 1
    keys = context_slots(first).followed_by(slots)
    assert slots.anchor_BS.shape == (1, num_slots)
    assert keys.position_BS[0].tolist() == list(range(first + num_slots)), "positions count on from the cache"
    causal = torch.ones(num_slots, first + num_slots).tril(first).bool()
    assert torch.equal(visible(slots, keys)[0], causal)


@given(depths=st.lists(st.integers(1, 4), min_size=1, max_size=8), data=st.data())
@settings(deadline=None, max_examples=40)
def test_an_anchor_sees_and_reads_in_training_what_it_sees_and_reads_when_served(
    depths: list[int], data: st.DataObject
) -> None:
    anchor = data.draw(st.integers(0, len(depths) - 1))
    count = depths[anchor]
    flat, served = training_slots(torch.tensor([depths])), serving_slots(anchor, 1, count)
    keys = context_slots(anchor).followed_by(served)
    rows = {slot: row for row, slot in enumerate(listed(flat))}
    for served_row, slot in enumerate(listed(served)):
        row = rows[slot]
        seen_flat = {listed(flat)[key] for key in visible(flat, flat)[0, row].nonzero().flatten().tolist()}
        seen_served = {listed(keys)[key] for key in visible(served, keys)[0, served_row].nonzero().flatten().tolist()}
        assert seen_flat == seen_served
        assert flat.position_BS[0, row] == served.position_BS[0, served_row] == sum(slot)


def test_the_label_of_a_slot_is_the_token_after_the_one_at_its_position_plus_one() -> None:
    slots = training_slots(torch.tensor([[3, 1, 2]]))
    labels = dict(zip(listed(slots), slots.label_BS[0].tolist(), strict=True))
    assert labels == {(0, 0): 2, (0, 1): 3, (0, 2): 4, (1, 0): 3, (2, 0): 4, (2, 1): 5}
    served = serving_slots(first_anchor=3, num_anchors=2, num_draft_tokens=3)
    assert served.label_BS[0, -3:].tolist() == [6, 7, 8], "x[0..5] is known, so drafts begin with x[6]"


def test_rows_are_padded_with_slots_that_no_slot_sees() -> None:
    slots = training_slots(torch.tensor([[2, 2, 2], [1, 1, 0], [1, 0, 0]]))
    is_padding_BS = slots.depth_BS == PADDING
    assert is_padding_BS.sum(1).tolist() == [0, 4, 5]
    sees = visible(slots, slots)
    assert not sees[is_padding_BS[:, None].expand_as(sees)].any()
    assert sees.any(-1).all(), "every query sees something, so that no attention row is empty"
    assert (slots.position_BS >= 0).all()


def test_padding_reads_placeholders_and_changes_no_real_slot() -> None:
    target = tiny_target()
    drafter = tiny_drafter(target)
    token_ids_BT, aux_BTA = aux_of(target)
    token_ids_BT, aux_BTA = token_ids_BT.expand(2, -1).clone(), aux_BTA.expand(2, -1, -1).clone()
    num_anchors = token_ids_BT.shape[1] - 1
    depths_BT = torch.full((2, num_anchors), 3)
    depths_BT[1, 5:] = 0
    slots, logits = training_logits(drafter, depths_BT, token_ids_BT, aux_BTA)
    alone_slots, alone = training_logits(drafter, depths_BT[1:, :5], token_ids_BT[1:, :6], aux_BTA[1:, :6])
    assert logits.isfinite().all()
    rows = [row for row, (_, depth) in enumerate(listed(slots, 1)) if depth != PADDING]
    assert [listed(slots, 1)[row] for row in rows] == listed(alone_slots)
    assert torch.allclose(logits[1, rows], alone[0], atol=1e-5)
    token_ids_BS, _ = inputs_of(drafter, slots, token_ids_BT, aux_BTA)
    assert (token_ids_BS[slots.depth_BS == PADDING] == drafter.config.mask_token_id).all()


def test_inputs_pair_each_state_with_the_token_after_it() -> None:
    tokens, states = torch.arange(50, 56)[None], torch.arange(6.0)[None, :, None]
    token_ids, fused = slot_inputs(training_slots(torch.tensor([[2, 1, 1]])), tokens, states, 7, torch.tensor([-1.0]))
    assert token_ids.tolist() == [[51, 52, 53, 7]]
    assert fused[0, :, 0].tolist() == [0, 1, 2, -1]
    served = slot_inputs(serving_slots(2, 2, 2), tokens[:, 2:], states[:, 2:], 7, torch.tensor([-1.0]), offset=2)
    assert served[0].tolist() == [[53, 54, 7]] and served[1][0, :, 0].tolist() == [2, 3, -1]


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"fc_norm": False, "norm_before_fc": True, "norm_before_residual": True},
        {"rope_parameters_type": "yarn"},
    ],
    ids=["fc_norm", "norm_before_fc", "yarn"],
)
def test_one_training_pass_gives_the_logits_that_serving_gives_at_every_anchor(step: int, switches: dict) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    target = tiny_target(**({"rope_parameters": rope} if switches.pop("rope_parameters_type", None) else {}))
    drafter = tiny_drafter(target, num_layers=3, **switches)
    token_ids_BT, aux_BTA = aux_of(target)
    depths_BT = torch.full((1, token_ids_BT.shape[1] - 1), 4)
    slots, flat = training_logits(drafter, depths_BT, token_ids_BT, aux_BTA)
    served = serving_logits(drafter, 4, token_ids_BT, aux_BTA, step)
    compared = 0
    for row, (anchor, depth) in enumerate(listed(slots)):
        if anchor in served:
            assert torch.allclose(flat[0, row], served[anchor][depth], atol=1e-4), (anchor, depth)
            compared += 1
    assert compared == 4 * len(served) and len(served) == -(-depths_BT.shape[1] // step)


def test_dropping_depths_of_other_anchors_changes_no_remaining_slot() -> None:
    target = tiny_target()
    drafter = tiny_drafter(target)
    token_ids_BT, aux_BTA = aux_of(target)
    num_anchors = token_ids_BT.shape[1] - 1
    whole_slots, whole = training_logits(drafter, torch.full((1, num_anchors), 4), token_ids_BT, aux_BTA)
    sampled_slots, sampled = training_logits(drafter, torch.randint(1, 5, (1, num_anchors)), token_ids_BT, aux_BTA)
    rows = {slot: row for row, slot in enumerate(listed(whole_slots))}
    for row, slot in enumerate(listed(sampled_slots)):
        assert torch.allclose(sampled[0, row], whole[0, rows[slot]], atol=1e-5), slot


@given(
    requests=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=5),
    spare=st.integers(0, 3),
    num_draft_tokens=st.integers(1, 5),
)
@settings(deadline=None, max_examples=60)
def test_slots_of_a_batch_are_the_slots_of_each_request_and_padding_behind_them(
    requests: list[tuple[int, int]], spare: int, num_draft_tokens: int
) -> None:
    first, counts = (torch.tensor(column) for column in zip(*requests, strict=True))
    max_anchors = int(counts.max()) + spare
    batch = batch_serving_slots(first, counts, max_anchors, num_draft_tokens)
    assert batch.anchor_BS.shape == batch.depth_BS.shape == (len(requests), max_anchors + num_draft_tokens - 1)
    for row, (first_anchor, num_anchors) in enumerate(requests):
        alone = listed(serving_slots(first_anchor, num_anchors, num_draft_tokens))
        assert listed(batch, row)[: len(alone)] == alone
        assert all(depth == PADDING for _, depth in listed(batch, row)[len(alone) :])
        assert all(first_anchor <= anchor < first_anchor + num_anchors for anchor, _ in listed(batch, row))
