"""A tiny target and its drafter as directories, for tests of commands."""

from pathlib import Path

import torch

from peagle.drafter.card import DrafterCard, TargetIdentity
from peagle.drafter.checkpoint import save_drafter
from tiny import tiny_drafter, tiny_target


def write_models(root: Path) -> Path:
    """Directories `target` and, in the compact form, `drafter`."""
    target = tiny_target()
    target.model.save_pretrained(root / "target")
    target.tokenizer.save_pretrained(root / "target")
    drafter = tiny_drafter(target)
    config = drafter.config
    card = DrafterCard(
        TargetIdentity.of(target), config.method, config.num_draft_tokens, config.max_length, config.aux_layer_ids
    )
    save_drafter(drafter, root / "drafter", card, full=False, dtype=torch.float32)
    return root
