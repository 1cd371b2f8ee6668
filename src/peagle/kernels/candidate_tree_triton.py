"""`grow_tree` on GPUs: one launch, one CTA of one warp per request.

The frontier lives in registers: the scores of all children of all nodes. Each round takes the best one and adds its
children. A single warp needs no barrier to find it.

Shapes as in `candidate_tree.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.overlap_triton import can_overlap, take_turn


def grow_tree_triton(logprob_BKX: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_requests, num_depths, *_, width = logprob_BKX.shape
    logprob_BKX, device = logprob_BKX.contiguous(), logprob_BKX.device
    parent_BL, depth_BL, ancestors_BL = (
        torch.empty(num_requests, num_nodes + 1, dtype=torch.int64, device=device) for _ in range(3)
    )
    choice_BM = torch.empty(num_requests, num_nodes, dtype=torch.int64, device=device)
    score_BM = torch.empty(num_requests, num_nodes, dtype=torch.float32, device=device)
    if num_requests == 0:
        return parent_BL, depth_BL, ancestors_BL, choice_BM, score_BM
    overlaps = can_overlap(device)
    # Triton launches on the current device, which may not be the logits' device.
    with torch.cuda.device_of(logprob_BKX):
        _grow[(num_requests,)](
            parent_BL,
            depth_BL,
            ancestors_BL,
            choice_BM,
            score_BM,
            logprob_BKX,
            num_depths=num_depths,
            num_rows=width if logprob_BKX.dim() == 4 else 1,
            width=width,
            padded_width=triton.next_power_of_2(width),
            num_nodes=num_nodes,
            padded_nodes=triton.next_power_of_2(num_nodes + 1),
            overlaps=overlaps,
            num_warps=1,
            **({"launch_pdl": True} if overlaps else {}),
        )
    return parent_BL, depth_BL, ancestors_BL, choice_BM, score_BM


@triton.jit
def _grow(
    parent_ptr,
    depth_ptr,
    ancestors_ptr,
    choice_ptr,
    score_ptr,
    logprob_ptr,
    num_depths: tl.constexpr,
    num_rows: tl.constexpr,
    width: tl.constexpr,
    padded_width: tl.constexpr,
    num_nodes: tl.constexpr,
    padded_nodes: tl.constexpr,
    overlaps: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, padded_width)
    node = tl.arange(0, padded_nodes)
    place = node[:, None] * padded_width + column[None, :]
    parents = tl.zeros([padded_nodes], tl.int32)
    depths = tl.zeros([padded_nodes], tl.int32)
    choices = tl.zeros([padded_nodes], tl.int32)
    scores = tl.zeros([padded_nodes], tl.float32)
    ancestors = tl.full([padded_nodes], 1, tl.int64)
    logprob_ptr += request * num_depths * num_rows * width
    take_turn(overlaps)
    first = tl.load(logprob_ptr + column, mask=column < width, other=float("-inf"))
    frontier = tl.where((node == 0)[:, None], first[None, :], float("-inf"))
    for new in range(1, num_nodes + 1):
        score = tl.max(frontier)
        best = tl.min(tl.where(frontier == score, place, padded_nodes * padded_width))
        parent, choice = best // padded_width, best % padded_width
        is_parent, is_new = node == parent, node == new
        depth = tl.sum(tl.where(is_parent, depths, 0)) + 1
        above = tl.sum(tl.where(is_parent, ancestors, 0))
        parents = tl.where(is_new, parent, parents)
        depths = tl.where(is_new, depth, depths)
        choices = tl.where(is_new, choice, choices)
        scores = tl.where(is_new, score, scores)
        ancestors = tl.where(is_new, above | (tl.full([], 1, tl.int64) << new), ancestors)
        # With pairs, each depth has one row per choice of the parent.
        child = (depth * num_rows + (choice if num_rows > 1 else 0)) * width + column
        is_child = (column < width) & (child < num_depths * num_rows * width)
        children = score + tl.load(logprob_ptr + child, mask=is_child, other=float("-inf"))
        frontier = tl.where(place == best, float("-inf"), frontier)
        frontier = tl.where(is_new[:, None], children[None, :], frontier)
    is_node = node <= num_nodes
    cell = request * (num_nodes + 1) + node
    tl.store(parent_ptr + cell, parents.to(tl.int64), mask=is_node)
    tl.store(depth_ptr + cell, depths.to(tl.int64), mask=is_node)
    tl.store(ancestors_ptr + cell, ancestors, mask=is_node)
    is_guess = is_node & (node > 0)
    guess = request * num_nodes + node - 1
    tl.store(choice_ptr + guess, choices.to(tl.int64), mask=is_guess)
    tl.store(score_ptr + guess, scores, mask=is_guess)
