"""What the slots of a segment see, as ranges of keys: a dense mask on a CPU, blocks for FlexAttention on a GPU.

The mask between depths depends on positions alone, so it need not be built for each batch: made once for the longest
row, it could be sliced for shorter ones. In the order of `partition.py` there is even less to build. Keys are the
columns of the row (the depth-0 slots of earlier segments, if there are any) followed by the segment's own slots, and
what slot number q = (anchor, depth) sees is at most three ranges of them:

    earlier text   from its document's start to the segment's left border
    own text       from there, or its document's start, to its anchor: the depth-0 slots come first, by column
    own chain      the last `depth` slots up to q itself: deeper slots of one anchor follow each other

Ranges need no look at the key, so documents that share a row cost nothing, and what a block of queries sees follows
from the ends of their ranges: FlexAttention's blocks are found without looking at single slots, and blocks of other
documents or of other anchors' chains are skipped. Only the dense mask is as large as queries times keys.

Shapes: B rows, S slots, C columns of earlier segments (0 or all T), R ranges, Q and X blocks of queries and keys.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from peagle.training.partition import Segment

BLOCK = 128


class Ranges(NamedTuple):
    """First and last key of each range a slot sees, int32 [R, B, S]; one whose last is before its first is empty."""

    first_RBS: Tensor
    last_RBS: Tensor


class Blocks(NamedTuple):
    """Blocks of keys that each block of queries sees a part of, or all of, and the same the other way round.

    Of each kind their number, int32 [B, 1, Q], and their list, int32 [B, 1, Q, X], in front.
    """

    partial: tuple[Tensor, Tensor]
    full: tuple[Tensor, Tensor]
    partial_by_key: tuple[Tensor, Tensor]
    full_by_key: tuple[Tensor, Tensor]


def key_ranges(segment: Segment, num_context: int) -> Ranges:
    """What each slot sees of `num_context` columns followed by the segment's slots."""
    anchor_BS, depth_BS, start_BS = segment.slots
    assert start_BS is not None, "partitioning gives it"
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
    """Whether each slot sees each key, bool [B, S, keys]."""
    first_RBS, last_RBS = key_ranges(segment, num_context)
    key = torch.arange(num_context + first_RBS.shape[2], device=first_RBS.device)
    return ((key >= first_RBS[..., None]) & (key <= last_RBS[..., None])).any(0)


def blocks_seen(segment: Segment, num_context: int) -> tuple[Ranges, Blocks]:
    """What slots see, and which blocks: those that nothing is seen of are in no list, whole ones need no mask."""
    ranges = key_ranges(segment, num_context)
    num_slots = ranges.first_RBS.shape[2]
    # Slots past the end repeat the last one.
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
    """What `blocks_seen` found, for FlexAttention."""
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
    """Attention [B, H, S, E] of queries over keys and values [B, H_kv, C + S, E], where `seen` says so."""
    if isinstance(seen, BlockMask):
        # Half a block of keys at a time: with whole ones, scores and mask together do not fit into a GPU's registers.
        attended = flex_attention(
            query, key, value, block_mask=seen, enable_gqa=True, kernel_options={"BLOCK_N": BLOCK // 2}
        )
        assert isinstance(attended, Tensor), "nothing else was asked for"
        return attended
    # Heads are repeated by hand: torch's fused kernels take a mask or grouped heads, not both.
    group_size = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group_size, 1), value.repeat_interleave(group_size, 1)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=seen[:, None])
