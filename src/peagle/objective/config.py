"""Settings of a training run, from command-line options and TOML recipes."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from peagle.config import check_choices
from peagle.data.config import require_at_least
from peagle.errors import ConfigError

DEEP = 8
"""Depths from this one on, counted from 0, are sparse under COD sampling and have a floor of their own."""


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """What to train on and where to write."""

    data: Path
    """shard directory from `peagle data`, or a JSONL/JSON file of conversations or of prompts (answered first)"""
    output: Path
    """directory of the finished drafter; run state and metrics go to OUTPUT/run"""
    from_drafter: Path | None = None
    """continue training this drafter (short: --from); its shape must match the settings"""
    held_out: Path | None = None
    """conversations with greedy answers to measure acceptance on; never trained on"""
    num_held_out: int = 128
    """without --held-out, hold out this many greedy answers of the data (at most a tenth of them)"""


@dataclass(frozen=True, kw_only=True)
class DrafterSettings:
    """Shape of the drafter."""

    method: Literal["p-eagle", "eagle3"] = "p-eagle"
    """p-eagle drafts all tokens in one forward pass, eagle3 one token per pass"""
    num_layers: int = 4
    """decoder layers; EAGLE-3 drafters usually have 1"""
    num_draft_tokens: int = 8
    """depths to train: the most draft tokens per step that can be served"""
    draft_vocab_size: int | None = None
    """draft only the N most frequent tokens of the answers (default: full vocabulary)"""
    init: Literal["target", "random"] = "target"
    """initialize layers from the target's last layers, or randomly"""
    pair_head: int | None = None
    """train a pair head of this rank (64 to 256) for the --from drafter, whose weights do not change"""


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Schedule and objective."""

    num_steps: int = 1000
    """optimizer steps"""
    batch_size: int = 16
    """packed sequences per step"""
    max_length: int = 512
    """tokens per packed sequence; longer conversations are truncated"""
    learning_rate: float = 1e-3
    """peak learning rate (AdamW, cosine decay)"""
    warmup_steps: int = 100
    """linear warmup"""
    loss: Literal["kl", "ce", "kl+ce", "tv+ce", "lk"] = "ce"
    """ce: match the target's argmax; kl: match its distribution; kl+ce: the sum; tv+ce: 0.9 times the total variation
    distance plus 0.1 times ce; lk: the negative log of the chance that a sampled draft is accepted"""
    labels: Literal["all", "reached", "until-failure", "on-policy"] | None = None
    """p-eagle: train on all labels, or (default) only on those reached when serving, where the text from anchor to
    label is the target's argmax; the rest is mostly noise in sampled answers. until-failure: of these only up to the
    drafter's first wrong draft. on-policy: the reached ones, with twice the weight where serving would begin a draft
    after a rejection"""
    retention: float = 0.8
    """COD sampling: depth d keeps a share retention ** d of the anchors"""
    seed: int = 0
    """seed of data order, COD sampling and random init"""
    save_every: int = 500
    """steps between checkpoints to resume from"""
    keep_best: bool = False
    """finish with the checkpoint of the best replayed acceptance on held-out answers, not with the last one"""


@dataclass(frozen=True, kw_only=True)
class HardwareSettings:
    """Memory, speed and several GPUs."""

    features: Literal["online", "cached"] = "online"
    """online: run the target in every step; cached: store its hidden states on disk once"""
    checkpoint_activations: bool = False
    """recompute activations in backward to save memory"""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """under torchrun: replicate the drafter, or shard the layers of drafter and target"""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(DataSettings, DrafterSettings, TrainingSettings, HardwareSettings):
    """All settings. The fields of this class are set in a recipe file, the inherited ones also by options."""

    aux_layer_ids: tuple[int, ...] | None = None
    """target layers the drafter reads (default: 2, L/2, L-3)"""
    mask_token_id: int | None = None
    """token id of the placeholder slots (default: an unused token)"""
    fc_norm: bool = True
    """norm each aux state before `fc`"""
    norm_before_fc: bool = False
    """one norm over all aux states instead; requires fc_norm = false"""
    norm_output: bool = True
    """eagle3: carry the normed state to the next depth, not the raw one"""
    embeddings: Literal["shared", "own"] = "shared"
    """shared: the target's table plus a trained mask row; own: a trained copy"""
    depth_weights: tuple[float, ...] | None = None
    """loss weight by depth (default: 1)"""
    retention_floor: float = 0.0
    """COD sampling: the least share that any depth keeps"""
    deep_floor: float = 0.1
    """COD sampling: the least share that depths beyond 8 keep, but no more than depth 8 keeps"""
    min_learning_rate_ratio: float = 0.02
    """final learning rate of the cosine decay, relative to the peak"""
    weight_decay: float = 0.05
    max_gradient_norm: float = 1.0
    """gradient clipping"""
    log_every: int = 20
    """steps between lines of metrics.jsonl"""
    pair_tables: Literal["projected", "free"] | None = None
    """pair head: rows of its own for each token plus a projection of the target's tables (default), or rows only"""
    features_directory: Path | None = None
    """directory of cached features, shared by runs on the same data (default: OUTPUT/features)"""
    micro_batch_size: int | None = None
    """packed sequences per forward pass (default: as many as fit into memory)"""
    num_partitions: int | None = None
    """segments of the slots of a sequence, trained one after another (default: as few as fit into memory)"""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile; auto compiles on a GPU"""

    def __post_init__(self) -> None:
        require_at_least(self, 1, "num_layers", "num_draft_tokens", "batch_size", "num_steps", "save_every")
        require_at_least(self, 1, "log_every", "micro_batch_size", "num_partitions", "pair_head")
        require_at_least(self, 0, "num_held_out", "warmup_steps", "weight_decay")
        require_at_least(self, 2, "draft_vocab_size")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be between 0 and 2**63 - 1, got {self.seed}")
        if self.features_directory is not None and self.features != "cached":
            raise ConfigError("features_directory requires features = cached", hint="pass --features cached")
        for name in ("learning_rate", "max_gradient_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        check_choices(self)
        if not 0 < self.retention <= 1:
            raise ConfigError(f"retention must be above 0 and at most 1, got {self.retention}")
        for name in ("retention_floor", "deep_floor", "min_learning_rate_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        self._check_method()
        self._check_pair_head()
        weights = self.depth_weights
        if weights is not None and (
            len(weights) != self.num_draft_tokens
            or not all(0 <= weight < math.inf for weight in weights)
            or not any(weights)
        ):
            raise ConfigError(
                f"depth_weights must be {self.num_draft_tokens} numbers of at least 0, one per draft token, not all 0, "
                f"got {list(weights)}"
            )
        if self.aux_layer_ids is not None and not self.aux_layer_ids:
            raise ConfigError("aux_layer_ids is empty", hint="omit it to read layers 2, L/2 and L-3")
        if self.max_length < self.num_draft_tokens + 3:
            raise ConfigError(
                f"max_length {self.max_length} is too short for {self.num_draft_tokens} draft tokens",
                hint=f"use at least {self.num_draft_tokens + 3}",
            )

    @property
    def kept_shares(self) -> tuple[float, ...]:
        """COD sampling: the share of the anchors that keeps each depth, which never rises with the depth."""
        shares = [max(self.retention**depth, self.retention_floor) for depth in range(self.num_draft_tokens)]
        floor = min(self.deep_floor, shares[min(DEEP, self.num_draft_tokens) - 1])
        return tuple(share if depth < DEEP else max(share, floor) for depth, share in enumerate(shares))

    def _check_method(self) -> None:
        """Reject settings that the method does not use, and contradictory ones."""
        if self.method == "p-eagle" and not self.norm_output:
            raise ConfigError("norm_output is for eagle3: p-eagle carries no state between depths", hint="omit it")
        if self.method == "eagle3" and self.mask_token_id is not None:
            raise ConfigError("mask_token_id is for p-eagle: eagle3 has no placeholders", hint="omit it")
        if self.method == "eagle3" and self.labels is not None:
            raise ConfigError("labels is for p-eagle: eagle3 reads the text before a label", hint="omit it")
        if self.method == "eagle3" and (self.num_partitions or 1) > 1:
            raise ConfigError("num_partitions is for p-eagle: eagle3 runs one depth at a time", hint="omit it")
        if self.fc_norm and self.norm_before_fc:
            raise ConfigError("fc_norm and norm_before_fc exclude each other", hint="set fc_norm = false")

    def _check_pair_head(self) -> None:
        if self.pair_head is None:
            if self.pair_tables is not None:
                raise ConfigError("pair_tables requires pair_head", hint="pass --pair-head 128, or omit it")
            return
        if self.method != "p-eagle":
            raise ConfigError("pair_head is for p-eagle: eagle3 reads the draft before each draft", hint="omit it")
        if self.from_drafter is None:
            raise ConfigError("pair_head requires a trained drafter", hint="pass --from DRAFTER")
        if self.labels in ("until-failure", "on-policy"):
            raise ConfigError(f"labels = {self.labels} is not for a pair head", hint="omit --labels")
        if self.loss != "ce":
            raise ConfigError(f"a pair head is trained with ce, got loss {self.loss}", hint="omit --loss")
