"""Loss of each label and its gradient, with hand-written backward through the vocabulary projection.

Shapes: N labels, M judges (positions whose target distributions they are compared with), V target vocabulary, U draft
vocabulary, D width.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from peagle.drafter.model import Drafter
from peagle.drafter.vocab import draft_to_target
from peagle.objective.config import TrainConfig
from peagle.objective.labels import Labels
from peagle.objective.objective import Features, compiled


class LabelLoss:
    """Loss and gradient of slot states. The logits, by far the largest tensor, exist for one chunk at a time.

    Forward and backward of a chunk are one function, which keeps only the gradient of the states.
    """

    def __init__(self, drafter: Drafter, config: TrainConfig, device: torch.device) -> None:
        self.drafter, self.config = drafter, config
        weights = config.depth_weights
        self._depth_weights = None if weights is None else torch.tensor(weights, device=device)
        self._chunk = compiled(self._judge_chunk, config, device)

    @torch.no_grad()
    def accumulate(
        self, states_ND: Tensor, labels: Labels, features: Features, num_labels: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradient of `states_ND` (one per label), sum(loss) / num_labels, and the sums by depth (see
        `ParallelObjective`). Adds the gradient of the drafter's own head, if it has one.
        """
        share_N = (
            labels.weight_N.to(states_ND.dtype if states_ND.dtype == torch.float64 else torch.float32) / num_labels
        )
        if self._depth_weights is not None:
            share_N = share_N * self._depth_weights[labels.depth_N]
        gradients, results = [], []
        chunks = zip(labels.chunks(), states_ND.chunk(labels.num_chunks), share_N.chunk(labels.num_chunks), strict=True)
        for chunk, states_nD, share_n in chunks:
            judges_MV = features.judge_logits(chunk.judge_row_M, chunk.judge_column_M)
            gradient_nD, head_gradient, *sums = self._chunk(
                states_nD, judges_MV, chunk.opinion_N, chunk.depth_N, chunk.weight_N, share_n
            )
            gradients.append(gradient_nD)
            results.append(sums)
            if head_gradient is not None:
                weight = self.drafter.lm_head.weight
                head_gradient = head_gradient.to(weight.dtype)
                weight.grad = head_gradient if weight.grad is None else weight.grad + head_gradient
        loss, sums_by_depth = (torch.stack(parts).sum(0) for parts in zip(*results, strict=True))
        return torch.cat(gradients), loss, sums_by_depth

    @torch.no_grad()
    def _judge_chunk(
        self,
        states_ND: Tensor,
        target_logits_MV: Tensor,
        opinion_N: Tensor,
        depth_N: Tensor,
        weight_N: Tensor,
        share_N: Tensor,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Gradients of the states and of an own head, the loss, and the sums by depth of one chunk."""
        offsets = getattr(self.drafter, "d2t", None)
        table = None if offsets is None else draft_to_target(offsets)
        logits_NU = self.drafter.logits(states_ND)
        judged = judge_slots(logits_NU, target_logits_MV, opinion_N, table, self.config.loss, share_N)
        head_UD = self.drafter.head_VD.to(states_ND.dtype)
        is_own = self.drafter.config.head == "own"
        head_gradient_UD = judged.gradient_NU.T @ states_ND if is_own else None
        rows = torch.stack([judged.loss_N, judged.is_correct_N.to(judged.loss_N.dtype), torch.ones_like(judged.loss_N)])
        # The loss of a label with weight 0 may be NaN.
        rows = torch.where(weight_N > 0, rows, 0).float()
        sums = rows.new_zeros(3, self.config.num_draft_tokens).index_add(1, depth_N, rows)
        loss = torch.where(weight_N > 0, judged.loss_N * share_N, 0).sum()
        return judged.gradient_NU @ head_UD, head_gradient_UD, loss.float(), sums


LEAST_OVERLAP = 1e-9  # keeps its logarithm finite


class Weights(NamedTuple):
    """What a loss is made of."""

    ce: float = 0
    kl: float = 0
    overlap: float = 0


WEIGHTS = {
    "ce": Weights(ce=1),
    "kl": Weights(kl=1),
    "kl+ce": Weights(ce=1, kl=1),
    "tv+ce": Weights(ce=0.1, overlap=0.9),
    "lk": Weights(overlap=1),
}


class Judged(NamedTuple):
    """Per slot: loss, whether its argmax equals the target's, and the gradient of its logits."""

    loss_N: Tensor
    is_correct_N: Tensor
    gradient_NU: Tensor


@torch.no_grad()
def judge_slots(
    draft_logits_NU: Tensor,
    target_logits_MV: Tensor,
    opinion_N: Tensor,
    draft_to_target_U: Tensor | None,
    kind: Literal["kl", "ce", "kl+ce", "tv+ce", "lk"],
    share_N: Tensor,
) -> Judged:
    """Compare each slot with its judge, row `opinion_N` of the target's logits. Gradients are of loss * share.

    kl: KL(target || drafter), with the target renormalized over a smaller draft vocabulary. ce: cross-entropy to the
    target's argmax within the draft vocabulary. kl+ce: their sum. With the overlap of the two distributions, which is
    the chance that a sampled draft is accepted: tv, its complement, and lk, its negative logarithm. `draft_to_target_U`
    maps draft ids to target ids; None means equal vocabularies.

    The gradient of ce and kl is the drafter's probabilities q minus the target's p (ce: minus one-hot). Of the overlap
    it is q * (is_below - sum(q * is_below)), where is_below tells where q < p. Terms of the judge are computed once for
    all its slots.
    """
    weights = WEIGHTS[kind]
    label_M = target_logits_MV.argmax(-1)
    target_logits_MU = target_logits_MV if draft_to_target_U is None else target_logits_MV[:, draft_to_target_U]
    choice_M = label_M if draft_to_target_U is None else target_logits_MU.argmax(-1)
    target_norm_M1 = _log_norm(target_logits_MU)
    draft_log_probs_NU = _precise(draft_logits_NU) - _log_norm(draft_logits_NU)
    guess_N = draft_logits_NU.argmax(-1)
    guess_N = guess_N if draft_to_target_U is None else draft_to_target_U[guess_N]
    loss_N, wanted_NU = torch.zeros_like(draft_log_probs_NU[:, 0]), torch.zeros_like(draft_log_probs_NU[:, :1])
    if weights.ce:
        choice_N1 = choice_M[opinion_N][:, None]
        is_choice_NU = torch.arange(draft_logits_NU.shape[1], device=choice_N1.device) == choice_N1
        loss_N = loss_N - weights.ce * draft_log_probs_NU.gather(1, choice_N1)[:, 0]
        wanted_NU = torch.add(wanted_NU, is_choice_NU, alpha=weights.ce)
    if kind != "ce":
        target_log_probs_NU = _precise(target_logits_MU[opinion_N]) - target_norm_M1[opinion_N]
        target_probs_NU = target_log_probs_NU.exp()
    if weights.kl:
        # 0 * -inf is NaN; tokens of target probability 0 contribute nothing.
        divergence_NU = target_probs_NU * (target_log_probs_NU - draft_log_probs_NU)
        loss_N = loss_N + torch.where(target_probs_NU == 0, 0, divergence_NU).sum(-1)
        wanted_NU = wanted_NU + target_probs_NU
    pull_NU = draft_log_probs_NU.exp() * (weights.ce + weights.kl) - wanted_NU
    if weights.overlap:
        draft_probs_NU = draft_log_probs_NU.exp()
        overlap_N1 = torch.minimum(draft_probs_NU, target_probs_NU).sum(-1, keepdim=True).clamp_min(LEAST_OVERLAP)
        below_NU = torch.where(draft_probs_NU < target_probs_NU, draft_probs_NU, 0)
        rise_NU = below_NU - draft_probs_NU * below_NU.sum(-1, keepdim=True)
        loss_N = loss_N + (-overlap_N1.log() if kind == "lk" else weights.overlap * (1 - overlap_N1))[:, 0]
        pull_NU = pull_NU - rise_NU * (1 / overlap_N1 if kind == "lk" else weights.overlap)
    # Labels of share 0 have no gradient, even if their loss is NaN.
    gradient_NU = torch.where(share_N[:, None] > 0, pull_NU * share_N[:, None], 0)
    return Judged(loss_N, guess_N == label_M[opinion_N], gradient_NU.to(draft_logits_NU.dtype))


def _log_norm(logits: Tensor) -> Tensor:
    """logsumexp [N, 1], written so that torch.compile fuses it into one pass."""
    logits = _precise(logits)
    largest = logits.amax(-1, keepdim=True)
    return largest + (logits - largest).exp().sum(-1, keepdim=True).log()


def _precise(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
