"""Drafter directories: config.json and model.safetensors as vLLM's P-EAGLE loader reads them, plus the card.

Two sizes of the same thing are written. The full directory carries the embedding table, as vLLM needs it. The compact
one leaves out tables that are the target's and keeps only the drafter's own mask row, as `mask_embedding`.

Published directories of other makers are read too: `config_json.py` knows their keys, `_read_tensors` their names.
"""

import json
import logging
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from peagle.drafter.card import CARD_NAME, DrafterCard, differences, read_card
from peagle.drafter.config import DrafterConfig
from peagle.drafter.config_json import read_config, write_config
from peagle.drafter.model import Drafter
from peagle.drafter.vocab import check_offsets
from peagle.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from peagle.targets.hf import HFTarget

log = logging.getLogger(__name__)

WEIGHTS_NAME = "model.safetensors"
CONFIG_NAME = "config.json"


def save_drafter(
    drafter: Drafter, directory: Path, card: DrafterCard, *, full: bool, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write a drafter directory, replacing an earlier one's three files; a failure leaves the earlier ones."""
    tensors = {name: tensor.detach() for name, tensor in drafter.state_dict().items()}
    if drafter.config.parallel:
        tensors["mask_hidden"] = tensors["mask_hidden"].view(1, 1, -1)
        if full or drafter.config.embeddings == "own":
            table = drafter.embedding_VD.detach().clone()
            table[drafter.config.mask_token_id] = tensors.pop("mask_embedding").to(table.dtype)
            tensors["embed_tokens.weight"] = table
    if full and drafter.config.head == "shared" and drafter.config.draft_vocab_size < drafter.config.vocab_size:
        tensors["lm_head.weight"] = drafter.head_VD  # engines can share the target's whole head, not rows of it
    tensors = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).cpu().contiguous()
        for name, tensor in tensors.items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=directory, prefix=".saving-"))
    try:
        save_file(tensors, scratch / WEIGHTS_NAME, metadata={"format": "pt"})
        (scratch / CONFIG_NAME).write_text(json.dumps(write_config(drafter.config, dtype), indent=2) + "\n")
        (scratch / CARD_NAME).write_text(card.to_json())
        for name in (WEIGHTS_NAME, CONFIG_NAME, CARD_NAME):
            (scratch / name).replace(directory / name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def load_drafter(path: Path | str | None, target: "HFTarget", *, allow_mismatch: bool = False) -> Drafter:
    """Load a drafter for `target`, in the target's precision and on its device, and tap the layers it reads.

    None loads the drafter that ships for the target, the name of one that ships (as
    "smollm2-135m-instruct-eagle3") that one. A drafter whose card names other weights, another tokenizer or another
    chat template is refused unless `allow_mismatch`.
    """
    directory = drafter_directory(path, target)
    card = read_card(directory)
    if card is not None:
        _check_card(card, target, directory, allow_mismatch)
    tensors = _read_tensors(directory / WEIGHTS_NAME)
    config = read_config(directory / CONFIG_NAME, tensors, target, card)
    _check_fit(config, target, directory)
    if card is not None:
        _check_agreement(card, config, directory)
    try:
        drafter = Drafter(config, target.embedding_VD, target.head_VD)
    except ConfigError as error:
        raise CheckpointError(f"{directory / CONFIG_NAME}: {error.message}", hint=error.hint) from error
    _fill(drafter, tensors, target, directory)
    drafter = drafter.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    drafter.card = card
    target.tap(config.aux_layer_ids)
    return drafter


def drafter_directory(path: Path | str | None, target: "HFTarget") -> Path:
    """The directory meant by `path`, None and bare names being shipped ones; refused where no drafter is in it."""
    if path is None:
        if target.shipped_drafter is None:
            raise CheckpointError(
                f"no drafter ships for target {target.name!r}",
                hint="give one with --drafter, or train one with `peagle train`",
            )
        path = target.shipped_drafter
    directory = Path(path).expanduser()
    if not directory.is_dir():
        directory = _shipped(directory, target)
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if not (directory / name).is_file():
            raise CheckpointError(
                f"no drafter at {directory}: {name} is missing",
                hint=f"a drafter directory holds {CONFIG_NAME} and {WEIGHTS_NAME}",
            )
    return directory


def _shipped(path: Path, target: "HFTarget") -> Path:
    """The directory of a shipped drafter that is meant by its name alone."""
    hint = f"a drafter directory holds {CONFIG_NAME} and {WEIGHTS_NAME}"
    shipped = target.shipped_drafter
    if len(path.parts) != 1 or shipped is None:
        raise CheckpointError(f"no directory {path}", hint=hint)
    directory = shipped.with_name(path.name)
    if not directory.is_dir():
        names = sorted(config.parent.name for config in shipped.parent.glob(f"*/{CONFIG_NAME}"))
        raise CheckpointError(
            f"no directory {path}, and no drafter of that name ships with this version; those that do: "
            f"{', '.join(names) or 'none'}",
            hint=hint,
        )
    return directory


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """The file's tensors by their names here, which are vLLM's but for `midlayer`, an older one for the first layer."""
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}", hint="the file is corrupt or cut short; copy it again"
        ) from error
    renamed = {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in tensors.items()}
    if len(renamed) < len(tensors):
        raise CheckpointError(
            f"{path} holds the first layer twice, as midlayer and as layers.0", hint="remove one of the two"
        )
    return renamed


