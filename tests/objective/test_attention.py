"""What slots see: ranges of keys against the layout's own rule, and FlexAttention's blocks against the dense mask.

FlexAttention has no gradients on a CPU, so here its results are compared; gradients are those of the same blocks.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.packed_sequences import conversation, conversations, packed_batch
from peagle.drafter.slots import Slots, training_slots, visible
from peagle.kernels.compiler import compiled
from peagle.objective import attention
from peagle.objective.attention import attend, block_mask, dense_mask, find_blocks
from peagle.objective.partition import partition

batches = st.builds(
    packed_batch,
    step=st.integers(0, 3),
    rows=st.builds(conversations, num_rows=st.integers(3, 20), longest=st.integers(6, 60), seed=st.integers(0, 9)),
    max_length=st.integers(9, 60),
    num_draft_tokens=st.integers(1, 6),
    retention=st.floats(0.3, 1.0),
    num_partitions=st.integers(1, 4),
)


def new_mask(segment, num_context, look=find_blocks):
    return block_mask(*look(segment, num_context), num_context)


def columns_before(batch, segment):
    """All columns as depth-0 slots; those the segment itself holds, or that come after it, as padding."""
    column_BT = torch.arange(batch.token_ids_BT.shape[1]).expand_as(batch.token_ids_BT)
    is_before_BT = (column_BT < segment.left_B[:, None]) & (batch.document_BT >= 0)
    return Slots(column_BT, torch.where(is_before_BT, 0, -1), column_BT - batch.position_BT)


@given(batches)
@settings(deadline=None, max_examples=60)
def test_the_ranges_of_a_slot_are_what_the_layout_lets_it_see(batch):
    for segment, _ in batch.parts:
        keys = columns_before(batch, segment).followed_by(segment.slots)
        expected = visible(segment.slots, keys)
        seen = dense_mask(segment, batch.token_ids_BT.shape[1])
        is_real = segment.slots.depth_BS >= 0
        # The last two columns of a document hold no slot, and none that has a label looks back at them.
        is_slot = keys.depth_BS >= 0
        assert torch.equal((seen & is_slot[:, None])[is_real], expected[is_real])
        assert not (seen & ~is_slot[:, None] & is_real[..., None])[..., batch.token_ids_BT.shape[1] :].any()
        assert seen.any(-1).all(), "padding sees something too: a row of nothing has no softmax"


def test_an_unpartitioned_row_is_the_training_layout_itself():
    batch = packed_batch()
    seen = dense_mask(batch.parts[0].segment, 0)
    slots = batch.slots
    is_real = slots.depth_BS >= 0
    assert torch.equal((seen & is_real[:, None])[is_real], visible(slots, slots)[is_real])


def test_one_document_sees_what_serving_will_let_it_see():
    """Four anchors of which 0 and 2 keep two depths: the worked example of the layout."""
    batch = packed_batch(rows=[conversation(range(5, 11), [1] * 6)], max_length=11, batch_size=1, retention=1.0)
    slots = training_slots(torch.tensor([[2, 1, 2, 1]]))
    seen = dense_mask(batch.parts[0].segment, 0)[0]
    places = {
        (int(anchor), int(depth)): number
        for number, (anchor, depth) in enumerate(zip(batch.slots.anchor_BS[0], batch.slots.depth_BS[0], strict=True))
        if depth >= 0
    }
    chosen = [places[anchor, depth] for anchor, depth in zip(*(part[0].tolist() for part in slots[:2]), strict=True)]
    assert torch.equal(seen[chosen][:, chosen], visible(slots, slots)[0])


@given(batches, st.booleans())
@settings(deadline=None, max_examples=60)
def test_the_listed_blocks_hold_all_that_is_seen_and_whole_ones_nothing_else(batch, has_context):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "BLOCK", 8)
        for segment, _ in batch.parts:
            num_context = batch.token_ids_BT.shape[1] if has_context else 0
            blocks, seen = new_mask(segment, num_context), dense_mask(segment, num_context)
            num_queries, num_keys = -(-seen.shape[1] // 8), -(-seen.shape[2] // 8)
            partial, full = (
                listed(blocks.kv_num_blocks, blocks.kv_indices),
                listed(blocks.full_kv_num_blocks, blocks.full_kv_indices),
            )
            assert partial.shape[1:] == (num_queries, num_keys) and not (partial & full).any()
            by_key = torch.repeat_interleave(torch.repeat_interleave(partial | full, 8, 1), 8, 2)
            assert not (seen & ~by_key[:, : seen.shape[1], : seen.shape[2]]).any()
            by_key = torch.repeat_interleave(torch.repeat_interleave(full, 8, 1), 8, 2)
            assert (seen | ~by_key[:, : seen.shape[1], : seen.shape[2]]).all()
            assert torch.equal(listed(blocks.q_num_blocks, blocks.q_indices), partial.mT)
            assert torch.equal(listed(blocks.full_q_num_blocks, blocks.full_q_indices), full.mT)
            b, q, k = torch.meshgrid(*(torch.arange(size) for size in seen.shape), indexing="ij")
            assert torch.equal(blocks.mask_mod(b, torch.zeros_like(b), q, k), seen)


def listed(num_blocks, indices):
    """Whether each query block lists each key block, bool [B, Q, X]."""
    is_listed = torch.arange(indices.shape[-1]) < num_blocks[..., None]
    found = torch.zeros_like(is_listed)
    found.scatter_(-1, indices.long(), is_listed)
    return found[:, 0]


def test_blocks_of_other_documents_and_other_chains_are_skipped():
    rows = conversations(60, shortest=100, longest=200)
    batch = packed_batch(rows=rows, max_length=2048, batch_size=2, num_draft_tokens=8, retention=0.8)
    blocks = new_mask(batch.parts[0].segment, 0)
    partial, full = (
        listed(blocks.kv_num_blocks, blocks.kv_indices),
        listed(blocks.full_kv_num_blocks, blocks.full_kv_indices),
    )
    assert (partial | full).float().mean() < 0.06, "of all blocks of queries and keys"


@pytest.mark.slow
@pytest.mark.parametrize(("num_partitions", "compiles"), [(1, False), (3, True)])
@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses what torch itself deprecates
def test_flex_attention_over_blocks_equals_masked_attention(num_partitions, compiles):
    if compiles and not torch.cpu._is_avx2_supported():
        pytest.skip("torch compiles flex attention for CPUs with AVX2 only")
    batch = packed_batch(max_length=200, num_partitions=num_partitions, rows=conversations(20, 20, 120))
    chance = torch.Generator().manual_seed(0)
    flex, look = (compiled(part, dynamic=False) if compiles else part for part in (attend, find_blocks))
    for segment, _ in batch.parts:
        num_context = 200 if num_partitions > 1 else 0
        num_slots = segment.slots.anchor_BS.shape[1]
        query = torch.randn(3, 4, num_slots, 16, generator=chance)
        key, value = torch.randn(2, 3, 2, num_context + num_slots, 16, generator=chance)
        expected = attend(query, key, value, dense_mask(segment, num_context))
        torch.testing.assert_close(
            flex(query, key, value, new_mask(segment, num_context, look)), expected, atol=2e-6, rtol=1e-5
        )


def test_an_unpartitioned_segment_has_the_slots_of_the_layout():
    depths_BT = torch.randint(0, 5, (3, 12), generator=torch.Generator().manual_seed(0))
    depths_BT[:, -2:] = 0
    start_BT = torch.tensor([0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8]).expand_as(depths_BT)
    sizes = {"num_slots": 60, "max_depth": 4, "multiple": 1}
    ((segment, _),) = partition(depths_BT, start_BT, num_partitions=1, **sizes)
    expected = training_slots(depths_BT, start_BT)
    num_slots = expected.depth_BS.shape[1]
    assert torch.equal(segment.slots.depth_BS[:, :num_slots], expected.depth_BS)
    assert (segment.slots.depth_BS[:, num_slots:] < 0).all()
    is_real = expected.depth_BS >= 0
    for own, other in zip(segment.slots, expected, strict=True):
        assert torch.equal(own[:, :num_slots][is_real], other[is_real])
