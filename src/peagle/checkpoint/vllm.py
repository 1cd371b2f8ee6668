"""Write a drafter in vLLM's layout, with every table vLLM needs, and check it by reading it back."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.checkpoint.card import DrafterCard, without_pair_head
from peagle.checkpoint.config_json import write_config
from peagle.checkpoint.native import load_drafter, stored_tensors, write_directory
from peagle.drafter.config import DrafterConfig
from peagle.drafter.model import Drafter
from peagle.errors import CheckpointError, ConfigError
from peagle.targets.hf import HFTarget

log = logging.getLogger(__name__)

LENGTH_FREE_ROPE = {"default", "llama3", "linear"}
"""Rotary types whose angles do not depend on max_position_embeddings."""
MIXED_WINDOWS = "vLLM supports one kind of KV cache per drafter and does not start with two"
NOT_COMPUTED = {"embeddings", "head", "num_draft_tokens", "advised_draft_tokens"}
"""Settings that do not change what a drafter computes: storage, and facts from card and catalog."""


def write(
    drafter: Drafter, target: HFTarget, card: DrafterCard, directory: Path, *, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """Write the directory without a pair head, read it back and compare; returns the directory.

    A parallel drafter gets the embedding table, since its mask token has its own row. Other tables of the target are
    left out, because engines share the target's. A vocabulary map is written as offsets, if there is one.
    """
    if has_mixed_windows(drafter.config):
        raise ConfigError(
            f"some of the drafter's {drafter.config.num_layers} layers have a sliding window of "
            f"{drafter.config.sliding_window}, some full attention; {MIXED_WINDOWS}",
            hint="serve it with peagle, or train one with the same attention in all layers",
        )
    drafter, card = leave_pair_head(drafter, card)
    config = served_config(drafter, target)
    write_directory(directory, stored_tensors(drafter, full=True), write_config(config, dtype), card, dtype)
    check_same(drafter, target, directory, dtype)
    return directory


def leave_pair_head(drafter: Drafter, card: DrafterCard) -> tuple[Drafter, DrafterCard]:
    """The drafter as other engines know it, and its card without what was measured with the pair head."""
    if drafter.pair_head is None:
        return drafter, card
    log.info("leaving out the pair head of rank %d, which only peagle reads", drafter.pair_head.rank)
    return drafter.without_pair_head(), without_pair_head(card)


def has_mixed_windows(config: DrafterConfig) -> bool:
    return 0 < len(config.sliding_layers) < config.num_layers


def served_config(drafter: Drafter, target: HFTarget) -> DrafterConfig:
    """The drafter's config with at least the target's number of positions: vLLM reads past a shorter rotary table."""
    config = drafter.config
    if config.max_length >= target.max_length:
        return config
    if config.rope_parameters.get("rope_type") in LENGTH_FREE_ROPE:
        log.info(
            "max_position_embeddings: %d as in the target, instead of %d, so that vLLM's rotary table covers it",
            target.max_length,
            config.max_length,
        )
        return dataclasses.replace(config, max_length=target.max_length)
    log.warning(
        "the drafter's max_position_embeddings is %d, where vLLM's rotary table ends: serve with --max-model-len %d "
        "or less",
        config.max_length,
        config.max_length,
    )
    return config


def speculative_config(drafter: Drafter, directory: Path, num_draft_tokens: int | None = None) -> dict[str, Any]:
    """The value of vLLM's --speculative-config. vLLM does not read the method from the files."""
    return {
        "method": "eagle3",
        "model": str(directory),
        "num_speculative_tokens": num_draft_tokens or drafter.config.usual_num_draft_tokens,
        "parallel_drafting": drafter.config.parallel,
    }


def check_same(drafter: Drafter, target: HFTarget, directory: Path, dtype: torch.dtype) -> None:
    """Read a directory back and compare it with the drafter it was written from, rounded to `dtype`.

    The error names the first difference; the files stay for inspection.
    """
    loaded = load_drafter(directory, target, allow_mismatch=True)
    if loaded.repairs:
        raise _broken(directory, "; ".join(loaded.repairs))
    for name in drafter.config.__dataclass_fields__:
        ours, theirs = getattr(drafter.config, name), getattr(loaded.config, name)
        if ours != theirs and name not in NOT_COMPUTED | {"max_length"}:  # `served_config` changes it
            raise _broken(directory, f"{name} is {theirs!r} there and {ours!r} here")
    found = loaded.state_dict() | all_tensors(loaded)  # the mask row also by its own name
    for name, wanted in (drafter.state_dict() | all_tensors(drafter)).items():
        if not torch.equal(_rounded(wanted, dtype), _rounded(found[name], dtype)):
            raise _broken(directory, f"the tensor {name!r} differs")


def all_tensors(drafter: Drafter) -> dict[str, Tensor]:
    """All tensors a drafter computes with by vLLM's names, shared tables included."""
    tables = {"embed_tokens.weight": drafter.embedding_VD.detach(), "lm_head.weight": drafter.head_VD.detach()}
    return tables | stored_tensors(drafter, full=True)


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.cpu().to(dtype) if tensor.is_floating_point() else tensor.cpu()


def _broken(directory: Path, difference: str) -> CheckpointError:
    return CheckpointError(
        f"{directory} does not read back as the drafter it was written from: {difference}",
        hint="export it again; if the error persists, please report it",
    )
