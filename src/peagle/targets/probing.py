"""What a target's layers ask of attention, told by a pass in which ours stands in for it.

Some models hand their windows to attention as an argument, which we read, and all of them put windows into the mask,
which we do not. In a probing pass the mask is one number, its window, so that attention can see whether both agree.
"""

from typing import Any

import torch
from torch import Tensor

from peagle.errors import TargetError


def window_as_mask(*, local_size: int | None = None, device: torch.device | str = "cpu", **kwargs: Any) -> Tensor:
    """Stands in for transformers' masks: as many tokens back as the mask would show, 0 for all, in four dimensions."""
    return torch.full((1, 1, 1, 1), local_size or 0, device=device)


def check_window(mask: Tensor | None, window: int | None, max_length: int, where: str) -> None:
    """Refuse a layer whose mask, made by `window_as_mask`, says something else than its argument `window`."""

    def within(size: int) -> int:
        return size if size < max_length else 0

    if mask is None:
        return
    if mask.numel() != 1:
        raise TargetError(
            f"{where} makes masks of its own, which our attention does not read",
            hint="decode such a target with transformers, or serve it on vLLM",
        )
    by_mask, by_argument = within(int(mask)), within(window or 0)
    if by_mask != by_argument:
        shown = [f"{size} tokens" if size else "all tokens" for size in (by_mask, by_argument)]
        raise TargetError(
            f"{where} sees {shown[0]} by its mask, but tells attention {shown[1]}; ours goes by the latter",
            hint="decode such a target with transformers, or serve it on vLLM",
        )
