"""The objective of a pair head: the target's token, given the token of the text before it.

The drafter runs over the slots of the P-EAGLE objective, without gradients. Each label is compared with the W likeliest
tokens of its slot; labels that are not among them are skipped, because no score could make them a draft. Labels of the
first depth have no pair. They count in the metrics, with the drafter's own loss and accuracy.

Shapes: B sequences, T tokens, N labels, M judges, W likeliest tokens, V target vocabulary, U draft vocabulary, R rank,
D width, K depths.
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from peagle.drafter.model import Drafter
from peagle.objective.batches import Batch, Part
from peagle.objective.config import TrainConfig
from peagle.objective.labels import Labels
from peagle.objective.objective import Features, compiled
from peagle.objective.p_eagle import ParallelObjective


class PairObjective(ParallelObjective):
    """Trains the pair head of a drafter that does not change."""

    def __init__(self, drafter: Drafter, config: TrainConfig) -> None:
        super().__init__(drafter, config)
        assert drafter.pair_head is not None, "made by `initial_drafter`"
        self.pair_head = drafter.pair_head
        weights = config.depth_weights or (1.0,) * config.num_draft_tokens
        self._depth_weights_K = torch.tensor(weights, device=self.device)
        self._find = compiled(self._candidates, config, self.device)

    @functools.cached_property
    def _draft_ids_V(self) -> Tensor:
        """Draft ids of the target's tokens; -1 for those without. Not made at once: a resumed run loads `d2t` later."""
        config = self.drafter.config
        draft_ids_U = torch.arange(config.draft_vocab_size, device=self.device)
        draft_ids_V = torch.full((config.vocab_size,), -1, device=self.device)
        draft_ids_V[self.drafter.to_target_ids(draft_ids_U)] = draft_ids_U
        return draft_ids_V

    def accumulate(self, batch: Batch, features: Features, num_labels: float) -> tuple[Tensor, Tensor]:
        """See `ParallelObjective.accumulate`."""
        tables = self.pair_head.tables()
        left_UR, right_UR = (table_UR.detach().requires_grad_() for table_UR in tables)
        results = []
        for labels, states_ND in self._states(batch, features):
            for chunk, states_nD in zip(labels.chunks(), states_ND.chunk(labels.num_chunks), strict=True):
                judges_MV = features.judge_logits(chunk.judge_row_M, chunk.judge_column_M)
                found = self._find(states_nD, judges_MV, chunk.opinion_N)
                before_N = self._draft_ids_V[batch.token_ids_BT[chunk.row_N, chunk.judge_N]]
                loss, sums_3K = self._judge(left_UR, right_UR, before_N, chunk, *found)
                (loss / num_labels).backward()
                results.append((loss.detach() / num_labels, sums_3K))
        torch.autograd.backward(tables, [left_UR.grad, right_UR.grad])
        loss, sums_3K = (torch.stack(parts).sum(0) for parts in zip(*results, strict=True))
        return loss, sums_3K

    @torch.no_grad()
    def _states(self, batch: Batch, features: Features) -> Iterator[tuple[Labels, Tensor]]:
        """The labels of each segment and the drafter's states [N, D] there."""
        aux_hidden_BTA, is_half = features.half_as_bfloat16()
        autocast = functools.partial(torch.autocast, self.device.type, torch.bfloat16, enabled=is_half)
        with autocast():
            fused = self._fuse(self.drafter, aux_hidden_BTA)
            context = self._read_text(batch, fused) if len(batch.parts) > 1 else []
        for segment, labels in self._parts(batch, features)[0]:
            with autocast():
                states_ND, _ = self._label_states(batch, fused, Part(segment, labels), context)
            yield labels, states_ND

    @torch.no_grad()
    def _candidates(self, states_ND: Tensor, judges_MV: Tensor, opinion_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The likeliest draft tokens [N, W], their log-probabilities, and which of them is the target's token."""
        tokens_NW, logprob_NW = self.drafter.candidates(self.drafter.logits(states_ND))
        return tokens_NW, logprob_NW, self.drafter.to_target_ids(tokens_NW) == judges_MV.argmax(-1)[opinion_N, None]

    def _judge(
        self,
        left_UR: Tensor,
        right_UR: Tensor,
        before_N: Tensor,
        labels: Labels,
        tokens_NW: Tensor,
        logprob_NW: Tensor,
        is_wanted_NW: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The summed loss of a chunk of labels, and the sums of loss, correct guesses and labels by depth [3, K]."""
        has_pair_N = labels.depth_N > 0
        is_judged_N = is_wanted_NW.any(-1) & (labels.weight_N > 0) & (~has_pair_N | (before_N >= 0))
        left_NR = functional.embedding(before_N.clamp_min(0), left_UR)
        pair_NW = (functional.embedding(tokens_NW, right_UR) @ left_NR[..., None])[..., 0]
        scores_NW = logprob_NW + torch.where(has_pair_N[:, None], pair_NW, 0)
        place_N1 = is_wanted_NW.int().argmax(-1, keepdim=True)
        loss_N = torch.where(is_judged_N, -scores_NW.log_softmax(-1).gather(1, place_N1)[:, 0], 0)
        with torch.no_grad():
            is_correct_N = is_judged_N & (scores_NW.argmax(-1) == place_N1[:, 0])
            rows = torch.stack([loss_N, is_correct_N.to(loss_N.dtype), is_judged_N.to(loss_N.dtype)])
            sums = rows.new_zeros(3, self.config.num_draft_tokens).index_add(1, labels.depth_N, rows)
        return (loss_N * self._depth_weights_K[labels.depth_N]).sum(), sums
