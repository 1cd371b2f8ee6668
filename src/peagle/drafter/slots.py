"""Slots: the drafter's input rows. What each slot reads, where it sits, and which other slots it attends to.

A slot is (anchor, depth). With x the tokens of the text and h the target's aux states:

    depth 0   reads token x[anchor + 1] and state h[anchor], both real
    depth d   reads the mask token and `mask_hidden`, placeholders that are the same at every depth
    position  anchor + depth        for the rotary embedding
    label     anchor + depth + 2    index of the token that the slot predicts

A slot attends to every depth-0 slot up to its own anchor (the real text), and to its own anchor's slots up to its own
depth. `visible` is this rule as a dense mask, and the reference for every faster form of it.

Serving with three draft tokens. The text is x[0..5]. x[5] was just emitted, so h exists for 0..4. Anchors 0..2 are in
the drafter's KV cache from earlier steps; anchors 3 and 4 are new:

>>> slots = serving_slots(first_anchor=3, num_anchors=2, num_draft_tokens=3)
>>> slots.anchor_BS.tolist(), slots.depth_BS.tolist()
([[3, 4, 4, 4]], [[0, 0, 1, 2]])
>>> slots.position_BS.tolist(), slots.label_BS.tolist()
([[3, 4, 5, 6]], [[5, 6, 7, 8]])

The last three slots draft x[6], x[7] and x[8]. The first one only fills the cache, since x[5] is known. Over the three
cached and four new slots the mask is plain causal attention:

>>> visible(slots, context_slots(3).followed_by(slots)).int().tolist()
[[[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1]]]

Training on four anchors, of which 0 and 2 keep two depths and the others one. Depth-0 slots come first, so slot number
a is (a, 0). The deeper slots follow, grouped by anchor:

>>> slots = training_slots(torch.tensor([[2, 1, 2, 1]]))
>>> slots.anchor_BS.tolist(), slots.depth_BS.tolist()
([[0, 1, 2, 3, 0, 2]], [[0, 0, 0, 0, 1, 1]])
>>> visible(slots, slots).int().tolist()  # doctest: +NORMALIZE_WHITESPACE
[[[1, 0, 0, 0, 0, 0],
  [1, 1, 0, 0, 0, 0],
  [1, 1, 1, 0, 0, 0],
  [1, 1, 1, 1, 0, 0],
  [1, 0, 0, 0, 1, 0],
  [1, 1, 1, 0, 0, 1]]]

Slot (2, 1), the last row, attends to the text up to anchor 2 and to itself, but not to (0, 1). Serving from anchor 2
shows it exactly the same. The trainer arranges its slots in segments (`objective/partition.py`) and computes this mask
by blocks (`objective/attention.py`); tests compare both with `training_slots` and `visible`.

A training row holds several documents. Anchors are columns of the row; positions restart with each document. Two
documents of three tokens, columns 0..2 and 3..5, whose first anchor keeps two depths:

>>> slots = training_slots(torch.tensor([[2, 0, 0, 2, 0, 0]]), start_BT=torch.tensor([[0, 0, 0, 3, 3, 3]]))
>>> slots.anchor_BS.tolist(), slots.depth_BS.tolist()
([[0, 1, 2, 3, 4, 5, 0, 3]], [[0, -1, -1, 0, -1, -1, 1, 1]])
>>> slots.position_BS[slots.depth_BS >= 0].tolist(), slots.label_BS[slots.depth_BS >= 0].tolist()
([0, 0, 1, 1], [2, 5, 3, 6])
>>> visible(slots, slots)[0, -1].int().tolist()
[0, 0, 0, 1, 0, 0, 0, 1]

Shapes: B rows or requests, S slots, T tokens, C prompt chunks, D width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

PADDING = -1
"""The depth of a slot that only pads a row to the length of the others."""


class Slots(NamedTuple):
    """Slots of B rows. Padding slots have depth `PADDING` and an arbitrary anchor."""

    anchor_BS: Tensor
    depth_BS: Tensor
    start_BS: Tensor | None = None
    """First column of the slot's document; None if all documents start at 0."""

    @property
    def position_BS(self) -> Tensor:
        position_BS = self.anchor_BS + self.depth_BS.clamp_min(0)
        return position_BS if self.start_BS is None else position_BS - self.start_BS

    @property
    def label_BS(self) -> Tensor:
        return self.anchor_BS + self.depth_BS.clamp_min(0) + 2

    def followed_by(self, other: "Slots") -> "Slots":
        pairs = ((a, b) for a, b in zip(self, other, strict=True) if a is not None and b is not None)
        return Slots(*(torch.cat(pair, dim=1) for pair in pairs))

    def to(self, device: torch.device) -> "Slots":
        return Slots(*(None if tensor is None else tensor.to(device) for tensor in self))  # type: ignore[arg-type]


