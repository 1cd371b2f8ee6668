"""The optimizer of a run: AdamW, or Muon for matrices beside it."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from peagle.drafter.model import Drafter
from peagle.training.config import TrainConfig

BETAS = (0.9, 0.95)


def make_optimizer(drafter: Drafter, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer the settings name. All its groups follow the learning rate of the schedule.

    Vectors (norms, biases, the learned placeholders) are not decayed. Muon takes the matrices that map states to
    states, those of the layers and `fc`; embeddings and head, whose rows are tokens, are AdamW's.
    """
    parameters = [(name, parameter) for name, parameter in drafter.named_parameters() if parameter.requires_grad]
    is_muons = {
        name: config.optimizer == "muon" and parameter.dim() == 2 and name.startswith(("layers.", "fc."))
        for name, parameter in parameters
    }
    adamw = torch.optim.AdamW(
        _groups((parameter for name, parameter in parameters if not is_muons[name]), config),
        lr=config.learning_rate,
        betas=BETAS,
        fused=True,
    )
    if config.optimizer == "adamw":
        return adamw
    muon = torch.optim.Muon(
        [parameter for name, parameter in parameters if is_muons[name]],
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        adjust_lr_fn="match_rms_adamw",  # updates as large as AdamW's, so that one learning rate serves both
    )
    return JoinedOptimizer(muon, adamw)


def _groups(parameters: Iterable[nn.Parameter], config: TrainConfig) -> list[dict[str, Any]]:
    parameters = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in parameters if parameter.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.dim() <= 1], "weight_decay": 0.0},
    ]
    return _unmixed(groups)


def _unmixed(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups with sharded parameters apart from whole ones, because one kernel cannot update both."""
    found = []
    for group in groups:
        for is_sharded in (True, False):
            chosen = [parameter for parameter in group["params"] if isinstance(parameter, DTensor) == is_sharded]
            if chosen:
                found.append(group | {"params": chosen})
    return found


class JoinedOptimizer(torch.optim.Optimizer):
    """Several optimizers, each with parameters of its own, as one. It owns them; they share their groups with it."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        # Loading replaces an optimizer's groups.
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
