"""Drafter directories: config.json and model.safetensors as vLLM's P-EAGLE loader reads them, plus the card.

The full form has the embedding table, which vLLM needs. The compact form leaves out the target's tables and keeps only
the drafter's own mask row, as `mask_embedding`. A pair head is a file of its own (`pair_head.py`).

Directories of other projects are read too: `config_json.py` knows their keys, `layouts.py` their files and names.
"""

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from peagle.checkpoint.card import CARD_NAME, DrafterCard, differences, read_card
from peagle.checkpoint.config_json import errors_in, read_config, write_config
from peagle.checkpoint.layouts import (
    CONFIG_NAME,
    PAIR_HEAD_NAME,
    SAVED_NAME,
    WEIGHTS_NAME,
    complete_directory,
    read_tensors,
    weights_files,
)
from peagle.checkpoint.pair_head import read_pair_head, stored_tables
from peagle.checkpoint.pairing import HOLDS, check_complete, check_sizes, in_package
from peagle.drafter.config import DrafterConfig
from peagle.drafter.model import Drafter
from peagle.drafter.pair_head import PairHead
from peagle.drafter.vocab import read_table
from peagle.errors import CheckpointError, nearest

if TYPE_CHECKING:
    from peagle.targets.hf import HFTarget

log = logging.getLogger(__name__)

SCRATCH_PREFIX = ".saving-"
COMPACT_TENSOR = "mask_embedding"
"""Only our compact form has it; no other engine reads it."""
MISSING_HINTS = {
    "d2t": "the vocabulary map was left behind; engines would take draft ids for target ids",
    "mask_hidden": "the learned placeholder state was left behind; parallel drafting needs it",
}


