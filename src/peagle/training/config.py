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
    """what to learn from: a directory of shards, or a file (JSONL or JSON, gzipped or not) of conversations or of
    prompts, which the target then answers first"""
    output: Path
    """directory of the finished drafter; the run's state and metrics are in its folder run"""
    method: Literal["p-eagle", "eagle3"] = "p-eagle"
    """p-eagle drafts all tokens in one pass; eagle3, the control, one a pass"""
    from_drafter: Path | None = None
    """drafter directory whose training goes on, in place of init; `--from` for short. Its shape must be the one set
    here"""
    held_out: Path | None = None
    """conversations whose greedy answers are replayed to measure acceptance; never trained on"""
    num_held_out: int = 128
    """without held_out, so many greedy answers of the data are set apart for it, but no more than a tenth of them"""
    num_layers: int = 4
    """EAGLE-3 drafters usually have 1, because each draft token costs a pass"""
    num_draft_tokens: int = 8
    """depths to learn, so the most draft tokens a step that can be served"""
    aux_layer_ids: tuple[int, ...] | None = None
    """target layers to read; by default 2, L/2 and L-3"""
    mask_token_id: int | None = None
    """the placeholders' token; by default one that no text uses is looked for"""
    fc_norm: bool = True
    """norm each aux state before they are fused"""
    norm_before_fc: bool = False
    """one norm over all aux states instead; needs fc_norm off"""
    norm_output: bool = True
    """eagle3: carry the normed state to the next draft token, not the raw one"""
    draft_vocab_size: int | None = None
    """draft only so many tokens, the most frequent ones of the data's answers; by default all of the target's"""
    embeddings: Literal["shared", "own"] = "shared"
    """shared: the target's table with a mask row of the drafter's own; own: a copy that is trained"""
    init: Literal["target", "random"] = "target"
    """start the layers from the target's last ones, or from noise"""
    loss: Literal["kl", "ce", "kl+ce"] = "ce"
    """match the target's most likely token (ce), its whole distribution (kl), or both (the sum)"""
    labels: Literal["all", "reached"] | None = None
    """p-eagle: learn from every label, or (the default) only from those a draft would be judged by: where the text
    between anchor and label is what the target finds likeliest. In sampled answers much of the rest is noise"""
    depth_weights: tuple[float, ...] | None = None
    """what a label of each depth counts in the loss; by default 1 at every depth"""
    retention: float = 0.8
    """COD: the share of anchors that depth d keeps is retention ** d"""
    retention_floor: float = 0.0
    """COD: no depth keeps a smaller share than this"""
    max_length: int = 512
    """tokens a row; longer conversations are cut"""
    batch_size: int = 16
    """rows an optimizer step"""
    num_steps: int = 1000
    """optimizer steps"""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon trains the layers' matrices and fc by orthogonalized momentum, and the rest by AdamW"""
    learning_rate: float = 1e-3
    """at its peak, after the warm-up"""
    warmup_steps: int = 100
    """steps in which the learning rate rises to its peak"""
    min_learning_rate_ratio: float = 0.02
    """where the cosine ends, as a share of the peak"""
    weight_decay: float = 0.05
    max_gradient_norm: float = 1.0
    """longer gradients are shortened to it"""
    seed: int = 0
    """of the order of the text, of COD's draws and of weights that start as noise"""
    save_every: int = 500
    """steps between states from which an interrupted run goes on"""
    log_every: int = 20
    """steps between lines of metrics.jsonl"""
    features: Literal["online", "cached"] = "online"
    """online: the target runs beside the drafter; cached: its states are written to disk once, then only read"""
    features_directory: Path | None = None
    """where cached states are kept, to be shared by runs on the same data; by default beside the run's state"""
    micro_batch_size: int | None = None
    """rows that go through target and drafter at once; by default as many as fit into memory"""
    num_partitions: int | None = None
    """parts in which the slots of a row are trained one after the other; by default as few as fit into memory"""
    checkpoint_activations: bool = False
    """keep only what enters each layer and compute the rest again for the gradients, to save memory"""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """with several processes: ddp keeps the whole drafter in each; fsdp spreads the layers of drafter and target"""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile; auto compiles on a GPU"""

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_draft_tokens", "batch_size", "num_steps", "save_every", "log_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be between 0 and 2**63 - 1, got {self.seed}")
        for name in ("warmup_steps", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("micro_batch_size", "num_partitions"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}", hint="leave it out")
        if self.parallel == "fsdp" and self.optimizer == "muon":
            raise ConfigError("muon updates whole matrices, which fsdp spreads", hint="use adamw, or parallel = ddp")
        if self.features_directory is not None and self.features != "cached":
            raise ConfigError("features_directory is for cached features", hint='set features to "cached"')
        for name in ("learning_rate", "max_gradient_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices and value != getattr(TrainConfig, name):  # where it is open by default
                raise ConfigError(
                    f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}",
                    hint=nearest(str(value), choices),
                )
        if not 0 < self.retention <= 1 or not 0 <= self.retention_floor <= 1:
            raise ConfigError(
                f"retention must be above 0 and at most 1 and retention_floor between 0 and 1, "
                f"got {self.retention} and {self.retention_floor}"
            )
        if not 0 <= self.min_learning_rate_ratio <= 1:
            raise ConfigError(f"min_learning_rate_ratio must be between 0 and 1, got {self.min_learning_rate_ratio}")
        self._check_method()
        weights = self.depth_weights
        if weights is not None and (
            len(weights) != self.num_draft_tokens
            or not all(0 <= weight < math.inf for weight in weights)
            or not any(weights)
        ):
            raise ConfigError(
                f"depth_weights must be {self.num_draft_tokens} numbers of at least 0, one for each of "
                f"num_draft_tokens, and not all 0, got {list(weights)}"
            )
        if self.aux_layer_ids is not None and not self.aux_layer_ids:
            raise ConfigError("aux_layer_ids is empty", hint="leave it out to read layers 2, L/2 and L-3")
        if self.max_length < self.num_draft_tokens + 3:
            raise ConfigError(
                f"max_length {self.max_length} leaves no room for {self.num_draft_tokens} draft tokens",
                hint=f"use at least {self.num_draft_tokens + 3}",
            )

    def _check_method(self) -> None:
        """Refuse settings that the method would not read, and those that exclude each other."""
        if self.num_held_out < 0:
            raise ConfigError(f"num_held_out must be at least 0, got {self.num_held_out}")
        if self.method == "p-eagle" and not self.norm_output:
            raise ConfigError("norm_output is for eagle3: p-eagle carries no state on", hint="leave it out")
        if self.method == "eagle3" and self.mask_token_id is not None:
            raise ConfigError("mask_token_id is for p-eagle: eagle3 has no placeholders", hint="leave it out")
        if self.method == "eagle3" and self.labels is not None:
            raise ConfigError("labels is for p-eagle: eagle3 sees the text before a label", hint="leave it out")
        if self.method == "eagle3" and (self.num_partitions or 1) > 1:
            raise ConfigError("num_partitions is for p-eagle: eagle3 goes a depth at a time", hint="leave it out")
        if self.fc_norm and self.norm_before_fc:
            raise ConfigError("fc_norm and norm_before_fc exclude each other", hint="turn fc_norm off: --no-fc-norm")
        if self.draft_vocab_size is not None and self.draft_vocab_size < 2:
            raise ConfigError(f"draft_vocab_size must be at least 2, got {self.draft_vocab_size}")


CHOICES: dict[str, tuple[str, ...]] = {
    name: get_args(part)
    for name, hint in get_type_hints(TrainConfig).items()
    for part in (hint, *get_args(hint))
    if get_origin(part) is Literal
}
