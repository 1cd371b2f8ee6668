"""What the training loop asks of a method: gradients for a batch, from the target's features."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from peagle.kernels import compiler
from peagle.training.batches import Batch
from peagle.training.config import TrainConfig

if TYPE_CHECKING:
    from peagle.training.features import Features


class Objective(Protocol):
    """A way to learn: P-EAGLE's parallel slots, or EAGLE-3's unrolled steps."""

    def accumulate(self, batch: Batch, features: "Features", num_labels: float) -> tuple[Tensor, Tensor]:
        """Add the gradients of sum(loss) / num_labels to the drafter's parameters.

        `num_labels` counts those of the whole optimizer step, of which `batch` may be a part. Returns that loss, and
        by depth the sums of loss, correct guesses and slots of this part: float [3, num_draft_tokens].
        """
        ...


def is_compiled(config: TrainConfig, device: torch.device) -> bool:
    """Whether the settings ask for it: by default on a GPU only."""
    return config.compile == "on" or (config.compile == "auto" and device.type == "cuda")


def compiled(function: Callable[..., Any], config: TrainConfig, device: torch.device) -> Callable[..., Any]:
    """`function`, compiled for fixed shapes where the settings ask for it."""
    return compiler.compiled(function, dynamic=False) if is_compiled(config, device) else function
