"""Labels that serving would never look at: found, left out, and nothing else changed."""

from pathlib import Path

import pytest
import torch

from harness.packed_sequences import NUM_DRAFT_TOKENS, labels_of, packed_batch, settings
from harness.tiny_models import tiny_drafter, tiny_target
from peagle.errors import ConfigError
from peagle.objective.config import TrainConfig
from peagle.objective.labels import ChunkShape
from peagle.objective.objective import Features
from peagle.objective.p_eagle import ParallelObjective
from peagle.objective.reach import likeliest_tokens, num_departures, on_policy, reached, until_failure


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def features_that_follow(target, batch, share):
    """Random states; the target's likeliest token is the text's next one at about `share` of the columns."""
    chance = torch.Generator().manual_seed(3)
    shape = batch.token_ids_BT.shape
    aux = torch.randn(*shape, len(target.aux_layer_ids) * target.hidden_size, generator=chance, dtype=torch.float64)
    logits = torch.randn(*shape, target.vocab_size, generator=chance, dtype=torch.float64)
    follows = torch.rand(shape, generator=chance) < share
    following = batch.token_ids_BT.roll(-1, 1)
    logits.scatter_add_(-1, following[..., None], follows[..., None] * torch.tensor(20.0, dtype=torch.float64))
    return Features(aux, logits, lambda hidden: hidden)


def is_reached(batch, features, row, depth, judge):
    likeliest, text = features.last_hidden_BTD[row].argmax(-1), batch.token_ids_BT[row]
    return all(likeliest[column] == text[column + 1] for column in range(judge - depth, judge))


def reached_only(batch, features, columns_at_a_time=4096):
    likeliest = likeliest_tokens(batch.token_ids_BT, features, columns_at_a_time)
    departures = num_departures(batch.token_ids_BT, likeliest)
    parts = tuple(part._replace(labels=reached(part.labels, departures)) for part in batch.parts)
    return batch._replace(parts=parts)


def new_drafter(target, **switches):
    drafter = tiny_drafter(target, num_layers=2, num_draft_tokens=NUM_DRAFT_TOKENS, **switches)
    drafter._target_embedding = drafter._target_embedding.double()
    return drafter.double().requires_grad_(True)


def learned(drafter, batch, features, **changes):
    loss, sums = ParallelObjective(drafter, settings(**changes)).accumulate(batch, features, batch.num_labels)
    gradients = [parameter.grad.clone() for parameter in drafter.parameters()]
    drafter.zero_grad()
    return loss, sums, gradients


@pytest.mark.parametrize("num_partitions", [1, 3])
@pytest.mark.parametrize("columns_at_a_time", [7, 4096])
def test_labels_keep_their_weight_where_the_text_before_them_is_the_likeliest(
    target, num_partitions, columns_at_a_time
):
    batch = packed_batch(num_partitions=num_partitions)
    features = features_that_follow(target, batch, 0.6)
    kept = reached_only(batch, features, columns_at_a_time)
    expected = [label for label in labels_of(batch) if is_reached(batch, features, label[0], *label[2:])]
    assert labels_of(kept) == expected
    assert 0 < len(expected) < len(labels_of(batch))
    assert {depth for _, _, depth, _ in expected} == set(range(NUM_DRAFT_TOKENS))


def test_what_is_learned_is_what_the_labels_that_are_left_teach(target):
    drafter, batch = new_drafter(target), packed_batch()
    features = features_that_follow(target, batch, 0.6)
    loss, sums, gradients = learned(drafter, batch, features, labels="reached")
    left = reached_only(batch, features)
    expected = learned(drafter, left, features)
    assert loss == expected[0] and torch.equal(sums, expected[1])
    assert all(map(torch.equal, gradients, expected[2]))
    every = learned(drafter, batch, features)
    assert sums[2, 0] == every[1][2, 0], "depth 0 is always looked at"
    assert (sums[2, 1:] < every[1][2, 1:]).all() and loss < every[0]


def test_partitions_leave_out_the_same(target):
    drafter = new_drafter(target)
    whole, parts = packed_batch(), packed_batch(num_partitions=3)
    features = features_that_follow(target, whole, 0.6)
    one, other = (learned(drafter, batch, features, labels="reached") for batch in (whole, parts))
    torch.testing.assert_close(one[1], other[1])
    for left, right in zip(one[2], other[2], strict=True):
        torch.testing.assert_close(left, right, atol=1e-10, rtol=1e-10)


def test_in_greedy_text_every_label_is_reached(target):
    drafter, batch = new_drafter(target), packed_batch()
    features = features_that_follow(target, batch, 1.1)
    every, kept = (learned(drafter, batch, features, labels=labels) for labels in ("all", "reached"))
    assert every[0] == kept[0] and all(map(torch.equal, every[2], kept[2]))


class CountingHead:
    """Logits as they are; remembers how many columns were asked for at a time."""

    def __init__(self):
        self.nums_columns = []

    def __call__(self, hidden):
        self.nums_columns.append(len(hidden))
        return hidden


