"""Exact acceptance of a drafter on the target's greedy answers, without decoding.

In a greedy answer, a draft token is accepted exactly if it equals the answer's token. One forward of target and
drafter over the answer gives the drafts at every anchor; walking through them step by step gives the acceptance that
serving would measure.

EAGLE-3 reads back its own drafts. Up to the first wrong draft they equal the answer's tokens, and later ones do not
count, so feeding it the answer's tokens gives the same result.

With a pair head, drafts are the chain that it chooses from the likeliest tokens of each depth. A tree of them accepts
the longest path that the answer takes.

Shapes: B rows, T tokens, K draft tokens, W likeliest tokens (one for a chain without a pair head), A anchors, U draft
vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.data.conversations import Conversation
from peagle.decoding.acceptance import Acceptance, VerifiedDraft
from peagle.decoding.draft_tree import check_tree
from peagle.drafter.model import Drafter, DrafterOutput
from peagle.drafter.slots import PADDING, Slots, training_slots, visible
from peagle.kernels.candidate_tree import grow_tree
from peagle.objective.batches import pack_sequences
from peagle.objective.cod import max_depths
from peagle.objective.labels import LABEL_CHUNK
from peagle.targets.hf import HFTarget

ANCHORS_AT_ONCE = 256
Count = Callable[[int, list[int]], int]
"""How many tokens the drafts at an anchor have in common with the answer."""


def replay(
    target: HFTarget,
    drafter: Drafter,
    conversations: Sequence[Conversation],
    num_draft_tokens: int,
    tokens_at_once: int = 16384,
    tree_nodes: int | None = None,
) -> Acceptance:
    """Acceptance on `conversations`, whose answers must be the target's greedy ones. Drafts are chains, or trees."""
    drafts = replay_drafts(target, drafter, conversations, num_draft_tokens, tokens_at_once, tree_nodes)
    return Acceptance.of((draft.num_accepted for draft in drafts), num_draft_tokens)


class Form(NamedTuple):
    """How drafts are made: as chains, or as trees of `tree_nodes`."""

    drafter: Drafter
    num_draft_tokens: int
    tree_nodes: int | None = None


def replay_drafts(
    target: HFTarget,
    drafter: Drafter,
    conversations: Sequence[Conversation],
    num_draft_tokens: int,
    tokens_at_once: int = 16384,
    tree_nodes: int | None = None,
) -> list[VerifiedDraft]:
    """The drafts that serving would verify, and where in the text."""
    [drafts] = replay_forms(target, [Form(drafter, num_draft_tokens, tree_nodes)], conversations, tokens_at_once)
    return drafts


@torch.no_grad()
def replay_forms(
    target: HFTarget, forms: Sequence[Form], conversations: Sequence[Conversation], tokens_at_once: int = 16384
) -> list[list[VerifiedDraft]]:
    """The same for several forms, with one pass of target and drafter: the drafters may differ in their pair heads."""
    for drafter, num_draft_tokens, tree_nodes in forms:
        drafter.config.check_num_draft_tokens(num_draft_tokens)
        check_tree(drafter, tree_nodes)
    drafts: list[list[VerifiedDraft]] = [[] for _ in forms]
    drafter = forms[0].drafter
    was_training = drafter.training
    drafter.eval()
    # A draft needs a first token, the answer's first token, and one to draft.
    order = sorted((row for row in conversations if len(row) >= 3), key=len)
    try:
        for rows in _batched(order, tokens_at_once):
            token_ids_BT, loss_mask_BT, *_ = pack_sequences([[row] for row in rows], len(rows[-1]))
            counters = _counters(target, forms, token_ids_BT.to(target.device), loss_mask_BT)
            for form, own, counts in zip(forms, drafts, counters, strict=True):
                for conversation, count in zip(rows, counts, strict=True):
                    own += _walk(count, conversation, form.num_draft_tokens)
    finally:
        drafter.train(was_training)
    return drafts


def _counters(
    target: HFTarget, forms: Sequence[Form], token_ids_BT: Tensor, loss_mask_BT: Tensor
) -> Iterator[Sequence[Count]]:
    """A function for each form and row."""
    drafter, num_draft_tokens, tree_nodes = forms[0]
    if len(forms) == 1 and tree_nodes is None:
        depths_BT = max_depths(loss_mask_BT, num_draft_tokens)
        drafts_BTK = draft_everywhere(target, drafter, token_ids_BT, depths_BT).tolist()
        yield [partial(_count_chain, drafts_TK) for drafts_TK in drafts_BTK]
        return
    # Drafts beyond the answer's end compete for the nodes, too.
    depths_BT = max_depths(loss_mask_BT, 1) * max(form.num_draft_tokens for form in forms)
    found = likeliest_everywhere(target, drafter, token_ids_BT, depths_BT, drafter.num_candidates)
    for drafter, num_draft_tokens, tree_nodes in forms:
        tables = [table_BTKW[:, :, :num_draft_tokens] for table_BTKW in found]
        if tree_nodes is None:
            yield [partial(_count_chain, drafts_TK) for drafts_TK in _chains(drafter, *tables).tolist()]
        else:
            yield [
                partial(_count_tree, drafter, tokens, scores, tree_nodes)
                for tokens, scores in zip(*tables, strict=True)
            ]