def context_slots(num_anchors: int, device: torch.device | None = None) -> Slots:
    """The depth-0 slots of anchors 0 .. num_anchors - 1: the contents of the drafter's KV cache."""
    anchors = torch.arange(num_anchors, device=device)[None]
    return Slots(anchors, torch.zeros_like(anchors))


def serving_slots(
    first_anchor: int, num_anchors: int, num_draft_tokens: int, device: torch.device | None = None
) -> Slots:
    """Depth 0 of each new anchor, then depths 1 .. num_draft_tokens - 1 of the last one."""
    last = first_anchor + num_anchors - 1
    anchors = torch.arange(first_anchor, last + num_draft_tokens, device=device).clamp_max(last)[None]
    depths = torch.arange(1 - num_anchors, num_draft_tokens, device=device).clamp_min(0)[None]
    return Slots(anchors, depths)


def batch_serving_slots(
    first_anchor_B: Tensor, num_anchors_B: Tensor, max_anchors: int, num_draft_tokens: int
) -> Slots:
    """`serving_slots` of many requests with 1 .. `max_anchors` new anchors each, padded at the end of each row.

    Shapes depend only on the two numbers, so a CUDA graph can capture a step with these slots.

    >>> slots = batch_serving_slots(torch.tensor([3, 7]), torch.tensor([2, 1]), max_anchors=3, num_draft_tokens=3)
    >>> slots.anchor_BS.tolist(), slots.depth_BS.tolist()
    ([[3, 4, 4, 4, 4], [7, 7, 7, 7, 7]], [[0, 0, 1, 2, -1], [0, 1, 2, -1, -1]])
    """
    column_S = torch.arange(max_anchors + num_draft_tokens - 1, device=first_anchor_B.device)
    last_B1 = num_anchors_B[:, None] - 1
    anchor_BS = first_anchor_B[:, None] + torch.minimum(column_S, last_B1)
    depth_BS = (column_S - last_B1).clamp_min(0)
    return Slots(anchor_BS, depth_BS.masked_fill(depth_BS >= num_draft_tokens, PADDING))


class PackedSlots(NamedTuple):
    """The slots of C prompt chunks in one row, [1, S], and their origin."""

    slots: Slots
    chunk_S: Tensor
    """The chunk of each slot."""
    token_S: Tensor
    """The index of its anchor among the packed tokens."""
    first_slot_C1: Tensor
    """C + 1 entries: chunk c has slots first_slot[c] .. first_slot[c + 1] - 1; padding follows the last."""


def packed_serving_slots(
    first_anchor_C: Tensor, first_token_C1: Tensor, num_tokens: int, num_draft_tokens: int
) -> PackedSlots:
    """`serving_slots` of prompt chunks packed in one row, where every token is an anchor; padded at the end.

    Chunk c has tokens first_token[c] .. first_token[c + 1] - 1 of `num_tokens`. The slots of an empty chunk are
    padding. Shapes depend only on the sizes. Anchors 0..2 of one sequence, 5 of another, and a token of padding:

    >>> packed = packed_serving_slots(torch.tensor([0, 5]), torch.tensor([0, 3, 4]), num_tokens=5, num_draft_tokens=3)
    >>> packed.slots.anchor_BS.tolist(), packed.slots.depth_BS.tolist()
    ([[0, 1, 2, 2, 2, 5, 5, 5, 5]], [[0, 0, 0, 1, 2, 0, 1, 2, -1]])
    >>> packed.chunk_S.tolist(), packed.token_S.tolist(), packed.first_slot_C1.tolist()
    ([0, 0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 2, 2, 2, 3, 3, 3, 3], [0, 5, 8])
    """
    num_chunks, num_deeper = len(first_anchor_C), num_draft_tokens - 1
    index_C1 = torch.arange(num_chunks + 1, device=first_token_C1.device)
    index_S = torch.arange(num_tokens + num_chunks * num_deeper, device=first_token_C1.device)
    first_slot_C1 = first_token_C1 + num_deeper * index_C1
    chunk_S = (index_S[:, None] >= first_slot_C1[1:]).sum(1).clamp_max(num_chunks - 1)
    column_S, last_S = index_S - first_slot_C1[chunk_S], first_token_C1.diff()[chunk_S] - 1
    anchor_column_S = torch.minimum(column_S, last_S).clamp_min(0)
    depth_S = (column_S - last_S).clamp_min(0)
    depth_S = depth_S.masked_fill((depth_S > num_deeper) | (last_S < 0), PADDING)
    token_S = (first_token_C1[chunk_S] + anchor_column_S).clamp_max(num_tokens - 1)
    slots = Slots((first_anchor_C[chunk_S] + anchor_column_S)[None], depth_S[None])
    return PackedSlots(slots, chunk_S, token_S, first_slot_C1)


