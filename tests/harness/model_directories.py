"""A tiny target and its drafter as directories, for tests of commands."""

from pathlib import Path

import torch

from harness.tiny_models import tiny_drafter, tiny_target
from peagle.checkpoint.card import DrafterCard, TargetIdentity
from peagle.checkpoint.native import save_drafter


def write_models(root: Path) -> Path:
    """Directories `target` and, in the compact form, `drafter`."""
    target = tiny_target(num_layers=3)
    target.model.save_pretrained(root / "target")
    target.tokenizer.save_pretrained(root / "target")
    drafter = tiny_drafter(target, num_layers=1)
    config = drafter.config
    card = DrafterCard(
        TargetIdentity.of(target), config.method, config.num_draft_tokens, config.max_length, config.aux_layer_ids
    )
    save_drafter(drafter, root / "drafter", card, full=False, dtype=torch.float32)
    return root
