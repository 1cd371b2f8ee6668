"""P-EAGLE's gradients: those of each document alone, packed or not, in any number of partitions."""

import weakref

import pytest
import torch

from harness.packed_sequences import (
    NUM_DRAFT_TOKENS,
    conversation,
    conversations,
    labels_of,
    packed_batch,
    settings,
    slots_by_segment,
    spans,
)
from harness.plain_losses import slot_losses
from harness.tiny_models import tiny_drafter, tiny_target
from peagle.drafter.slots import Slots, slot_inputs, visible
from peagle.objective import labels as labels_module
from peagle.objective.objective import Features
from peagle.objective.p_eagle import ParallelObjective


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_layers=3)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(labels_module, "LABEL_CHUNK", 64)
    monkeypatch.setattr(labels_module, "LABEL_MULTIPLE", 4)


def new_drafter(target, **switches):
    drafter = tiny_drafter(target, num_layers=3, num_draft_tokens=NUM_DRAFT_TOKENS, **switches)
    drafter._target_embedding = drafter._target_embedding.double()  # not a parameter: it is the target's
    return drafter.double().requires_grad_(True)


def random_features(target, batch):
    """Any states will do: what is learned from them does not depend on where they come from."""
    chance = torch.Generator().manual_seed(7)
    shape, width = batch.token_ids_BT.shape, target.hidden_size
    aux = torch.randn(*shape, len(target.aux_layer_ids) * width, generator=chance, dtype=torch.float64)
    last = torch.randn(*shape, width, generator=chance, dtype=torch.float64)
    head = target.head_VD.double()
    return Features(aux, last, lambda hidden_ND: hidden_ND @ head.T)


def plain_loss(drafter, batch, features, kind):
    """The mean over labels, each document on its own in one autograd pass and each label's loss on its own."""
    slots_by_row, labels_by_row = {}, {}
    for row, anchor, depth in sorted(
        set().union(*slots_by_segment(batch)), key=lambda slot: (slot[0], slot[2], slot[1])
    ):
        slots_by_row.setdefault(row, []).append((anchor, depth))
    for row, anchor, depth, judge in labels_of(batch):
        labels_by_row.setdefault(row, []).append((anchor, depth, judge))
    losses = []
    for row, first, end in spans(batch):
        own = [(anchor - first, depth) for anchor, depth in slots_by_row.get(row, []) if first <= anchor < end]
        labels = [label for label in labels_by_row.get(row, []) if first <= label[0] < end]
        if not labels:
            continue
        slots = Slots(*(torch.tensor([part]) for part in zip(*own, strict=True)))
        inputs = slot_inputs(
            slots,
            batch.token_ids_BT[row : row + 1, first:end],
            drafter.fuse(features.aux_hidden_BTA[row : row + 1, first:end]),
            drafter.config.mask_token_id,
            drafter.fuse(drafter.mask_hidden),
        )
        logits = drafter.logits(drafter(*inputs, slots.position_BS, visible(slots, slots)).normed_BSD)[0]
        for anchor, depth, judge in labels:
            judged = features.judge_logits(torch.tensor([row]), torch.tensor([judge]))
            losses.append(slot_losses(logits[own.index((anchor - first, depth))][None], judged, None, kind)[0])
    return torch.cat(losses).sum() / batch.num_labels


def gradients(drafter):
    found = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}
    drafter.zero_grad()
    return found


def accumulated(drafter, batch, features, **changes):
    objective = ParallelObjective(drafter, settings(**changes))
    loss, sums = objective.accumulate(batch, features, batch.num_labels)
    return loss, sums, gradients(drafter)


def assert_equal_gradients(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.abs().max() > 0, name
        torch.testing.assert_close(
            tensor, right[name], atol=1e-10, rtol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(("embeddings", "head"), [("shared", "shared"), ("own", "shared"), ("shared", "own")])
@pytest.mark.parametrize("loss", ["kl", "ce", "kl+ce"])
def test_packed_chunked_gradients_are_those_of_each_document_alone(target, loss, embeddings, head):
    drafter = new_drafter(target, embeddings=embeddings, head=head)
    batch = packed_batch()
    assert batch.labels.num_chunks > 1, "several chunks, or the test shows less"
    assert max(batch.document_BT.amax(1).tolist()) > 0, "several documents a row"
    features = random_features(target, batch)
    found_loss, _, found = accumulated(drafter, batch, features, loss=loss)
    plain = plain_loss(drafter, batch, features, loss)
    plain.backward()
    assert found_loss.item() == pytest.approx(plain.item(), rel=1e-6)
    assert_equal_gradients(found, gradients(drafter))
    assert ("embed_tokens.weight" in found) == (embeddings == "own")
    assert ("lm_head.weight" in found) == (head == "own")


@pytest.mark.parametrize("num_partitions", [2, 5, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 16))])
@pytest.mark.parametrize("checkpoint_activations", [False, True])
def test_partitions_give_the_gradients_of_one_pass(target, num_partitions, checkpoint_activations):
    drafter = new_drafter(target, embeddings="own", head="own")
    whole = packed_batch()
    features = random_features(target, whole)
    whole_loss, whole_sums, expected = accumulated(drafter, whole, features)
    batch = packed_batch(num_partitions=num_partitions)
    loss, sums, found = accumulated(drafter, batch, features, checkpoint_activations=checkpoint_activations)
    assert loss.item() == pytest.approx(whole_loss.item(), rel=1e-6)
    torch.testing.assert_close(sums, whole_sums)
    assert_equal_gradients(found, expected)