def training_slots(num_depths_BT: Tensor, start_BT: Tensor | None = None) -> Slots:
    """Depths 0 .. num_depths_BT[b, a] - 1 of every anchor a: all depth-0 slots first, then by anchor and depth.

    Slot number a is (a, 0), or padding if the anchor keeps no depth. Rows are padded to the longest. `start_BT` is the
    first column of each anchor's document.
    """
    num_rows, num_anchors = num_depths_BT.shape
    counts_B = (num_depths_BT - 1).clamp_min(0).sum(1)
    num_slots = num_anchors + int(counts_B.max())
    depth_D = torch.arange(1, max(1, int(num_depths_BT.max())), device=num_depths_BT.device)
    row, anchor, depth = (num_depths_BT[..., None] > depth_D).nonzero(as_tuple=True)
    column = num_anchors + torch.arange(len(row), device=row.device) - (counts_B.cumsum(0) - counts_B)[row]
    anchor_BS = row.new_zeros(num_rows, num_slots)
    depth_BS = row.new_full((num_rows, num_slots), PADDING)
    anchor_BS[:, :num_anchors] = torch.arange(num_anchors, device=row.device)
    depth_BS[:, :num_anchors] = torch.where(num_depths_BT > 0, 0, PADDING)
    anchor_BS[row, column], depth_BS[row, column] = anchor, depth + 1
    return Slots(anchor_BS, depth_BS, None if start_BT is None else start_BT.gather(1, anchor_BS))


def visible(query: Slots, key: Slots) -> Tensor:
    """Mask: which key slots each query slot attends to, bool [B, S_query, S_key]. Padding keys are masked out."""
    query_anchor, query_depth = query.anchor_BS[:, :, None], query.depth_BS[:, :, None]
    key_anchor, key_depth = key.anchor_BS[:, None, :], key.depth_BS[:, None, :]
    is_earlier_text = (key_depth == 0) & (key_anchor <= query_anchor)
    if query.start_BS is not None:
        is_earlier_text = is_earlier_text & (key_anchor >= query.start_BS[:, :, None])
    is_own_chain = (key_anchor == query_anchor) & (key_depth > 0) & (key_depth <= query_depth)
    return is_earlier_text | is_own_chain


def slot_inputs(
    slots: Slots,
    token_ids_BT: Tensor,
    fused_BTD: Tensor,
    mask_token_id: int,
    fused_mask_D: Tensor,
    offset: int | Tensor = 0,
) -> tuple[Tensor, Tensor]:
    """What each slot reads: token ids [B, S] and fused aux states [B, S, D]. Padding slots read placeholders.

    Column t of `token_ids_BT` and `fused_BTD` holds x[offset + t] and the fused h[offset + t]. `offset` is the first
    anchor of the slots if earlier ones are cached: a number, or [B, 1].
    """
    is_real_BS = slots.depth_BS == 0
    column_BS = (slots.anchor_BS - offset).clamp_min(0)
    next_token_BS = token_ids_BT.gather(1, column_BS + 1)
    token_ids_BS = torch.where(is_real_BS, next_token_BS, mask_token_id)
    state_BSD = fused_BTD.gather(1, column_BS[..., None].expand(-1, -1, fused_BTD.shape[-1]))
    return token_ids_BS, torch.where(is_real_BS[..., None], state_BSD, fused_mask_D)