def save_drafter(
    drafter: Drafter, directory: Path, card: DrafterCard, *, full: bool, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write a drafter directory. See `write_directory` for what happens to an earlier drafter there."""
    config = write_config(drafter.config, dtype)
    write_directory(directory, stored_tensors(drafter, full=full), config, card, dtype, drafter.pair_head)


def stored_tensors(drafter: Drafter, *, full: bool) -> dict[str, Tensor]:
    """The drafter's tensors by vLLM's names, without the pair head's. `full` adds the tables that engines need."""
    tensors = {name: tensor.detach() for name, tensor in drafter.without_pair_head().state_dict().items()}
    if drafter.config.parallel:
        tensors["mask_hidden"] = tensors["mask_hidden"].view(1, 1, -1)
        if full or drafter.config.embeddings == "own":
            table = drafter.embedding_VD.detach().clone()
            table[drafter.config.mask_token_id] = tensors.pop(COMPACT_TENSOR).to(table.dtype)
            tensors["embed_tokens.weight"] = table
    if full and drafter.config.head == "shared" and drafter.config.draft_vocab_size < drafter.config.vocab_size:
        tensors["lm_head.weight"] = drafter.head_VD  # engines can share the whole head of the target, not some rows
    return tensors


def write_directory(
    directory: Path,
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    card: DrafterCard,
    dtype: torch.dtype,
    pair_head: PairHead | None = None,
) -> None:
    """Write weights (in `dtype`), config.json and card. After a kill at any time the old or the new drafter is there.

    A drafter without a pair head removes that of an earlier drafter in the directory.

    The files are written into a scratch directory, whose rename to `.saved` commits the save: from then on our readers
    read `.saved` (`complete_directory`). Its files then replace those of the directory. config.json goes first and
    comes back last, so that other programs see the old drafter, none or the new one, but never a mix.
    """
    weights = {WEIGHTS_NAME: tensors}
    if pair_head is not None:
        weights[PAIR_HEAD_NAME] = stored_tables(pair_head)
    directory.mkdir(parents=True, exist_ok=True)
    _finish_save(directory)
    scratch = Path(tempfile.mkdtemp(dir=directory, prefix=SCRATCH_PREFIX))
    try:
        (scratch / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
        (scratch / CARD_NAME).write_text(card.to_json())
        for name, own in weights.items():
            save_file(_stored(own, dtype), scratch / name, metadata={"format": "pt"})
            # safetensors creates files that only their owner can read.
            (scratch / name).chmod((scratch / CONFIG_NAME).stat().st_mode)
        for path in scratch.iterdir():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
        scratch.rename(directory / SAVED_NAME)
        _finish_save(directory)
    except (OSError, SafetensorError) as error:  # safetensors raises its own error if the disk is full
        free = shutil.disk_usage(directory).free / 2**30
        raise CheckpointError(
            f"the drafter cannot be written to {directory} ({free:.1f} GiB free): {error}",
            hint="free some space and rerun the command; the earlier drafter is intact",
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _stored(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).cpu().contiguous()
        for name, tensor in tensors.items()
    }


def _finish_save(directory: Path) -> None:
    """Move the files of a committed save into place, and delete the remains of killed saves."""
    saved = directory / SAVED_NAME
    if saved.is_dir():
        for name in (CONFIG_NAME, WEIGHTS_NAME, PAIR_HEAD_NAME, CARD_NAME):
            (directory / name).unlink(missing_ok=True)
        names = [PAIR_HEAD_NAME] if (saved / PAIR_HEAD_NAME).exists() else []
        for name in (*names, WEIGHTS_NAME, CARD_NAME, CONFIG_NAME):
            try:
                os.link(saved / name, directory / name)
            except OSError:  # no hard links on this file system
                shutil.copy(saved / name, directory / name)
        saved.rename(Path(tempfile.mkdtemp(dir=directory, prefix=SCRATCH_PREFIX)) / SAVED_NAME)
    for scratch in directory.glob(f"{SCRATCH_PREFIX}*"):
        shutil.rmtree(scratch, ignore_errors=True)


def load_drafter(path: Path | str | None, target: "HFTarget", *, allow_mismatch: bool = False) -> Drafter:
    """Load a drafter in the target's dtype and on its device, and tap the target layers it reads.

    `path` is a directory, a shipped or catalog name ("smollm2-135m-instruct-eagle3", "long-context"), a Hugging Face
    id, or None for the target's default. A drafter whose card names other weights, another tokenizer or another chat
    template is refused unless `allow_mismatch`.
    """
    directory = drafter_directory(path, target)
    card = read_card(directory)
    if card is not None:
        check_card(card, target, directory, allow_mismatch)
    tensors = read_tensors(directory)
    repairs: list[str] = []
    config = read_config(directory / CONFIG_NAME, tensors, target, card, repairs)
    config = _with_advice(config, target, directory)
    check_fit(config, target, directory)
    if card is not None:
        check_agreement(card, config, directory)
    with errors_in(directory / CONFIG_NAME):
        drafter = Drafter(config, target.embedding_VD, target.head_VD)
    drafter.load_state_dict(checked_state(drafter, tensors, target, directory, repairs))
    drafter.pair_head = read_pair_head(directory, config)
    for repair in repairs:
        log.warning("%s: %s", directory, repair)
    drafter = drafter.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    drafter.card, drafter.repairs = card, tuple(repairs)
    target.tap(config.aux_layer_ids)
    return drafter


def drafter_directory(path: Path | str | None, target: "HFTarget") -> Path:
    """Resolve `path` as `load_drafter` does; an error if there is no drafter."""
    path = target.shipped_drafter if path is None else path
    if path is None:
        raise CheckpointError(
            f"no drafter ships for target {target.name!r}",
            hint="pass --drafter, or train one: `peagle build`; generate and serve need none with --num-draft-tokens 0",
        )
    directory = Path(path).expanduser()
    if not directory.is_dir():
        directory = _shipped(directory, target)
    directory = complete_directory(directory)
    check_complete(directory)
    return directory


def _shipped(path: Path, target: "HFTarget") -> Path:
    """The directory of a drafter given by name: from the catalog, the hub or the package."""
    named = target.find_drafter(str(path))
    if named is not None:
        return named
    message, hint = f"no directory {path}", HOLDS
    is_name = len(path.parts) == 1
    if is_name and target.entry is not None:
        message += f", and the catalog has no drafter of that name for {target.name}"
        hint = nearest(str(path), [drafter.variant for drafter in target.entry.drafters])
    elif (directory := in_package(path)) is not None:  # for a fine-tune of its target
        return directory
    elif is_name and (shipped := target.shipped_drafter) is not None:
        directory = shipped.with_name(path.name)
        if directory.is_dir():
            return directory
        names = sorted(config.parent.name for config in shipped.parent.glob(f"*/{CONFIG_NAME}"))
        message += ", and no drafter of that name ships with this version; those that do: "
        message += ", ".join(names) or "none"
    raise CheckpointError(message, hint=hint)


def _with_advice(config: DrafterConfig, target: "HFTarget", directory: Path) -> DrafterConfig:
    """Add what only the catalog knows: the trained and the recommended number of draft tokens."""
    known = target.catalog_drafter(directory)
    if known is None:
        return config
    return replace(
        config,
        num_draft_tokens=config.num_draft_tokens or known.trained_draft_tokens,
        advised_draft_tokens=known.num_draft_tokens,
    )


def check_card(card: DrafterCard, target: "HFTarget", directory: Path, allow_mismatch: bool) -> None:
    found = differences(card, target)
    if not found:
        return
    message = f"{directory} was trained for target {card.target.name!r}; of the given target, {target.name!r}, "
    if not allow_mismatch:
        own = f", {card.target.source}" if card.target.source else ""
        raise CheckpointError(
            message + "; ".join(found),
            hint=f"use the drafter's own target{own}, or pass --allow-mismatch to try it anyway",
        )
    log.warning("%s", message + "; ".join(found))


def check_agreement(card: DrafterCard, config: DrafterConfig, directory: Path) -> None:
    """Refuse a card that belongs to another drafter than config.json and the weights."""
    for name, on_card, in_config in (
        ("aux_layer_ids", list(card.aux_layer_ids), list(config.aux_layer_ids)),
        ("method", card.method, config.method),
    ):
        if on_card != in_config:
            raise CheckpointError(
                f"{directory}: {name} is {on_card} in {CARD_NAME}, but {in_config} by {CONFIG_NAME} and the weights",
                hint="the files belong to different drafters, or one was edited",
            )


def check_fit(config: DrafterConfig, target: "HFTarget", directory: Path) -> None:
    """Refuse sizes that cannot work with the target."""
    sizes = {
        "vocab_size": (config.vocab_size, target.vocab_size),
        "target_hidden_size": (config.target_hidden_size, target.hidden_size),
    }
    check_sizes(directory, target.name, sizes, config.aux_layer_ids, target.num_layers)


def checked_state(
    drafter: Drafter, tensors: Mapping[str, Tensor], target: "HFTarget", directory: Path, repairs: list[str]
) -> dict[str, Tensor]:
    """The state of the drafter in `tensors`. Missing, unknown, misshapen and non-finite tensors are refused by name.

    Tensors that are read in another sense than engines read them are added to `repairs`.
    """
    path = weights_files(directory)[0]
    config = drafter.config
    tensors = dict(tensors)
    _settle_vocabulary(tensors, config, path, repairs)
    if config.parallel and not tensors.keys() & {"embed_tokens.weight", COMPACT_TENSOR}:
        log.warning(
            "%s has no embeddings, so the mask token %s gets the target's row. If that row was trained, drafts beyond "
            "the first lose acceptance",
            directory,
            config.mask_token_id,
        )
    state = state_of(config, tensors, target)
    check_state(state, drafter, path)
    for name, tensor in state.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise CheckpointError(
                f"{path}: tensor {name!r} holds NaN or infinite values", hint="copy or train it again"
            )
    return state


def state_of(config: DrafterConfig, tensors: Mapping[str, Tensor], target: "HFTarget") -> dict[str, Tensor]:
    """Tensors by the names of `Drafter.state_dict`. Without its own mask row, the row an engine falls back to."""
    state = dict(tensors)
    if config.parallel:
        table = state.get("embed_tokens.weight")
        source = target.embedding_VD.cpu() if table is None else table
        if source.dim() != 2 or not 0 <= (config.mask_token_id or 0) < len(source):
            raise CheckpointError(
                f"the embeddings of shape {list(source.shape)} have no row for the mask token {config.mask_token_id}",
                hint="config.json and the weights belong to different drafters, or the table was truncated",
            )
        state.setdefault(COMPACT_TENSOR, source[config.mask_token_id].clone())
        if "mask_hidden" in state:
            state["mask_hidden"] = state["mask_hidden"].flatten()
    unused = {
        "t2d": True,
        "d2t": config.draft_vocab_size == config.vocab_size,
        "embed_tokens.weight": config.embeddings == "shared",
        "lm_head.weight": config.head == "shared",
    }
    return {name: tensor for name, tensor in state.items() if not unused.get(name, False)}


def check_state(state: Mapping[str, Tensor], drafter: Drafter, path: Path) -> None:
    """Refuse missing, unknown and misshapen tensors by name. The drafter may be on the meta device."""
    wanted = drafter.state_dict()
    for name in sorted(wanted.keys() - state.keys()):
        hint = MISSING_HINTS.get(name, "the file is incomplete, or a switch in config.json is wrong")
        raise CheckpointError(f"{path} lacks the tensor {name!r}", hint=hint)
    for name in sorted(state.keys() - wanted.keys()):
        raise CheckpointError(
            f"{path} holds the tensor {name!r}, which {CONFIG_NAME} has no place for",
            hint="a switch in config.json (fc_norm, norm_before_fc, attention_bias, num_hidden_layers) may be wrong",
        )
    for name, tensor in state.items():
        if tensor.shape != wanted[name].shape:
            raise CheckpointError(
                f"{path}: tensor {name!r} has shape {list(tensor.shape)}, but {CONFIG_NAME} asks for "
                f"{list(wanted[name].shape)}",
                hint="config.json and the weights belong to different drafters",
            )


def _settle_vocabulary(tensors: dict[str, Tensor], config: DrafterConfig, path: Path, repairs: list[str]) -> None:
    """Turn `d2t` into offsets; drop it if draft ids are target ids."""
    t2d, d2t = tensors.pop("t2d", None), tensors.pop("d2t", None)
    is_whole = config.draft_vocab_size == config.vocab_size
    if d2t is None:
        return
    if d2t.shape != (config.draft_vocab_size,):
        raise CheckpointError(
            f"{path}: tensor 'd2t' has shape {list(d2t.shape)}, but {CONFIG_NAME} asks for [{config.draft_vocab_size}]"
        )
    with errors_in(path):
        offsets, held_ids = read_table(d2t, None if is_whole else t2d, config.vocab_size)
    if held_ids:
        repairs.append("d2t holds target ids, not offsets as engines expect; it is read as ids")
    if not is_whole:
        tensors["d2t"] = offsets
    elif bool(offsets.any()):
        raise CheckpointError(
            f"{path}: d2t is not all zeros, although the draft vocabulary is the full vocabulary",
            hint="d2t holds offsets (target = draft + d2t[draft]); remove it if the vocabulary is full",
        )
