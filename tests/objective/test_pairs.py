"""The pair head's loss and gradients against its definition, label by label, each document on its own."""

import pytest
import torch

from harness.packed_sequences import NUM_DRAFT_TOKENS, labels_of, packed_batch, settings, slots_by_segment, spans
from harness.tiny_models import tiny_drafter, tiny_target
from peagle.drafter.slots import Slots, slot_inputs, visible
from peagle.objective import labels as labels_module
from peagle.objective.objective import Features
from peagle.objective.pairs import PairObjective
from peagle.training.initial_drafter import with_new_pair_head

WIDTH = 96  # of 288 tokens, so that the target's token is often among them
RANK = 5


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(labels_module, "LABEL_CHUNK", 64)
    monkeypatch.setattr(labels_module, "LABEL_MULTIPLE", 4)
    monkeypatch.setattr("peagle.drafter.model.TREE_WIDTH", WIDTH)


def pair_settings(**changes):
    return settings(pair_head=RANK, from_drafter="earlier", loss="ce", **changes)


def new_drafter(target, config, **switches):
    drafter = tiny_drafter(target, num_layers=2, num_draft_tokens=NUM_DRAFT_TOKENS, **switches)
    if "d2t" in drafter.state_dict():
        drafter.d2t[100:] = 60
    drafter = with_new_pair_head(drafter, RANK, config)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():  # far from its start, so that the scores matter
        for parameter in drafter.pair_head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=noise))
    return drafter


def random_features(target, batch):
    noise = torch.Generator().manual_seed(7)
    shape, width = batch.token_ids_BT.shape, target.hidden_size
    aux = torch.randn(*shape, len(target.aux_layer_ids) * width, generator=noise)
    last = torch.randn(*shape, width, generator=noise)
    return Features(aux, last, lambda hidden_ND: hidden_ND @ target.head_VD.T)


def plain_losses(drafter, batch, features):
    """(depth, loss, is correct) of every label that the head is trained on, or would be but for its depth."""
    slots_by_row, found = {}, []
    for row, anchor, depth in sorted(set().union(*slots_by_segment(batch)), key=lambda slot: (*slot[::2], slot[1])):
        slots_by_row.setdefault(row, []).append((anchor, depth))
    left_UR, right_UR = drafter.pair_head.tables()
    draft_ids = drafter.to_target_ids(torch.arange(drafter.config.draft_vocab_size)).tolist()
    for row, first, end in spans(batch):
        own = [(anchor - first, depth) for anchor, depth in slots_by_row.get(row, []) if first <= anchor < end]
        if not own:
            continue
        slots = Slots(*(torch.tensor([part]) for part in zip(*own, strict=True)))
        fused = drafter.fuse(features.aux_hidden_BTA[row : row + 1, first:end])
        text, mask = batch.token_ids_BT[row : row + 1, first:end], drafter.fuse(drafter.mask_hidden)
        inputs = slot_inputs(slots, text, fused, drafter.config.mask_token_id, mask)
        logits = drafter.logits(drafter(*inputs, slots.position_BS, visible(slots, slots)).normed_BSD)[0]
        for label_row, anchor, depth, judge in labels_of(batch):
            if label_row != row or not first <= anchor < end:
                continue
            wanted = int(features.judge_logits(torch.tensor([row]), torch.tensor([judge]))[0].argmax())
            before = int(batch.token_ids_BT[row, anchor + depth + 1])
            top = logits[own.index((anchor - first, depth))].log_softmax(-1).topk(WIDTH)
            candidates = top.indices.tolist()
            if wanted not in [draft_ids[token] for token in candidates] or (depth and before not in draft_ids):
                continue
            scores = top.values
            if depth:
                scores = scores + right_UR[candidates] @ left_UR[draft_ids.index(before)]
            place = [draft_ids[token] for token in candidates].index(wanted)
            found.append((depth, -scores.log_softmax(-1)[place], int(scores.argmax()) == place))
    return found


@pytest.mark.parametrize("num_partitions", [1, 3])
@pytest.mark.parametrize(
    ("tables", "switches"),
    [("projected", {}), ("free", {}), ("projected", {"draft_vocab_size": 200, "head": "own"})],
    ids=["projected", "free", "small vocabulary"],
)
def test_loss_and_gradients_are_those_of_the_definition(target, tables, switches, num_partitions):
    config = pair_settings(pair_tables=tables, num_partitions=num_partitions, depth_weights=(3, 1, 2, 0.5))
    drafter, batch = new_drafter(target, config, **switches), packed_batch(num_partitions=num_partitions)
    features = random_features(target, batch)
    loss, sums = PairObjective(drafter, config).accumulate(batch, features, batch.num_labels)
    assert all(parameter.grad is None for parameter in drafter.without_pair_head().parameters())
    gradients = {name: parameter.grad.clone() for name, parameter in drafter.pair_head.named_parameters()}
    drafter.pair_head.zero_grad()
    expected = plain_losses(drafter, batch, features)
    assert sum(depth > 0 for depth, *_ in expected) >= 15, "labels enough"
    total = sum(config.depth_weights[depth] * each for depth, each, _ in expected) / batch.num_labels
    total.backward()
    torch.testing.assert_close(loss, total.detach())
    for name, parameter in drafter.pair_head.named_parameters():
        assert gradients[name].abs().max() > 0, name
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5, rtol=1e-4)
    for depth in range(NUM_DRAFT_TOKENS):
        own = [(float(each.detach()), right) for at, each, right in expected if at == depth]
        by_hand = torch.tensor([sum(each for each, _ in own), sum(right for _, right in own), len(own)])
        torch.testing.assert_close(sums[:, depth], by_hand.float(), atol=1e-3, rtol=1e-4)


def test_the_first_depth_and_labels_without_weight_train_nothing(target):
    config = pair_settings(depth_weights=(1, 0, 0, 0))
    drafter, batch = new_drafter(target, config), packed_batch()
    PairObjective(drafter, config).accumulate(batch, random_features(target, batch), batch.num_labels)
    assert all(not parameter.grad.any() for parameter in drafter.pair_head.parameters())


def test_rare_tokens_share_what_a_projection_learns(target):
    projected, free = (new_drafter(target, pair_settings(pair_tables=tables)) for tables in ("projected", "free"))
    for drafter in (projected, free):
        left_UR, _ = drafter.pair_head.tables()
        left_UR[7].sum().backward()
    assert projected.pair_head.left_projection.grad.abs().max() > 0
    for drafter in (projected, free):
        assert drafter.pair_head.left.grad.any(-1).nonzero().tolist() == [[7]]
    assert projected.pair_head.state_dict().keys() == {"left", "right", "left_projection", "right_projection"}
