"""A drafter as vLLM's own directory: every table it needs inside, and checked by reading it back."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.drafter.card import DrafterCard
from peagle.drafter.checkpoint import load_drafter, stored_tensors, write_directory
from peagle.drafter.config import DrafterConfig
from peagle.drafter.config_json import write_config
from peagle.drafter.model import Drafter
from peagle.errors import CheckpointError, ConfigError
from peagle.targets.hf import HFTarget

log = logging.getLogger(__name__)

LENGTH_FREE_ROPE = {"default", "llama3", "linear"}
"""Rotary settings whose angles do not depend on max_position_embeddings, which then only sizes a table."""
MIXED_WINDOWS = "vLLM keeps all layers of a drafter in one kind of memory and does not start with two"
UNCOMPARED = {"embeddings", "head", "num_draft_tokens", "advised_draft_tokens", "max_length"}
"""Settings that may change on the way: what is stored, what card and catalog say, and the room for positions."""


def write(
    drafter: Drafter, target: HFTarget, card: DrafterCard, directory: Path, *, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """Write the directory, read it back, and refuse to leave one that does not say the same; returns it.

    The embedding table goes with a parallel drafter, whose placeholder has a row of its own in it; tables that are the
    target's stay out otherwise, because engines share the target's. A vocabulary map is written only where there is
    one, as offsets.
    """
    if has_mixed_windows(drafter.config):
        raise ConfigError(
            f"of the drafter's {drafter.config.num_layers} layers some see a window of {drafter.config.sliding_window} "
            f"positions and some the whole text; {MIXED_WINDOWS}",
            hint="serve it with peagle, or train one whose layers all see the same",
        )
    config = served_config(drafter, target)
    write_directory(directory, stored_tensors(drafter, full=True), write_config(config, dtype), card, dtype)
    check_same(drafter, target, directory, dtype)
    return directory


def has_mixed_windows(config: DrafterConfig) -> bool:
    return 0 < len(config.sliding_layers) < config.num_layers


def served_config(drafter: Drafter, target: HFTarget) -> DrafterConfig:
    """The drafter's config, with room for every position of the target.

    vLLM makes its rotary table for max_position_embeddings and reads past its end beyond that.
    """
    config = drafter.config
    if config.max_length >= target.max_length:
        return config
    if config.rope_parameters.get("rope_type") in LENGTH_FREE_ROPE:
        log.info(
            "max_position_embeddings is written as %d, the target's, instead of %d: vLLM's rotary table must cover it",
            target.max_length,
            config.max_length,
        )
        return dataclasses.replace(config, max_length=target.max_length)
    log.warning(
        "the drafter's max_position_embeddings is %d, and vLLM's rotary table ends there: serve it with "
        "--max-model-len %d or less",
        config.max_length,
        config.max_length,
    )
    return config


def speculative_config(drafter: Drafter, directory: Path, num_draft_tokens: int | None = None) -> dict[str, Any]:
    """What vLLM's --speculative-config takes. It must be told the method: it does not see it in the files."""
    return {
        "method": "eagle3",
        "model": str(directory),
        "num_speculative_tokens": num_draft_tokens or drafter.config.usual_num_draft_tokens,
        "parallel_drafting": drafter.config.parallel,
    }


def check_same(drafter: Drafter, target: HFTarget, directory: Path, dtype: torch.dtype) -> None:
    """Read a directory back and compare it with the drafter it was written from, rounded to `dtype` as its files are.

    On a difference the directory's files are left for inspection, and the error names the first.
    """
    loaded = load_drafter(directory, target, allow_mismatch=True)
    if loaded.repairs:
        raise _broken(directory, "; ".join(loaded.repairs))
    for name in drafter.config.__dataclass_fields__:
        ours, theirs = getattr(drafter.config, name), getattr(loaded.config, name)
        if ours != theirs and name not in UNCOMPARED:
            raise _broken(directory, f"{name} is {theirs!r} there and {ours!r} here")
    found = meaning(loaded)
    for name, wanted in meaning(drafter).items():
        if not torch.equal(_rounded(wanted, dtype), _rounded(found[name], dtype)):
            raise _broken(directory, f"the tensor {name!r} differs")


def meaning(drafter: Drafter) -> dict[str, Tensor]:
    """What a drafter computes with, whichever tables it shares: its parameters, its embeddings and its head."""
    tensors = {name: tensor.detach() for name, tensor in drafter.state_dict().items()}
    tensors |= {"embed_tokens.weight": drafter.embedding_VD.detach(), "lm_head.weight": drafter.head_VD.detach()}
    if drafter.config.parallel:
        table = tensors["embed_tokens.weight"].clone()
        table[drafter.config.mask_token_id] = tensors["mask_embedding"].to(table.dtype)
        tensors["embed_tokens.weight"] = table
    return tensors


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.cpu().to(dtype) if tensor.is_floating_point() else tensor.cpu()


def _broken(directory: Path, difference: str) -> CheckpointError:
    return CheckpointError(
        f"{directory} does not read back as the drafter it was written from: {difference}",
        hint="this is a fault of peagle, or of the disk; export it again, and report it if it stays",
    )
