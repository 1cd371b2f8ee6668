"""The losses as their definitions say, for autograd to differentiate."""

import torch
from torch.nn import functional


def slot_losses(draft_logits_NU, target_logits_NV, draft_to_target_U, kind):
    """The loss of each slot in double precision, and whether its most likely token is the target's."""
    draft, target = draft_logits_NU.double(), target_logits_NV.double()
    wanted = target if draft_to_target_U is None else target[:, draft_to_target_U]
    guess = draft.argmax(-1)
    is_correct = target.argmax(-1) == (guess if draft_to_target_U is None else draft_to_target_U[guess])
    losses = torch.zeros(len(draft), dtype=torch.float64)
    if "ce" in kind:
        weight = 0.1 if kind == "tv+ce" else 1
        losses = losses + weight * functional.cross_entropy(draft, wanted.argmax(-1), reduction="none")
    overlap = torch.minimum(draft.softmax(-1), wanted.softmax(-1)).sum(-1)
    if "tv" in kind:
        losses = losses + 0.9 * (1 - overlap)
    if kind == "lk":
        losses = losses - overlap.log()
    if "kl" in kind:
        losses = losses + functional.kl_div(
            functional.log_softmax(draft, -1), functional.log_softmax(wanted, -1), reduction="none", log_target=True
        ).sum(-1)
    return losses, is_correct
