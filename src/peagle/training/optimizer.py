"""AdamW and the learning-rate schedule."""

import math

import torch
from torch.distributed.tensor import DTensor

from peagle.drafter.model import Drafter
from peagle.objective.config import TrainConfig

BETAS = (0.9, 0.95)


def make_optimizer(drafter: Drafter, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only, not on norms, biases and the learned placeholders."""
    parameters = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    groups = []
    for is_matrix in (True, False):
        # One fused kernel cannot update sharded and whole parameters together.
        for is_sharded in (True, False):
            chosen = [
                parameter
                for parameter in parameters
                if (parameter.dim() > 1) == is_matrix and isinstance(parameter, DTensor) == is_sharded
            ]
            if chosen:
                groups.append({"params": chosen, "weight_decay": config.weight_decay if is_matrix else 0.0})
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=BETAS, fused=True)


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warmup, then cosine decay to `min_learning_rate_ratio` of the peak."""
    warmup = min(1.0, (step + 1) / max(1, config.warmup_steps))
    progress = min(1.0, max(0, step - config.warmup_steps) / max(1, config.num_steps - config.warmup_steps))
    floor = config.min_learning_rate_ratio
    return config.learning_rate * warmup * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
