"""Replay against an independent slow walk: one drafter pass a step, no cache, plain counting."""

import copy

import numpy as np
import pytest
import torch

from harness.model_families import trained_drafter
from harness.pair_heads import random_head
from harness.tiny_models import tiny_drafter, tiny_target
from peagle.data.conversations import Conversation
from peagle.decoding.acceptance import Acceptance, VerifiedDraft
from peagle.decoding.reference import decode
from peagle.drafter.slots import serving_slots, slot_inputs, visible
from peagle.errors import ConfigError
from peagle.sampling_params import SamplingParams
from peagle.training.replay import Form, draft_everywhere, replay, replay_drafts, replay_forms

NUM_DRAFT_TOKENS = [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(5, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_layers=4)


@pytest.fixture(scope="module")
def drafter(target):
    return tiny_drafter(target, num_draft_tokens=5)


@torch.no_grad()
def greedy(target, token_ids, num_tokens):
    token_ids = list(token_ids)
    for _ in range(num_tokens):
        token_ids.append(int(target.forward(torch.tensor([token_ids])).logits_BTV[0, -1].argmax()))
    return token_ids


def conversation(target, *turns, seed=0):
    """Each turn is (prompt length, answer length); the answers are the target's greedy ones."""
    chance = np.random.default_rng(seed)
    token_ids, mask = [], []
    for prompt_length, answer_length in turns:
        token_ids += chance.integers(3, 260, prompt_length).tolist()
        token_ids = greedy(target, token_ids, answer_length)
        mask += [False] * prompt_length + [True] * answer_length
    return Conversation(np.array(token_ids, dtype=np.int32), np.array(mask))


@torch.no_grad()
def served_draft(target, drafter, token_ids, num_draft_tokens):
    """Drafts after `token_ids`, of which the last was just emitted: the target has not read it yet."""
    known = torch.tensor([token_ids])
    fused = drafter.fuse(target.forward(known[:, :-1]).aux_hidden_BTA)
    slots = serving_slots(0, len(token_ids) - 1, num_draft_tokens)
    inputs = slot_inputs(slots, known, fused, drafter.config.mask_token_id, drafter.fuse(drafter.mask_hidden))
    output = drafter(*inputs, slots.position_BS, visible(slots, slots))
    return drafter.to_target_ids(drafter.logits(output.normed_BSD[0, -num_draft_tokens:]).argmax(-1)).tolist()


def answers(conversation):
    """(start, stop) of each run of answer tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], conversation.loss_mask.astype(int), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def slow_walk(target, drafter, conversations, num_draft_tokens):
    num_drafts, accepted_per_position = 0, [0] * num_draft_tokens
    for row in conversations:
        token_ids = row.token_ids.tolist()
        for start, stop in answers(row):
            emitted = start + 1  # prefill emits the first token
            while emitted < stop:
                drafts = served_draft(target, drafter, token_ids[:emitted], num_draft_tokens)
                num_drafts += 1
                accepted = 0
                for draft, answer in zip(drafts, token_ids[emitted:stop], strict=False):
                    if draft != answer:
                        break
                    accepted_per_position[accepted] += 1
                    accepted += 1
                emitted += accepted + 1
    return Acceptance(num_drafts, tuple(accepted_per_position))


def decoded(target, drafter, conversations, num_draft_tokens, tree_nodes=None):
    """Counts of really decoding each answer of each conversation."""
    accepted = []
    for row in conversations:
        token_ids = row.token_ids.tolist()
        for start, stop in answers(row):
            params = SamplingParams(max_tokens=stop - start, temperature=0.0, ignore_eos=True)
            drafts = {"drafter": drafter, "num_draft_tokens": num_draft_tokens, "tree_nodes": tree_nodes}
            steps = list(decode(target, token_ids[:start], params, **drafts))
            assert [token for step in steps for token in step.token_ids] == token_ids[start:stop]
            accepted += [step.num_accepted_emitted for step in steps[1:]]
    return Acceptance.of(accepted, num_draft_tokens)


@pytest.mark.parametrize("num_draft_tokens", NUM_DRAFT_TOKENS)
@pytest.mark.parametrize("init_seed", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_replay_counts_what_serving_step_by_step_counts(num_draft_tokens, init_seed, monkeypatch):
    target = tiny_target(num_layers=4, seed=init_seed)
    drafter = tiny_drafter(target, num_draft_tokens=5)
    rows = [
        conversation(target, (7, 24), seed=1),
        conversation(target, (3, 5), (4, 1), (5, 9), seed=2),
        conversation(target, (1, 12), (1, 8), seed=3),
        conversation(target, (9, 2), seed=4),
        conversation(target, (2, 1), seed=5),
    ]
    expected = slow_walk(target, drafter, rows, num_draft_tokens)
    assert sum(expected.accepted_per_position) > 0, "drafts that are never accepted would prove little"
    assert replay(target, drafter, rows, num_draft_tokens, tokens_at_once=60) == expected
    monkeypatch.setattr("peagle.training.replay.ANCHORS_AT_ONCE", 7)
    assert replay(target, drafter, rows[::-1], num_draft_tokens, tokens_at_once=1000) == expected


@pytest.fixture(scope="module")
def repeating():
    """A target whose answers repeat, so that chains grow long, and conversations with it."""
    target = tiny_target(num_layers=4, initializer_range=0.05)
    return target, [
        conversation(target, (7, 24), seed=1),
        conversation(target, (3, 5), (4, 1), (5, 9), seed=2),
        conversation(target, (1, 12), (1, 8), seed=3),
        conversation(target, (9, 2), seed=4),
    ]


@pytest.fixture(scope="module")
def trained(repeating):
    target, rows = repeating
    return trained_drafter(target, [row.token_ids.tolist() for row in rows[:3]], num_draft_tokens=5)


@pytest.mark.parametrize("num_draft_tokens", NUM_DRAFT_TOKENS)
@pytest.mark.parametrize(
    "switches",
    [
        {"parallel": True},
        {"parallel": False, "norm_output": True},
        pytest.param({"parallel": False, "norm_output": False, "num_layers": 1}, marks=pytest.mark.slow),
        pytest.param(
            {"parallel": False, "norm_output": True, "draft_vocab_size": 200, "head": "own"}, marks=pytest.mark.slow
        ),
    ],
    ids=["p-eagle", "eagle3", "eagle3-raw-states", "eagle3-small-vocabulary"],
)
def test_replay_counts_what_decoding_counts(switches, num_draft_tokens, repeating, trained, monkeypatch):
    target, rows = repeating
    drafter = trained if switches["parallel"] else tiny_drafter(target, num_draft_tokens=5, **switches)
    if "draft_vocab_size" in switches:
        drafter.d2t[100:] = 60
        drafter.lm_head.weight.copy_(target.head_VD[drafter.to_target_ids(torch.arange(200))])
    expected = decoded(target, drafter, rows, num_draft_tokens)
    assert num_draft_tokens == 1 or expected.accepted_per_position[1] > 0, "chains of one token would prove little"
    assert replay(target, drafter, rows, num_draft_tokens, tokens_at_once=60) == expected
    monkeypatch.setattr("peagle.training.replay.ANCHORS_AT_ONCE", 7)
    assert replay(target, drafter, rows[::-1], num_draft_tokens, tokens_at_once=1000) == expected


@pytest.mark.parametrize("has_pair_head", [False, True], ids=["marginals", "pair head"])
@pytest.mark.parametrize("tree_nodes", [2, 31])
def test_replay_of_trees_counts_what_decoding_counts(tree_nodes, has_pair_head, repeating, trained):
    (target, rows), drafter = repeating, copy.deepcopy(trained)
    if has_pair_head:
        drafter.pair_head = random_head(drafter)
    expected = decoded(target, drafter, rows, 5, tree_nodes)
    assert expected.accepted_per_position[1] > 0, "paths of one token would prove little"
    assert replay(target, drafter, rows, 5, tree_nodes=tree_nodes) == expected
    if tree_nodes == 31 and has_pair_head:  # a wrong head misleads the chain
        assert replay(target, drafter, rows, 5).acceptance_length < expected.acceptance_length


def test_several_forms_share_the_passes_of_target_and_drafter(repeating, trained, monkeypatch):
    (target, rows), plain, drafter = repeating, trained, copy.deepcopy(trained)
    drafter.pair_head = random_head(drafter)
    forms = [Form(plain, 3), Form(drafter, 5), Form(drafter, 5, 12), Form(plain, 4, 9)]
    expected = [replay_drafts(target, own, rows, depth, tree_nodes=nodes) for own, depth, nodes in forms]
    num_passes, aux_hidden = [], target.aux_hidden
    monkeypatch.setattr(target, "aux_hidden", lambda *arguments: num_passes.append(1) or aux_hidden(*arguments))
    assert replay_forms(target, forms, rows) == expected
    assert len(num_passes) == 1 and len({str(drafts) for drafts in expected}) == len(forms), "the forms differ"


def test_drafts_from_every_anchor_are_the_served_ones(target, drafter):
    row = conversation(target, (4, 9))
    token_ids = torch.from_numpy(row.token_ids).long()[None]
    drafts = draft_everywhere(target, drafter, token_ids, torch.full((1, token_ids.shape[1] - 2), 5))
    for anchor in range(token_ids.shape[1] - 2):
        served = served_draft(target, drafter, token_ids[0, : anchor + 2].tolist(), 5)
        assert drafts[0, anchor].tolist() == served, f"anchor {anchor}"


def always_right(num_draft_tokens):
    """In place of `draft_everywhere`: the text's own tokens from every anchor, also beyond the end of its answer."""

    def draft(target, drafter, token_ids_BT, depths_BT):
        longer = torch.nn.functional.pad(token_ids_BT, (0, num_draft_tokens), value=-1)
        return longer.unfold(1, num_draft_tokens, 1)[:, 2 : token_ids_BT.shape[1]]

    return draft


def test_a_draft_counts_only_inside_its_answer(target, drafter, monkeypatch):
    row = conversation(target, (5, 9))
    longer = conversation(target, (5, 20))
    assert longer.token_ids[: len(row)].tolist() == row.token_ids.tolist()
    cut = Conversation(longer.token_ids, np.arange(len(longer)) < len(row))
    cut.loss_mask[:5] = False
    assert replay(target, drafter, [cut], 5) == replay(target, drafter, [row], 5)
    monkeypatch.setattr("peagle.training.replay.draft_everywhere", always_right(5))
    # Eight tokens after the first: six in a step, and the answer ends two tokens into the second draft.
    assert replay(target, drafter, [cut], 5) == replay(target, drafter, [row], 5) == Acceptance(2, (2, 2, 1, 1, 1))


def test_always_right_drafts_have_the_longest_acceptance(target, drafter, monkeypatch):
    row = conversation(target, (4, 21))
    monkeypatch.setattr("peagle.training.replay.draft_everywhere", always_right(4))
    result = replay(target, drafter, [row], 4)
    # 20 tokens after the first, five a step.
    assert result.num_drafts == 4 and result.acceptance_length == 5.0 and result.per_position == [1.0] * 4


def test_drafts_know_where_in_which_answer_they_were_made(target, drafter, monkeypatch):
    row = conversation(target, (4, 11), (6, 8))
    monkeypatch.setattr("peagle.training.replay.draft_everywhere", always_right(4))
    assert replay_drafts(target, drafter, [row], 4) == [
        VerifiedDraft(4, 1, 4),
        VerifiedDraft(4, 6, 4),
        VerifiedDraft(21, 1, 4),
        VerifiedDraft(21, 6, 2),
    ]


def test_nothing_to_draft_counts_nothing(target, drafter):
    rows = [
        Conversation(np.array([5, 6], dtype=np.int32), np.array([False, True])),
        Conversation(np.array([5], dtype=np.int32), np.array([True])),
        Conversation(np.array([5, 6, 7], dtype=np.int32), np.array([False, False, True])),
    ]
    result = replay(target, drafter, rows, 2)
    assert result == Acceptance(0, (0, 0)) and result.acceptance_length == 1.0 and result.per_position == [0.0, 0.0]


def test_more_draft_tokens_than_trained_are_refused(target, drafter):
    with pytest.raises(ConfigError, match="between 1 and 5"):
        replay(target, drafter, [], 6)


def test_the_drafter_is_left_in_the_mode_it_was_in(target, drafter, monkeypatch):
    row = conversation(target, (3, 4))
    drafter.train()
    replay(target, drafter, [row], 2)
    assert drafter.training

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("peagle.training.replay.draft_everywhere", interrupt)
    with pytest.raises(KeyboardInterrupt):
        replay(target, drafter, [row], 2)
    assert drafter.training
    drafter.eval()
