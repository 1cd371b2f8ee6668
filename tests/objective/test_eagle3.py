"""EAGLE-3's unrolled training against the served drafter, chain by chain."""

from pathlib import Path

import numpy as np
import pytest
import torch

from harness.plain_losses import slot_losses
from harness.tiny_models import tiny_drafter, tiny_target
from peagle.data.conversations import Conversation
from peagle.decoding.acceptance import Acceptance
from peagle.decoding.reference import decode
from peagle.drafter.drafting import DraftingSession
from peagle.drafter.slots import PADDING
from peagle.objective.batches import Batches
from peagle.objective.config import TrainConfig
from peagle.objective.eagle3 import UnrolledObjective
from peagle.objective.p_eagle import ParallelObjective
from peagle.sampling_params import SamplingParams
from peagle.training.features import OnlineFeatures
from peagle.training.replay import replay
from peagle.training.resume import RunState
from peagle.training.trainer import Trainer

NUM_DRAFT_TOKENS = 4
SHAPES = [
    {"num_layers": 1, "norm_output": True},
    {"num_layers": 1, "norm_output": False},
    {"num_layers": 2, "norm_output": True, "norm_before_residual": True, "embeddings": "own"},
]


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_layers=3)


def settings(**changes):
    values = {
        "method": "eagle3",
        "num_layers": 1,
        "num_draft_tokens": NUM_DRAFT_TOKENS,
        "max_length": 32,
        "batch_size": 2,
        "num_partitions": 1,
        "compile": "off",
    }
    return TrainConfig(data=Path("data.jsonl"), output=Path("drafter"), **(values | changes))


def conversations(*lengths):
    """Two turns each, so that some labels end before the text does."""
    chance = np.random.default_rng(1)
    rows = []
    for length in lengths:
        column = np.arange(length)
        mask = (column >= 2) & (column != length // 2)
        rows.append(Conversation(chance.integers(3, 260, length).astype(np.int32), mask))
    return rows


def new_drafter(target, **switches):
    drafter = tiny_drafter(target, parallel=False, num_draft_tokens=NUM_DRAFT_TOKENS, **switches)
    return drafter.requires_grad_(True)


def documents(batch):
    """(row, first column, tokens) of every document."""
    found = []
    for row in range(len(batch.token_ids_BT)):
        for number in range(int(batch.document_BT[row].max()) + 1):
            columns = (batch.document_BT[row] == number).nonzero()[:, 0]
            found.append((row, int(columns[0]), batch.token_ids_BT[row, columns].tolist()))
    return found


def chain_logits(target, drafter, text, anchor, num_tokens):
    """What serving computes from an anchor when every draft is the text's own token: logits [num_tokens, U]."""
    seen = []
    logits = drafter.logits

    def keep(states):
        """Record the logits, and return some whose most likely token is the text's own."""
        seen.append(logits(states))
        forced = torch.zeros_like(seen[-1])
        forced[:, next(following)] = 1
        return forced

    drafter.logits = keep
    try:
        aux_hidden_TA = target.forward(torch.tensor([text])).aux_hidden_BTA[0, : anchor + 1]
        ids = drafter.to_target_ids(torch.arange(drafter.config.draft_vocab_size)).tolist()

        following = iter([ids.index(token) for token in text[anchor + 2 :]] + [0] * num_tokens)
        DraftingSession(drafter).draft(text[: anchor + 2], aux_hidden_TA, num_tokens)
    finally:
        del drafter.logits
    return torch.cat(seen)


@pytest.mark.parametrize("switches", SHAPES, ids=str)
def test_training_sees_what_serving_sees(target, switches):
    config = settings(retention=0.7)
    drafter = new_drafter(target, **switches)
    batch = Batches(conversations(19, 11, 30, 3, 7), config).make(0)
    assert len(documents(batch)) > len(batch.token_ids_BT), "rows that are not packed would prove little"
    objective = UnrolledObjective(drafter, config)
    with torch.no_grad():
        states = objective._slot_states(batch.token_ids_BT, OnlineFeatures(target)(batch).aux_hidden_BTA, *batch.slots)
        logits = drafter.logits(states)
    num_compared = [0] * NUM_DRAFT_TOKENS
    for row, first, text in documents(batch):
        for slot in range(states.shape[1]):
            anchor, depth = int(batch.slots.anchor_BS[row, slot]), int(batch.slots.depth_BS[row, slot])
            if depth == PADDING or not first <= anchor < first + len(text):
                continue
            served = chain_logits(target, drafter, text, anchor - first, depth + 1)[depth]
            torch.testing.assert_close(logits[row, slot], served, atol=1e-3, rtol=1e-5, msg=f"{row} {anchor} {depth}")
            num_compared[depth] += 1
    assert min(num_compared) > 3, num_compared


def plain_mean_loss(target, drafter, batch, config):
    """Every chain run on its own in one autograd graph: the drafter's own code, with no batching at all."""
    losses = []
    labels = batch.labels
    listed = zip(labels.row_N.tolist(), labels.slot_N.tolist(), labels.judge_N.tolist(), strict=True)
    wanted = {}
    for (row, slot, judge), weight in zip(listed, labels.weight_N.tolist(), strict=True):
        if weight:
            anchor, depth = int(batch.slots.anchor_BS[row, slot]), int(batch.slots.depth_BS[row, slot])
            wanted[row, anchor, depth] = judge
    for row, first, text in documents(batch):
        output = target.forward(torch.tensor([text]))
        for (label_row, anchor, depth), judge in wanted.items():
            if label_row != row or not first <= anchor < first + len(text):
                continue
            fused = drafter.fuse(output.aux_hidden_BTA[:, : anchor - first + 1])
            tokens = torch.tensor([text[1 : anchor - first + 2]])
            num_read = tokens.shape[1]
            mask = torch.ones(num_read, num_read, dtype=torch.bool).tril()[None]
            normed, carried, cache = drafter(tokens, fused, torch.arange(num_read)[None], mask)
            for step in range(1, depth + 1):
                token = torch.tensor([[text[anchor - first + 1 + step]]])
                position = torch.tensor([[num_read - 1 + step]])
                seen = torch.ones(1, 1, num_read + step, dtype=torch.bool)
                normed, carried, cache = drafter(token, carried[:, -1:], position, seen, cache)
            draft = drafter.logits(normed[:, -1])
            losses.append(slot_losses(draft, output.logits_BTV[:, judge - first], None, config.loss)[0])
    assert len(losses) == batch.num_labels
    return torch.cat(losses).mean()


@pytest.mark.parametrize("loss", ["kl", "kl+ce"])
@pytest.mark.parametrize("checkpoint_activations", [False, True])
@pytest.mark.parametrize("switches", SHAPES, ids=str)
def test_gradients_go_through_the_whole_chain(target, switches, checkpoint_activations, loss):
    config = settings(max_length=14, retention=0.8, loss=loss, checkpoint_activations=checkpoint_activations)
    drafter = new_drafter(target, **switches)
    batch = Batches(conversations(14, 8, 6, 9), config).make(0)
    loss, sums = UnrolledObjective(drafter, config).accumulate(batch, OnlineFeatures(target)(batch), batch.num_labels)
    unrolled = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}
    drafter.zero_grad()
    plain = plain_mean_loss(target, drafter, batch, config)
    plain.backward()
    assert loss.item() == pytest.approx(plain.item(), abs=1e-5)
    assert sums[2].sum() == batch.num_labels and sums[0].sum().item() == pytest.approx(plain.item() * batch.num_labels)
    for name, parameter in drafter.named_parameters():
        assert parameter.grad.abs().max() > 0, name
        torch.testing.assert_close(unrolled[name], parameter.grad, atol=2e-6, rtol=1e-4, msg=name)


