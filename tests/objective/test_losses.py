"""Losses and their gradients against their formulas written out in double precision."""

import math

import pytest
import torch

from harness.plain_losses import slot_losses
from peagle.objective.losses import judge_slots

INFINITY = float("inf")
KINDS = ("kl", "ce", "kl+ce", "tv+ce", "lk")


def logits(*shape, seed=0, scale=3.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def judged(draft, target, table=None, kind="kl", share=None):
    """Each slot with a judge of its own."""
    share = torch.ones(len(draft)) if share is None else share
    return judge_slots(draft, target, torch.arange(len(target)), table, kind, share)


def direct_kl(target_row, draft_row):
    target, draft = target_row.double(), draft_row.double()
    target_probs = torch.exp(target - torch.logsumexp(target, 0)).tolist()
    draft_probs = torch.exp(draft - torch.logsumexp(draft, 0)).tolist()
    return sum(p * math.log(p / q) for p, q in zip(target_probs, draft_probs, strict=True) if p > 0)


def test_kl_is_the_divergence_of_the_drafter_from_the_target():
    draft, target = logits(5, 11, seed=1), logits(5, 11, seed=2)
    expected = [direct_kl(t, d) for t, d in zip(target, draft, strict=True)]
    assert judged(draft, target).loss_N.tolist() == pytest.approx(expected, rel=1e-5)


def test_kl_of_equal_distributions_is_zero_whatever_constant_the_logits_carry():
    target = logits(4, 7)
    found = judged(target + 5, target)
    assert found.loss_N.abs().max() < 1e-6 and found.is_correct_N.all() and found.gradient_NU.abs().max() < 1e-6


def test_ce_is_minus_the_log_probability_of_the_targets_first_choice():
    draft, target = logits(5, 11, seed=1), logits(5, 11, seed=2)
    expected = [-math.log(torch.softmax(d.double(), 0)[int(t.argmax())]) for d, t in zip(draft, target, strict=True)]
    assert judged(draft, target, kind="ce").loss_N.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("table", [None, torch.tensor([1, 4, 5, 9])])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_the_definition(kind, table):
    draft, target = logits(9, 11 if table is None else 4, seed=1), logits(9, 11, seed=2)
    share = torch.rand(9, generator=torch.Generator().manual_seed(3))
    leaf = draft.double().requires_grad_()
    losses, is_correct = slot_losses(leaf, target, table, kind)
    (losses * share).sum().backward()
    found = judged(draft, target, table, kind, share)
    torch.testing.assert_close(found.loss_N, losses.detach().float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.gradient_NU, leaf.grad.float(), atol=1e-6, rtol=1e-5)
    assert torch.equal(found.is_correct_N, is_correct)


@pytest.mark.parametrize("kind", KINDS)
def test_slots_that_share_a_judge_are_judged_as_if_each_had_its_own(kind):
    draft, target = logits(6, 11, seed=1), logits(3, 11, seed=2)
    opinion = torch.tensor([2, 0, 0, 1, 2, 2])
    shared = judge_slots(draft, target, opinion, None, kind, torch.ones(6))
    alone = judged(draft, target[opinion], kind=kind)
    assert all(torch.equal(*pair) for pair in zip(shared, alone, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_smaller_draft_vocabulary_renormalises_the_target_over_it(kind):
    table = torch.tensor([1, 4, 5, 9])
    draft, target = logits(6, 4, seed=3), logits(6, 11, seed=4)
    found, whole = judged(draft, target, table, kind), judged(draft, target[:, table], kind=kind)
    assert torch.equal(found.loss_N, whole.loss_N) and torch.equal(found.gradient_NU, whole.gradient_NU)
    probs = torch.softmax(target.double(), -1)[:, table]
    renormalised = (probs / probs.sum(-1, keepdim=True)).log()
    if kind == "kl":
        expected = [direct_kl(t, d) for t, d in zip(renormalised, draft, strict=True)]
        assert found.loss_N.tolist() == pytest.approx(expected, rel=1e-5)


def test_a_guess_is_correct_only_if_it_is_the_targets_choice_among_all_tokens():
    table = torch.tensor([1, 3])
    target = torch.tensor([[0.0, 9, 0, 0], [0.0, 0, 0, 9], [9.0, 8, 0, 0], [0.0, 9, 0, 0]])
    draft = torch.tensor([[5.0, 0], [0.0, 5], [5.0, 0], [0.0, 5]])
    for kind in KINDS:
        # The third target wants token 0, which the drafter cannot say: its best guess is still wrong.
        assert judged(draft, target, table, kind).is_correct_N.tolist() == [True, True, False, False]


def test_tokens_the_target_rules_out_weigh_nothing_and_pass_no_gradient_astray():
    target, draft = logits(3, 8, seed=5), logits(3, 8, seed=6)
    target[:, 6:] = -INFINITY
    found = judged(draft, target)
    expected = [direct_kl(t, d) for t, d in zip(target, draft, strict=True)]
    assert found.loss_N.tolist() == pytest.approx(expected, rel=1e-5)
    pull = torch.softmax(draft, -1) - torch.softmax(target, -1)
    torch.testing.assert_close(found.gradient_NU, pull, atol=1e-6, rtol=1e-5)


def test_tokens_ruled_out_by_both_leave_the_loss_and_its_gradient_finite():
    target, draft = logits(2, 8, seed=7), logits(2, 8, seed=8)
    target[:, 0] = draft[:, 0] = -INFINITY
    found = judged(draft, target)
    assert found.loss_N.isfinite().all() and found.gradient_NU.isfinite().all()


def test_neither_a_drafter_nor_a_target_that_went_wrong_gives_a_perfect_loss():
    wrong = torch.full((1, 4), float("nan"))
    assert judged(wrong, logits(1, 4)).loss_N.isnan().all()
    assert judged(logits(1, 4), wrong).loss_N.isnan().all()


def test_a_slot_without_a_share_passes_no_gradient_even_where_it_went_wrong():
    draft = torch.cat([torch.full((1, 4), float("nan")), logits(1, 4)])
    found = judged(draft, logits(2, 4, seed=1), share=torch.tensor([0.0, 0.5]))
    assert found.gradient_NU[0].tolist() == [0.0] * 4 and found.gradient_NU[1].abs().max() > 0


def test_half_precision_logits_are_compared_in_float32():
    draft, target = logits(3, 50, seed=1).bfloat16(), logits(3, 50, seed=2).bfloat16()
    found, exact = judged(draft, target), judged(draft.float(), target.float())
    assert found.loss_N.dtype == torch.float32 and torch.equal(found.loss_N, exact.loss_N)
    assert torch.equal(found.gradient_NU, exact.gradient_NU.bfloat16()), "rounded once, at the end"
