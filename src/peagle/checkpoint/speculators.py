"""Write a drafter in the layout of the speculators library.

`vllm serve DIRECTORY` finds target, method and number of draft tokens in it. vLLM copies the layer config and adds the
keys it knows for the method. Keys it would drop (for P-EAGLE `fc_norm` and the number of aux states) are therefore
written to the layer config as well.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.checkpoint.card import DrafterCard
from peagle.checkpoint.config_json import AUX_KEY, NORM_FLAGS, layer_values
from peagle.checkpoint.native import write_directory
from peagle.checkpoint.vllm import (
    MIXED_WINDOWS,
    all_tensors,
    check_same,
    has_mixed_windows,
    leave_pair_head,
    served_config,
)
from peagle.drafter.config import DrafterConfig
from peagle.drafter.model import Drafter
from peagle.drafter.vocab import draft_to_target
from peagle.errors import ConfigError
from peagle.targets.hf import HFTarget

log = logging.getLogger(__name__)

CHECKED_WITH = "0.9.0"
"""The speculators release that our tests load the result with."""


def write(
    drafter: Drafter, target: HFTarget, card: DrafterCard, directory: Path, *, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """Write the directory with all tables, without a pair head, read it back and compare; returns the directory."""
    drafter, card = leave_pair_head(drafter, card)
    config = served_config(drafter, target)
    if config.hidden_size != config.target_hidden_size:
        raise ConfigError(
            f"hidden_size {config.hidden_size} differs from the target's {config.target_hidden_size}, which speculators"
            " does not support",
            hint="export it with --to vllm, which supports any size",
        )
    if has_mixed_windows(config):
        log.warning("vLLM cannot serve this directory: %s", MIXED_WINDOWS)
    write_directory(directory, _tensors(drafter), _values(config, target, dtype), card, dtype)
    check_same(drafter, target, directory, dtype)
    return directory


def verifier_name(target: HFTarget) -> str:
    """The target's Hugging Face id if it is in the Hub's cache, else its directory.

    >>> from types import SimpleNamespace
    >>> verifier_name(SimpleNamespace(directory=Path("/cache/hub/models--org--model/snapshots/0123"), name="model"))
    'org/model'
    """
    parts = [] if target.directory is None else list(target.directory.parts)
    if "snapshots" in parts[1:]:
        kind, *names = parts[parts.index("snapshots") - 1].split("--")
        if kind == "models" and names:
            return "/".join(names)
    return str(target.directory or target.name)


def _tensors(drafter: Drafter) -> dict[str, Tensor]:
    """vLLM's names, both tables, and both directions of a vocabulary map."""
    tensors = all_tensors(drafter)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].clone()  # safetensors cannot store tied tables
    if "d2t" in tensors:
        is_drafted_V = torch.zeros(drafter.config.vocab_size, dtype=torch.bool)
        is_drafted_V[draft_to_target(tensors["d2t"].cpu())] = True
        tensors["t2d"] = is_drafted_V
    return tensors


def _values(config: DrafterConfig, target: HFTarget, dtype: torch.dtype) -> dict[str, Any]:
    kind, name = ("peagle", "PEagleDraftModel") if config.parallel else ("eagle3", "Eagle3DraftModel")
    layers = layer_values(config) | {"tie_word_embeddings": False, "num_aux_hidden_states": len(config.aux_layer_ids)}
    if config.fc_norm:
        layers["fc_norm"] = True
    values: dict[str, Any] = {
        "architectures": [name],
        "speculators_model_type": kind,
        "speculators_version": CHECKED_WITH,
        "transformer_layer_config": layers,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.usual_num_draft_tokens,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {
                "name_or_path": verifier_name(target),
                "architectures": list(target.model.config.architectures or [type(target.model).__name__]),
            },
        },
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None,
        AUX_KEY: list(config.aux_layer_ids),
        **{name: getattr(config, name) for name in NORM_FLAGS},
        "embed_requires_grad": config.embeddings == "own",
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }
    if config.parallel:
        values["mask_token_id"] = config.mask_token_id
    return values
