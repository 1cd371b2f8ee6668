"""Exact acceptance of a drafter on known greedy answers, without decoding them again.

Where an answer is the target's own greedy choice, a draft token is accepted exactly when it equals the answer's token.
So one pass of the target and one of the drafter over a whole answer give the drafts of every anchor, and walking from
step to step gives what serving would have counted.

Shapes: B rows, T tokens, K draft tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.decoding.acceptance import Acceptance
from peagle.drafter.model import Drafter
from peagle.drafter.slots import Slots, slot_inputs, training_slots, visible
from peagle.errors import ConfigError
from peagle.targets.hf import HFTarget
from peagle.training.batches import LABEL_CHUNK, pad_rows
from peagle.training.cod import max_depths
from peagle.training.conversations import Conversation

ANCHORS_AT_ONCE = 256


@torch.no_grad()
def replay(
    target: HFTarget,
    drafter: Drafter,
    conversations: Sequence[Conversation],
    num_draft_tokens: int,
    rows_at_once: int = 4,
) -> Acceptance:
    """Replay the answers in `conversations`, which must be the target's greedy ones, at `num_draft_tokens`."""
    if not drafter.config.parallel:
        raise ConfigError(
            f"replay is for parallel drafters; this one is {drafter.config.method}",
            hint="measure its acceptance by decoding",
        )
    drafter.config.check_num_draft_tokens(num_draft_tokens)
    accepted_by_step: list[int] = []
    was_training = drafter.training
    drafter.eval()
    # Shorter ones hold no draft: a first token of the text, an answer's first token, and one to draft.
    order = sorted((row for row in conversations if len(row) >= 3), key=len)
    try:
        for first in range(0, len(order), rows_at_once):
            rows = order[first : first + rows_at_once]
            token_ids_BT, loss_mask_BT = pad_rows(rows, max(len(row) for row in rows))
            depths_BT = max_depths(loss_mask_BT, num_draft_tokens)
            drafts_BTK = draft_everywhere(target, drafter, token_ids_BT.to(target.device), depths_BT).tolist()
            for row, conversation in enumerate(rows):
                accepted_by_step += _walk(drafts_BTK[row], conversation, num_draft_tokens)
    finally:
        drafter.train(was_training)
    return Acceptance.of(accepted_by_step, num_draft_tokens)


@torch.no_grad()
def draft_everywhere(target: HFTarget, drafter: Drafter, token_ids_BT: Tensor, depths_BT: Tensor) -> Tensor:
    """Draft tokens (target ids) [B, T - 2, K] from every anchor; -1 at depths beyond `depths_BT` except the first.

    The depth-0 slots run first and stay cached; the placeholders follow for some anchors at a time, because all of
    them together would need memory by the square of T times K.
    """
    mask_token_id = drafter.config.mask_token_id
    assert mask_token_id is not None, "only parallel drafters are replayed"
    depths_BT = depths_BT.clamp_min(1)
    drafts_BTK = torch.full((*depths_BT.shape, int(depths_BT.max())), -1, dtype=torch.long)
    aux_hidden_BTA = target.forward(token_ids_BT).aux_hidden_BTA
    with torch.autocast(target.device.type, target.dtype, enabled=target.dtype != torch.float32):
        fused_BTD = drafter.fuse(aux_hidden_BTA)
        fused_mask_D = drafter.fuse(drafter.mask_hidden.to(aux_hidden_BTA.dtype))
        context = training_slots(torch.ones_like(depths_BT)).to(target.device)
        inputs = slot_inputs(context, token_ids_BT, fused_BTD, mask_token_id, fused_mask_D)
        output = drafter(*inputs, context.position_BS, visible(context, context))
        _fill_in(drafts_BTK, drafter, context, output.normed_BSD)
        for anchors in torch.arange(depths_BT.shape[1]).split(ANCHORS_AT_ONCE):
            slots = _placeholders(depths_BT, anchors).to(target.device)
            if slots.depth_BS.shape[1]:
                inputs = slot_inputs(slots, token_ids_BT, fused_BTD, mask_token_id, fused_mask_D)
                seen = visible(slots, context.followed_by(slots))
                states_BSD = drafter(*inputs, slots.position_BS, seen, output.cache).normed_BSD
                _fill_in(drafts_BTK, drafter, slots, states_BSD)
    return drafts_BTK


def _placeholders(depths_BT: Tensor, anchors: Tensor) -> Slots:
    """The slots of some anchors without their depth 0."""
    slots = training_slots(depths_BT[:, anchors])
    deeper = Slots(*(part[:, len(anchors) :] for part in slots))  # every anchor's depth 0 comes first
    return Slots(deeper.anchor_BS + anchors[0], deeper.depth_BS)


def _fill_in(drafts_BTK: Tensor, drafter: Drafter, slots: Slots, states_BSD: Tensor) -> None:
    """Write the most likely token of each slot to its place in `drafts_BTK`."""
    row, slot = (slots.depth_BS >= 0).nonzero(as_tuple=True)
    for part in torch.arange(len(row), device=row.device).split(LABEL_CHUNK):
        at = (row[part], slot[part])
        guesses = drafter.to_target_ids(drafter.logits(states_BSD[at]).argmax(-1))
        drafts_BTK[row[part].cpu(), slots.anchor_BS[at].cpu(), slots.depth_BS[at].cpu()] = guesses.cpu()


def _walk(drafts_TK: list[list[int]], conversation: Conversation, num_draft_tokens: int) -> list[int]:
    """Accepted tokens of each step. Prefill emits an answer's first token; each step then emits accepted + 1."""
    token_ids, mask = conversation.token_ids.tolist(), conversation.loss_mask.tolist()
    accepted_by_step = []
    newest = 1
    while newest < len(token_ids) - 1:
        if not (mask[newest] and mask[newest + 1]):
            newest += 1
            continue
        drafts = drafts_TK[newest - 1]
        accepted = 0
        while (
            accepted < min(num_draft_tokens, len(drafts))
            and newest + 1 + accepted < len(token_ids)
            and mask[newest + 1 + accepted]
            and drafts[accepted] == token_ids[newest + 1 + accepted]
        ):
            accepted += 1
        accepted_by_step.append(accepted)
        newest += accepted + 1
    return accepted_by_step
