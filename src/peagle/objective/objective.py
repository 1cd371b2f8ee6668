"""What both objectives share: the target's features, and whether functions are compiled."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from peagle.kernels import compiler
from peagle.objective.config import TrainConfig


class Features(NamedTuple):
    """The target's states of one micro-batch, without gradients."""

    aux_hidden_BTA: Tensor
    last_hidden_BTD: Tensor
    """input of the target's head, or the logits if the head cannot run separately"""
    head: Callable[[Tensor], Tensor]

    def half_as_bfloat16(self) -> tuple[Tensor, bool]:
        """The aux states, and whether to autocast: float16 gradients would need loss scaling."""
        is_half = self.aux_hidden_BTA.dtype in (torch.bfloat16, torch.float16)
        return self.aux_hidden_BTA.to(torch.bfloat16) if is_half else self.aux_hidden_BTA, is_half

    def judge_logits(self, row_N: Tensor, column_N: Tensor) -> Tensor:
        """The target's logits [N, V] for the token after each position."""
        return self.head(self.last_hidden_BTD[row_N, column_N])


def is_compiled(config: TrainConfig, device: torch.device) -> bool:
    """Whether to use torch.compile; by default on a GPU only."""
    return config.compile == "on" or (config.compile == "auto" and device.type == "cuda")


def compiled(function: Callable[..., Any], config: TrainConfig, device: torch.device) -> Callable[..., Any]:
    """`function`, compiled for static shapes if the settings say so."""
    return compiler.compiled(function, dynamic=False) if is_compiled(config, device) else function
