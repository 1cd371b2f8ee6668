"""How far the drafter's distribution is from the target's, a slot at a time.

Shapes: N slots with a label, V target vocabulary, U draft vocabulary.
"""

from typing import Literal

from torch import Tensor
from torch.nn import functional


def slot_losses(
    draft_logits_NU: Tensor,
    target_logits_NV: Tensor,
    draft_to_target_U: Tensor | None,
    kind: Literal["kl", "ce"],
) -> tuple[Tensor, Tensor]:
    """The loss of each slot, and whether its most likely token is the target's: float [N], bool [N].

    kl: KL(target || drafter); with a smaller draft vocabulary the target's distribution is renormalised over it.
    ce: cross-entropy to the target's most likely token among those the drafter can say.
    `draft_to_target_U` maps draft ids to target ids; None means the vocabularies are the same.
    """
    label_N = target_logits_NV.argmax(-1)
    target_logits_NU = target_logits_NV if draft_to_target_U is None else target_logits_NV[:, draft_to_target_U]
    draft_log_probs_NU = functional.log_softmax(draft_logits_NU.float(), dim=-1)
    guess_N = draft_logits_NU.argmax(-1)
    is_correct_N = label_N == (guess_N if draft_to_target_U is None else draft_to_target_U[guess_N])
    if kind == "ce":
        return functional.nll_loss(draft_log_probs_NU, target_logits_NU.argmax(-1), reduction="none"), is_correct_N
    target_log_probs_NU = functional.log_softmax(target_logits_NU.float(), dim=-1)
    target_probs_NU = target_log_probs_NU.exp()
    divergence_NU = target_probs_NU * (target_log_probs_NU - draft_log_probs_NU)
    # A token the target rules out weighs nothing (0 * -inf is not a number); a NaN of the drafter's must stay one.
    is_ruled_out_NU = (target_probs_NU == 0) & ~draft_log_probs_NU.isnan()
    return divergence_NU.masked_fill(is_ruled_out_NU, 0.0).sum(-1), is_correct_N
