"""Draft for one request: the drafter, its KV cache, and the text it has read.

P-EAGLE runs once per step and reads all draft tokens from its slots. EAGLE-3 runs once per draft token and feeds its
own state and token back. In both cases the cache keeps only real tokens with the target's real states: rows of
placeholders, or of the drafter's own guesses, are cropped before the next step.

Shapes: T new anchors, A concatenated aux width, K draft tokens, U draft vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.drafter.model import Drafter, DrafterOutput, KeyValues
from peagle.drafter.slots import Slots, context_slots, serving_slots, slot_inputs, visible


class Draft(NamedTuple):
    """The drafter's most likely tokens, by the target's ids."""

    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]
    """Margin of each token: how far its logit is above the second best."""
    logits_KU: Tensor


class DraftingSession:
    """Drafts for one request and owns the drafter's KV cache of that request."""

    @torch.no_grad()
    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._cache: KeyValues | None = None
        self.num_anchors = 0
        """Anchors in the cache: the length of the text without its newest token, as of the last draft."""
        if drafter.config.parallel:
            self._fused_mask_D = drafter.fuse(drafter.mask_hidden)

    @torch.no_grad()
    def draft(self, token_ids: list[int], aux_hidden_TA: Tensor, num_draft_tokens: int) -> Draft:
        """Read what the target emitted since the last call and draft the next tokens.

        `token_ids` are the T + 1 tokens from index `num_anchors` to the newest. `aux_hidden_TA` are the target's states
        of all but the newest.
        """
        first = self.num_anchors
        token_ids_BT = torch.tensor([token_ids], device=aux_hidden_TA.device)
        fused_BTD = self.drafter.fuse(aux_hidden_TA[None])
        self.num_anchors = first + len(token_ids) - 1
        read = self._draft_in_parallel if self.drafter.config.parallel else self._draft_one_by_one
        logits_KU, drafted_K = read(first, token_ids_BT, fused_BTD, num_draft_tokens)
        assert self._cache is not None, "a pass has just filled the cache"
        self._cache = [(key[:, :, : self.num_anchors], value[:, :, : self.num_anchors]) for key, value in self._cache]
        top_K2 = logits_KU.float().topk(2, dim=-1).values
        ids = self.drafter.to_target_ids(drafted_K)
        return Draft(tuple(ids.tolist()), tuple((top_K2[:, 0] - top_K2[:, 1]).tolist()), logits_KU)

    def _draft_in_parallel(
        self, first: int, token_ids_BT: Tensor, fused_BTD: Tensor, num_draft_tokens: int
    ) -> tuple[Tensor, Tensor]:
        slots = serving_slots(first, fused_BTD.shape[1], num_draft_tokens, fused_BTD.device)
        mask_token_id = self.drafter.config.mask_token_id
        assert mask_token_id is not None, "a parallel drafter has a mask token"
        inputs = slot_inputs(slots, token_ids_BT, fused_BTD, mask_token_id, self._fused_mask_D, offset=first)
        output = self._run(*inputs, slots, num_cached=first)
        logits_KU = self.drafter.logits(output.normed_BSD[0, -num_draft_tokens:])
        if self.drafter.pair_head is None:
            return logits_KU, logits_KU.argmax(-1)
        return logits_KU, self.drafter.pair_head.chain(*self.drafter.candidates(logits_KU))[0]

    def _draft_one_by_one(
        self, first: int, token_ids_BT: Tensor, fused_BTD: Tensor, num_draft_tokens: int
    ) -> tuple[Tensor, Tensor]:
        slots = serving_slots(first, fused_BTD.shape[1], 1, fused_BTD.device)
        output = self._run(token_ids_BT[:, 1:], fused_BTD, slots, num_cached=first)
        logits, drafted = [], []
        for index in range(num_draft_tokens):
            logits.append(self.drafter.logits(output.normed_BSD[0, -1:]))
            drafted.append(logits[-1].argmax(-1))
            if index + 1 < num_draft_tokens:
                anchor = self.num_anchors + index
                slots = serving_slots(anchor, 1, 1, fused_BTD.device)
                fed_back = self.drafter.to_target_ids(drafted[-1])[None]
                output = self._run(fed_back, output.carried_BSD[:, -1:], slots, num_cached=anchor)
        return torch.cat(logits), torch.cat(drafted)

    def _run(self, token_ids_BS: Tensor, fused_BSD: Tensor, slots: Slots, num_cached: int) -> DrafterOutput:
        keys = context_slots(num_cached, fused_BSD.device).followed_by(slots)
        output: DrafterOutput = self.drafter(
            token_ids_BS, fused_BSD, slots.position_BS, visible(slots, keys), self._cache, keys.position_BS
        )
        self._cache = output.cache
        return output