@pytest.mark.parametrize("draft_vocab_size", [288, 100, 8, 2])
def test_judging_a_whole_vocabulary_takes_no_more_logits_than_a_chunk_of_a_small_one(target, draft_vocab_size):
    drafter, shape = new_drafter(target, draft_vocab_size=draft_vocab_size), ChunkShape(64, 40)
    batch = packed_batch()._replace(chunk_shape=shape)
    features = features_that_follow(target, batch, 0.6)._replace(head=CountingHead())
    found, _ = ParallelObjective(drafter, settings(labels="reached"))._parts(batch, features)
    sizes = features.head.nums_columns
    assert max(sizes) * target.vocab_size <= max(shape.num_labels * draft_vocab_size, target.vocab_size)
    assert len(set(sizes)) == 1, "one shape, for which kernels are chosen or compiled once"
    assert sum(sizes) - batch.token_ids_BT.numel() < len(sizes), "hardly any column is judged twice"
    kept = reached_only(batch, features)
    assert torch.equal(found[0].labels.weight_N, kept.labels.weight_N)


def test_labels_behind_the_first_wrong_guess_of_their_anchor_are_left_out(target):
    batch = packed_batch()
    features = features_that_follow(target, batch, 1.1)
    likeliest = likeliest_tokens(batch.token_ids_BT, features, 4096)
    is_right = torch.rand(len(batch.labels.row_N), generator=torch.Generator().manual_seed(1)) < 0.7
    guesses = likeliest[batch.labels.row_N, batch.labels.judge_N] + ~is_right
    kept = batch._replace(parts=(batch.parts[0]._replace(labels=until_failure(batch.labels, guesses, likeliest)),))
    is_label = batch.labels.weight_N > 0  # the others are padding
    right = dict(zip(labels_of(batch), is_right[is_label].tolist(), strict=True))

    def is_counted(row, anchor, depth, judge):
        return all(right[row, anchor, each, judge - depth + each] for each in range(depth))

    expected = [label for label in labels_of(batch) if is_counted(*label)]
    assert labels_of(kept) == expected and 0 < len(expected) < len(labels_of(batch))


@pytest.mark.parametrize("num_partitions", [1, 3])
def test_what_is_learned_until_failure_is_a_part_of_what_is_reached(target, num_partitions):
    drafter, batch = new_drafter(target), packed_batch(num_partitions=num_partitions)
    features = features_that_follow(target, batch, 0.6)
    every, some = (learned(drafter, batch, features, labels=labels) for labels in ("reached", "until-failure"))
    assert some[1][2, 0] == every[1][2, 0], "depth 0 is always judged"
    assert (some[1][2, 1:] < every[1][2, 1:]).all()


def test_labels_count_double_where_a_draft_begins_after_a_rejection(target):
    batch = packed_batch()
    features = features_that_follow(target, batch, 1.1)
    likeliest = likeliest_tokens(batch.token_ids_BT, features, 4096)
    is_right = torch.rand(len(batch.labels.row_N), generator=torch.Generator().manual_seed(1)) < 0.8
    guesses = likeliest[batch.labels.row_N, batch.labels.judge_N] + ~is_right
    weights = on_policy(batch.labels, guesses, likeliest).weight_N
    assert weights[batch.labels.weight_N == 0].eq(0).all(), "padding"
    is_label = batch.labels.weight_N > 0
    found = dict(zip(labels_of(batch), weights[is_label].tolist(), strict=True))
    chains = {}
    for (row, _, depth, judge), right in zip(labels_of(batch), is_right[is_label].tolist(), strict=True):
        chains.setdefault((row, judge - depth), {})[depth] = right
    rejected = set()
    for (row, newest), chain in chains.items():
        first_wrong = next((depth for depth in sorted(chain) if not chain[depth]), None)
        if first_wrong is not None:
            rejected.add((row, newest + first_wrong + 1))
    assert found == {label: 1 + ((label[0], label[3] - label[2]) in rejected) for label in labels_of(batch)}
    assert set(found.values()) == {1, 2}


@pytest.mark.parametrize("num_partitions", [1, 3])
def test_on_policy_counts_the_labels_that_are_reached(target, num_partitions):
    drafter, batch = new_drafter(target), packed_batch(num_partitions=num_partitions)
    features = features_that_follow(target, batch, 0.6)
    every, weighted = (learned(drafter, batch, features, labels=labels) for labels in ("reached", "on-policy"))
    assert torch.equal(weighted[1], every[1]) and weighted[0] > every[0]


def test_reached_labels_are_the_default(target):
    drafter, batch = new_drafter(target), packed_batch()
    features = features_that_follow(target, batch, 0.6)
    assert TrainConfig(data=Path("data"), output=Path("out")).labels is None
    found, _ = ParallelObjective(drafter, settings(labels=None))._parts(batch, features)
    assert torch.equal(found[0].labels.weight_N, reached_only(batch, features).labels.weight_N)


@pytest.mark.parametrize("labels", ["all", "reached"])
def test_eagle3_has_no_such_choice(labels):
    with pytest.raises(ConfigError) as caught:
        settings(method="eagle3", labels=labels)
    assert caught.value.message == "labels is for p-eagle: eagle3 reads the text before a label"
