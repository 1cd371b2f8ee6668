"""Losses against their formulas written out in double precision."""

import math

import pytest
import torch

from peagle.training.losses import slot_losses

INFINITY = float("inf")


def logits(*shape, seed=0, scale=3.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def direct_kl(target_row, draft_row):
    target, draft = target_row.double(), draft_row.double()
    target_probs = torch.exp(target - torch.logsumexp(target, 0)).tolist()
    draft_probs = torch.exp(draft - torch.logsumexp(draft, 0)).tolist()
    return sum(p * math.log(p / q) for p, q in zip(target_probs, draft_probs, strict=True) if p > 0)


def test_kl_is_the_divergence_of_the_drafter_from_the_target():
    draft, target = logits(5, 11, seed=1), logits(5, 11, seed=2)
    losses, _ = slot_losses(draft, target, None, "kl")
    assert losses.tolist() == pytest.approx([direct_kl(t, d) for t, d in zip(target, draft, strict=True)], rel=1e-5)


def test_kl_of_equal_distributions_is_zero_whatever_constant_the_logits_carry():
    target = logits(4, 7)
    losses, is_correct = slot_losses(target + 5, target, None, "kl")
    assert losses.abs().max() < 1e-6 and is_correct.all()


def test_ce_is_minus_the_log_probability_of_the_targets_first_choice():
    draft, target = logits(5, 11, seed=1), logits(5, 11, seed=2)
    losses, _ = slot_losses(draft, target, None, "ce")
    expected = [-math.log(torch.softmax(d.double(), 0)[int(t.argmax())]) for d, t in zip(draft, target, strict=True)]
    assert losses.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["kl", "ce"])
def test_a_smaller_draft_vocabulary_renormalises_the_target_over_it(kind):
    table = torch.tensor([1, 4, 5, 9])
    draft, target = logits(6, 4, seed=3), logits(6, 11, seed=4)
    losses, _ = slot_losses(draft, target, table, kind)
    whole, _ = slot_losses(draft, target[:, table], None, kind)
    assert torch.equal(losses, whole)
    probs = torch.softmax(target.double(), -1)[:, table]
    renormalised = (probs / probs.sum(-1, keepdim=True)).log()
    if kind == "kl":
        assert losses.tolist() == pytest.approx(
            [direct_kl(t, d) for t, d in zip(renormalised, draft, strict=True)], rel=1e-5
        )


def test_a_guess_is_correct_only_if_it_is_the_targets_choice_among_all_tokens():
    table = torch.tensor([1, 3])
    target = torch.tensor([[0.0, 9, 0, 0], [0.0, 0, 0, 9], [9.0, 8, 0, 0], [0.0, 9, 0, 0]])
    draft = torch.tensor([[5.0, 0], [0.0, 5], [5.0, 0], [0.0, 5]])
    for kind in ("kl", "ce"):
        _, is_correct = slot_losses(draft, target, table, kind)
        # The third target wants token 0, which the drafter cannot say: its best guess is still wrong.
        assert is_correct.tolist() == [True, True, False, False]


def test_tokens_the_target_rules_out_weigh_nothing_and_pass_no_gradient_astray():
    target = logits(3, 8, seed=5)
    target[:, 6:] = -INFINITY
    draft = logits(3, 8, seed=6).requires_grad_()
    losses, _ = slot_losses(draft, target, None, "kl")
    assert losses.tolist() == pytest.approx([direct_kl(t, d) for t, d in zip(target, draft, strict=True)], rel=1e-5)
    losses.sum().backward()
    expected = torch.softmax(draft.detach(), -1) - torch.softmax(target, -1)
    torch.testing.assert_close(draft.grad, expected, atol=1e-6, rtol=1e-5)


def test_tokens_ruled_out_by_both_leave_the_loss_and_its_gradient_finite():
    target, draft = logits(2, 8, seed=7), logits(2, 8, seed=8)
    target[:, 0] = draft[:, 0] = -INFINITY
    draft.requires_grad_()
    losses, _ = slot_losses(draft, target, None, "kl")
    losses.sum().backward()
    assert losses.isfinite().all() and draft.grad.isfinite().all()


def test_a_drafter_that_went_wrong_is_not_given_a_perfect_loss():
    draft = torch.full((1, 4), float("nan"))
    losses, _ = slot_losses(draft, logits(1, 4), None, "kl")
    assert losses.isnan().all()


def test_half_precision_logits_are_compared_in_float32():
    draft, target = logits(3, 50, seed=1).bfloat16(), logits(3, 50, seed=2).bfloat16()
    losses, _ = slot_losses(draft, target, None, "kl")
    exact, _ = slot_losses(draft.float(), target.float(), None, "kl")
    assert losses.dtype == torch.float32 and torch.equal(losses, exact)