def _check_card(card: DrafterCard, target: "HFTarget", directory: Path, allow_mismatch: bool) -> None:
    found = differences(card, target)
    if not found:
        return
    message = f"{directory} was trained for target {card.target.name!r}; of the given target, {target.name!r}, "
    if not allow_mismatch:
        raise CheckpointError(
            message + "; ".join(found), hint="use the drafter's own target, or pass --allow-mismatch to try it anyway"
        )
    log.warning("%s", message + "; ".join(found))


def _check_agreement(card: DrafterCard, config: DrafterConfig, directory: Path) -> None:
    """Refuse a card that describes another drafter than config.json and the weights do."""
    for name, on_card, in_config in (
        ("aux_layer_ids", list(card.aux_layer_ids), list(config.aux_layer_ids)),
        ("method", card.method, config.method),
    ):
        if on_card != in_config:
            raise CheckpointError(
                f"{directory}: {name} is {on_card} in {CARD_NAME}, but {in_config} by {CONFIG_NAME} and the weights",
                hint="the files are of two drafters, or one of them was edited",
            )


def _check_fit(config: DrafterConfig, target: "HFTarget", directory: Path) -> None:
    """Refuse sizes that cannot work with the target, before any tensor is looked at."""
    for name, ours, theirs in (
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("target_hidden_size", config.target_hidden_size, target.hidden_size),
    ):
        if ours != theirs:
            raise CheckpointError(
                f"{directory / CONFIG_NAME}: {name} is {ours}, but target {target.name!r} has {theirs}",
                hint="the drafter belongs to another target",
            )
    if max(config.aux_layer_ids) >= target.num_layers or min(config.aux_layer_ids) < 0:
        raise CheckpointError(
            f"{directory / CONFIG_NAME}: the drafter reads layers {list(config.aux_layer_ids)}, "
            f"but those of target {target.name!r} are 0 to {target.num_layers - 1}",
            hint="the drafter belongs to another target",
        )


def _fill(drafter: Drafter, tensors: dict[str, Tensor], target: "HFTarget", directory: Path) -> None:
    """Copy `tensors` into the drafter; one that is missing, left over, misshapen or not finite is refused by name."""
    path = directory / WEIGHTS_NAME
    config = drafter.config
    tensors = dict(tensors)
    tensors.pop("t2d", None)
    if config.parallel:
        row = config.mask_token_id
        table = tensors.get("embed_tokens.weight")
        tensors.setdefault("mask_embedding", (target.embedding_VD.cpu() if table is None else table)[row].clone())
        if "mask_hidden" in tensors:
            tensors["mask_hidden"] = tensors["mask_hidden"].flatten()
    if config.embeddings == "shared":
        tensors.pop("embed_tokens.weight", None)
    if config.head == "shared":
        tensors.pop("lm_head.weight", None)
    if config.draft_vocab_size == config.vocab_size and bool(tensors.pop("d2t", torch.zeros(1)).any()):
        raise CheckpointError(
            f"{path}: d2t is not all zeros, although the draft vocabulary is the target's whole one",
            hint="d2t holds offsets (target = draft + d2t[draft]), not target ids; with a whole vocabulary remove it",
        )
    wanted = drafter.state_dict()
    for name in sorted(wanted.keys() - tensors.keys()):
        raise CheckpointError(f"{path} lacks the tensor {name!r}", hint=_missing_hint(name))
    for name in sorted(tensors.keys() - wanted.keys()):
        raise CheckpointError(
            f"{path} holds the tensor {name!r}, which {CONFIG_NAME} has no place for",
            hint="a switch in config.json (fc_norm, norm_before_fc, attention_bias, num_hidden_layers) may be wrong",
        )
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise CheckpointError(
                f"{path}: tensor {name!r} has shape {list(tensor.shape)}, but {CONFIG_NAME} asks for "
                f"{list(wanted[name].shape)}"
            )
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise CheckpointError(
                f"{path}: tensor {name!r} holds NaN or infinite values", hint="copy or train it again"
            )
    if "d2t" in tensors:
        try:
            check_offsets(tensors["d2t"], config.vocab_size)
        except ConfigError as error:
            raise CheckpointError(f"{path}: {error.message}", hint=error.hint) from error
    drafter.load_state_dict(tensors)


def _missing_hint(name: str) -> str:
    if name == "d2t":
        return "a draft vocabulary smaller than the target's needs d2t, or its ids mean nothing"
    if name == "mask_hidden":
        return "parallel drafting needs the learned placeholder state"
    return "the file is incomplete, or a switch in config.json is wrong"