@torch.no_grad()
def draft_everywhere(target: HFTarget, drafter: Drafter, token_ids_BT: Tensor, depths_BT: Tensor) -> Tensor:
    """Draft tokens (target ids) [B, T - 2, K] for the first `depths_BT` depths of every anchor; -1 beyond."""
    width = 1 if drafter.pair_head is None else drafter.num_candidates
    drafts_BTK = _chains(drafter, *likeliest_everywhere(target, drafter, token_ids_BT, depths_BT, width))
    return drafts_BTK.masked_fill(torch.arange(drafts_BTK.shape[-1]) >= depths_BT[..., None], -1)


@torch.no_grad()
def likeliest_everywhere(
    target: HFTarget, drafter: Drafter, token_ids_BT: Tensor, depths_BT: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """The likeliest tokens (draft ids) and their log-probabilities [B, T - 2, K, W] at every anchor.

    Zeros beyond the first `depths_BT` depths, and for the log-probability of a single token. EAGLE-3 drafts after the
    text's own tokens, so its drafts match serving up to the first wrong one. The depth-0 slots run first and stay
    cached. Deeper slots run for a few anchors at a time: all at once would need memory quadratic in T x K.
    """
    tokens_BTKW = torch.zeros(*depths_BT.shape, int(depths_BT.max()), width, dtype=torch.long)
    found = (tokens_BTKW, torch.zeros_like(tokens_BTKW, dtype=torch.float32))
    aux_hidden_BTA = target.aux_hidden(token_ids_BT)
    with torch.autocast(target.device.type, target.dtype, enabled=target.dtype != torch.float32):
        fused_BTD = drafter.fuse(aux_hidden_BTA)
        context = training_slots(torch.ones_like(depths_BT)).to(target.device)
        inputs = (token_ids_BT[:, 1:-1], fused_BTD[:, :-2])
        output = drafter(*inputs, context.position_BS, visible(context, context))
        _fill_in(found, drafter, context, output.normed_BSD, depths_BT)
        deeper = _deeper_in_parallel if drafter.config.parallel else _deeper_one_by_one
        for anchors in torch.arange(depths_BT.shape[1]).split(ANCHORS_AT_ONCE):
            for slots, states_BSD in deeper(drafter, token_ids_BT, depths_BT, anchors, context, output):
                _fill_in(found, drafter, slots, states_BSD, depths_BT)
    return found


def _chains(drafter: Drafter, tokens_BTKW: Tensor, logprob_BTKW: Tensor) -> Tensor:
    """The draft tokens (target ids) [B, T, K] among the likeliest tokens of each depth."""
    device, head = drafter.fc.weight.device, drafter.pair_head
    if head is None:
        return drafter.to_target_ids(tokens_BTKW[..., 0].to(device)).cpu()
    parts = zip(
        *(table.flatten(0, 1).to(device).split(ANCHORS_AT_ONCE) for table in (tokens_BTKW, logprob_BTKW)), strict=True
    )
    drafts = [drafter.to_target_ids(head.chain(*part)[0]).cpu() for part in parts]
    return torch.cat(drafts).view(tokens_BTKW.shape[:-1])


def _deeper_in_parallel(
    drafter: Drafter, token_ids_BT: Tensor, depths_BT: Tensor, anchors: Tensor, context: Slots, output: DrafterOutput
) -> Iterator[tuple[Slots, Tensor]]:
    """P-EAGLE: the states of depths 1 and up of some anchors."""
    slots = _placeholders(depths_BT, anchors).to(token_ids_BT.device)
    if slots.depth_BS.shape[1]:
        mask_token_id = drafter.config.mask_token_id
        assert mask_token_id is not None, "a parallel drafter has one"
        fused_mask_D = drafter.fuse(drafter.mask_hidden.to(output.normed_BSD.dtype))
        tokens_BS = torch.full_like(slots.anchor_BS, mask_token_id)
        states_BSD = fused_mask_D.expand(*tokens_BS.shape, -1)
        keys = context.followed_by(slots)
        seen = visible(slots, keys)
        yield slots, drafter(tokens_BS, states_BSD, slots.position_BS, seen, output.cache, keys.position_BS).normed_BSD


def _deeper_one_by_one(
    drafter: Drafter, token_ids_BT: Tensor, depths_BT: Tensor, anchors: Tensor, context: Slots, output: DrafterOutput
) -> Iterator[tuple[Slots, Tensor]]:
    """EAGLE-3: the same, one depth at a time, each reading the text's token and the carried state."""
    keys, state_BSD, cache = context, output.carried_BSD[:, anchors.to(token_ids_BT.device)], output.cache
    for depth in range(1, int(depths_BT[:, anchors].max())):
        is_drafted_BS = depths_BT[:, anchors] > depth
        depth_BS = torch.where(is_drafted_BS, depth, PADDING)
        slots = Slots(anchors.expand_as(depth_BS), depth_BS).to(token_ids_BT.device)
        keys = keys.followed_by(slots)
        tokens_BS = token_ids_BT.gather(1, slots.position_BS + 1)
        output = drafter(tokens_BS, state_BSD, slots.position_BS, visible(slots, keys), cache, keys.position_BS)
        state_BSD, cache = output.carried_BSD, output.cache
        yield slots, output.normed_BSD


def _placeholders(depths_BT: Tensor, anchors: Tensor) -> Slots:
    """The slots of some anchors at depth 1 and up."""
    slots = training_slots(depths_BT[:, anchors].clamp_min(1))
    deeper = Slots(*(part[:, len(anchors) :] for part in slots[:2]))  # depth-0 slots come first
    return Slots(deeper.anchor_BS + anchors[0], deeper.depth_BS)


def _fill_in(
    found: tuple[Tensor, Tensor], drafter: Drafter, slots: Slots, states_BSD: Tensor, depths_BT: Tensor
) -> None:
    """Write the likeliest tokens (draft ids) of each requested slot to `found`; if there are several, their scores."""
    anchor_BS, depth_BS = slots.anchor_BS.cpu(), slots.depth_BS.cpu()
    is_drafted_BS = (depth_BS >= 0) & (depth_BS < depths_BT.gather(1, anchor_BS))
    for row, slot in zip(*(part.split(LABEL_CHUNK) for part in is_drafted_BS.nonzero(as_tuple=True)), strict=True):
        states_ND = states_BSD[row.to(states_BSD.device), slot.to(states_BSD.device)]
        logits_NU, place = drafter.logits(states_ND), (row, anchor_BS[row, slot], depth_BS[row, slot])
        if found[0].shape[-1] == 1:
            found[0][place] = logits_NU.argmax(-1, keepdim=True).cpu()
        else:
            for table, values_NW in zip(found, drafter.candidates(logits_NU), strict=True):
                table[place] = values_NW.cpu()


def _batched(rows: Sequence[Conversation], num_tokens: int) -> Iterator[list[Conversation]]:
    """Batches of rows in ascending length, each at most `num_tokens` when padded, or a single row."""
    batch: list[Conversation] = []
    for row in rows:
        if batch and (len(batch) + 1) * len(row) > num_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _walk(count: Count, conversation: Conversation, num_draft_tokens: int) -> list[VerifiedDraft]:
    """The draft of each step. Prefill emits the answer's first token; each step emits accepted + 1."""
    token_ids, mask = conversation.token_ids.tolist(), conversation.loss_mask.tolist()
    drafts = []
    newest, start = 1, 0
    while newest < len(token_ids) - 1:
        if not (mask[newest] and mask[newest + 1]):
            newest, start = newest + 1, 0
            continue
        if not start:
            start = newest - sum(takewhile(bool, reversed(mask[:newest])))
        following = slice(newest + 1, newest + 1 + num_draft_tokens)
        answer = takewhile(itemgetter(1), zip(token_ids[following], mask[following], strict=True))
        accepted = count(newest - 1, [token for token, _ in answer])
        drafts.append(VerifiedDraft(start, newest + 1 - start, accepted))
        newest += accepted + 1
    return drafts


def _count_chain(drafts_TK: list[list[int]], anchor: int, answer: list[int]) -> int:
    pairs = zip(drafts_TK[anchor], answer, strict=False)
    return sum(takewhile(bool, (draft == token for draft, token in pairs)))


def _count_tree(
    drafter: Drafter, tokens_TKW: Tensor, logprob_TKW: Tensor, num_nodes: int, anchor: int, answer: list[int]
) -> int:
    device, head = drafter.fc.weight.device, drafter.pair_head
    tokens_1KW, logprob_1KX = tokens_TKW[anchor][None].to(device), logprob_TKW[anchor][None].to(device)
    if head is not None:
        logprob_1KX = head.conditionals(tokens_1KW, logprob_1KX)
    tree = grow_tree(logprob_1KX.cpu(), torch.tensor([len(tokens_TKW[anchor])]), num_nodes)
    token_ids: list[list[int]] = drafter.to_target_ids(tokens_1KW)[0].tolist()
    parents, depths = tree.parent_BL[0].tolist(), tree.depth_BL[0].tolist()
    nodes = {}
    for node, (choice, score) in enumerate(zip(tree.choice_BM[0].tolist(), tree.score_BM[0].tolist(), strict=True), 1):
        if score > -math.inf:
            nodes[parents[node], token_ids[depths[node] - 1][choice]] = node
    node = accepted = 0
    for token in answer:
        if (node, token) not in nodes:
            break
        node, accepted = nodes[node, token], accepted + 1
    return accepted
