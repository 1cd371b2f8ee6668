"""Settings of a training run. Plain data; the command line and TOML recipes are made from it."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from peagle.errors import ConfigError, nearest


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides what a training run learns. Two runs with equal settings learn the same."""

    data: Path
    """conversations to learn from: JSONL or JSON, gzipped or not"""
    output: Path
    """directory of the finished drafter; the run's state is kept beside it until the run is complete"""
    held_out: Path | None = None
    """conversations whose greedy answers are replayed to measure acceptance; never trained on"""
    num_layers: int = 4
    num_draft_tokens: int = 8
    """depths to learn, so the most draft tokens a step that can be served"""
    aux_layer_ids: tuple[int, ...] | None = None
    """target layers to read; by default 2, L/2 and L-3"""
    mask_token_id: int | None = None
    """the placeholders' token; by default one that no text uses is looked for"""
    fc_norm: bool = True
    """norm each aux state before they are fused"""
    embeddings: Literal["shared", "own"] = "shared"
    """shared: the target's table with a mask row of the drafter's own; own: a copy that is trained"""
    init: Literal["target", "random"] = "target"
    """start the layers from the target's last ones, or from noise"""
    loss: Literal["kl", "ce"] = "kl"
    """match the target's whole distribution, or its most likely token"""
    retention: float = 0.8
    """COD: the share of anchors that depth d keeps is retention ** d"""
    retention_floor: float = 0.0
    """COD: no depth keeps a smaller share than this"""
    max_length: int = 512
    """tokens a row; longer conversations are cut"""
    batch_size: int = 16
    """rows an optimizer step"""
    num_steps: int = 1000
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    min_learning_rate_ratio: float = 0.02
    """where the cosine ends, as a share of the peak"""
    weight_decay: float = 0.05
    max_gradient_norm: float = 1.0
    seed: int = 0
    save_every: int = 500
    """steps between states from which an interrupted run goes on"""
    log_every: int = 20
    """steps between lines of metrics.jsonl"""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile; auto compiles on a GPU"""

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_draft_tokens", "batch_size", "num_steps", "save_every", "log_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("warmup_steps", "seed", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("learning_rate", "max_gradient_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"{name} must be one of {', '.join(map(repr, choices))}, got {getattr(self, name)!r}",
                    hint=nearest(str(getattr(self, name)), choices),
                )
        if not 0 < self.retention <= 1 or not 0 <= self.retention_floor <= 1:
            raise ConfigError(
                f"retention must be above 0 and at most 1 and retention_floor between 0 and 1, "
                f"got {self.retention} and {self.retention_floor}"
            )
        if not 0 <= self.min_learning_rate_ratio <= 1:
            raise ConfigError(f"min_learning_rate_ratio must be between 0 and 1, got {self.min_learning_rate_ratio}")
        if self.aux_layer_ids is not None and not self.aux_layer_ids:
            raise ConfigError("aux_layer_ids is empty", hint="leave it out to read layers 2, L/2 and L-3")
        if self.max_length < self.num_draft_tokens + 3:
            raise ConfigError(
                f"max_length {self.max_length} leaves no room for {self.num_draft_tokens} draft tokens",
                hint=f"use at least {self.num_draft_tokens + 3}",
            )


CHOICES: dict[str, tuple[str, ...]] = {
    name: get_args(hint) for name, hint in get_type_hints(TrainConfig).items() if get_origin(hint) is Literal
}
