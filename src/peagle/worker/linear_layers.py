"""Linear layers of both models, prepared for the few tokens of a decode step, and restored afterwards.

On a GPU, layers that read the same input are joined with each other and with the gates behind them, and experts are
computed by our kernels. On a CPU layers are joined and their weights packed.

Shapes: V vocabulary, D model width.
"""

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from peagle.drafter.model import Drafter
from peagle.drafter.paged import use_native_layers, use_plain_layers
from peagle.experts.fused import fuse_experts
from peagle.linears.joined_linear import Joined, join_linears, joined_groups, part_linears
from peagle.linears.skinny_linear import use_plain_linears, use_skinny_linears
from peagle.native.linear_kernels import blocks_of
from peagle.native.packed_linear import PackedLinear, pack_linears, unpack_linears
from peagle.native.products import BlockWeight
from peagle.native.rounded_linear import round_linears
from peagle.targets.fusing import fuse
from peagle.targets.hf import HFTarget

log = logging.getLogger(__name__)

Undo = Callable[[], None]

MIN_ROUNDED_HEAD = 2**22
"""least weights in the head of a drafter that computes in integers: a smaller head takes little of a step"""


@torch.no_grad()
def join_models(target: HFTarget, drafter: Drafter | None) -> Undo:
    """On a GPU: fewer and faster kernel launches for a few tokens. Call the result to undo it."""
    steps: list[Undo] = []

    def undo() -> None:
        for step in reversed(steps):
            step()
        steps.clear()

    models: list[nn.Module] = [target.model] if drafter is None else [target.model, drafter]
    try:
        for model in models:
            steps.append(partial(part_linears, model))
            join_linears(model, few_bit=True)
            steps.append(partial(use_plain_linears, model))
            use_skinny_linears(model)
            steps.append(fuse(model))
        steps.append(fuse_experts(target.model))
        if drafter is not None and (heads := _own_heads(drafter)):
            steps.append(partial(drafter.serve_head, None))
            drafter.serve_head(heads[0])  # gathered once, not in every pass
    except BaseException:
        undo()
        raise
    return undo


@torch.no_grad()
def pack_models(target: HFTarget, drafter: Drafter | None, num_rows: int, most_rows: int) -> Undo:
    """On a CPU: join layers that read the same input, and pack all for steps of `num_rows` to `most_rows` tokens.

    A drafter with a large head computes in integers, where the CPU has fast products of them; others share the target's
    packed head. Call the result to undo all of it.
    """
    models: list[nn.Module] = [target.model] if drafter is None else [target.model, drafter]

    def undo() -> None:
        if drafter is not None:
            drafter.serve_head(None)
            use_plain_layers(drafter)
        for model in models:
            unpack_linears(model)
            part_linears(model)

    try:
        for model in models:
            join_linears(model)
        wholes = [nn.ModuleList([model, *map(_joined_linear, joined_groups(model))]) for model in models]
        rounded = None if drafter is None else _round(drafter, wholes[-1])
        heads = nn.ModuleList() if drafter is None or rounded else nn.ModuleList(_own_heads(drafter))
        # One call for both models, so that a shape they share is timed once.
        pack_linears(nn.ModuleList([*wholes[: 1 if rounded else None], heads]), num_rows, most_rows)
        for model, whole in zip(models, wholes, strict=True):
            for group, linear in zip(joined_groups(model), list(whole)[1:], strict=True):
                group.packed = linear
        if drafter is not None:
            _serve_head(drafter, rounded or _packed_head(target, drafter, heads))
            use_native_layers(drafter)
    except BaseException:
        undo()
        raise
    return undo


def repack(drafter: Drafter) -> None:
    """Pack the drafter's weights again, after they changed in place. On a GPU nothing is packed."""
    packed = [*drafter.modules(), *(group.packed for group in joined_groups(drafter))]
    linears = [module for module in packed if isinstance(module, PackedLinear)]
    for linear in linears:
        linear.repack()
    if linears:
        use_native_layers(drafter)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A layer that wraps existing tensors."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _joined_linear(group: Joined) -> nn.Linear:
    """The layer of a joined group, with the blocks of its parts if all have the same form."""
    assert isinstance(group.weight, Tensor), "only a GPU computes from quantized weights"
    linear = _linear(group.weight, group.bias)
    blocks = [blocks_of(part.weight) for part in group.parts if isinstance(part.weight, Tensor)]
    kept = [each for each in blocks if each is not None]
    if len(kept) == len(blocks) and len({each.form for each in kept}) == 1:
        linear.weight.blocks = BlockWeight.joined(kept)  # type: ignore[attr-defined]
    return linear


def _own_heads(drafter: Drafter) -> list[nn.Linear]:
    """The target's head restricted to the draft vocabulary, as a layer; empty if the drafter uses the whole head."""
    config = drafter.config
    is_part = config.head == "shared" and config.draft_vocab_size < config.vocab_size
    return [_linear(drafter.head_VD, None)] if is_part else []


def _round(drafter: Drafter, whole: nn.ModuleList) -> nn.Module | None:
    """Let a drafter with a large head compute in integers: the linear layers in `whole` and the head, which it returns.

    Drafts then differ from those of exact products where two tokens are about equally likely.
    """
    head_VD = drafter.head_VD
    if head_VD.numel() < MIN_ROUNDED_HEAD:
        return None
    heads = nn.ModuleList([drafter.lm_head if drafter.config.head == "own" else _linear(head_VD, None)])
    if (reason := round_linears(nn.ModuleList([whole, heads]))) is not None:
        log.info("the drafter computes in float32: %s", reason)
        return None
    return heads[0]


def _packed_head(target: HFTarget, drafter: Drafter, heads: nn.ModuleList) -> nn.Module | None:
    shared = drafter.lm_head if drafter.config.head == "own" else target.model.get_output_embeddings()
    return heads[0] if len(heads) else shared


def _serve_head(drafter: Drafter, head: nn.Module | None) -> None:
    if isinstance(head, nn.Linear) and getattr(head, "bias", None) is None:
        drafter.serve_head(head)
