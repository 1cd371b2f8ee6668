"""The linear layers of an engine in the form that suits a step's few rows, and the way back.

On a GPU layers are joined with each other and with the gates behind them; on a CPU joined and packed, or of
8-bit weights.

Shapes: V vocabulary, D model width.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from peagle.drafter.model import Drafter
from peagle.kernels.joined_linear import join_linears, joined_groups, part_linears
from peagle.kernels.linear import pack_linears, replace_modules, unpack_linears
from peagle.kernels.linear_int8 import Int8Linear, quantize_linears
from peagle.kernels.skinny_linear import use_plain_linears, use_skinny_linears
from peagle.targets.fusing import fuse
from peagle.targets.hf import HFTarget

Undo = Callable[[], None]


@torch.no_grad()
def join_models(target: HFTarget, drafter: Drafter | None) -> Undo:
    """On a GPU: fewer and faster launches for a few rows. The result undoes it."""
    steps: list[Undo] = []

    def undo() -> None:
        for step in reversed(steps):
            step()
        steps.clear()

    models: list[nn.Module] = [target.model] if drafter is None else [target.model, drafter]
    try:
        for model in models:
            steps.append(partial(part_linears, model))
            join_linears(model)
            steps.append(partial(use_plain_linears, model))
            use_skinny_linears(model)
            steps.append(fuse(model))
    except BaseException:
        undo()
        raise
    return undo


@torch.no_grad()
def pack_models(target: HFTarget, drafter: Drafter | None, num_rows: int, most_rows: int) -> Undo:
    """Pack the linear layers of both for steps of `num_rows` to `most_rows` rows; they share the target's packed head.

    Layers that read the same input become one product first. The result undoes all of it.
    """
    models: list[nn.Module] = [target.model] if drafter is None else [target.model, drafter]

    def undo() -> None:
        if drafter is not None:
            drafter.serve_head(None)
        for model in models:
            unpack_linears(model)
            part_linears(model)

    try:
        for model in models:
            join_linears(model)
        groups = [group for model in models for group in joined_groups(model)]
        joined = nn.ModuleList(_linear(group.weight, group.bias) for group in groups)
        heads = nn.ModuleList() if drafter is None else nn.ModuleList(_own_heads(drafter))
        # All under one roof, so that shapes which the target and the drafter share are timed once.
        pack_linears(nn.ModuleList([*models, joined, heads]), num_rows, most_rows)
        for group, linear in zip(groups, joined, strict=True):
            group.packed = linear
        if drafter is not None:
            _share_head(target, drafter, heads)
    except BaseException:
        undo()
        raise
    return undo


def quantize_target(target: HFTarget, num_rows: int) -> Undo:
    """Give the target 8-bit weights. The float ones are kept, for the way back and for a drafter that shares them."""
    plain = {name: module for name, module in target.model.named_modules() if type(module) is nn.Linear}
    quantize_linears(target.model, num_rows, keep_weights=True)

    def undo() -> None:
        replace_modules(
            target.model,
            {
                module: plain[name]
                for name, module in target.model.named_modules()
                if isinstance(module, Int8Linear) and name in plain
            },
        )

    return undo


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A layer around tensors that exist."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _own_heads(drafter: Drafter) -> list[nn.Linear]:
    """Rows of the target's head as a layer, for a drafter that reads only those."""
    config = drafter.config
    is_part = config.head == "shared" and config.draft_vocab_size < config.vocab_size
    return [_linear(drafter.head_VD, None)] if is_part else []


def _share_head(target: HFTarget, drafter: Drafter, heads: nn.ModuleList) -> None:
    shared = drafter.lm_head if drafter.config.head == "own" else target.model.get_output_embeddings()
    head = heads[0] if len(heads) else shared
    if isinstance(head, nn.Linear) and getattr(head, "bias", None) is None:
        drafter.serve_head(head)
