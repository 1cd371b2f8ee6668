"""Drafting for one request: the drafter, its cache, and the text it has read so far.

P-EAGLE lays out its slots, runs once, and reads all draft tokens. EAGLE-3 runs once a token, feeding its own state and
token back. Either way only real tokens with the target's real states stay in the cache: rows of placeholders, or of
the drafter's own guesses, are cut off again before the next step.

Shapes: T newly known anchors, A concatenated aux width, K draft tokens, U draft vocabulary, V target vocabulary.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from peagle.drafter.slots import Slots, context_slots, serving_slots, slot_inputs, visible

if TYPE_CHECKING:
    from peagle.drafter.model import Drafter, DrafterOutput, KeyValues

Choose = Callable[[Tensor, int], Tensor]
"""Picks draft-vocabulary ids [K] from draft probabilities [K, U]; the second argument is the first one's position."""
Pick = Callable[[Tensor, int], Tensor]
"""The same from draft logits."""


class Draft(NamedTuple):
    """`probs_KV` is the distribution each token was drawn from; None where the likeliest token was taken."""

    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]
    """how far the likeliest token's logit is above the second's, for each token"""
    probs_KV: Tensor | None


class DraftingSession:
    """Drafts for one request. It owns the drafter's cache of that request."""

    @torch.no_grad()
    def __init__(self, drafter: "Drafter") -> None:
        self._drafter = drafter
        self._cache: KeyValues | None = None
        self.num_anchors = 0
        """anchors in the cache: the text before the newest token, as of the last draft"""
        if drafter.config.parallel:
            self._fused_mask_D = drafter.fuse(drafter.mask_hidden)

    @torch.no_grad()
    def draft(
        self,
        token_ids: list[int],
        aux_hidden_TA: Tensor,
        num_draft_tokens: int,
        choose: Choose | None = None,
        temperature: float = 1.0,
    ) -> Draft:
        """Read what the target emitted since the last call and draft what it may emit next.

        `token_ids` are the T + 1 tokens from index `num_anchors` to the newest; `aux_hidden_TA` are the target's
        states of all but the newest. With `choose`, tokens are drawn from softmax(logits / temperature).
        """
        device = aux_hidden_TA.device
        first, num_new = self.num_anchors, len(token_ids) - 1
        token_ids_BT = torch.tensor([token_ids], device=device)
        fused_BTD = self._drafter.fuse(aux_hidden_TA[None])
        read = self._draft_in_parallel if self._drafter.config.parallel else self._draft_one_by_one
        self.num_anchors = first + num_new

        def pick(logits_KU: Tensor, position: int) -> Tensor:
            return logits_KU.argmax(-1) if choose is None else choose(_probs(logits_KU, temperature), position)

        logits_KU, drawn_K = read(first, token_ids_BT, fused_BTD, num_draft_tokens, pick)
        self._forget_beyond(self.num_anchors)
        top_K2 = logits_KU.float().topk(2, dim=-1).values
        ids = self._drafter.to_target_ids(drawn_K)
        probs_KV = None if choose is None else self._over_target_vocabulary(_probs(logits_KU, temperature))
        return Draft(tuple(ids.tolist()), tuple((top_K2[:, 0] - top_K2[:, 1]).tolist()), probs_KV)

    def _draft_in_parallel(
        self, first: int, token_ids_BT: Tensor, fused_BTD: Tensor, num_draft_tokens: int, pick: Pick
    ) -> tuple[Tensor, Tensor]:
        slots = serving_slots(first, fused_BTD.shape[1], num_draft_tokens, fused_BTD.device)
        mask_token_id = self._drafter.config.mask_token_id
        assert mask_token_id is not None, "a parallel drafter has a mask token"
        inputs = slot_inputs(slots, token_ids_BT, fused_BTD, mask_token_id, self._fused_mask_D, offset=first)
        output = self._run(*inputs, slots, num_cached=first)
        logits_KU = self._drafter.logits(output.normed_BSD[0, -num_draft_tokens:])
        return logits_KU, pick(logits_KU, self.num_anchors + 1)

    def _draft_one_by_one(
        self, first: int, token_ids_BT: Tensor, fused_BTD: Tensor, num_draft_tokens: int, pick: Pick
    ) -> tuple[Tensor, Tensor]:
        slots = serving_slots(first, fused_BTD.shape[1], 1, fused_BTD.device)
        output = self._run(token_ids_BT[:, 1:], fused_BTD, slots, num_cached=first)
        logits, drawn = [], []
        for index in range(num_draft_tokens):
            logits.append(self._drafter.logits(output.normed_BSD[0, -1:]))
            drawn.append(pick(logits[-1], self.num_anchors + 1 + index))
            if index + 1 < num_draft_tokens:
                anchor = self.num_anchors + index
                slots = serving_slots(anchor, 1, 1, fused_BTD.device)
                fed_back = self._drafter.to_target_ids(drawn[-1])[None]
                output = self._run(fed_back, output.carried_BSD[:, -1:], slots, num_cached=anchor)
        return torch.cat(logits), torch.cat(drawn)

    def _run(self, token_ids_BS: Tensor, fused_BSD: Tensor, slots: Slots, num_cached: int) -> "DrafterOutput":
        keys = context_slots(num_cached, fused_BSD.device).followed_by(slots)
        output: DrafterOutput = self._drafter(
            token_ids_BS, fused_BSD, slots.position_BS, visible(slots, keys), self._cache, keys.position_BS
        )
        self._cache = output.cache
        return output

    def _forget_beyond(self, num_anchors: int) -> None:
        assert self._cache is not None, "a pass has just filled the cache"
        self._cache = [(key[:, :, :num_anchors], value[:, :, :num_anchors]) for key, value in self._cache]

    def _over_target_vocabulary(self, probs_KU: Tensor) -> Tensor:
        config = self._drafter.config
        if config.draft_vocab_size == config.vocab_size:
            return probs_KU
        target_ids = self._drafter.to_target_ids(torch.arange(config.draft_vocab_size, device=probs_KU.device))
        return probs_KU.new_zeros(len(probs_KU), config.vocab_size).index_copy(1, target_ids, probs_KU)


def _probs(logits_KU: Tensor, temperature: float) -> Tensor:
    return torch.softmax(logits_KU.float() / temperature, dim=-1)