def test_both_methods_learn_from_the_same_slots_and_labels(target):
    config = settings()
    batch = Batches(conversations(19, 11, 30), config).make(3)
    features = OnlineFeatures(target)(batch)
    parallel = tiny_drafter(target, num_draft_tokens=NUM_DRAFT_TOKENS).requires_grad_(True)
    every_label = settings(method="p-eagle", labels="all")
    _, theirs = ParallelObjective(parallel, every_label).accumulate(batch, features, 1.0)
    _, ours = UnrolledObjective(new_drafter(target), config).accumulate(batch, features, 1.0)
    assert ours[2].tolist() == theirs[2].tolist() and ours[2].min() > 0


def test_rows_without_a_label_give_no_gradient_and_no_nan(target):
    rows = [Conversation(np.arange(5, 8, dtype=np.int32), np.array([False, False, True]))]
    config = settings(max_length=12)
    drafter = new_drafter(target)
    batch = Batches(rows, config).make(0)
    loss, _ = UnrolledObjective(drafter, config).accumulate(batch, OnlineFeatures(target)(batch), 1.0)
    assert loss.item() == 0
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is None or not parameter.grad.any(), name


def greedy_answers(target, prompts, num_tokens):
    rows = []
    for prompt in prompts:
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        answer = [token for step in decode(target, prompt, params) for token in step.token_ids]
        mask = np.arange(len(prompt) + num_tokens) >= len(prompt)
        rows.append(Conversation(np.array(prompt + answer, dtype=np.int32), mask))
    return rows


@pytest.mark.slow
def test_what_it_learned_by_heart_is_accepted_when_it_serves(tmp_path):
    target = tiny_target(num_layers=4)
    prompts = [[5, 6, 7], [40, 41, 42, 43]]
    rows = greedy_answers(target, prompts, 25)
    config = settings(
        num_steps=300, learning_rate=5e-3, warmup_steps=10, log_every=50, save_every=1000, max_length=32, retention=1.0
    )
    config = TrainConfig(**(vars(config) | {"output": tmp_path}))
    drafter = tiny_drafter(target, parallel=False, num_layers=1, norm_output=True, num_draft_tokens=NUM_DRAFT_TOKENS)
    drafter.requires_grad_(True)
    lines = []
    run = RunState(config)
    trainer = Trainer(drafter, UnrolledObjective(drafter, config), OnlineFeatures(target), config, run)
    trainer.train(rows, lambda step, metrics: lines.append(metrics))
    drafter.eval().requires_grad_(False)
    accuracy = lines[-1]["accuracy_by_depth"]
    assert min(accuracy) > 0.96, accuracy
    accepted = []
    for prompt in prompts:
        params = SamplingParams(max_tokens=25, ignore_eos=True)
        steps = decode(target, prompt, params, drafter=drafter, num_draft_tokens=NUM_DRAFT_TOKENS)
        accepted += [step.num_accepted_emitted for step in list(steps)[1:]]
    served = Acceptance.of(accepted, NUM_DRAFT_TOKENS)
    assert served == replay(target, drafter, rows, NUM_DRAFT_TOKENS)
    # 24 tokens of each answer after its first: with every draft right, five a step.
    assert served.acceptance_length > 4.3, served
