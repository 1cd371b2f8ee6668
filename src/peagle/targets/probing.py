"""Probe what a target's layers ask of attention: run a few tokens with our function in place of transformers'.

Some models pass a sliding window to attention as an argument, which we read. All of them put it into the mask, which we
do not read. In a probing pass the mask is a single number, the window, so we can check that both agree.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from peagle.errors import TargetError
from peagle.targets.hf import HFTarget

OTHER_ENGINES = "decode this target with transformers, or serve it with vLLM"
OWN_LAYER_TYPES = {"full_attention", "sliding_attention"}
"""Layer types that our attention implements. transformers implements the others through a mask."""
# Arguments of attention that we support, or that do not change its result here.
KNOWN_ARGUMENTS = {
    "scaling", "softcap", "s_aux",
    "dropout", "position_ids", "position_embeddings", "use_cache", "cache_position", "is_causal", "past_key_values",
    "output_attentions", "output_hidden_states", "return_dict", "output_router_logits", "shared_kv_states",
}  # fmt: skip


def check_layer_types(target: HFTarget) -> None:
    """Refuse layer types that our attention does not implement: a mask that we ignore would go unnoticed."""
    others = set(getattr(target.model.config.get_text_config(), "layer_types", None) or ()) - OWN_LAYER_TYPES
    if others:
        raise TargetError(
            f"{type(target.model).__name__} has layers of type {', '.join(sorted(others))}, which peagle's attention "
            "does not support",
            hint=OTHER_ENGINES,
        )


def no_mask(*args: Any, **kwargs: Any) -> None:
    """Replaces transformers' masks: our attention builds its own."""
    return None


def window_as_mask(*, local_size: int | None = None, device: torch.device | str = "cpu", **kwargs: Any) -> Tensor:
    """Replaces transformers' masks in a probing pass: the mask's window, 0 for none, in four dimensions."""
    return torch.full((1, 1, 1, 1), local_size or 0, device=device)


@dataclass(frozen=True)
class Probe:
    """Collects the windows of the layers in a probing pass, and refuses what our attention does not support."""

    name: str
    max_length: int
    windows: dict[int, int] = field(default_factory=dict)
    """By layer; 0 for none."""

    def record(self, layer: int, mask: Tensor | None, window: int | None, others: dict[str, Any]) -> None:
        """`others` are the arguments that our attention ignores."""
        unknown = sorted(name for name, value in others.items() if value is not None and name not in KNOWN_ARGUMENTS)
        if unknown:
            raise TargetError(
                f"{self.name} passes {', '.join(unknown)} to its attention (layer {layer}), which is not supported",
                hint=OTHER_ENGINES,
            )
        if mask is not None:
            self._check_window(mask, window or 0, f"layer {layer} of {self.name}")
        self.windows[layer] = window or 0

    def _check_window(self, mask: Tensor, window: int, where: str) -> None:
        """Refuse a layer whose mask, made by `window_as_mask`, disagrees with its argument `window`."""
        if mask.numel() != 1:
            raise TargetError(
                f"{where} builds its own masks, which peagle's attention does not read", hint=OTHER_ENGINES
            )
        sizes = [size if size < self.max_length else 0 for size in (int(mask), window)]
        if sizes[0] != sizes[1]:
            shown = [f"{size} tokens" if size else "all tokens" for size in sizes]
            raise TargetError(
                f"{where} attends to {shown[0]} by its mask, but to {shown[1]} by its argument, which peagle follows",
                hint=OTHER_ENGINES,
            )
