"""Settings of an adaptation. Imports no torch, so the command line can be built from them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.data.config import require_at_least
from peagle.errors import ConfigError

MOST_LOSS = 0.02
"""The largest share of the acceptance length on old text that an adaptation may cost."""


@dataclass(frozen=True, kw_only=True)
class AdaptSettings:
    """What to adapt to, and for how long."""

    data: Path
    """what is served: a directory of `peagle serve --record --record-text`, or a JSONL/JSON file of conversations or
    prompts (the target answers them anew), or a shard directory from `peagle data`"""
    output: Path
    """directory of the adapted drafter. It is written only if the drafter is kept"""
    old: Path | None = None
    """text of the kind that the drafter was trained on, as for --data; default: the target writes some"""
    minutes: float = 5.0
    """minutes of training; fewer if ten passes over the text take less"""
    old_share: float = 0.25
    """share of old text in training, so that the drafter does not forget it"""
    num_held_out: int = 64
    """conversations of each text to measure acceptance on, at most a fifth of them; never trained on"""
    num_old: int | None = None
    """conversations that the target writes without --old (default: 1024 on a GPU, 96 on a CPU)"""
    learning_rate: float = 3e-4
    """peak learning rate"""
    seed: int = 0
    """random seed of the text and the training"""

    def __post_init__(self) -> None:
        require_at_least(self, 1, "num_held_out", "num_old")
        require_at_least(self, 0, "seed")
        if not 0 < self.minutes <= 24 * 60:
            raise ConfigError(f"minutes must be above 0 and at most {24 * 60}, got {self.minutes:g}")
        if not 0 <= self.old_share < 1:
            raise ConfigError(f"old_share must be at least 0 and below 1, got {self.old_share:g}")
        if not 0 < self.learning_rate < 1:
            raise ConfigError(f"learning_rate must be above 0 and below 1, got {self.learning_rate:g}")

    def described(self) -> dict[str, Any]:
        """The settings that a rerun must repeat."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in vars(self).items()}