def test_a_long_document_that_spans_all_partitions_has_the_gradients_of_one_pass(target):
    rows = [conversation(torch.randint(3, 200, (120,)).tolist(), [0] * 10 + [1] * 110)]
    values = {"rows": rows, "max_length": 120, "batch_size": 1}
    drafter = new_drafter(target)
    whole = packed_batch(**values)
    features = random_features(target, whole)
    _, _, expected = accumulated(drafter, whole, features)
    for num_partitions in (2, 4, 7):
        _, _, found = accumulated(drafter, packed_batch(num_partitions=num_partitions, **values), features)
        assert_equal_gradients(found, expected)


def test_micro_batches_add_up_to_the_batch(target):
    drafter = new_drafter(target)
    batch = packed_batch(batch_size=4)
    features = random_features(target, batch)
    _, whole_sums, expected = accumulated(drafter, batch, features)
    objective = ParallelObjective(drafter, settings())
    sums = 0
    for first in (0, 2):
        part = features._replace(
            aux_hidden_BTA=features.aux_hidden_BTA[first : first + 2],
            last_hidden_BTD=features.last_hidden_BTD[first : first + 2],
        )
        sums += objective.accumulate(batch.rows(first, first + 2), part, batch.num_labels)[1]
    torch.testing.assert_close(sums, whole_sums)
    assert_equal_gradients(gradients(drafter), expected)


def test_depth_weights_scale_the_loss_of_each_depth_and_not_what_is_reported(target):
    drafter = new_drafter(target)
    batch = packed_batch()
    features = random_features(target, batch)
    loss, sums, _ = accumulated(drafter, batch, features)
    weights = (1.0, 0.5, 0.25, 2.0)
    weighted, weighted_sums, _ = accumulated(drafter, batch, features, depth_weights=weights)
    torch.testing.assert_close(sums, weighted_sums)
    expected = sum(weight * part for weight, part in zip(weights, sums[0].tolist(), strict=True)) / batch.num_labels
    assert weighted.item() == pytest.approx(expected, rel=1e-5)
    assert loss.item() == pytest.approx(float(sums[0].sum()) / batch.num_labels, rel=1e-5)


def test_sums_count_the_labels_of_each_depth(target):
    batch = packed_batch()
    _, sums, _ = accumulated(new_drafter(target), batch, random_features(target, batch))
    depths = [depth for _, _, depth, _ in labels_of(batch)]
    assert sums[2].tolist() == [depths.count(depth) for depth in range(NUM_DRAFT_TOKENS)]
    assert (sums[1] <= sums[2]).all()


def most_bytes_kept(drafter, batch, features, **changes):
    """The most that autograd keeps for backward passes at one time, without the drafter's own weights."""
    now = most = 0
    weights = {parameter.untyped_storage().data_ptr() for parameter in drafter.parameters()}
    counted = {}

    def pack(tensor):
        nonlocal now, most
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        holder = Kept(tensor)
        if pointer not in weights:
            if not counted.get(pointer):
                counted[pointer] = 0
                now += storage.nbytes()
                most = max(most, now)
            counted[pointer] += 1
            weakref.finalize(holder, drop, pointer, storage.nbytes())
        return holder

    def drop(pointer, size):
        nonlocal now
        counted[pointer] -= 1
        if not counted[pointer]:
            now -= size

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
        accumulated(drafter, batch, features, **changes)
    return most


class Kept:
    def __init__(self, tensor):
        self.tensor = tensor


def test_memory_for_gradients_falls_with_the_number_of_partitions_and_with_checkpoints(target):
    rows = conversations(8, 200, 256)
    values = {"rows": rows, "max_length": 256, "batch_size": 1, "num_draft_tokens": NUM_DRAFT_TOKENS, "retention": 0.8}
    drafter = new_drafter(target)
    features = random_features(target, packed_batch(**values))
    most = {
        num_partitions: most_bytes_kept(drafter, packed_batch(num_partitions=num_partitions, **values), features)
        for num_partitions in (1, 2, 4)
    }
    assert most[2] < 0.65 * most[1] and most[4] < 0.4 * most[1], most
    checkpointed = most_bytes_kept(drafter, packed_batch(**values), features, checkpoint_activations=True)
    assert checkpointed < 0.5 * most[1], (checkpointed, most)
