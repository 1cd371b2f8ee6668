"""Attention masks of the slots of a segment: dense on a CPU, a FlexAttention block mask on a GPU.

Keys are the columns of the sequence (the depth-0 slots of earlier segments, if any) followed by the segment's own
slots. In the slot order of `partition.py`, slot q = (anchor, depth) attends to at most three ranges of keys:

    earlier text   from the start of its document to the start of the segment
    own text       from there, or the start of its document, to its anchor: depth-0 slots come first, by column
    own chain      the last `depth` slots up to q itself: the deeper slots of an anchor are contiguous

The ranges include the document mask of sequence packing. FlexAttention's blocks follow from the bounds of the ranges,
so blocks of other documents and other anchors' chains are skipped; only the dense mask has queries x keys elements.
Tests hold the mask equal to `drafter.slots.visible`.

Shapes: B sequences, S slots, C columns of earlier segments (0 or all T), R ranges, Q and X blocks of queries and keys.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from peagle.objective.partition import Segment

BLOCK = 128


class Ranges(NamedTuple):
    """First and last key of each range, int32 [R, B, S]. A range is empty if last < first."""

    first_RBS: Tensor
    last_RBS: Tensor


class Blocks(NamedTuple):
    """Partially and fully attended key blocks of each query block, and the same by key block.

    Each is a pair: the number of blocks, int32 [B, 1, Q], and their indices, int32 [B, 1, Q, X], listed first.
    """

    partial: tuple[Tensor, Tensor]
    full: tuple[Tensor, Tensor]
    partial_by_key: tuple[Tensor, Tensor]
    full_by_key: tuple[Tensor, Tensor]


def key_ranges(segment: Segment, num_context: int) -> Ranges:
    """The ranges of keys, `num_context` columns followed by the segment's slots, that each slot attends to."""
    anchor_BS, depth_BS, start_BS = segment.slots
    assert start_BS is not None, "set by partition"
    left_B1 = segment.left_B[:, None]
    number_S = torch.arange(anchor_BS.shape[1], device=anchor_BS.device)
    own_text = ((start_BS - left_B1).clamp_min(0), anchor_BS - left_B1)
    chain = (number_S - depth_BS + 1, number_S.expand_as(depth_BS))
    ranges = [(first + num_context, last + num_context) for first, last in (own_text, chain)]
    if num_context:
        ranges.append((start_BS, torch.minimum(anchor_BS, left_B1 - 1)))
    first_RBS, last_RBS = (torch.stack(ends).int() for ends in zip(*ranges, strict=True))
    return Ranges(first_RBS, last_RBS)


def dense_mask(segment: Segment, num_context: int) -> Tensor:
    """Mask: which keys each slot attends to, bool [B, S, keys]."""
    first_RBS, last_RBS = key_ranges(segment, num_context)
    key = torch.arange(num_context + first_RBS.shape[2], device=first_RBS.device)
    return ((key >= first_RBS[..., None]) & (key <= last_RBS[..., None])).any(0)


def find_blocks(segment: Segment, num_context: int) -> tuple[Ranges, Blocks]:
    """The ranges, and the key blocks to visit: fully attended blocks need no mask, unattended ones are skipped."""
    ranges = key_ranges(segment, num_context)
    num_slots = ranges.first_RBS.shape[2]
    # Pad to whole blocks with the last slot.
    number_S = torch.arange(num_slots + -num_slots % BLOCK, device=ranges.first_RBS.device).clamp_max(num_slots - 1)
    first_RBQs, last_RBQs = (ends[:, :, number_S].unflatten(2, (-1, BLOCK)) for ends in ranges)
    key_X = torch.arange(0, num_context + num_slots, BLOCK, device=number_S.device)
    reaches_RBQX = (first_RBQs.amin(-1)[..., None] < key_X + BLOCK) & (last_RBQs.amax(-1)[..., None] >= key_X)
    covers_RBQX = (first_RBQs.amax(-1)[..., None] <= key_X) & (last_RBQs.amin(-1)[..., None] >= key_X + BLOCK - 1)
    is_full_BQX = covers_RBQX.any(0)
    is_partial_BQX = reaches_RBQX.any(0) & ~is_full_BQX
    kinds = (is_partial_BQX, is_full_BQX, is_partial_BQX.mT, is_full_BQX.mT)
    return ranges, Blocks(*map(_listed, kinds))


def _listed(chosen_BQX: Tensor) -> tuple[Tensor, Tensor]:
    order_BQX = chosen_BQX.int().argsort(dim=-1, descending=True, stable=True)
    return chosen_BQX.sum(-1, dtype=torch.int32)[:, None], order_BQX.to(torch.int32)[:, None].contiguous()


def block_mask(ranges: Ranges, blocks: Blocks, num_context: int) -> BlockMask:
    """The result of `find_blocks` for FlexAttention."""
    first_RBS, last_RBS = ranges

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (k >= first_RBS[0, b, q]) & (k <= last_RBS[0, b, q])
        for number in range(1, len(first_RBS)):
            seen = seen | ((k >= first_RBS[number, b, q]) & (k <= last_RBS[number, b, q]))
        return seen

    num_slots = first_RBS.shape[2]
    return BlockMask(
        (num_slots, num_context + num_slots),
        *blocks.partial,
        *blocks.full,
        *blocks.partial_by_key,
        *blocks.full_by_key,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=mask_mod,
    )


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | BlockMask) -> Tensor:
    """Attention [B, H, S, E] over keys and values [B, H_kv, C + S, E] with mask `seen`."""
    if isinstance(seen, BlockMask):
        # Half a block of keys at a time: scores and mask of a whole block spill registers.
        attended = flex_attention(
            query, key, value, block_mask=seen, enable_gqa=True, kernel_options={"BLOCK_N": BLOCK // 2}
        )
        assert isinstance(attended, Tensor), "no auxiliary outputs requested"
        return attended
    # torch's fused kernels take a mask or grouped heads, not both, so repeat the heads.
    group_size = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group_size, 1), value.repeat_interleave(group_size, 1)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=seen[:, None])
