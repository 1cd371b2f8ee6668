"""Chunks of labels: none lost, none too large, and each label finds its judge."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.packed_sequences import settings
from peagle.objective import labels as labels_module
from peagle.objective.labels import ChunkShape, list_labels


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(labels_module, "LABEL_MULTIPLE", 4)
        yield


@st.composite
def listings(draw):
    """Labels ordered by row and judge, and what tells them apart."""
    pairs = draw(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12), st.integers(0, 5)), unique=True, max_size=80)
    )
    columns = list(zip(*sorted(pairs), strict=True)) or [(), (), ()]
    row, judge, depth = (torch.tensor(column, dtype=torch.long) for column in columns)
    return row, torch.arange(len(row)), depth, judge


@given(listings(), st.sampled_from([4, 8, 16]))
def test_every_label_is_in_one_chunk_with_its_judge(listing, num_judges):
    row, slot, depth, judge = listing
    labels = list_labels(row, slot, depth, judge, ChunkShape(16, num_judges))
    real = labels.weight_N > 0
    for found, given_ in zip(labels[:4], listing, strict=True):
        assert torch.equal(found[real], given_)
    assert labels.num_labels == len(row) == int(labels.weight_N.sum())
    chunks = labels.chunks()
    assert len(chunks) == labels.num_chunks
    assert len({(len(chunk.row_N), len(chunk.judge_row_M)) for chunk in chunks}) == 1, "one shape"
    for chunk in chunks:
        real = chunk.weight_N > 0
        assert len(chunk.row_N) <= 16
        assert torch.equal(chunk.judge_row_M[chunk.opinion_N][real], chunk.row_N[real])
        assert torch.equal(chunk.judge_column_M[chunk.opinion_N][real], chunk.judge_N[real])


def test_labels_of_one_judge_share_it():
    judge = torch.tensor([3, 3, 3, 7, 7, 7])
    labels = list_labels(
        torch.zeros(6, dtype=torch.long), torch.arange(6), torch.arange(6) % 3, judge, ChunkShape(16, 8)
    )
    assert labels.opinion_N[:6].tolist() == [0, 0, 0, 1, 1, 1]
    assert labels.judge_column_M[:2].tolist() == [3, 7]


def test_a_chunk_ends_where_judges_would_be_too_many():
    judge = torch.arange(40)
    labels = list_labels(torch.zeros_like(judge), judge, torch.zeros_like(judge), judge, ChunkShape(16, 4))
    assert labels.num_chunks == 10
    assert [int(chunk.weight_N.sum()) for chunk in labels.chunks()] == [4] * 10


@given(listings(), st.integers(0, 4), st.integers(0, 4))
def test_labels_of_some_rows_are_those_with_rows_counted_anew(listing, first, last):
    labels = list_labels(*listing, ChunkShape(16, 8)).of_rows(first, last, ChunkShape(16, 8))
    row, slot, depth, judge = listing
    chosen = (row >= first) & (row < last)
    expected = list_labels(row[chosen] - first, slot[chosen], depth[chosen], judge[chosen], ChunkShape(16, 8))
    assert all(torch.equal(*pair) for pair in zip(labels[:8], expected[:8], strict=True))


def test_a_chunk_has_room_for_the_judges_its_labels_have_on_average():
    """Depths keep 1 + 0.5 + 0.25 + 0.125 of the anchors, so 1.875 labels share a judge."""
    shape = ChunkShape.of(settings(retention=0.5, num_draft_tokens=4))
    assert shape == ChunkShape(1024, 600, is_fixed=False), "1024 / 1.875 and a tenth more"


@pytest.mark.parametrize(("vocab_size", "num_labels"), [(49152, 10240), (151936, 3072), (10**6, 1024)])
def test_chunks_of_a_gpu_have_one_shape_that_holds_a_gibibyte_of_logits(vocab_size, num_labels):
    shape = ChunkShape.of(settings(), vocab_size)
    assert (shape.num_labels, shape.is_fixed) == (num_labels, True)


def test_columns_of_the_whole_vocabulary_take_no_more_logits_than_the_labels_of_a_chunk():
    shape = ChunkShape.of(settings(), 8192)
    assert shape.num_labels == 65536
    assert shape.num_whole_columns(8192, 151936) == 3533, "2**29 / 151936"
    assert shape.num_whole_columns(8192, 8192) == 65536
    assert ChunkShape(64, 40).num_whole_columns(2, 288) == 1, "one at a time if no more would fit"


@given(listings())
def test_chunks_of_a_fixed_shape_are_full_even_where_labels_are_few_or_none(listing):
    labels = list_labels(*listing, ChunkShape(16, 8, is_fixed=True))
    assert all((len(chunk.row_N), len(chunk.judge_row_M)) == (16, 8) for chunk in labels.chunks())
    assert int(labels.weight_N.sum()) == len(listing[0])
