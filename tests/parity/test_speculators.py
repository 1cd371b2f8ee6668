"""Slots, masks and losses on random cases, ours beside those of speculators' own functions, run in its environment.

Where the two differ, speculators is wrong or does something a server never asks for; a test says what and why, and
fails when it has changed there.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.packed_sequences import conversation, packed_batch, slots_by_segment
from peagle.drafter.slots import visible
from peagle.objective.cod import max_depths
from peagle.objective.losses import judge_slots

pytestmark = pytest.mark.parity

PYTHON = os.environ.get("PEAGLE_SPECULATORS_PYTHON", ".venv-speculators/bin/python")
OURS_TO_THEIRS = {"kl": "kl_div", "ce": "ce", "kl+ce": '{"kl_div": 1.0, "ce": 1.0}'}
patient = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])


class Judge:
    """A process of speculators' environment that answers questions."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("answer_speculators.py")
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        self.process = subprocess.Popen(
            [PYTHON, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment | {"HF_HUB_OFFLINE": "1"},
        )

    def __call__(self, ask, **question):
        print(json.dumps({"ask": ask} | question), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(timeout=60)


@pytest.fixture(scope="module")
def judge():
    judge = Judge()
    versions = judge("versions")
    print(f"speculators {versions['speculators']}, torch {versions['torch']}")
    yield judge
    judge.close()


@st.composite
def texts(draw):
    """Documents of a row, each with a loss mask."""
    flags = st.lists(st.booleans(), min_size=3, max_size=20)
    return [conversation(range(5, 5 + len(mask)), mask) for mask in draw(st.lists(flags, min_size=1, max_size=3))]


@given(rows=texts(), num_draft_tokens=st.integers(1, 6), retention=st.floats(0.3, 1.0), step=st.integers(0, 3))
@patient
def test_masks_of_packed_rows_agree_bit_for_bit(judge, rows, num_draft_tokens, retention, step):
    batch = packed_batch(
        step, rows, max_length=64, batch_size=1, num_draft_tokens=num_draft_tokens, retention=retention
    )
    is_real_S = batch.slots.depth_BS[0] >= 0
    anchor, depth = (part[0][is_real_S].tolist() for part in batch.slots[:2])
    theirs = judge("mask", anchor=anchor, depth=depth, document=batch.document_BT[0].tolist())["visible"]
    ours = visible(batch.slots, batch.slots)[0][is_real_S][:, is_real_S]
    assert ours.int().tolist() == theirs


@given(
    shape=st.tuples(st.integers(1, 12), st.integers(2, 9)),
    kind=st.sampled_from(sorted(OURS_TO_THEIRS)),
    scale=st.floats(0.1, 20.0),
    seed=st.integers(0, 10**6),
)
@patient
def test_losses_and_counts_of_correct_guesses_agree(judge, shape, kind, scale, seed):
    chance = torch.Generator().manual_seed(seed)
    (num_slots, vocabulary), num_depths = shape, 4
    logits, targets = (torch.randn(num_slots, vocabulary, generator=chance) * scale for _ in range(2))
    depth = torch.randint(0, num_depths, (num_slots,), generator=chance)
    anchor = torch.arange(num_slots)
    loss_mask = torch.randint(0, 2, (num_slots + num_depths,), generator=chance)
    loss_mask[anchor[0] + depth[0]] = 1
    theirs = judge(
        "loss",
        kind=OURS_TO_THEIRS[kind],
        logits=logits.tolist(),
        targets=targets.tolist(),
        loss_mask=loss_mask.tolist(),
        anchor=anchor.tolist(),
        depth=depth.tolist(),
        num_depths=num_depths,
    )
    counted = loss_mask[anchor + depth].bool()
    ours = judge_slots(logits, targets, anchor, None, kind, counted.float())
    assert float(ours.loss_N[counted].mean()) == pytest.approx(theirs["loss"], rel=1e-4, abs=1e-5)
    correct = [int((ours.is_correct_N & counted & (depth == number)).sum()) for number in range(num_depths)]
    assert correct == theirs["correct"]
    assert [int((counted & (depth == number)).sum()) for number in range(num_depths)] == theirs["counted"]


def their_slots(judge, mask, num_depths, retention=1.0, seed=0):
    """Their slots of one text. They drop its first token, so that their mask is of the token a slot reads."""
    found = judge("slots", loss_mask=mask[1:], num_depths=num_depths, retention=retention, floor=0.0, seed=seed)
    return set(zip(found["anchor"], found["depth"], strict=True))


def our_slots(mask, num_depths):
    limits = max_depths(torch.tensor([mask]).bool(), num_depths)[0].tolist()
    return {(anchor, depth) for anchor, limit in enumerate(limits) for depth in range(limit)}


def is_served(mask, anchor, depth):
    """Whether a server could ask for it: drafting from an answer's token, towards a token of the same answer."""
    return anchor >= 0 and anchor + depth + 2 < len(mask) and all(mask[anchor + 1 : anchor + depth + 3])


@given(mask=st.lists(st.integers(0, 1), min_size=3, max_size=30), num_depths=st.integers(1, 6), seed=st.integers(0, 99))
@patient
def test_each_of_their_slots_that_a_server_could_ask_for_is_one_of_ours(judge, mask, num_depths, seed):
    theirs = their_slots(judge, mask, num_depths, seed=seed)
    assert {slot for slot in theirs if is_served(mask, *slot)} <= our_slots(mask, num_depths)


@pytest.mark.parametrize("mask", [[0, 0, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0]])
def test_each_of_our_slots_is_one_that_they_sample(judge, mask):
    """They leave one slot a depth out at random even with a retention of 1, so several samples are looked at."""
    seen = set().union(*(their_slots(judge, mask, 3, seed=seed) for seed in range(60)))
    assert our_slots(mask, 3) == {slot for slot in seen if is_served(mask, *slot)}


@given(num_tokens=st.integers(20, 300), retention=st.floats(0.3, 0.95), num_depths=st.integers(2, 8))
@patient
def test_depths_of_one_long_answer_keep_as_many_slots_as_theirs(judge, num_tokens, retention, num_depths):
    """Up to rounding: they round down, we round up, and they have a slot less with each depth."""
    mask = [0] + [1] * (num_tokens - 1)
    theirs = judge("slots", loss_mask=mask[1:], num_depths=num_depths, retention=retention, floor=0.0, seed=1)["depth"]
    rows = [conversation(range(5, 5 + num_tokens), mask)]
    values = {"max_length": num_tokens, "batch_size": 1, "num_draft_tokens": num_depths, "retention": retention}
    (ours,) = slots_by_segment(packed_batch(0, rows, **values))
    for depth in range(1, num_depths):
        kept = sum(slot[2] == depth for slot in ours)
        assert abs(kept - theirs.count(depth)) <= depth + 2, f"depth {depth}"


def test_they_draft_from_a_token_before_the_text(judge):
    """Their first pool for depth 1 holds position 0, whose anchor is -1: it reads the state of the row's last token.

    NeMo and SpecForge have mended it; a slot of ours begins at anchor 0.
    """
    theirs = set().union(*(their_slots(judge, [1] * 8, 3, seed=seed) for seed in range(20)))
    assert min(anchor for anchor, _ in theirs) == -1
    assert min(anchor for anchor, _ in our_slots([1] * 8, 3)) == 0


def test_their_chains_run_on_into_the_next_document(judge):
    """Chains follow the loss mask, not the documents, so a slot may be asked for a token of the next document while it
    sees its own anchor's. Ours end with the document.
    """
    rows = [conversation(range(5, 11), [1] * 6), conversation(range(30, 36), [1] * 6)]
    batch = packed_batch(0, rows, max_length=12, batch_size=1, retention=1.0)
    documents = batch.document_BT[0].tolist()
    theirs = set().union(*(their_slots(judge, [1] * 12, 3, seed=seed) for seed in range(20)))
    crossing = {(a, d) for a, d in theirs if a >= 0 and a + d + 1 < 12 and documents[a] != documents[a + d + 1]}
    assert crossing
    (ours,) = slots_by_segment(batch)
    assert all(documents[anchor] == documents[anchor + depth + 2] for _, anchor, depth in ours)


def test_they_train_slots_that_begin_in_a_prompt_or_end_behind_an_answer(judge):
    """A server drafts only after the target's first token and nothing beyond its last, so ours learn nothing there."""
    mask = [0, 0, 0, 1, 1, 1, 0, 0]
    theirs = set().union(*(their_slots(judge, mask, 3, seed=seed) for seed in range(20)))
    assert {(1, 1), (3, 1)} <= theirs, "which read token 2 and are asked for token 6"
    assert our_slots(mask, 3) == {(2, 0), (2, 1), (3, 0)}
